//! The tests that take too long for every change.

use anyhow::Result;

use crate::step::{Report, Step, Verdict};
use crate::workspace::Workspace;
use crate::{downstream, faults, servers, simulation, upgrade};

/// How many seeds the long simulation runs.
const SEEDS: u64 = 200_000;
/// How often each fault of the matrix is repeated.
const ROUNDS: u32 = 20;

const WITHOUT_SERVERS: &[Step] = &[
    Step {
        name: "simulation",
        run: |workspace| simulation::sweep(workspace, SEEDS).map(|()| Verdict::Passed),
    },
    Step { name: "downstream, lowest versions", run: downstream::lowest },
];

const WITH_SERVERS: &[Step] = &[
    Step { name: "upgrade", run: upgrade::step },
    Step { name: "faults", run: |workspace| faults::run(workspace, ROUNDS).map(|()| Verdict::Passed) },
];

/// Runs the long versions of the tests, and those that the test command leaves out.
pub(crate) fn full(workspace: &Workspace) -> Result<()> {
    let mut report = Report::default();
    report.run(WITHOUT_SERVERS, workspace);
    if let Some(variables) = report.time("servers up", || {
        simba_servers::install_tools()?;
        servers::up(workspace)
    }) {
        report.run(WITH_SERVERS, &workspace.clone().with_variables(variables));
    }
    report.time("servers down", || servers::down(workspace));
    report.finish()
}
