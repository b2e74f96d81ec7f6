//! The faults of a run, drawn from its seed before it starts.

use std::time::Duration;

use fastrand::Rng;
use simba_tck::{Rule, Violation};

/// The size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Scale {
    /// The length, in virtual time.
    pub length: Duration,
    /// The number of processes that contend.
    pub nodes: usize,
}

impl Default for Scale {
    fn default() -> Self {
        Self { length: Duration::from_secs(60), nodes: 5 }
    }
}

/// Everything that a seed determines.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The size.
    pub scale: Scale,
    /// The processes.
    pub nodes: Vec<NodePlan>,
    /// The faults, sorted by time.
    pub events: Vec<(Duration, Fault)>,
    /// Whether all hints are lost in this run, so that waiters depend on the poll.
    pub loses_all_hints: bool,
}

/// One process.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NodePlan {
    /// The rate of its clock.
    pub rate: f64,
    /// Its role.
    pub role: Role,
}

/// What a process does with the mutex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Contends until stopped and works while it leads; sometimes stops, restarts and steps down.
    Leader,
    /// Locks, works, releases or drops the guard, repeatedly.
    Locker,
    /// Tries and waits with time limits, and drops its futures at any point.
    TimeLimited,
    /// Runs a scheduled job while it leads.
    Scheduler,
    /// Leads through callbacks, and takes some time to stop when it is asked to.
    Callback,
}

/// A fault at a point in time.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// The network of a process gets these faults.
    Network(usize, FaultRates),
    /// A process is paused for this time.
    Pause(usize, Duration),
    /// A process is killed, and restarted after this time.
    Crash(usize, Duration),
    /// The store loses all data.
    DataLoss,
    /// All faults end.
    End,
}

/// The probability of each fault, per message.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct FaultRates {
    /// A message is lost.
    pub lose: f64,
    /// A call fails with an error.
    pub fail: f64,
    /// A message is delayed.
    pub delay: f64,
    /// The maximum delay.
    pub max_delay: Duration,
    /// A hint is lost.
    pub lose_hint: f64,
    /// After how long a hint is forged.
    pub forge_hint_after: Option<Duration>,
}

impl FaultRates {
    /// No faults but a small latency.
    pub const NONE: Self = Self {
        lose: 0.0,
        fail: 0.0,
        delay: 0.5,
        max_delay: Duration::from_millis(2),
        lose_hint: 0.0,
        forge_hint_after: None,
    };
}

/// The maximum delay of all networks.
const MAX_DELAY: Duration = Duration::from_millis(1_500);

/// The share of a run, at its end, that has no faults: the contenders must recover in it.
const FAULT_FREE_SHARE: f64 = 0.25;

impl Plan {
    /// Creates the plan of this seed.
    #[must_use]
    pub fn new(seed: u64, scale: Scale) -> Self {
        let mut random = Rng::with_seed(seed);
        let nodes = (0..scale.nodes).map(|_| node(&mut random)).collect();
        let loses_all_hints = random.u8(..8) == 0;
        let faults_end = scale.length.mul_f64(1.0 - FAULT_FREE_SHARE);
        let count = random.usize(4..24);
        let mut events: Vec<_> = (0..count)
            .map(|_| (faults_end.mul_f64(random.f64()), fault(&mut random, scale.nodes)))
            .chain([(faults_end, Fault::End)])
            .collect();
        events.sort_by_key(|(at, _)| *at);
        Self { seed, scale, nodes, events, loses_all_hints }
    }

    /// Returns whether the violated rule was guaranteed: a store that loses its writes may grant a mutex twice.
    ///
    /// Tokens grow even then. But a contender whose reply was in flight during the data loss may receive its token
    /// after another contender received a greater one.
    #[must_use]
    pub fn guarantees(&self, violation: &Violation) -> bool {
        let mut losses = self.events.iter().filter(|(_, fault)| *fault == Fault::DataLoss).map(|(at, _)| *at);
        match violation.rule {
            Rule::Exclusion | Rule::Work => losses.next().is_none(),
            Rule::Tokens => !losses.any(|at| (at..at + MAX_DELAY).contains(&violation.at)),
            _ => true,
        }
    }
}

fn node(random: &mut Rng) -> NodePlan {
    let role =
        [Role::Leader, Role::Callback, Role::Locker, Role::TimeLimited, Role::Scheduler][random.usize(..5)];
    // The ends of the supported range are more frequent than a uniform distribution would make them.
    let rate = match random.u8(..4) {
        0 => 0.99,
        1 => 1.01,
        _ => 0.99 + random.f64() * 0.02,
    };
    NodePlan { rate, role }
}

fn fault(random: &mut Rng, nodes: usize) -> Fault {
    let node = random.usize(..nodes);
    match random.u8(..20) {
        0..=9 => Fault::Network(node, fault_rates(random)),
        10..=13 => Fault::Pause(node, Duration::from_millis(random.u64(50..4_000))),
        14..=17 => Fault::Crash(node, Duration::from_millis(random.u64(1..4_000))),
        18 => Fault::Network(node, FaultRates::NONE),
        _ if random.u8(..4) == 0 => Fault::DataLoss,
        _ => Fault::Network(node, FaultRates { lose: 1.0, ..FaultRates::NONE }),
    }
}

fn fault_rates(random: &mut Rng) -> FaultRates {
    let mut some = |share: f64| if random.bool() { random.f64() * share } else { 0.0 };
    let (lose, fail, delay, lose_hint) = (some(0.5), some(0.6), some(1.0), some(1.0));
    FaultRates {
        lose,
        fail,
        delay,
        max_delay: Duration::from_millis(random.u64(1..1_500)),
        lose_hint,
        forge_hint_after: random.bool().then(|| Duration::from_millis(random.u64(1..300))),
    }
}
