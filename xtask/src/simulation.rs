//! The simulation: the engine on virtual time, seed after seed, and the deliberate bugs that prove it.

use anyhow::Result;

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// What every run of the tests simulates.
const SEEDS: u64 = 5_000;

/// Runs this many seeds.
pub(crate) fn sweep(workspace: &Workspace, seeds: u64) -> Result<()> {
    let words = format!("run --release --locked -p simba-sim -- --seeds {seeds}");
    step::run(&mut workspace.cargo(&words))
}

/// The share of the seeds that belongs into the tests.
pub(crate) fn step(workspace: &Workspace) -> Result<Verdict> {
    sweep(workspace, SEEDS)?;
    Ok(Verdict::Passed)
}

/// Builds the engine with its deliberate bugs, in a directory of its own, and lets the checkers catch them.
pub(crate) fn prove(workspace: &Workspace) -> Result<Verdict> {
    let words = "test --release --locked -p simba-sim --test seeded --target-dir target/seeded";
    step::run(workspace.cargo(words).env("RUSTFLAGS", "--cfg simba_bugs"))?;
    Ok(Verdict::Passed)
}
