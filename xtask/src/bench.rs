//! Runs the benchmarks.

use anyhow::Result;

use crate::step;
use crate::workspace::Workspace;

/// Runs the benchmark program, optimised.
pub(crate) fn bench(workspace: &Workspace, quick: bool) -> Result<()> {
    let mut command = workspace.cargo("run --release --locked -p simba-bench --");
    if quick {
        command.arg("--quick");
    }
    step::run(&mut command)
}
