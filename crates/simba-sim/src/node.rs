//! One process: its clock, its network, its handle, and how it is stopped, killed and restarted.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use simba_core::spi::Backend;
use simba_core::{
    Clock, ErrorKind, FencingToken, Lease, Loss, MemoryBackend, Moment, Simba, Tenure, TokioClock,
};
use simba_tck::{Call, FaultyBackend, History, Leg, Passage, SkewedClock, Weather, What};

use crate::actor;
use crate::plan::{FaultRates, NodePlan};

/// The state that all processes share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) clock: TokioClock,
    pub(crate) store: MemoryBackend,
    /// The store as the processes see it.
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) history: History,
    pub(crate) lease: Lease,
    pub(crate) loses_all_hints: bool,
}

impl Shared {
    pub(crate) fn now(&self) -> Duration {
        self.clock.now() - Moment::ZERO
    }
}

/// A node, which can be killed and restarted.
pub(crate) struct Node {
    name: String,
    plan: NodePlan,
    shared: Shared,
    random: Rng,
    restarts: u32,
    process: Process,
}

/// One process of a node, until it is killed.
struct Process {
    context: Context,
    network: Arc<ProcessNetwork>,
}

impl Node {
    pub(crate) fn start(index: usize, plan: NodePlan, shared: Shared, mut random: Rng) -> Self {
        let name = format!("n{index}");
        let process = Process::start(&name, 0, &plan, &shared, &mut random);
        Self { name, plan, shared, random, restarts: 0, process }
    }

    /// Sets the faults of the network of the process.
    pub(crate) fn set_fault_rates(&self, fault_rates: FaultRates) {
        *self.process.network.fault_rates.lock().unwrap_or_else(PoisonError::into_inner) = fault_rates;
    }

    /// Pauses the process: its time continues, but no sleep completes and no message reaches it.
    pub(crate) fn pause(&self) {
        self.process.context.clock.pause();
        self.record(What::Paused);
    }

    pub(crate) fn resume(&self) {
        if !self.process.network.dead.load(Ordering::Relaxed) {
            self.record(What::Resumed);
            self.process.context.clock.resume();
        }
    }

    /// Kills the process: like a pause without an end. Its messages are still in flight.
    pub(crate) fn crash(&self) {
        self.process.network.dead.store(true, Ordering::Relaxed);
        self.process.context.clock.pause();
        self.record(What::Crashed);
        self.process.context.record_crash();
    }

    pub(crate) fn restart(&mut self) {
        if self.process.network.dead.load(Ordering::Relaxed) {
            self.restarts += 1;
            self.process =
                Process::start(&self.name, self.restarts, &self.plan, &self.shared, &mut self.random);
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.process.network.dead.load(Ordering::Relaxed)
    }

    pub(crate) fn simba(&self) -> Simba {
        self.process.context.simba.clone()
    }

    fn record(&self, what: What) {
        self.shared.history.record(self.shared.now(), &self.process.context.name, what);
    }
}

impl Process {
    fn start(node: &str, number: u32, plan: &NodePlan, shared: &Shared, random: &mut Rng) -> Self {
        let clock = SkewedClock::with_rate(shared.clock.clone(), plan.rate);
        let network = Arc::new(ProcessNetwork {
            random: Mutex::new(random.fork()),
            fault_rates: Mutex::new(FaultRates::NONE),
            dead: AtomicBool::new(false),
            loses_all_hints: shared.loses_all_hints,
        });
        let weather: Arc<dyn Weather> = Arc::<ProcessNetwork>::clone(&network);
        let backend = FaultyBackend::over(Arc::clone(&shared.backend), shared.clock.clone(), weather)
            .with_caller_clock(clock.clone());
        let simba = Simba::builder(Arc::new(backend))
            .with_clock(clock.clone())
            .with_lease(shared.lease)
            .with_seed(random.u64(..))
            .build();
        let context = Context {
            name: format!("{node}.{number}"),
            shared: shared.clone(),
            clock,
            simba,
            network: Arc::clone(&network),
            holds: Arc::default(),
            last_token: Arc::default(),
        };
        tokio::spawn(actor::act(context.clone(), plan.role, random.fork()));
        Self { context, network }
    }
}

/// What the actor of a process needs: a name, a clock, a handle, and the history.
#[derive(Clone)]
pub(crate) struct Context {
    pub(crate) name: String,
    pub(crate) shared: Shared,
    pub(crate) clock: SkewedClock,
    pub(crate) simba: Simba,
    network: Arc<ProcessNetwork>,
    /// Tenures whose end is not recorded yet.
    holds: Arc<Mutex<Vec<(String, Tenure)>>>,
    /// The token of the last recorded tenure.
    last_token: Arc<Mutex<Option<FencingToken>>>,
}

impl Context {
    /// Records an event, unless the process was killed: its tasks exist until the end of the run, and one of them may
    /// still be woken by another.
    pub(crate) fn record(&self, who: &str, what: What) {
        if !self.network.dead.load(Ordering::Relaxed) {
            self.shared.history.record(self.shared.now(), who, what);
        }
    }

    pub(crate) async fn sleep(&self, duration: Duration) {
        self.clock.sleep_until(self.clock.now() + duration).await;
    }

    /// Records the start of the tenure, once. A task records its end.
    pub(crate) fn record_tenure(&self, who: &str, tenure: &Tenure) {
        let token = Some(tenure.token());
        if self.last_token.lock().unwrap_or_else(PoisonError::into_inner).replace(tenure.token()) == token {
            return;
        }
        self.record_ended();
        self.record(who, What::Acquired { token: tenure.token() });
        self.holds().push((who.to_owned(), tenure.clone()));
        let (context, who, tenure) = (self.clone(), who.to_owned(), tenure.clone());
        tokio::spawn(async move {
            tenure.expiring().await;
            context.record(&who, What::Expiring);
            tenure.lost().await;
            context.record_ended();
            context.sleep(context.shared.lease.ttl()).await;
            if tenure.is_held() {
                context.record(&who, What::Revived { token: tenure.token() });
            }
        });
    }

    /// Records tenures that have ended, each once.
    fn record_ended(&self) {
        let mut holds = self.holds();
        let (ended, open) =
            std::mem::take(&mut *holds).into_iter().partition(|(_, tenure)| !tenure.is_held());
        *holds = open;
        drop(holds);
        for (who, tenure) in ended as Vec<(String, Tenure)> {
            if let Some(loss) = tenure.loss() {
                self.record_loss(&who, &tenure, loss);
            }
        }
    }

    fn record_loss(&self, who: &str, tenure: &Tenure, loss: Loss) {
        let now = self.shared.now();
        let deadline = self.clock.on_base(tenure.deadline()) - Moment::ZERO;
        // A loss for any other reason came before the deadline.
        let valid_until = if loss == Loss::Deadline { deadline } else { now };
        self.record(who, What::Lost { loss, valid_until });
    }

    /// Records the end of the tenures of a killed process: they are valid until their deadlines.
    fn record_crash(&self) {
        for (who, tenure) in self.holds().drain(..) {
            let valid_until = self.clock.on_base(tenure.deadline()) - Moment::ZERO;
            let lost = What::Lost { loss: Loss::Vanished, valid_until };
            self.shared.history.record(valid_until, who, lost);
        }
    }

    fn holds(&self) -> std::sync::MutexGuard<'_, Vec<(String, Tenure)>> {
        self.holds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The network of one process.
#[derive(Debug)]
struct ProcessNetwork {
    random: Mutex<Rng>,
    fault_rates: Mutex<FaultRates>,
    dead: AtomicBool,
    loses_all_hints: bool,
}

impl Weather for ProcessNetwork {
    fn passage(&self, call: Call) -> Passage {
        let fault_rates = *self.fault_rates.lock().unwrap_or_else(PoisonError::into_inner);
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        if self.dead.load(Ordering::Relaxed) {
            return Passage::HANG;
        }
        if call == Call::Hint {
            let lost = self.loses_all_hints || random.f64() < fault_rates.lose_hint;
            let request = if lost { Leg::Lose } else { leg(&mut random, &fault_rates) };
            return Passage { request, reply: Leg::Pass };
        }
        let mut passage =
            Passage { request: leg(&mut random, &fault_rates), reply: leg(&mut random, &fault_rates) };
        if random.f64() < fault_rates.fail {
            let end = if random.bool() { &mut passage.request } else { &mut passage.reply };
            *end = Leg::Fail(if random.u8(..8) == 0 { ErrorKind::Denied } else { ErrorKind::Unavailable });
        }
        passage
    }

    fn forged_hint(&self) -> Option<Duration> {
        self.fault_rates.lock().unwrap_or_else(PoisonError::into_inner).forge_hint_after
    }
}

fn leg(random: &mut Rng, fault_rates: &FaultRates) -> Leg {
    if random.f64() < fault_rates.lose {
        Leg::Lose
    } else if random.f64() < fault_rates.delay {
        Leg::Delay(fault_rates.max_delay.mul_f64(random.f64()))
    } else {
        Leg::Pass
    }
}
