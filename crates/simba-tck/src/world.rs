//! Helpers of all cases: names, peers with a network each, and waits with a limit.

use std::future::{Future, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use simba_core::spi::{Answer, Backend, Claim, Holding, Intent, Ownership, Prior, Session};
use simba_core::{
    Clock, Contender, ContenderId, FencingToken, Guard, Lease, Locker, Moment, MutexName, MutexState,
    Observer, Result, Simba, SystemClock, Tenure, View,
};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::skips::skip;
use crate::suite::CASE_LIMIT;
use crate::{Fixture, Network};

/// Time limit for operations that need no waiting. A busy machine needs less. The poll of the [`long`] lease is longer,
/// so that neither a poll nor the end of a lease can explain the result.
pub(crate) const SOON: Duration = Duration::from_secs(20);
/// How long the machine may be paused without failing a case. Leases leave more time than this between a renewal and
/// its deadline.
pub(crate) const MAX_PAUSE: Duration = Duration::from_secs(2);
/// How late a signal of the engine may come: the timer's thread and the task that it wakes may each be paused.
pub(crate) const MAX_DELAY: Duration = Duration::from_secs(4);
/// The poll interval for a state without a notification.
const POLL: Duration = Duration::from_millis(5);

/// Returns a mutex name that no other case has.
pub(crate) fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("tck-{}", nonce.to_lowercase())).expect("the name is valid")
}

/// Returns a lease and a poll that are longer than every wait of the suite: under it, a hand-over is explained by a
/// release only.
pub(crate) fn long() -> Lease {
    let poll = Duration::from_secs(30);
    let lease = Lease::new(Duration::from_secs(30), Duration::from_secs(20));
    lease.and_then(|lease| lease.with_poll(poll)).expect("the lease is valid")
}

/// Returns the current time on the clock of every handle.
pub(crate) fn now() -> Moment {
    SystemClock.now()
}

/// Returns a time as the [`History`](crate::History) records it.
pub(crate) fn since_zero(at: Moment) -> Duration {
    at - Moment::ZERO
}

pub(crate) async fn sleep_until(at: Moment) {
    SystemClock.sleep_until(at).await;
}

/// Returns the time limit for the end of a lease and its detection.
pub(crate) fn lease_limit(fixture: &dyn Fixture) -> Duration {
    fixture.lease().total() * 2 + SOON
}

/// Waits for a result, and panics with the broken guarantee if it does not come in time.
pub(crate) async fn soon<F: Future>(guarantee: &str, future: F) -> F::Output {
    within(SOON, guarantee, future).await
}

pub(crate) async fn within<F: Future>(limit: Duration, guarantee: &str, future: F) -> F::Output {
    match timeout(limit, future).await {
        Ok(output) => output,
        Err(_) => panic!("broken: {guarantee} (not within {limit:?})"),
    }
}

/// Waits for a state without a notification.
pub(crate) async fn until(guarantee: &str, reached: impl Fn() -> bool + Send + Sync) {
    let poll = async {
        while !reached() {
            sleep(POLL).await;
        }
    };
    soon(guarantee, poll).await;
}

/// Unwraps a result that must be `Ok`.
pub(crate) fn assert_ok<T>(guarantee: &str, outcome: Result<T>) -> T {
    outcome.unwrap_or_else(|error| panic!("broken: {guarantee}: {error}"))
}

/// One process at the store: its handle, and its network with fault injection.
pub(crate) struct Peer {
    pub(crate) simba: Simba,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) network: Arc<dyn Network>,
}

impl Peer {
    pub(crate) async fn connect(fixture: &dyn Fixture) -> Self {
        // The fixture may have to set up a server first.
        let connection = within(CASE_LIMIT, "the store can be connected to", fixture.connect()).await;
        let backend = Arc::clone(&connection.backend);
        let simba = Simba::builder(connection.backend).with_lease(fixture.lease()).build();
        Self { simba, backend, network: connection.network }
    }

    /// Connects two processes to one store.
    pub(crate) async fn pair(fixture: &dyn Fixture) -> (Self, Self) {
        (Self::connect(fixture).await, Self::connect(fixture).await)
    }

    pub(crate) fn locker(&self, mutex: &MutexName) -> Locker {
        self.simba.locker(mutex.clone())
    }

    /// Returns a locker whose lease is longer than the case.
    pub(crate) fn long_locker(&self, mutex: &MutexName) -> Locker {
        self.locker(mutex).with_lease(long())
    }

    /// Acquires a mutex that must be free or become free.
    pub(crate) async fn lock(&self, mutex: &MutexName) -> Guard {
        lock(&self.locker(mutex)).await
    }

    /// Tries to acquire a mutex until there is an answer and not an error. Uses the [`long`] lease, whose calls may
    /// take longer than a [`MAX_PAUSE`]: an abandoned call may have acquired what the next one then finds held.
    pub(crate) async fn try_lock(&self, mutex: &MutexName) -> Option<Guard> {
        try_lock(&self.long_locker(mutex)).await
    }

    /// Opens a session of a contender that waits in the queue, with the [`long`] lease.
    pub(crate) async fn waiter(&self, mutex: &MutexName) -> DirectSession {
        self.session(Claim::new(mutex.clone(), ContenderId::generate(), long())).await
    }

    pub(crate) async fn session_for(&self, mutex: &MutexName, intent: Intent) -> DirectSession {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        self.session(claim.with_intent(intent)).await
    }

    pub(crate) async fn session(&self, claim: Claim) -> DirectSession {
        let id = claim.contender.clone();
        let session =
            assert_ok("a session can be opened", soon("a session opens", self.backend.open(claim)).await);
        DirectSession { id, session }
    }

    /// Simulates a crash of the process: its entries in the store stay until the lease ends.
    pub(crate) fn crash(&self) {
        self.network.stall();
    }

    /// Lets a holder crash. Returns it, another process, and its guard; `None` skips the case on a store that does not
    /// free the mutex of a dead holder.
    pub(crate) async fn crashed_holder(fixture: &dyn Fixture) -> Option<(Self, Self, Guard)> {
        if !fixture.profile().expires_without_client {
            skip("the mutex of a dead holder is not freed");
            return None;
        }
        let (dead, alive) = Self::pair(fixture).await;
        let guard = dead.lock(&name()).await;
        dead.crash();
        Some((dead, alive, guard))
    }

    /// Acquires a mutex whose holder has crashed.
    pub(crate) async fn succeed(&self, fixture: &dyn Fixture, mutex: &MutexName) -> Guard {
        let locker = self.locker(mutex);
        let next = within(lease_limit(fixture), "a dead holder is succeeded", locker.lock()).await;
        assert_ok("a dead holder is succeeded", next)
    }

    /// Checks that the mutex is free and has no waiters.
    pub(crate) async fn assert_free(&self, mutex: &MutexName) {
        let guard = soon("an abandoned mutex is free", self.locker(mutex).lock()).await;
        assert_ok(
            "a free mutex can be released",
            assert_ok("a free mutex can be locked", guard).release().await,
        );
        self.assert_no_waiters(mutex).await;
    }

    pub(crate) async fn assert_no_waiters(&self, mutex: &MutexName) {
        let Some(operate) = self.backend.operate() else { return };
        let empty = async {
            while assert_ok("a mutex can be read", operate.read(mutex).await).waiters.unwrap_or(0) > 0 {
                sleep(POLL).await;
            }
        };
        soon("a waiter that gave up is not queued any more", empty).await;
    }

    pub(crate) async fn shutdown(self) {
        soon("a shutdown ends", self.simba.shutdown()).await;
    }
}

pub(crate) async fn lock(locker: &Locker) -> Guard {
    let guard = soon("a mutex that is free or becomes free is acquired", locker.lock()).await;
    assert_ok("a free mutex can be locked", guard)
}

pub(crate) async fn try_lock(locker: &Locker) -> Option<Guard> {
    let answered = async {
        loop {
            match locker.try_lock().await {
                // A call may exceed its limit on a busy machine: try again.
                Err(error) if error.is_transient() => {}
                outcome => return assert_ok("a try is answered", outcome),
            }
        }
    };
    soon("a try is answered", answered).await
}

pub(crate) async fn release(guard: Guard) {
    let released = soon("a release ends", guard.release()).await;
    assert_ok("what is held can be released", released);
}

/// A session that is called directly, as the engine does.
pub(crate) struct DirectSession {
    pub(crate) id: ContenderId,
    pub(crate) session: Box<dyn Session>,
}

impl DirectSession {
    pub(crate) async fn contend(&mut self, prior: Prior) -> Answer {
        assert_ok("a call is answered", soon("a call is answered", self.session.contend(prior)).await)
    }

    /// Acquires the mutex, which must be free, and returns the token.
    pub(crate) async fn take(&mut self) -> FencingToken {
        match self.contend(Prior::Nothing).await {
            Answer::Ours(ours) => self.token_of(&ours),
            other => {
                panic!("broken: the first call acquires a free mutex, but the answer is {other:?}")
            }
        }
    }

    /// Contends for a mutex that another must hold.
    pub(crate) async fn queue(&mut self) -> Ownership {
        match self.contend(Prior::Nothing).await {
            Answer::Held(other) => other,
            other => panic!("broken: a held mutex is answered by its holder, not by {other:?}"),
        }
    }

    /// Contends whenever a hint comes, and only then.
    pub(crate) async fn take_by_hints(&mut self, guarantee: &str) -> FencingToken {
        let hinted = async {
            loop {
                if let Answer::Ours(ours) = self.session.contend(Prior::Nothing).await? {
                    return Ok(ours);
                }
                self.session.changed().await?;
            }
        };
        let ours = assert_ok(guarantee, soon(guarantee, hinted).await);
        self.token_of(&ours)
    }

    /// Waits for a hint.
    pub(crate) async fn hint(&mut self, guarantee: &str) {
        assert_ok(guarantee, soon(guarantee, self.session.changed()).await);
    }

    pub(crate) async fn inspect(&mut self) -> Option<Ownership> {
        assert_ok(
            "an inspection is answered",
            soon("an inspection is answered", self.session.inspect()).await,
        )
    }

    pub(crate) async fn release(&mut self, token: Option<FencingToken>) {
        let holding = token.map_or(Holding::Unknown, Holding::Under);
        assert_ok(
            "a release is confirmed",
            soon("a release is confirmed", self.session.release(holding)).await,
        );
    }

    pub(crate) fn token_of(&self, ours: &Ownership) -> FencingToken {
        assert_eq!(ours.owner, self.id, "broken: an answer `ours` names the caller");
        assert!(!ours.remaining.is_zero(), "broken: a hold has time left");
        ours.token.expect("broken: a hold has a token")
    }
}

/// Returns the token of an answer that must be `ours`.
pub(crate) fn ours(guarantee: &str, answer: Answer) -> FencingToken {
    match answer {
        Answer::Ours(Ownership { token: Some(token), .. }) => token,
        other => panic!("broken: {guarantee}; the answer is {other:?}"),
    }
}

/// Waits until the observer shows the wanted view.
pub(crate) async fn sees(
    observer: &mut Observer,
    guarantee: &str,
    wanted: impl Fn(&View) -> bool + Send + Sync,
) {
    let seen = async { while !wanted(&assert_ok(guarantee, observer.changed().await)) {} };
    soon(guarantee, seen).await;
}

/// A callback of a contender.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Callback {
    Acquired(FencingToken),
    Released(FencingToken),
}

/// A contender that records its callbacks.
pub(crate) struct Recorder(mpsc::UnboundedSender<Callback>);

pub(crate) fn recorder() -> (Recorder, mpsc::UnboundedReceiver<Callback>) {
    let (sender, callbacks) = mpsc::unbounded_channel();
    (Recorder(sender), callbacks)
}

impl Contender for Recorder {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.0.send(Callback::Acquired(tenure.token())).ok();
    }

    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        self.0.send(Callback::Released(tenure.token())).ok();
    }
}

/// Polls `future` at most `polls` times, each when it is woken, and then drops it. Returns its output if it was ready.
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
