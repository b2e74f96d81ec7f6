//! A bad network between the engine and any backend: every call is a request and a reply, and each of the two
//! can be lost, late, or turned into an error.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::async_trait;
use simba_core::{
    Answer, Backend, Claim, Clock, Error, ErrorKind, Holding, Operate, Ownership, Prior, Result, Session,
};
use tokio::sync::{Notify, oneshot};

use crate::held::{Held, Released, Trap};

/// What is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Call {
    /// [`Backend::open`]
    Open,
    /// [`Session::contend`]
    Contend,
    /// [`Session::inspect`]
    Inspect,
    /// [`Session::release`]
    Release,
    /// A hint on its way to [`Session::changed`]; it has no reply.
    Hint,
}

/// What becomes of a message on one leg of its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leg {
    /// It arrives at once.
    Pass,
    /// It arrives later, whether anybody still waits for it or not.
    Delay(Duration),
    /// It never arrives.
    Lose,
    /// It does not arrive, and the caller is told so by an error of this kind.
    Fail(ErrorKind),
}

/// What becomes of a call: of its request, and of its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Passage {
    /// The way to the store.
    pub request: Leg,
    /// The way back.
    pub reply: Leg,
}

impl Passage {
    /// Nothing happens to it.
    pub const CLEAR: Self = Self { request: Leg::Pass, reply: Leg::Pass };
    /// The store never hears of it, and nobody answers.
    pub const HANG: Self = Self { request: Leg::Lose, reply: Leg::Pass };
    /// The store carries it out, and nobody answers.
    pub const REPLY_LOST: Self = Self { request: Leg::Pass, reply: Leg::Lose };

    /// The store never hears of it, and the caller gets an error.
    #[must_use]
    pub const fn fail(kind: ErrorKind) -> Self {
        Self { request: Leg::Fail(kind), reply: Leg::Pass }
    }
}

/// Decides what becomes of each call.
pub trait Weather: fmt::Debug + Send + Sync + 'static {
    /// The passage of this call.
    fn passage(&self, call: Call) -> Passage;

    /// Keeps this call's request back until the other end of the trap delivers or discards it.
    fn hold(&self, call: Call) -> Option<Trap> {
        let _ = call;
        None
    }

    /// After how long a hint is forged, if none comes by itself.
    fn forged_hint(&self) -> Option<Duration> {
        None
    }
}

/// Weather by hand: clear until switched, and a record of what was called.
#[derive(Debug, Default)]
pub struct Switch {
    state: Mutex<SwitchState>,
}

#[derive(Debug, Default)]
struct SwitchState {
    all: Option<Passage>,
    lag: Option<(Duration, Duration)>,
    next: Vec<(Call, Passage)>,
    traps: Vec<(Call, Trap)>,
    cut: bool,
    lose_reply: bool,
    calls: Vec<Call>,
}

impl Switch {
    /// Clear weather.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Every call goes this way from now on.
    pub fn set(&self, passage: Passage) {
        self.with(|state| state.all = Some(passage));
    }

    /// Every message is late by `each` and a random part of `jitter` from now on.
    pub fn lag(&self, each: Duration, jitter: Duration) {
        self.with(|state| state.lag = Some((each, jitter)));
    }

    /// The weather clears up.
    pub fn clear(&self) {
        self.with(|state| {
            (state.all, state.lag) = (None, None);
            state.next.clear();
            (state.cut, state.lose_reply) = (false, false);
        });
    }

    /// The next call of this kind goes this way.
    pub fn once(&self, call: Call, passage: Passage) {
        self.with(|state| state.next.push((call, passage)));
    }

    /// The connection breaks: the next call, of whatever kind, fails with [`ErrorKind::Unavailable`].
    pub fn cut(&self) {
        self.with(|state| state.cut = true);
    }

    /// The next call of a session, of whatever kind, is carried out and never answered.
    pub fn lose_reply(&self) {
        self.with(|state| state.lose_reply = true);
    }

    /// Keeps back the request of the next call of this kind. What is held outlives [`clear`](Self::clear).
    #[must_use = "the request is discarded when this is dropped"]
    pub fn hold_next(&self, call: Call) -> Held {
        let (held, trap) = Held::pair();
        self.with(|state| state.traps.push((call, trap)));
        held
    }

    /// How often it was called so far.
    #[must_use]
    pub fn count(&self, call: Call) -> usize {
        self.with(|state| state.calls.iter().filter(|made| **made == call).count())
    }

    /// How many calls were made so far, hints aside.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.with(|state| state.calls.iter().filter(|made| **made != Call::Hint).count())
    }

    fn with<R>(&self, act: impl FnOnce(&mut SwitchState) -> R) -> R {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl SwitchState {
    fn late(&self) -> Option<Passage> {
        let (each, jitter) = self.lag?;
        let leg = || Leg::Delay(each + jitter.mul_f64(fastrand::f64()));
        Some(Passage { request: leg(), reply: leg() })
    }
}

impl Weather for Switch {
    fn passage(&self, call: Call) -> Passage {
        self.with(|state| {
            state.calls.push(call);
            if call != Call::Hint && std::mem::take(&mut state.cut) {
                return Passage::fail(ErrorKind::Unavailable);
            }
            if !matches!(call, Call::Open | Call::Hint) && std::mem::take(&mut state.lose_reply) {
                return Passage::REPLY_LOST;
            }
            match state.next.iter().position(|(next, _)| *next == call) {
                Some(at) => state.next.remove(at).1,
                None => state.all.or_else(|| state.late()).unwrap_or(Passage::CLEAR),
            }
        })
    }

    fn hold(&self, call: Call) -> Option<Trap> {
        self.with(|state| {
            let at = state.traps.iter().position(|(next, _)| *next == call)?;
            Some(state.traps.remove(at).1)
        })
    }
}

/// A backend behind bad weather. Give each handle one of its own, around one store.
#[derive(Clone, Debug)]
pub struct FaultyBackend {
    inner: Arc<dyn Backend>,
    air: Air,
}

/// What a message passes through.
#[derive(Clone, Debug)]
struct Air {
    clock: Arc<dyn Clock>,
    /// The clock of the process that waits; while it stands still, nothing reaches it.
    gate: Option<Arc<dyn Clock>>,
    weather: Arc<dyn Weather>,
}

impl FaultyBackend {
    /// `inner` as it is seen through `weather`; delays pass on `clock`.
    pub fn new(inner: impl Backend, clock: impl Clock, weather: Arc<dyn Weather>) -> Self {
        Self::over(Arc::new(inner), clock, weather)
    }

    /// Like [`new`](Self::new), around a backend that is shared.
    pub fn over(inner: Arc<dyn Backend>, clock: impl Clock, weather: Arc<dyn Weather>) -> Self {
        Self { inner, air: Air { clock: Arc::new(clock), gate: None, weather } }
    }
}

impl FaultyBackend {
    /// Lets nothing reach the caller while the sleeps of its own `clock` are
    /// [paused](crate::SkewedClock::pause).
    #[must_use]
    pub fn with_gate(mut self, clock: impl Clock) -> Self {
        self.air.gate = Some(Arc::new(clock));
        self
    }
}

#[async_trait]
impl Backend for FaultyBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        let Passage { request, reply } = self.air.weather.passage(Call::Open);
        self.air.travel(request).await?;
        let session = self.inner.open(claim).await?;
        self.air.travel(reply).await?;
        self.air.arrive().await;
        let far = Arc::new(Far {
            session: tokio::sync::Mutex::new(session),
            knocking: AtomicUsize::new(0),
            knock: Notify::new(),
        });
        Ok(Box::new(FaultySession { far, air: self.air.clone() }))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        self.inner.operate()
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

impl Air {
    /// Waits at the door of a process that stands still.
    async fn arrive(&self) {
        if let Some(gate) = &self.gate {
            gate.sleep_until(gate.now()).await;
        }
    }

    /// Takes a caller, who waits, over one leg.
    async fn travel(&self, leg: Leg) -> Result<()> {
        match leg {
            Leg::Pass => Ok(()),
            Leg::Delay(delay) => {
                self.clock.sleep_until(self.clock.now() + delay).await;
                Ok(())
            }
            Leg::Lose => std::future::pending().await,
            Leg::Fail(kind) => Err(Error::new(kind, "injected fault")),
        }
    }
}

/// The session at the far end, where late requests still arrive.
struct Far {
    session: tokio::sync::Mutex<Box<dyn Session>>,
    knocking: AtomicUsize,
    knock: Notify,
}

struct FaultySession {
    far: Arc<Far>,
    air: Air,
}

#[derive(Clone, Copy)]
enum Request {
    Contend(Prior),
    Inspect,
    Release(Holding),
}

enum Reply {
    Contend(Answer),
    Inspect(Option<Ownership>),
    Release,
}

impl Request {
    const fn call(self) -> Call {
        match self {
            Self::Contend(_) => Call::Contend,
            Self::Inspect => Call::Inspect,
            Self::Release(_) => Call::Release,
        }
    }
}

impl Far {
    /// Carries a request out. Who listens for hints makes room for it.
    async fn perform(&self, request: Request) -> Result<Reply> {
        self.knocking.fetch_add(1, Ordering::SeqCst);
        self.knock.notify_waiters();
        let mut session = self.session.lock().await;
        self.knocking.fetch_sub(1, Ordering::SeqCst);
        match request {
            Request::Contend(prior) => session.contend(prior).await.map(Reply::Contend),
            Request::Inspect => session.inspect().await.map(Reply::Inspect),
            Request::Release(holding) => session.release(holding).await.map(|()| Reply::Release),
        }
    }

    /// Waits for a hint, letting requests in.
    async fn changed(&self) -> Result<()> {
        loop {
            let mut knock = std::pin::pin!(self.knock.notified());
            knock.as_mut().enable();
            let mut session = self.session.lock().await;
            if self.knocking.load(Ordering::SeqCst) > 0 {
                drop(session);
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                biased;
                () = knock => {}
                hint = session.changed() => return hint,
            }
        }
    }
}

impl FaultySession {
    async fn call(&self, request: Request) -> Result<Reply> {
        let kept = self.air.weather.hold(request.call()).and_then(Trap::spring);
        let passage = self.air.weather.passage(request.call());
        let reply = self.pass(passage, kept, request).await;
        self.air.arrive().await;
        reply
    }

    async fn pass(&self, passage: Passage, kept: Option<Released>, request: Request) -> Result<Reply> {
        if passage == Passage::CLEAR && kept.is_none() {
            return self.far.perform(request).await;
        }
        if let Leg::Fail(kind) = passage.request {
            return Err(Error::new(kind, "injected fault"));
        }
        let (answered, answer) = oneshot::channel();
        let (far, air) = (Arc::clone(&self.far), self.air.clone());
        // On its own from here: what the caller gave up on still arrives.
        tokio::spawn(async move {
            let mut answer = None;
            if let Some(kept) = kept {
                answer = Some(kept.answer);
                if kept.released.await.is_err() {
                    return;
                }
            }
            let _ = air.travel(passage.request).await;
            let reply = far.perform(request).await;
            drop((far, answer));
            let reply = air.travel(passage.reply).await.and(reply);
            let _ = answered.send(reply);
        });
        match answer.await {
            Ok(reply) => reply,
            Err(_) => std::future::pending().await,
        }
    }
}

fn mixed_up<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Protocol, "the reply belongs to another request"))
}

#[async_trait]
impl Session for FaultySession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        match self.call(Request::Contend(prior)).await? {
            Reply::Contend(answer) => Ok(answer),
            _ => mixed_up(),
        }
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        match self.call(Request::Inspect).await? {
            Reply::Inspect(ownership) => Ok(ownership),
            _ => mixed_up(),
        }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        match self.call(Request::Release(holding)).await? {
            Reply::Release => Ok(()),
            _ => mixed_up(),
        }
    }

    async fn changed(&mut self) -> Result<()> {
        loop {
            let forged = self.air.weather.forged_hint();
            let forge = async {
                match forged {
                    Some(after) => self.air.clock.sleep_until(self.air.clock.now() + after).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                hint = self.far.changed() => hint?,
                () = forge => return Ok(()),
            }
            match self.air.weather.passage(Call::Hint).request {
                Leg::Lose => {}
                leg => {
                    self.air.travel(leg).await?;
                    self.air.arrive().await;
                    return Ok(());
                }
            }
        }
    }
}
