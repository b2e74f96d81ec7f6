//! Fault injection between the engine and any backend: every call is a request and a reply, and each of the two can be
//! lost, delayed, or turned into an error.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::spi::async_trait;
use simba_core::spi::{Answer, Backend, Claim, Holding, Operate, Ownership, Prior, Session};
use simba_core::{Clock, Error, ErrorKind, Result};
use tokio::sync::{Notify, oneshot};

use crate::held::{Held, Released, Trap};

/// The kind of a call.
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
    /// A hint for [`Session::changed`]; it has no reply.
    Hint,
}

/// What happens to a request or a reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Leg {
    /// It arrives at once.
    Pass,
    /// It arrives later, even if the caller has given up.
    Delay(Duration),
    /// It never arrives.
    Lose,
    /// It does not arrive, and the caller gets an error of this kind.
    Fail(ErrorKind),
}

/// What happens to a call: to its request, and to its reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct Passage {
    /// The request to the store.
    pub request: Leg,
    /// The reply of the store.
    pub reply: Leg,
}

impl Passage {
    /// No fault.
    pub const CLEAR: Self = Self { request: Leg::Pass, reply: Leg::Pass };
    /// The request is lost, and there is no reply.
    pub const HANG: Self = Self { request: Leg::Lose, reply: Leg::Pass };
    /// The request is executed, and its reply is lost.
    pub const REPLY_LOST: Self = Self { request: Leg::Pass, reply: Leg::Lose };

    /// Returns a fault that loses the request and returns an error to the caller.
    #[must_use]
    pub const fn fail(kind: ErrorKind) -> Self {
        Self { request: Leg::Fail(kind), reply: Leg::Pass }
    }
}

/// Decides which faults each call gets.
pub trait Weather: fmt::Debug + Send + Sync + 'static {
    /// Returns what happens to this call.
    fn passage(&self, call: Call) -> Passage;

    /// Holds this call's request back until the other end of the trap delivers or discards it.
    fn hold(&self, call: Call) -> Option<Trap> {
        let _ = call;
        None
    }

    /// Returns after how long a hint is forged, if no real one comes.
    fn forged_hint(&self) -> Option<Duration> {
        None
    }
}

/// Faults that a test sets, and a record of the calls. A new switch has no faults.
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
    /// Creates a switch without faults.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Sets what happens to every call from now on.
    pub fn set(&self, passage: Passage) {
        self.with(|state| state.all = Some(passage));
    }

    /// Delays every message by `each` and a random part of `jitter` from now on.
    pub fn lag(&self, each: Duration, jitter: Duration) {
        self.with(|state| state.lag = Some((each, jitter)));
    }

    /// Removes all faults.
    pub fn clear(&self) {
        self.with(|state| {
            (state.all, state.lag) = (None, None);
            state.next.clear();
            (state.cut, state.lose_reply) = (false, false);
        });
    }

    /// Sets what happens to the next call of this kind.
    pub fn once(&self, call: Call, passage: Passage) {
        self.with(|state| state.next.push((call, passage)));
    }

    /// Breaks the connection: the next call of any kind fails with [`ErrorKind::Unavailable`].
    pub fn cut(&self) {
        self.with(|state| state.cut = true);
    }

    /// Executes the next call of a session, of any kind, and loses its reply.
    pub fn lose_reply(&self) {
        self.with(|state| state.lose_reply = true);
    }

    /// Holds back the request of the next call of this kind. A held request survives [`clear`](Self::clear).
    #[must_use = "the request is discarded when this is dropped"]
    pub fn hold_next(&self, call: Call) -> Held {
        let (held, trap) = Held::pair();
        self.with(|state| state.traps.push((call, trap)));
        held
    }

    /// Returns how many calls of this kind were made so far.
    #[must_use]
    pub fn count(&self, call: Call) -> usize {
        self.with(|state| state.calls.iter().filter(|made| **made == call).count())
    }

    /// Returns how many calls were made so far, without hints.
    #[must_use]
    pub fn calls(&self) -> usize {
        self.with(|state| state.calls.iter().filter(|made| **made != Call::Hint).count())
    }

    fn with<R>(&self, act: impl FnOnce(&mut SwitchState) -> R) -> R {
        act(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl SwitchState {
    fn delayed(&self) -> Option<Passage> {
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
                None => state.all.or_else(|| state.delayed()).unwrap_or(Passage::CLEAR),
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

/// A backend with injected faults. Use one per handle, around one store.
#[derive(Clone, Debug)]
pub struct FaultyBackend {
    inner: Arc<dyn Backend>,
    link: Link,
}

/// The connection between a caller and the store.
#[derive(Clone, Debug)]
struct Link {
    clock: Arc<dyn Clock>,
    /// The clock of the calling process; while it is paused, nothing reaches the caller.
    caller_clock: Option<Arc<dyn Clock>>,
    weather: Arc<dyn Weather>,
}

impl FaultyBackend {
    /// Wraps `inner` with the faults of `weather`; delays use `clock`.
    pub fn new(inner: impl Backend, clock: impl Clock, weather: Arc<dyn Weather>) -> Self {
        Self::over(Arc::new(inner), clock, weather)
    }

    /// Wraps a shared backend, like [`new`](Self::new).
    pub fn over(inner: Arc<dyn Backend>, clock: impl Clock, weather: Arc<dyn Weather>) -> Self {
        Self { inner, link: Link { clock: Arc::new(clock), caller_clock: None, weather } }
    }
}

impl FaultyBackend {
    /// Blocks replies to the caller while the sleeps of its own `clock` are [paused](crate::SkewedClock::pause).
    #[must_use]
    pub fn with_caller_clock(mut self, clock: impl Clock) -> Self {
        self.link.caller_clock = Some(Arc::new(clock));
        self
    }
}

#[async_trait]
impl Backend for FaultyBackend {
    fn name(&self) -> &'static str {
        self.inner.name()
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        let Passage { request, reply } = self.link.weather.passage(Call::Open);
        self.link.apply(request).await?;
        let session = self.inner.open(claim).await?;
        self.link.apply(reply).await?;
        self.link.wait_for_caller().await;
        let remote = Arc::new(RemoteSession {
            session: tokio::sync::Mutex::new(session),
            pending: AtomicUsize::new(0),
            pending_changed: Notify::new(),
        });
        Ok(Box::new(FaultySession { remote, link: self.link.clone() }))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        self.inner.operate()
    }

    async fn close(&self) {
        self.inner.close().await;
    }
}

impl Link {
    /// Waits while the calling process is paused.
    async fn wait_for_caller(&self) {
        if let Some(caller_clock) = &self.caller_clock {
            caller_clock.sleep_until(caller_clock.now()).await;
        }
    }

    /// Applies a fault to a message while the caller waits.
    async fn apply(&self, leg: Leg) -> Result<()> {
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

/// The session at the store's end, where delayed requests still arrive.
struct RemoteSession {
    session: tokio::sync::Mutex<Box<dyn Session>>,
    pending: AtomicUsize,
    pending_changed: Notify,
}

struct FaultySession {
    remote: Arc<RemoteSession>,
    link: Link,
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

impl RemoteSession {
    /// Executes a request. A waiting `changed` releases the session for it.
    async fn execute(&self, request: Request) -> Result<Reply> {
        self.pending.fetch_add(1, Ordering::SeqCst);
        self.pending_changed.notify_waiters();
        let mut session = self.session.lock().await;
        self.pending.fetch_sub(1, Ordering::SeqCst);
        match request {
            Request::Contend(prior) => session.contend(prior).await.map(Reply::Contend),
            Request::Inspect => session.inspect().await.map(Reply::Inspect),
            Request::Release(holding) => session.release(holding).await.map(|()| Reply::Release),
        }
    }

    /// Waits for a hint, but lets requests use the session.
    async fn changed(&self) -> Result<()> {
        loop {
            let mut pending_changed = std::pin::pin!(self.pending_changed.notified());
            pending_changed.as_mut().enable();
            let mut session = self.session.lock().await;
            if self.pending.load(Ordering::SeqCst) > 0 {
                drop(session);
                tokio::task::yield_now().await;
                continue;
            }
            tokio::select! {
                biased;
                () = pending_changed => {}
                hint = session.changed() => return hint,
            }
        }
    }
}

impl FaultySession {
    async fn call(&self, request: Request) -> Result<Reply> {
        let held_back = self.link.weather.hold(request.call()).and_then(Trap::trigger);
        let passage = self.link.weather.passage(request.call());
        let reply = self.transfer(passage, held_back, request).await;
        self.link.wait_for_caller().await;
        reply
    }

    async fn transfer(
        &self,
        passage: Passage,
        held_back: Option<Released>,
        request: Request,
    ) -> Result<Reply> {
        if passage == Passage::CLEAR && held_back.is_none() {
            return self.remote.execute(request).await;
        }
        if let Leg::Fail(kind) = passage.request {
            return Err(Error::new(kind, "injected fault"));
        }
        let (answered, answer) = oneshot::channel();
        let (remote, link) = (Arc::clone(&self.remote), self.link.clone());
        // Spawned, so that an abandoned request still arrives.
        tokio::spawn(async move {
            let mut answer = None;
            if let Some(held_back) = held_back {
                answer = Some(held_back.answer);
                if held_back.released.await.is_err() {
                    return;
                }
            }
            let _ = link.apply(passage.request).await;
            let reply = remote.execute(request).await;
            drop((remote, answer));
            let reply = link.apply(passage.reply).await.and(reply);
            let _ = answered.send(reply);
        });
        match answer.await {
            Ok(reply) => reply,
            Err(_) => std::future::pending().await,
        }
    }
}

fn wrong_reply<T>() -> Result<T> {
    Err(Error::new(ErrorKind::Protocol, "the reply belongs to another request"))
}

#[async_trait]
impl Session for FaultySession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        match self.call(Request::Contend(prior)).await? {
            Reply::Contend(answer) => Ok(answer),
            _ => wrong_reply(),
        }
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        match self.call(Request::Inspect).await? {
            Reply::Inspect(ownership) => Ok(ownership),
            _ => wrong_reply(),
        }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        match self.call(Request::Release(holding)).await? {
            Reply::Release => Ok(()),
            _ => wrong_reply(),
        }
    }

    async fn changed(&mut self) -> Result<()> {
        loop {
            let forged = self.link.weather.forged_hint();
            let forge = async {
                match forged {
                    Some(after) => self.link.clock.sleep_until(self.link.clock.now() + after).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                hint = self.remote.changed() => hint?,
                () = forge => return Ok(()),
            }
            match self.link.weather.passage(Call::Hint).request {
                Leg::Lose => {}
                leg => {
                    self.link.apply(leg).await?;
                    self.link.wait_for_caller().await;
                    return Ok(());
                }
            }
        }
    }
}
