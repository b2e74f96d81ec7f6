//! Runs the benchmarks.

use anyhow::Result;
use simba_servers::Setup;

use crate::workspace::Workspace;
use crate::{servers, step};

/// The variable with the URL of a ZooKeeper server that does not sync to disk.
const ZOOKEEPER: &str = "SIMBA_BENCH_ZOOKEEPER";

/// Runs the optimised benchmark program with the servers that it measures. Passes `words` on to it.
pub(crate) fn bench(workspace: Workspace, words: &[String]) -> Result<()> {
    simba_servers::keep_data_on_disk();
    servers::with_servers(workspace, |workspace| {
        // A sync to disk takes far longer than the operations that are compared.
        let zookeeper = Setup::zookeeper().with_setting("forceSync=no").start()?;
        let mut command = workspace.cargo("run --release --locked -p simba-bench --");
        step::run(command.args(words).env(ZOOKEEPER, zookeeper.url()))
    })
}
