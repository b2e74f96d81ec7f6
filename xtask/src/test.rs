//! All checks and tests, the fastest and those that need no server first.

use anyhow::Result;

use crate::step::{self, Report, Step, Verdict};
use crate::suites::{self, Group};
use crate::workspace::Workspace;
use crate::{deny, downstream, examples, servers, simulation};

/// What needs neither root nor a package nor a server.
const QUICK: &[Step] = &[
    Step { name: "fmt", run: fmt },
    Step { name: "simulation", run: simulation::step },
    Step { name: "clippy", run: clippy },
    Step { name: "build", run: build },
    Step { name: "library", run: |workspace| suites::run(workspace, Group::Library) },
    Step { name: "command", run: |workspace| suites::run(workspace, Group::Command) },
    Step { name: "doctests", run: doctests },
    Step { name: "examples", run: examples::run_all },
];

/// What needs no server.
const ALONE: &[Step] = &[
    Step { name: "fmt", run: fmt },
    Step { name: "simulation", run: simulation::step },
    Step { name: "seeded bugs", run: simulation::prove },
    Step { name: "deny", run: deny::step },
    Step { name: "clippy", run: clippy },
    Step { name: "features", run: features },
    Step { name: "build", run: build },
];

/// What runs with the servers.
const WITH_SERVERS: &[Step] = &[
    Step { name: "library", run: |workspace| suites::run(workspace, Group::Library) },
    Step { name: "stores", run: |workspace| suites::run(workspace, Group::Stores) },
    Step { name: "command", run: |workspace| suites::run(workspace, Group::Command) },
    Step { name: "examples", run: examples::run_all },
];

/// What is left, without servers again.
const AFTER: &[Step] = &[
    Step { name: "doctests", run: doctests },
    Step { name: "outside backend", run: outside_backend },
    Step { name: "downstream", run: downstream::newest },
    Step { name: "docs", run: docs },
    Step { name: "msrv", run: msrv },
];

/// Runs everything that a change must pass, with the servers that it needs; or what belongs before every commit.
pub(crate) fn test(workspace: Workspace, quick: bool) -> Result<()> {
    let mut report = Report::default();
    if quick {
        report.take(QUICK, &workspace.quick());
        return report.finish();
    }
    report.take(ALONE, &workspace);
    if let Some(variables) = report.time("servers up", || {
        simba_servers::install_tools()?;
        servers::up(&workspace)
    }) {
        report.take(WITH_SERVERS, &workspace.clone().with_variables(variables));
    }
    report.time("servers down", || servers::down(&workspace));
    report.take(AFTER, &workspace);
    report.finish()
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

/// Builds all test programs, so that the next steps show how long the tests themselves take.
fn build(workspace: &Workspace) -> Result<Verdict> {
    suites::build(workspace)?;
    Ok(Verdict::Passed)
}

fn doctests(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "test --locked --workspace --all-features --doc")
}

/// A backend that is no member of the workspace passes the suite with what is published alone.
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
