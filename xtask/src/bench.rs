//! Runs the benchmarks.

use anyhow::Result;

use crate::workspace::Workspace;
use crate::{servers, step};

/// Runs the benchmark program, optimised, with the servers that it measures. `words` are its own.
pub(crate) fn bench(workspace: Workspace, words: &[String]) -> Result<()> {
    servers::around(workspace, |workspace| {
        let mut command = workspace.cargo("run --release --locked -p simba-bench --");
        step::run(command.args(words))
    })
}
