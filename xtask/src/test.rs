//! All checks and tests, in the order in which they are most likely to tell something soon.

use anyhow::Result;

use crate::step::{self, Step, Verdict};
use crate::workspace::Workspace;
use crate::{deny, examples, servers, simulation, suites};

const STEPS: &[Step] = &[
    Step { name: "fmt", quick: true, run: fmt },
    Step { name: "clippy", quick: true, run: clippy },
    Step { name: "features", quick: false, run: features },
    Step { name: "tests", quick: true, run: tests },
    Step { name: "doctests", quick: true, run: doctests },
    Step { name: "examples", quick: true, run: examples::run_all },
    Step { name: "outside backend", quick: false, run: outside_backend },
    Step { name: "simulation", quick: true, run: simulation::step },
    Step { name: "seeded bugs", quick: false, run: simulation::prove },
    Step { name: "docs", quick: false, run: docs },
    Step { name: "deny", quick: false, run: deny::step },
    Step { name: "msrv", quick: false, run: msrv },
];

/// Runs all steps with the servers that they need, or those that belong before every commit, which need none.
pub(crate) fn test(workspace: Workspace, quick: bool) -> Result<()> {
    let steps = STEPS.iter().filter(|step| step.quick || !quick);
    simba_servers::install_tools()?;
    if quick {
        return step::take(steps, &workspace);
    }
    servers::around(workspace, |workspace| step::take(steps, workspace))
}

fn fmt(workspace: &Workspace) -> Result<Verdict> {
    // The one cargo command that knows no `--locked`: it resolves nothing.
    cargo(workspace, "fmt --all --check")
}

fn clippy(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "clippy --locked --workspace --all-targets --all-features -- -D warnings")
}

/// The core, and the stores with a server, without what the rest of the workspace turns on.
fn features(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "check --locked -p simba-core --no-default-features")?;
    let mut stores = workspace.cargo("check --locked");
    step::run(stores.args(suites::STORES.iter().flat_map(|package| ["-p", package])))?;
    Ok(Verdict::Passed)
}

fn tests(workspace: &Workspace) -> Result<Verdict> {
    suites::run_all(workspace)?;
    Ok(Verdict::Passed)
}

fn doctests(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "test --locked --workspace --all-features --doc")
}

/// A backend that is no member of the workspace passes the kit with what is published alone.
fn outside_backend(workspace: &Workspace) -> Result<Verdict> {
    let words = "test --locked --manifest-path examples/outside-backend/Cargo.toml --target-dir target";
    // The profile of our own workspace, so that what both build is built once.
    step::run(workspace.cargo(words).env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only"))?;
    Ok(Verdict::Passed)
}

fn docs(workspace: &Workspace) -> Result<Verdict> {
    let mut command = workspace.cargo("doc --locked --workspace --all-features --no-deps");
    step::run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Verdict::Passed)
}

/// Checks that the oldest promised compiler will do. The one step that may be left out, and says so.
fn msrv(workspace: &Workspace) -> Result<Verdict> {
    let version = env!("CARGO_PKG_RUST_VERSION");
    if !has_toolchain(workspace, version) {
        eprintln!("msrv: no toolchain {version} at hand, not checked");
        return Ok(Verdict::NotChecked);
    }
    // A directory of its own: otherwise the two compilers would undo each other's work.
    let words = format!("+{version} check --locked --workspace --all-features --target-dir target/msrv");
    cargo(workspace, &words)
}

fn has_toolchain(workspace: &Workspace, version: &str) -> bool {
    // At hand means installed: rustup must not fetch it just because we ask.
    let mut probe = workspace.cargo(&format!("+{version} --version"));
    probe.env("RUSTUP_AUTO_INSTALL", "0").output().is_ok_and(|output| output.status.success())
}

fn cargo(workspace: &Workspace, words: &str) -> Result<Verdict> {
    step::run(&mut workspace.cargo(words))?;
    Ok(Verdict::Passed)
}
