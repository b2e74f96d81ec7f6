//! Runs the benchmarks.

use anyhow::Result;
use simba_servers::Setup;

use crate::workspace::Workspace;
use crate::{servers, step};

/// Where the ZooKeeper is that does not wait for its disk.
const ZOOKEEPER: &str = "SIMBA_BENCH_ZOOKEEPER";

/// Runs the benchmark program, optimised, with the servers that it measures. `words` are its own.
pub(crate) fn bench(workspace: Workspace, words: &[String]) -> Result<()> {
    simba_servers::keep_data_on_disk();
    servers::around(workspace, |workspace| {
        // A disk takes far longer than what is compared.
        let zookeeper = Setup::zookeeper().with_setting("forceSync=no").start()?;
        let mut command = workspace.cargo("run --release --locked -p simba-bench --");
        step::run(command.args(words).env(ZOOKEEPER, zookeeper.url()))
    })
}
