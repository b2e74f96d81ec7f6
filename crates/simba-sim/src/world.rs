//! One run, from its seed to its result.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use simba_core::spi::Backend;
use simba_core::{Lease, MemoryBackend, MutexName, TokioClock};
use simba_tck::{Event, History, Rule, Violation, What};

use crate::node::{Node, Shared};
use crate::plan::{Fault, FaultRates, Plan};

/// The mutex for which all contend.
pub(crate) const MUTEX: &str = "the-mutex";

/// The result of a run.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The plan of the run.
    pub plan: Plan,
    /// The events.
    pub history: History,
    /// The violated rules.
    pub violations: Vec<Violation>,
    /// The number of tenures.
    pub tenures: usize,
}

impl Outcome {
    /// Returns the run as readable text.
    #[must_use]
    pub fn timeline(&self) -> String {
        let mut text = format!(
            "seed {}; all times are the store's, each process has a clock of its own:\n",
            self.plan.seed
        );
        for (index, node) in self.plan.nodes.iter().enumerate() {
            let (role, rate) = (node.role, node.rate);
            text +=
                &format!("  n{index}: {role:?}, its clock shows {rate:.4} s for every second of the store\n");
        }
        text += &self.history.timeline();
        for violation in &self.violations {
            text += &format!("VIOLATION: {violation}\n");
        }
        text
    }
}

/// Runs a plan to its end, in virtual time.
///
/// # Panics
///
/// If no runtime can be created.
#[must_use]
pub fn run(plan: Plan) -> Outcome {
    run_over(plan, |store| Arc::new(store))
}

/// Runs a plan like [`run`], with the store wrapped by `wrap`.
///
/// # Panics
///
/// Like [`run`].
#[must_use]
pub fn run_over(plan: Plan, wrap: impl FnOnce(MemoryBackend) -> Arc<dyn Backend>) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O can be created");
    let (history, leftovers) = runtime.block_on(simulate(&plan, wrap));
    // A copy: killed tasks are dropped with the runtime and must not add events.
    let history = snapshot(&history);
    drop(runtime);
    let mut violations = history.check();
    violations.retain(|violation| plan.guarantees(violation));
    violations.extend(leftovers);
    violations.extend(liveness(&plan, &history.events()));
    let tenures = history.events().iter().filter(|event| matches!(event.what, What::Acquired { .. })).count();
    Outcome { plan, history, violations, tenures }
}

fn snapshot(history: &History) -> History {
    let copy = History::new();
    for Event { at, who, what, .. } in history.events() {
        copy.record(at, who, what);
    }
    copy
}

/// Returns a lease with ttl 600 ms and transition 400 ms: a minute has room for a hundred tenures.
fn lease() -> Lease {
    Lease::new(Duration::from_millis(600), Duration::from_millis(400)).expect("a valid lease")
}

async fn simulate(
    plan: &Plan,
    wrap: impl FnOnce(MemoryBackend) -> Arc<dyn Backend>,
) -> (History, Vec<Violation>) {
    let clock = TokioClock::new();
    let store = MemoryBackend::with_clock(clock.clone());
    let shared = Shared {
        backend: wrap(store.clone()),
        store,
        clock,
        history: History::new(),
        lease: lease(),
        loses_all_hints: plan.loses_all_hints,
    };
    let mut random = Rng::with_seed(plan.seed ^ 0x5117);
    let mut nodes: Vec<Node> = plan
        .nodes
        .iter()
        .enumerate()
        .map(|(index, node)| Node::start(index, node.clone(), shared.clone(), random.fork()))
        .collect();
    for (at, action) in actions(plan) {
        tokio::time::sleep(at.saturating_sub(shared.now())).await;
        execute(action, &mut nodes, &shared);
    }
    tokio::time::sleep(plan.scale.length.saturating_sub(shared.now())).await;
    let leftovers = shut_down(&nodes, &shared).await;
    (shared.history, leftovers)
}

/// A change of the processes; faults with a duration have a start and an end.
#[derive(Clone, Copy)]
enum Action {
    Network(usize, FaultRates),
    Pause(usize),
    Resume(usize),
    Crash(usize),
    Restart(usize),
    DataLoss,
    End,
}

fn actions(plan: &Plan) -> Vec<(Duration, Action)> {
    let mut actions = Vec::new();
    for (at, fault) in &plan.events {
        match *fault {
            Fault::Network(node, rates) => actions.push((*at, Action::Network(node, rates))),
            Fault::Pause(node, length) => {
                actions.extend([(*at, Action::Pause(node)), (*at + length, Action::Resume(node))]);
            }
            Fault::Crash(node, length) => {
                actions.extend([(*at, Action::Crash(node)), (*at + length, Action::Restart(node))]);
            }
            Fault::DataLoss => actions.push((*at, Action::DataLoss)),
            Fault::End => actions.push((*at, Action::End)),
        }
    }
    actions.sort_by_key(|(at, _)| *at);
    actions
}

fn execute(action: Action, nodes: &mut [Node], shared: &Shared) {
    match action {
        Action::Network(node, rates) => nodes[node].set_fault_rates(rates),
        Action::Pause(node) if !nodes[node].is_dead() => nodes[node].pause(),
        Action::Resume(node) => nodes[node].resume(),
        Action::Crash(node) if !nodes[node].is_dead() => nodes[node].crash(),
        Action::Restart(node) => nodes[node].restart(),
        Action::DataLoss => {
            shared.history.record(shared.now(), "store", What::Note("the store loses all data".into()));
            shared.store.lose_all();
        }
        Action::End => {
            shared.history.record(shared.now(), "simulation", What::Note("all faults have ended".into()));
            nodes.iter().for_each(|node| node.set_fault_rates(FaultRates::NONE));
        }
        Action::Pause(_) | Action::Crash(_) => {}
    }
}

/// Time limit for a shutdown, longer than any call or work.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// Shuts down every live process and checks for leftovers in the store.
async fn shut_down(nodes: &[Node], shared: &Shared) -> Vec<Violation> {
    let mut found = Vec::new();
    for (index, node) in nodes.iter().enumerate().filter(|(_, node)| !node.is_dead()) {
        if tokio::time::timeout(SHUTDOWN, node.simba().shutdown()).await.is_err() {
            found.push(Violation::new(Rule::Liveness, shared.now(), format!("n{index} does not shut down")));
        }
    }
    // Killed processes do not clean up, but their leases ended in the part without faults.
    let mutex = MutexName::new(MUTEX).expect("a valid name");
    let operate = shared.store.operate().expect("the memory backend has operations");
    match operate.read(&mutex).await {
        Ok(record) if record.owner.is_none() && record.waiters == Some(0) => {}
        left => found.push(Violation::new(Rule::Leftovers, shared.now(), format!("left behind: {left:?}"))),
    }
    found
}

/// The maximum time without a holder once the faults have ended: a lease, the entry of a dead waiter, a poll, the last
/// restart, and the time that the contenders sleep between two rounds.
const MAX_VACANCY: Duration = Duration::from_secs(5);

fn liveness(plan: &Plan, events: &[Event]) -> Vec<Violation> {
    let recovered = plan.events.last().map_or(Duration::ZERO, |(at, _)| *at) + Duration::from_secs(4);
    let (mut held_until, mut holders) = (recovered, 0_usize);
    let mut found = Vec::new();
    let mut check = |at: Duration, held_until: Duration| {
        if at > held_until + MAX_VACANCY {
            found.push(Violation::new(Rule::Liveness, at, format!("no holder since {held_until:?}")));
        }
    };
    for Event { at, what, .. } in events.iter().filter(|event| event.at <= plan.scale.length) {
        match what {
            What::Acquired { .. } => {
                check(*at, held_until);
                holders += 1;
            }
            What::Lost { valid_until, .. } => {
                held_until = held_until.max(*valid_until);
                holders = holders.saturating_sub(1);
            }
            _ => {}
        }
    }
    if holders == 0 {
        check(plan.scale.length, held_until);
    }
    found
}
