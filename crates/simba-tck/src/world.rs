//! What every case needs: names, peers with a network each, and waiting with a bound.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use simba_core::{
    Answer, Backend, Claim, Clock, Contender, ContenderId, FencingToken, Guard, Holding, Intent, Lease,
    Locker, Moment, MutexName, MutexState, Observer, Ownership, Prior, Result, Session, Simba, SystemClock,
    Tenure, View,
};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::{Fixture, Network};

/// How long anything may take that takes no time: far more than a noisy machine needs, and far less than the
/// [`long`] lease, so that no lease that ends by itself can explain it.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// How long the machine may stand still without failing a case. Leases leave more time than this between a renewal
/// and its deadline, and a signal of the engine may come this late.
pub(crate) const STANDSTILL: Duration = Duration::from_secs(2);
/// How often a state that gives no signal is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// A mutex name that no other case has.
pub(crate) fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("tck-{}", nonce.to_lowercase())).expect("the name is plain")
}

/// A lease and a poll that outlast every wait of the kit: what is passed on under it was passed on on
/// purpose.
pub(crate) fn long() -> Lease {
    let poll = Duration::from_secs(30);
    let lease = Lease::new(Duration::from_secs(30), Duration::from_secs(20));
    lease.and_then(|lease| lease.with_poll(poll)).expect("the lease is in order")
}

/// This moment on the clock of every handle.
pub(crate) fn now() -> Moment {
    SystemClock.now()
}

pub(crate) async fn sleep_until(at: Moment) {
    SystemClock.sleep_until(at).await;
}

/// How long a lease may take to run out and be noticed.
pub(crate) fn patience(fixture: &dyn Fixture) -> Duration {
    fixture.lease().total() * 2 + SOON
}

/// Waits for what must come, and says which promise is broken if it does not.
pub(crate) async fn soon<F: Future>(promise: &str, future: F) -> F::Output {
    within(SOON, promise, future).await
}

pub(crate) async fn within<F: Future>(limit: Duration, promise: &str, future: F) -> F::Output {
    match timeout(limit, future).await {
        Ok(output) => output,
        Err(_) => panic!("broken: {promise} (not within {limit:?})"),
    }
}

/// Waits for a state that gives no signal.
pub(crate) async fn until(promise: &str, reached: impl Fn() -> bool + Send + Sync) {
    let look = async {
        while !reached() {
            sleep(LOOK).await;
        }
    };
    soon(promise, look).await;
}

/// Unwraps what must be given.
pub(crate) fn kept<T>(promise: &str, outcome: Result<T>) -> T {
    outcome.unwrap_or_else(|error| panic!("broken: {promise}: {error}"))
}

/// One process at the store: its handle, and the network that can be broken.
pub(crate) struct Peer {
    pub(crate) simba: Simba,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) network: Arc<dyn Network>,
}

impl Peer {
    pub(crate) async fn connect(fixture: &dyn Fixture) -> Self {
        let connection = soon("the store can be connected to", fixture.connect()).await;
        let backend = Arc::clone(&connection.backend);
        let simba = Simba::builder(connection.backend).lease(fixture.lease()).build();
        Self { simba, backend, network: connection.network }
    }

    /// Two processes at one store.
    pub(crate) async fn pair(fixture: &dyn Fixture) -> (Self, Self) {
        (Self::connect(fixture).await, Self::connect(fixture).await)
    }

    pub(crate) fn locker(&self, mutex: &MutexName) -> Locker {
        self.simba.locker(mutex.clone())
    }

    /// A locker whose lease outlasts the case.
    pub(crate) fn long_locker(&self, mutex: &MutexName) -> Locker {
        self.locker(mutex).with_lease(long())
    }

    /// Takes a mutex that must be free or become so.
    pub(crate) async fn lock(&self, mutex: &MutexName) -> Guard {
        lock(&self.locker(mutex)).await
    }

    /// Tries to take a mutex, and gets an answer: an error is none.
    pub(crate) async fn try_lock(&self, mutex: &MutexName) -> Option<Guard> {
        try_lock(&self.locker(mutex)).await
    }

    /// Opens a session of a contender that waits its turn, by the [`long`] lease.
    pub(crate) async fn waiter(&self, mutex: &MutexName) -> Asking {
        self.session(Claim::new(mutex.clone(), ContenderId::generate(), long())).await
    }

    pub(crate) async fn session_for(&self, mutex: &MutexName, intent: Intent) -> Asking {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        self.session(claim.with_intent(intent)).await
    }

    pub(crate) async fn session(&self, claim: Claim) -> Asking {
        let id = claim.contender.clone();
        let session =
            kept("a session can be opened", soon("a session opens", self.backend.open(claim)).await);
        Asking { id, session }
    }

    /// The process is gone without a word: what it has at the store is left to the lease.
    pub(crate) fn die(&self) {
        self.network.stall();
    }

    /// Checks that nothing is left of anybody: not held, nobody queued.
    pub(crate) async fn finds_nothing_of(&self, mutex: &MutexName) {
        let guard = soon("what was given up is free", self.locker(mutex).lock()).await;
        kept("a free mutex can be released", kept("a free mutex can be locked", guard).release().await);
        self.finds_no_waiter_of(mutex).await;
    }

    pub(crate) async fn finds_no_waiter_of(&self, mutex: &MutexName) {
        let Some(operate) = self.backend.operate() else { return };
        let empty = async {
            while kept("a mutex can be read", operate.read(mutex).await).waiters.unwrap_or(0) > 0 {
                sleep(LOOK).await;
            }
        };
        soon("who gave up is not queued any more", empty).await;
    }

    pub(crate) async fn shutdown(self) {
        soon("a shutdown ends", self.simba.shutdown()).await;
    }
}

pub(crate) async fn lock(locker: &Locker) -> Guard {
    let guard = soon("a mutex that is free or becomes free is acquired", locker.lock()).await;
    kept("a free mutex can be locked", guard)
}

pub(crate) async fn try_lock(locker: &Locker) -> Option<Guard> {
    let answered = async {
        loop {
            match locker.try_lock().await {
                // A call may take too long on a noisy machine; that is no answer.
                Err(error) if error.is_transient() => {}
                outcome => return kept("a try is answered", outcome),
            }
        }
    };
    soon("a try is answered", answered).await
}

pub(crate) async fn release(guard: Guard) {
    let released = soon("a release ends", guard.release()).await;
    kept("what is held can be released", released);
}

/// A session that is called directly, as the engine does.
pub(crate) struct Asking {
    pub(crate) id: ContenderId,
    pub(crate) session: Box<dyn Session>,
}

impl Asking {
    pub(crate) async fn contend(&mut self, prior: Prior) -> Answer {
        kept("a call is answered", soon("a call is answered", self.session.contend(prior)).await)
    }

    /// Takes the mutex, which must be free, and gives the token.
    pub(crate) async fn take(&mut self) -> FencingToken {
        match self.contend(Prior::Nothing).await {
            Answer::Ours(ours) => self.token_of(&ours),
            other => {
                panic!("broken: a free mutex is given to the first who asks, but the answer is {other:?}")
            }
        }
    }

    /// Asks for a mutex that must be somebody else's.
    pub(crate) async fn queue(&mut self) -> Ownership {
        match self.contend(Prior::Nothing).await {
            Answer::Held(other) => other,
            other => panic!("broken: a held mutex is answered by its holder, not by {other:?}"),
        }
    }

    /// Asks whenever a hint comes, and only then.
    pub(crate) async fn take_by_hints(&mut self, promise: &str) -> FencingToken {
        let hinted = async {
            loop {
                if let Answer::Ours(ours) = self.session.contend(Prior::Nothing).await? {
                    return Ok(ours);
                }
                self.session.changed().await?;
            }
        };
        let ours = kept(promise, soon(promise, hinted).await);
        self.token_of(&ours)
    }

    /// Waits for a hint.
    pub(crate) async fn hint(&mut self, promise: &str) {
        kept(promise, soon(promise, self.session.changed()).await);
    }

    pub(crate) async fn inspect(&mut self) -> Option<Ownership> {
        kept("a look is answered", soon("a look is answered", self.session.inspect()).await)
    }

    pub(crate) async fn release(&mut self, token: Option<FencingToken>) {
        let holding = token.map_or(Holding::Unknown, Holding::Under);
        kept("a release is confirmed", soon("a release is confirmed", self.session.release(holding)).await);
    }

    pub(crate) fn token_of(&self, ours: &Ownership) -> FencingToken {
        assert_eq!(ours.owner, self.id, "broken: an answer that says `ours` names us");
        assert!(!ours.remaining.is_zero(), "broken: what is ours is ours for some time");
        ours.token.expect("broken: what is ours has a token")
    }
}

/// The token of an answer that must say `ours`.
pub(crate) fn ours(promise: &str, answer: Answer) -> FencingToken {
    match answer {
        Answer::Ours(Ownership { token: Some(token), .. }) => token,
        other => panic!("broken: {promise}; the answer is {other:?}"),
    }
}

/// Waits until the observer shows what it must see.
pub(crate) async fn sees(
    observer: &mut Observer,
    promise: &str,
    wanted: impl Fn(&View) -> bool + Send + Sync,
) {
    let seen = async { while !wanted(&kept(promise, observer.changed().await)) {} };
    soon(promise, seen).await;
}

/// What a contender was told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Told {
    Acquired(FencingToken),
    Released(FencingToken),
}

/// A contender that writes down what it is told.
pub(crate) struct Recorder(mpsc::UnboundedSender<Told>);

pub(crate) fn recorder() -> (Recorder, mpsc::UnboundedReceiver<Told>) {
    let (sender, told) = mpsc::unbounded_channel();
    (Recorder(sender), told)
}

impl Contender for Recorder {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.0.send(Told::Acquired(tenure.token())).ok();
    }

    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        self.0.send(Told::Released(tenure.token())).ok();
    }
}

/// Polls `future` at most `polls` times, each when it asks for it, and then drops it. Its output if it was
/// through.
pub(crate) async fn polled<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let (mut future, mut left) = (pin!(future), polls);
    poll_fn(|context| {
        let Some(after) = left.checked_sub(1) else { return Poll::Ready(None) };
        left = after;
        match future.as_mut().poll(context) {
            Poll::Ready(output) => Poll::Ready(Some(output)),
            Poll::Pending if left == 0 => Poll::Ready(None),
            Poll::Pending => Poll::Pending,
        }
    })
    .await
}
