//! One run, from its seed to its verdict.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use simba_core::{Backend, Lease, MemoryBackend, MutexName, TokioClock};
use simba_tck::{Event, History, Rule, Violation, What};

use crate::node::{Node, Shared};
use crate::plan::{Climate, Fault, Plan};

/// The mutex that everyone wants.
pub(crate) const MUTEX: &str = "the-mutex";

/// How a run went.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Outcome {
    /// The plan it followed.
    pub plan: Plan,
    /// What happened.
    pub history: History,
    /// What should not have.
    pub violations: Vec<Violation>,
    /// How many tenures there were.
    pub tenures: usize,
}

impl Outcome {
    /// The run as a person reads it.
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
/// If the system gives no runtime.
#[must_use]
pub fn run(plan: Plan) -> Outcome {
    run_over(plan, |store| Arc::new(store))
}

/// Like [`run`], with the processes seeing the store through what `see` makes of it.
///
/// # Panics
///
/// As [`run`].
#[must_use]
pub fn run_over(plan: Plan, see: impl FnOnce(MemoryBackend) -> Arc<dyn Backend>) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .build()
        .expect("a runtime without I/O");
    let (history, leftovers) = runtime.block_on(simulate(&plan, see));
    // What was killed is dropped with the runtime and writes no more.
    let history = freeze(&history);
    drop(runtime);
    let mut violations = history.check();
    violations.retain(|violation| plan.promises(violation));
    violations.extend(leftovers);
    violations.extend(liveness(&plan, &history.events()));
    let tenures = history.events().iter().filter(|event| matches!(event.what, What::Acquired { .. })).count();
    Outcome { plan, history, violations, tenures }
}

fn freeze(history: &History) -> History {
    let frozen = History::new();
    for Event { at, who, what, .. } in history.events() {
        frozen.record(at, who, what);
    }
    frozen
}

/// ttl 600 ms and transition 400 ms: a minute has room for a hundred tenures.
fn lease() -> Lease {
    Lease::new(Duration::from_millis(600), Duration::from_millis(400)).expect("in order")
}

async fn simulate(
    plan: &Plan,
    see: impl FnOnce(MemoryBackend) -> Arc<dyn Backend>,
) -> (History, Vec<Violation>) {
    let clock = TokioClock::new();
    let store = MemoryBackend::with_clock(clock.clone());
    let shared = Shared {
        backend: see(store.clone()),
        store,
        clock,
        history: History::new(),
        lease: lease(),
        deaf: plan.deaf,
    };
    let mut random = Rng::with_seed(plan.seed ^ 0x5117);
    let mut nodes: Vec<Node> = plan
        .nodes
        .iter()
        .enumerate()
        .map(|(index, node)| Node::start(index, node.clone(), shared.clone(), random.fork()))
        .collect();
    for (at, act) in agenda(plan) {
        tokio::time::sleep(at.saturating_sub(shared.now())).await;
        carry_out(act, &mut nodes, &shared);
    }
    tokio::time::sleep(plan.scale.length.saturating_sub(shared.now())).await;
    let leftovers = wind_up(&nodes, &shared).await;
    (shared.history, leftovers)
}

/// What is done to the processes, begins and ends apart.
#[derive(Clone, Copy)]
enum Act {
    Climate(usize, Climate),
    Pause(usize),
    Resume(usize),
    Crash(usize),
    Restart(usize),
    DataLoss,
    Calm,
}

fn agenda(plan: &Plan) -> Vec<(Duration, Act)> {
    let mut agenda = Vec::new();
    for (at, fault) in &plan.events {
        match *fault {
            Fault::Climate(node, climate) => agenda.push((*at, Act::Climate(node, climate))),
            Fault::Pause(node, length) => {
                agenda.extend([(*at, Act::Pause(node)), (*at + length, Act::Resume(node))]);
            }
            Fault::Crash(node, length) => {
                agenda.extend([(*at, Act::Crash(node)), (*at + length, Act::Restart(node))]);
            }
            Fault::DataLoss => agenda.push((*at, Act::DataLoss)),
            Fault::Calm => agenda.push((*at, Act::Calm)),
        }
    }
    agenda.sort_by_key(|(at, _)| *at);
    agenda
}

fn carry_out(act: Act, nodes: &mut [Node], shared: &Shared) {
    match act {
        Act::Climate(node, climate) => nodes[node].set_climate(climate),
        Act::Pause(node) if !nodes[node].is_dead() => nodes[node].pause(),
        Act::Resume(node) => nodes[node].resume(),
        Act::Crash(node) if !nodes[node].is_dead() => nodes[node].crash(),
        Act::Restart(node) => nodes[node].restart(),
        Act::DataLoss => {
            shared.history.record(shared.now(), "store", What::Note("the store forgets everything".into()));
            shared.store.lose_all();
        }
        Act::Calm => {
            shared.history.record(shared.now(), "world", What::Note("all faults are over".into()));
            nodes.iter().for_each(|node| node.set_climate(Climate::CALM));
        }
        Act::Pause(_) | Act::Crash(_) => {}
    }
}

/// No handle takes longer to shut down, since no call and no work does.
const SHUTDOWN: Duration = Duration::from_secs(10);

/// Shuts every living process down and looks for what is left at the store.
async fn wind_up(nodes: &[Node], shared: &Shared) -> Vec<Violation> {
    let mut found = Vec::new();
    for (index, node) in nodes.iter().enumerate().filter(|(_, node)| !node.is_dead()) {
        if tokio::time::timeout(SHUTDOWN, node.simba().shutdown()).await.is_err() {
            found.push(Violation::new(Rule::Liveness, shared.now(), format!("n{index} does not shut down")));
        }
    }
    // The killed have nobody to clean up after them, but their leases ended in the calm.
    let mutex = MutexName::new(MUTEX).expect("a plain name");
    let operate = shared.store.operate().expect("memory can be operated");
    match operate.read(&mutex).await {
        Ok(record) if record.owner.is_none() && record.waiters == Some(0) => {}
        left => found.push(Violation::new(Rule::Leftovers, shared.now(), format!("left behind: {left:?}"))),
    }
    found
}

/// Once the faults are over, nobody may hold for no longer than this: a lease, the place of a dead waiter, a
/// poll, the last restart, and the time that the contenders sleep by themselves.
const VACANT: Duration = Duration::from_secs(5);

fn liveness(plan: &Plan, events: &[Event]) -> Vec<Violation> {
    let calm = plan.events.last().map_or(Duration::ZERO, |(at, _)| *at) + Duration::from_secs(4);
    let (mut held_until, mut holders) = (calm, 0_usize);
    let mut found = Vec::new();
    let mut look = |at: Duration, held_until: Duration| {
        if at > held_until + VACANT {
            found.push(Violation::new(Rule::Liveness, at, format!("nobody held since {held_until:?}")));
        }
    };
    for Event { at, what, .. } in events.iter().filter(|event| event.at <= plan.scale.length) {
        match what {
            What::Acquired { .. } => {
                look(*at, held_until);
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
        look(plan.scale.length, held_until);
    }
    found
}
