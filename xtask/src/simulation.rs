//! The simulation: the engine on virtual time, seed after seed, and the deliberate bugs that prove it.

use std::process::Command;

use anyhow::Result;

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// What every run of the tests simulates.
const SEEDS: u64 = 5_000;

/// Runs this many seeds, by the build that has the deliberate bugs in it, switched off: one optimised build serves both
/// this and [`prove`].
pub(crate) fn sweep(workspace: &Workspace, seeds: u64) -> Result<()> {
    step::run(with_bugs(workspace, "run").args(["--", "--seeds", &seeds.to_string()]))
}

/// Runs the share of the seeds that belongs into the tests.
pub(crate) fn step(workspace: &Workspace) -> Result<Verdict> {
    sweep(workspace, SEEDS)?;
    Ok(Verdict::Passed)
}

/// Switches the deliberate bugs on, one after the other, and lets the checkers catch them.
pub(crate) fn prove(workspace: &Workspace) -> Result<Verdict> {
    step::run(with_bugs(workspace, "test").args(["--test", "seeded"]))?;
    Ok(Verdict::Passed)
}

/// A build in a directory of its own: its flags would undo the work of all others.
fn with_bugs(workspace: &Workspace, verb: &str) -> Command {
    let mut command =
        workspace.cargo(&format!("{verb} --locked -p simba-sim --release --target-dir target/seeded"));
    command.env("RUSTFLAGS", "--cfg simba_bugs");
    // Half a minute of simulation does not pay for the last tenth of speed.
    command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    command.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
    command
}
