//! The fault matrix on real servers, with a given number of rounds.

use anyhow::{Result, ensure};

use crate::servers;
use crate::suites::{self, Group};
use crate::workspace::Workspace;

/// Starts the servers and runs every test that is named after a row of the matrix, each fault `rounds` times.
pub(crate) fn faults(workspace: Workspace, rounds: u32) -> Result<()> {
    simba_servers::install_tools()?;
    servers::with_servers(workspace, |workspace| run(workspace, rounds))
}

/// Runs the rows with servers that are already running. Every program runs, even if one fails.
pub(crate) fn run(workspace: &Workspace, rounds: u32) -> Result<()> {
    let workspace = workspace.clone().with_variables(vec![("SIMBA_FAULT_ROUNDS", rounds.to_string())]);
    let groups = [Group::Library, Group::Stores, Group::Command];
    let failures: Vec<String> = groups
        .into_iter()
        .filter_map(|group| suites::run_named(&workspace, group, "row_").err())
        .map(|error| format!("{error:#}"))
        .collect();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}
