//! All checks and tests; the fastest and those without servers come first.

use anyhow::Result;

use crate::step::{self, Report, Step, Verdict};
use crate::suites::{self, Group};
use crate::workspace::Workspace;
use crate::{deny, downstream, examples, servers, simulation};

/// The steps that need neither root nor packages nor servers.
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

/// The steps before the servers are started.
const WITHOUT_SERVERS: &[Step] = &[
    Step { name: "fmt", run: fmt },
    Step { name: "simulation", run: simulation::step },
    Step { name: "seeded bugs", run: simulation::prove },
    Step { name: "deny", run: deny::step },
    Step { name: "clippy", run: clippy },
    Step { name: "features", run: features },
    Step { name: "build", run: build },
];

/// The steps with servers.
const WITH_SERVERS: &[Step] = &[
    Step { name: "library", run: |workspace| suites::run(workspace, Group::Library) },
    Step { name: "stores", run: |workspace| suites::run(workspace, Group::Stores) },
    Step { name: "command", run: |workspace| suites::run(workspace, Group::Command) },
    Step { name: "examples", run: examples::run_all },
];

/// The steps after the servers are stopped.
const AFTER_SERVERS: &[Step] = &[
    Step { name: "doctests", run: doctests },
    Step { name: "outside backend", run: outside_backend },
    Step { name: "downstream", run: downstream::newest },
    Step { name: "docs", run: docs },
    Step { name: "msrv", run: msrv },
];

/// Runs all checks for a change, with the servers that they need; with `quick`, the checks for every commit.
pub(crate) fn test(workspace: Workspace, quick: bool) -> Result<()> {
    let mut report = Report::default();
    if quick {
        report.run(QUICK, &workspace.quick());
        return report.finish();
    }
    report.run(WITHOUT_SERVERS, &workspace);
    if let Some(variables) = report.time("servers up", || {
        simba_servers::install_tools()?;
        servers::up(&workspace)
    }) {
        report.run(WITH_SERVERS, &workspace.clone().with_variables(variables));
    }
    report.time("servers down", || servers::down(&workspace));
    report.run(AFTER_SERVERS, &workspace);
    report.finish()
}

fn fmt(workspace: &Workspace) -> Result<Verdict> {
    // The one cargo command without `--locked`: it resolves nothing.
    cargo(workspace, "fmt --all --check")
}

fn clippy(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "clippy --locked --workspace --all-targets --all-features -- -D warnings")
}

/// Checks the core and the stores with a server without the features that the rest of the workspace enables.
fn features(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "check --locked -p simba-core --no-default-features")?;
    let mut stores = workspace.cargo("check --locked");
    step::run(stores.args(suites::STORES.iter().flat_map(|package| ["-p", package])))?;
    Ok(Verdict::Passed)
}

/// Builds all test programs, so that the next steps show the time of the tests alone.
fn build(workspace: &Workspace) -> Result<Verdict> {
    suites::build(workspace)?;
    Ok(Verdict::Passed)
}

fn doctests(workspace: &Workspace) -> Result<Verdict> {
    cargo(workspace, "test --locked --workspace --all-features --doc")
}

/// Runs the suite on a backend outside the workspace, with the published crates only. Its tests start their servers.
fn outside_backend(workspace: &Workspace) -> Result<Verdict> {
    let words = "test --locked --manifest-path examples/outside-backend/Cargo.toml --target-dir target";
    let mut command = workspace.cargo(words);
    // The profile of our workspace, so that shared dependencies are built once.
    command.env("CARGO_PROFILE_DEV_DEBUG", "line-tables-only");
    step::run(command.env(suites::AT_ONCE.0, suites::AT_ONCE.1))?;
    Ok(Verdict::Passed)
}

fn docs(workspace: &Workspace) -> Result<Verdict> {
    let mut command = workspace.cargo("doc --locked --workspace --all-features --no-deps");
    step::run(command.env("RUSTDOCFLAGS", "-D warnings"))?;
    Ok(Verdict::Passed)
}

/// Checks the minimum supported compiler. Reports `NotChecked` if it is not installed.
fn msrv(workspace: &Workspace) -> Result<Verdict> {
    let version = env!("CARGO_PKG_RUST_VERSION");
    if !has_toolchain(workspace, version) {
        eprintln!("msrv: toolchain {version} is not installed, not checked");
        return Ok(Verdict::NotChecked);
    }
    // A separate directory: otherwise the two compilers would invalidate each other's builds.
    let words = format!("+{version} check --locked --workspace --all-features --target-dir target/msrv");
    cargo(workspace, &words)
}

fn has_toolchain(workspace: &Workspace, version: &str) -> bool {
    // Only installed toolchains: rustup must not download one because of this check.
    let mut probe = workspace.cargo(&format!("+{version} --version"));
    probe.env("RUSTUP_AUTO_INSTALL", "0").output().is_ok_and(|output| output.status.success())
}

fn cargo(workspace: &Workspace, words: &str) -> Result<Verdict> {
    step::run(&mut workspace.cargo(words))?;
    Ok(Verdict::Passed)
}
