//! The fault matrix on real servers, as often as wanted.

use anyhow::Result;

use crate::workspace::Workspace;
use crate::{servers, step, suites};

/// Starts the servers and runs every test that is named after a row of the matrix, each fault `rounds` times.
pub(crate) fn faults(workspace: Workspace, rounds: u32) -> Result<()> {
    simba_servers::install_tools()?;
    servers::around(workspace, |workspace| run(workspace, rounds))
}

/// Runs the rows with servers that run already.
pub(crate) fn run(workspace: &Workspace, rounds: u32) -> Result<()> {
    let mut command =
        workspace.cargo("test --locked --workspace --all-features --no-fail-fast --tests -- row_");
    command.env(suites::AT_ONCE.0, suites::AT_ONCE.1).env("SIMBA_FAULT_ROUNDS", rounds.to_string());
    step::run(&mut command)
}
