//! What goes wrong in a run, drawn from its seed before it starts.

use std::time::Duration;

use fastrand::Rng;
use simba_tck::{Rule, Violation};

/// The size of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Scale {
    /// How long it lasts, in virtual time.
    pub length: Duration,
    /// How many processes contend.
    pub nodes: usize,
}

impl Default for Scale {
    fn default() -> Self {
        Self { length: Duration::from_secs(60), nodes: 5 }
    }
}

/// Everything that a seed decides.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Plan {
    /// The seed.
    pub seed: u64,
    /// The size.
    pub scale: Scale,
    /// What each process is.
    pub nodes: Vec<NodePlan>,
    /// What happens to whom, in the order of time.
    pub events: Vec<(Duration, Fault)>,
    /// Whether wake-ups reach nobody in this run, so that the poll alone must do.
    pub deaf: bool,
}

/// One process.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct NodePlan {
    /// How fast its clock runs.
    pub rate: f64,
    /// What it does.
    pub role: Role,
}

/// What a process does with the mutex.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Role {
    /// Contends for ever and works while it leads; sometimes stops, restarts and steps down.
    Leader,
    /// Locks, works, releases or drops the guard, again and again.
    Locker,
    /// Tries and waits with time limits, and drops its futures anywhere.
    Impatient,
    /// Runs a scheduled job while it leads.
    Scheduler,
    /// Leads through callbacks, and takes its time to stop when it is told to.
    Callback,
}

/// What happens at a moment.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Fault {
    /// The network of a process gets this bad.
    Climate(usize, Climate),
    /// A process stands still for a while.
    Pause(usize, Duration),
    /// A process is killed, and started again after a while.
    Crash(usize, Duration),
    /// The store forgets everything.
    DataLoss,
    /// All faults are over.
    Calm,
}

/// How likely what is, of every message.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub struct Climate {
    /// A message is lost.
    pub lose: f64,
    /// A call fails with an error.
    pub fail: f64,
    /// A message is late.
    pub delay: f64,
    /// How late at the most.
    pub latest: Duration,
    /// A hint is lost.
    pub lose_hint: f64,
    /// After how long a hint is forged.
    pub forge: Option<Duration>,
}

impl Climate {
    /// Nothing happens to anything but a little latency.
    pub const CALM: Self = Self {
        lose: 0.0,
        fail: 0.0,
        delay: 0.5,
        latest: Duration::from_millis(2),
        lose_hint: 0.0,
        forge: None,
    };
}

/// No message is later.
const LATEST: Duration = Duration::from_millis(1_500);

/// The last part of a run is calm, so that it must come to rest.
const CALM_SHARE: f64 = 0.25;

impl Plan {
    /// The plan of this seed.
    #[must_use]
    pub fn new(seed: u64, scale: Scale) -> Self {
        let mut random = Rng::with_seed(seed);
        let nodes = (0..scale.nodes).map(|_| node(&mut random)).collect();
        let deaf = random.u8(..8) == 0;
        let calm = scale.length.mul_f64(1.0 - CALM_SHARE);
        let count = random.usize(4..24);
        let mut events: Vec<_> = (0..count)
            .map(|_| (calm.mul_f64(random.f64()), fault(&mut random, scale.nodes)))
            .chain([(calm, Fault::Calm)])
            .collect();
        events.sort_by_key(|(at, _)| *at);
        Self { seed, scale, nodes, events, deaf }
    }

    /// Whether what was broken had been promised: a store that loses its writes may give a mutex twice.
    ///
    /// Tokens grow even then, but a contender whose answer was under way meanwhile learns of its token after
    /// one that came later, and got a greater one.
    #[must_use]
    pub fn promises(&self, violation: &Violation) -> bool {
        let mut losses = self.events.iter().filter(|(_, fault)| *fault == Fault::DataLoss).map(|(at, _)| *at);
        match violation.rule {
            Rule::Exclusion | Rule::Work => losses.next().is_none(),
            Rule::Tokens => !losses.any(|at| (at..at + LATEST).contains(&violation.at)),
            _ => true,
        }
    }
}

fn node(random: &mut Rng) -> NodePlan {
    let role =
        [Role::Leader, Role::Callback, Role::Locker, Role::Impatient, Role::Scheduler][random.usize(..5)];
    // The ends of the promised range come up more often than chance would have it.
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
        0..=9 => Fault::Climate(node, climate(random)),
        10..=13 => Fault::Pause(node, Duration::from_millis(random.u64(50..4_000))),
        14..=17 => Fault::Crash(node, Duration::from_millis(random.u64(1..4_000))),
        18 => Fault::Climate(node, Climate::CALM),
        _ if random.u8(..4) == 0 => Fault::DataLoss,
        _ => Fault::Climate(node, Climate { lose: 1.0, ..Climate::CALM }),
    }
}

fn climate(random: &mut Rng) -> Climate {
    let mut some = |share: f64| if random.bool() { random.f64() * share } else { 0.0 };
    let (lose, fail, delay, lose_hint) = (some(0.5), some(0.6), some(1.0), some(1.0));
    Climate {
        lose,
        fail,
        delay,
        latest: Duration::from_millis(random.u64(1..1_500)),
        lose_hint,
        forge: random.bool().then(|| Duration::from_millis(random.u64(1..300))),
    }
}
