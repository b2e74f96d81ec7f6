//! The simulation: runs the engine on virtual time with many seeds, and checks that deliberate bugs are detected.

use std::process::Command;

use anyhow::Result;

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// The number of seeds in every run of the tests.
const SEEDS: u64 = 5_000;

/// Runs this many seeds. Uses the build that contains the deliberate bugs, disabled: one optimised build serves both
/// this and [`prove`].
pub(crate) fn sweep(workspace: &Workspace, seeds: u64) -> Result<()> {
    step::run(with_bugs(workspace, "run").args(["--", "--seeds", &seeds.to_string()]))
}

/// Runs the seeds that belong to the tests.
pub(crate) fn step(workspace: &Workspace) -> Result<Verdict> {
    sweep(workspace, SEEDS)?;
    Ok(Verdict::Passed)
}

/// Enables the deliberate bugs, one after the other, and checks that each is detected.
pub(crate) fn prove(workspace: &Workspace) -> Result<Verdict> {
    step::run(with_bugs(workspace, "test").args(["--test", "seeded"]))?;
    Ok(Verdict::Passed)
}

/// Returns a cargo command with its own target directory: its flags would invalidate all other builds.
fn with_bugs(workspace: &Workspace, verb: &str) -> Command {
    let mut command =
        workspace.cargo(&format!("{verb} --locked -p simba-sim --release --target-dir target/seeded"));
    command.env("RUSTFLAGS", "--cfg simba_bugs");
    // Optimise less: the simulation takes half a minute, and a full optimisation takes longer than it saves.
    command.env("CARGO_PROFILE_RELEASE_OPT_LEVEL", "2").env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    command.env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true");
    command
}
