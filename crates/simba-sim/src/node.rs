//! One process: its clock, its network, its handle, and the way it is stopped, killed and started again.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastrand::Rng;
use simba_core::{
    Backend, Clock, ErrorKind, FencingToken, Lease, Loss, MemoryBackend, Moment, Simba, Tenure, TokioClock,
};
use simba_tck::{Call, FaultyBackend, History, Leg, Passage, SkewedClock, Weather, What};

use crate::actor;
use crate::plan::{Climate, NodePlan};

/// What all processes share.
#[derive(Clone, Debug)]
pub(crate) struct Shared {
    pub(crate) clock: TokioClock,
    pub(crate) store: MemoryBackend,
    /// The store as the processes see it.
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) history: History,
    pub(crate) lease: Lease,
    pub(crate) deaf: bool,
}

impl Shared {
    pub(crate) fn now(&self) -> Duration {
        self.clock.now() - Moment::ZERO
    }
}

/// A process, life after life.
pub(crate) struct Node {
    name: String,
    plan: NodePlan,
    shared: Shared,
    random: Rng,
    lives: u32,
    life: Life,
}

/// One life of a process.
struct Life {
    seat: Seat,
    air: Arc<Air>,
}

impl Node {
    pub(crate) fn start(index: usize, plan: NodePlan, shared: Shared, mut random: Rng) -> Self {
        let name = format!("n{index}");
        let life = Life::begin(&name, 0, &plan, &shared, &mut random);
        Self { name, plan, shared, random, lives: 0, life }
    }

    pub(crate) fn set_climate(&self, climate: Climate) {
        *self.life.air.climate.lock().unwrap_or_else(PoisonError::into_inner) = climate;
    }

    /// The process stands still: its time goes on, but nothing wakes it and nothing reaches it.
    pub(crate) fn pause(&self) {
        self.life.seat.clock.pause();
        self.record(What::Paused);
    }

    pub(crate) fn resume(&self) {
        if !self.life.air.dead.load(Ordering::Relaxed) {
            self.record(What::Resumed);
            self.life.seat.clock.resume();
        }
    }

    /// The process is killed: like a pause that never ends. What it sent is still under way.
    pub(crate) fn crash(&self) {
        self.life.air.dead.store(true, Ordering::Relaxed);
        self.life.seat.clock.pause();
        self.record(What::Crashed);
        self.life.seat.bury();
    }

    pub(crate) fn restart(&mut self) {
        if self.life.air.dead.load(Ordering::Relaxed) {
            self.lives += 1;
            self.life = Life::begin(&self.name, self.lives, &self.plan, &self.shared, &mut self.random);
        }
    }

    pub(crate) fn is_dead(&self) -> bool {
        self.life.air.dead.load(Ordering::Relaxed)
    }

    pub(crate) fn simba(&self) -> Simba {
        self.life.seat.simba.clone()
    }

    fn record(&self, what: What) {
        self.shared.history.record(self.shared.now(), &self.life.seat.name, what);
    }
}

impl Life {
    fn begin(node: &str, number: u32, plan: &NodePlan, shared: &Shared, random: &mut Rng) -> Self {
        let clock = SkewedClock::with_rate(shared.clock.clone(), plan.rate);
        let air = Arc::new(Air {
            random: Mutex::new(random.fork()),
            climate: Mutex::new(Climate::CALM),
            dead: AtomicBool::new(false),
            deaf: shared.deaf,
        });
        let weather: Arc<dyn Weather> = Arc::<Air>::clone(&air);
        let backend = FaultyBackend::over(Arc::clone(&shared.backend), shared.clock.clone(), weather)
            .with_gate(clock.clone());
        let simba = Simba::builder(Arc::new(backend))
            .clock(clock.clone())
            .lease(shared.lease)
            .seed(random.u64(..))
            .build();
        let seat = Seat {
            name: format!("{node}.{number}"),
            shared: shared.clone(),
            clock,
            simba,
            holds: Arc::default(),
            newest: Arc::default(),
        };
        tokio::spawn(actor::act(seat.clone(), plan.role, random.fork()));
        Self { seat, air }
    }
}

/// What the actor of a process has: a name, a clock, a handle, and a pen.
#[derive(Clone)]
pub(crate) struct Seat {
    pub(crate) name: String,
    pub(crate) shared: Shared,
    pub(crate) clock: SkewedClock,
    pub(crate) simba: Simba,
    /// Tenures whose end is not written down yet.
    holds: Arc<Mutex<Vec<(String, Tenure)>>>,
    /// The last one whose begin was.
    newest: Arc<Mutex<Option<FencingToken>>>,
}

impl Seat {
    pub(crate) fn record(&self, who: &str, what: What) {
        self.shared.history.record(self.shared.now(), who, what);
    }

    pub(crate) async fn sleep(&self, duration: Duration) {
        self.clock.sleep_until(self.clock.now() + duration).await;
    }

    /// Writes the tenure down, once, and in time what becomes of it.
    pub(crate) fn hold(&self, who: &str, tenure: &Tenure) {
        let token = Some(tenure.token());
        if self.newest.lock().unwrap_or_else(PoisonError::into_inner).replace(tenure.token()) == token {
            return;
        }
        self.settle();
        self.record(who, What::Acquired { token: tenure.token() });
        self.holds().push((who.to_owned(), tenure.clone()));
        let (seat, who, tenure) = (self.clone(), who.to_owned(), tenure.clone());
        tokio::spawn(async move {
            tenure.expiring().await;
            seat.record(&who, What::Expiring);
            tenure.lost().await;
            seat.settle();
            seat.sleep(seat.shared.lease.ttl()).await;
            if tenure.is_held() {
                seat.record(&who, What::Revived { token: tenure.token() });
            }
        });
    }

    /// Writes down what has ended, once: whoever comes first.
    fn settle(&self) {
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
        // Any other loss than that of the deadline came before it.
        let valid_until = if loss == Loss::Deadline { deadline } else { now };
        self.record(who, What::Lost { loss, valid_until });
    }

    /// The process is gone; its tenures are valid until their deadlines, as nobody tells it otherwise.
    fn bury(&self) {
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
struct Air {
    random: Mutex<Rng>,
    climate: Mutex<Climate>,
    dead: AtomicBool,
    deaf: bool,
}

impl Weather for Air {
    fn passage(&self, call: Call) -> Passage {
        let climate = *self.climate.lock().unwrap_or_else(PoisonError::into_inner);
        let mut random = self.random.lock().unwrap_or_else(PoisonError::into_inner);
        if self.dead.load(Ordering::Relaxed) {
            return Passage::HANG;
        }
        if call == Call::Hint {
            let lost = self.deaf || random.f64() < climate.lose_hint;
            let request = if lost { Leg::Lose } else { leg(&mut random, &climate) };
            return Passage { request, reply: Leg::Pass };
        }
        let mut passage = Passage { request: leg(&mut random, &climate), reply: leg(&mut random, &climate) };
        if random.f64() < climate.fail {
            let end = if random.bool() { &mut passage.request } else { &mut passage.reply };
            *end = Leg::Fail(if random.u8(..8) == 0 { ErrorKind::Denied } else { ErrorKind::Unavailable });
        }
        passage
    }

    fn forged_hint(&self) -> Option<Duration> {
        self.climate.lock().unwrap_or_else(PoisonError::into_inner).forge
    }
}

fn leg(random: &mut Rng, climate: &Climate) -> Leg {
    if random.f64() < climate.lose {
        Leg::Lose
    } else if random.f64() < climate.delay {
        Leg::Delay(climate.latest.mul_f64(random.f64()))
    } else {
        Leg::Pass
    }
}
