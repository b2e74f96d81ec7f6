//! Holding a mutex: until when, under which token, and how it ended.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::clock::{Clock, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::park;
use crate::seeded::{self, Bug};
use crate::types::{ContenderId, FencingToken, MutexName};
use crate::watched::Watched;

/// Why a tenure ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// The lease could not be renewed in time.
    Deadline,
    /// The store says that another holds it.
    TakenBy(ContenderId),
    /// The store knows nothing of us any more: evicted, flushed, or restored from an older state.
    Vanished,
    /// The longest hold that was allowed is over.
    MaxHold,
    /// The holder stepped down.
    SteppedDown,
    /// The holder gave it up itself: released, stopped or shut down.
    Released,
}

impl Loss {
    /// Short lower-case name for logs and metrics.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::TakenBy(_) => "taken",
            Self::Vanished => "vanished",
            Self::MaxHold => "max_hold",
            Self::SteppedDown => "stepped_down",
            Self::Released => "released",
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline => f.write_str("the lease could not be renewed in time"),
            Self::TakenBy(other) => write!(f, "`{other}` holds it now"),
            Self::Vanished => f.write_str("the store does not know this holder any more"),
            Self::MaxHold => f.write_str("the longest allowed hold is over"),
            Self::SteppedDown => f.write_str("the holder stepped down"),
            Self::Released => f.write_str("the holder released it"),
        }
    }
}

/// One uninterrupted hold of a mutex by one contender.
///
/// Validity is a deadline, never a flag: [`is_held`](Self::is_held) reads the clock, and
/// [`expiring`](Self::expiring) and [`lost`](Self::lost) wait on the machine's timers, so both come on time
/// while the store hangs or the engine's runtime is busy. Cheap to clone; all clones are the same tenure.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
/// let guard = simba.locker("orders").lock().await?;
/// let tenure = guard.tenure();
/// assert!(tenure.is_held());
/// guard.release().await?;
/// assert_eq!(tenure.lost().await, simba_core::Loss::Released);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Tenure {
    inner: Arc<Inner>,
}

struct Inner {
    mutex: MutexName,
    contender: ContenderId,
    token: FencingToken,
    clock: Arc<dyn Clock>,
    acquired_at: Moment,
    /// The end of the longest allowed hold.
    cap: Option<Moment>,
    state: Watched<State>,
}

#[derive(Debug)]
struct State {
    deadline: Moment,
    grace: Duration,
    /// The end is announced: work is told to stop and none may start.
    closing: Option<Loss>,
    ended: Option<Loss>,
    /// Work under way that a graceful end waits for.
    work: usize,
    /// Work was under way at least once.
    used: bool,
}

/// The terms of a tenure: what the engine knows when it begins.
pub(crate) struct Terms {
    pub(crate) mutex: MutexName,
    pub(crate) contender: ContenderId,
    pub(crate) token: FencingToken,
    pub(crate) acquired_at: Moment,
    pub(crate) deadline: Moment,
    pub(crate) grace: Duration,
    pub(crate) max_hold: Option<Duration>,
}

impl Tenure {
    /// The mutex.
    #[must_use]
    pub fn mutex(&self) -> &MutexName {
        &self.inner.mutex
    }

    /// Who holds it.
    #[must_use]
    pub fn contender(&self) -> &ContenderId {
        &self.inner.contender
    }

    /// The number to hand to every resource that the work touches.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.inner.token
    }

    /// When the winning request was sent.
    #[must_use]
    pub fn acquired_at(&self) -> Moment {
        self.inner.acquired_at
    }

    /// When the mutex is lost unless a renewal comes first.
    #[must_use]
    pub fn deadline(&self) -> Moment {
        self.inner.state.read(|state| state.deadline)
    }

    /// Whether the mutex is held at this moment. Reads the clock; ask before every step that counts.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.loss().is_none()
    }

    /// Whether the work should stop: the end is announced, near, or past.
    #[must_use]
    pub fn is_expiring(&self) -> bool {
        self.inner.state.read(|state| {
            let now = self.inner.clock.now();
            state.closing.is_some() || state.ended.is_some() || now >= state.expiring()
        })
    }

    /// How long the mutex stays held without a renewal; zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.inner.state.read(|state| match state.ended {
            Some(_) => Duration::ZERO,
            None => state.deadline - self.inner.clock.now(),
        })
    }

    /// Why the tenure ended; `None` while the mutex is held.
    #[must_use]
    pub fn loss(&self) -> Option<Loss> {
        self.inner.state.read(|state| self.inner.verdict(state))
    }

    /// Completes when the work should stop: `grace` before the deadline, or when the end is announced.
    ///
    /// Advisory: the engine goes on renewing, and if a renewal succeeds, the tenure stays valid. A later call
    /// then waits for the next such moment.
    ///
    /// Once the mutex is lost, this and [`lost`](Self::lost) are both ready at the first poll. A task that is woken after
    /// the deadline and has to stop its work before it handles the loss polls this one first:
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> simba_core::Result<()> {
    /// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
    /// # let guard = simba.locker("orders").lock().await?;
    /// # let tenure = guard.tenure();
    /// # guard.release().await?;
    /// tokio::select! {
    ///     biased;
    ///     () = tenure.expiring() => println!("stop the work"),
    ///     loss = tenure.lost() => println!("lost: {loss}"),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Cancel safety
    ///
    /// Only listens; drop it at any time.
    pub async fn expiring(&self) {
        let told = |state: &State| state.closing.is_some() || state.ended.is_some();
        let when = if seeded::on(Bug::NoExpiring) { |state: &State| state.deadline } else { State::expiring };
        self.reached(when, told).await;
    }

    /// Completes when the mutex is lost, with the reason; at the deadline at the latest, whatever hangs. Ready at the
    /// first poll if the mutex is lost already, so a loop may call it anew in every turn.
    ///
    /// # Cancel safety
    ///
    /// Only listens; drop it at any time.
    pub async fn lost(&self) -> Loss {
        self.over().await;
        self.loss().unwrap_or(Loss::Deadline)
    }

    /// Runs `work` for as long as the mutex is held.
    ///
    /// The work learns that it should stop from [`expiring`](Self::expiring), if it listens to a clone of
    /// this tenure. If it is still there when a quarter of the grace is left, it is dropped: before another
    /// can hold the mutex. A graceful stop of the contention waits for it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] if the work was dropped or never started.
    ///
    /// # Cancel safety
    ///
    /// Dropping the call drops the work.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let Some(_under_way) = self.begin() else { return Err(self.lost_error()) };
        let mut work = pin!(work);
        tokio::select! {
            biased;
            () = self.reached(State::last_call, |state| state.ended.is_some()) => Err(self.lost_error()),
            output = &mut work => Ok(output),
        }
    }

    /// Calls `act` from a thread of its own if the mutex is lost, even while the runtime is blocked.
    ///
    /// For a last resort such as `std::process::abort`. Nothing happens if the holder gives the mutex up
    /// itself.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the system starts no thread.
    pub fn watchdog(&self, act: impl FnOnce(Loss) + Send + 'static) -> Result<()> {
        let tenure = self.clone();
        let watch = move || match park::block_on(tenure.lost()) {
            Loss::Released | Loss::SteppedDown => {}
            loss => act(loss),
        };
        thread::Builder::new().name("simba-watchdog".into()).spawn(watch).map(drop).map_err(|error| {
            Error::new(ErrorKind::Unavailable, "the system starts no thread for a watchdog")
                .with_source(error)
        })
    }

    /// Waits until the moment that `when` gives is reached or `told` says so, however often it moves.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    fn reached(
        &self,
        when: fn(&State) -> Moment,
        told: fn(&State) -> bool,
    ) -> impl Future<Output = ()> + Send {
        async move {
            let Inner { state, clock, .. } = &*self.inner;
            let never = |_: &State| Moment::ZERO + Duration::from_secs(1 << 30);
            let when = if seeded::on(Bug::NoDeadline) { never } else { when };
            loop {
                // The clock is read under the lock: between a look at the deadline and one at the clock, a
                // renewal could move the one and time pass the other.
                let (at, over) = state.read(|state| {
                    let at = when(state);
                    (at, told(state) || clock.now() >= at)
                });
                if over {
                    return;
                }
                tokio::select! {
                    biased;
                    () = state.until(|state| (told(state) || when(state) < at).then_some(())) => {}
                    () = clock.sleep_until(at) => {}
                }
            }
        }
    }

    fn lost_error(&self) -> Error {
        let why = self.inner.state.read(|state| state.ended.clone().or_else(|| state.closing.clone()));
        let why = why.unwrap_or(Loss::Deadline);
        Error::new(ErrorKind::Lost, format!("the mutex is lost: {why}")).with_mutex(self.mutex())
    }
}

// ===== the engine's side =====

impl Tenure {
    pub(crate) fn new(clock: Arc<dyn Clock>, terms: Terms) -> Self {
        let Terms { mutex, contender, token, acquired_at, deadline, grace, max_hold } = terms;
        let cap = max_hold.map(|max_hold| acquired_at + max_hold);
        let (deadline, grace) = limited(deadline, grace, acquired_at, cap);
        let state = State { deadline, grace, closing: None, ended: None, work: 0, used: false };
        let state = Watched::new(state);
        Self { inner: Arc::new(Inner { mutex, contender, token, clock, acquired_at, cap, state }) }
    }

    /// Moves the deadline and sets the grace after a renewal. Refused once the tenure is over: what was lost
    /// stays lost.
    pub(crate) fn extend(&self, deadline: Moment, grace: Duration) -> bool {
        let Inner { acquired_at, cap, .. } = *self.inner;
        let (deadline, grace) = limited(deadline, grace, acquired_at, cap);
        let (extended, notify) = self.inner.state.update_quietly(|state| {
            if self.inner.verdict(state).is_some() && !seeded::on(Bug::Resurrect) {
                return (false, false);
            }
            let (before, expiring) = (state.deadline, state.expiring());
            (state.deadline, state.grace) = (deadline, grace);
            // A task that sleeps until the old moment looks again by itself when that comes, unless the new moment is
            // earlier. A contender that was notified to stop waits for this renewal.
            let earlier = deadline < before || state.expiring() < expiring;
            (true, earlier || self.inner.clock.now() >= expiring)
        });
        if notify {
            self.inner.state.notify();
        }
        extended
    }

    /// Announces the end: work is told to stop and none may start.
    pub(crate) fn close(&self, why: Loss) {
        self.inner.state.update(|state| state.closing.get_or_insert(why).clone());
    }

    /// Ends it, unless it is over already; returns the reason that counts.
    pub(crate) fn end(&self, why: Loss) -> Loss {
        self.inner.state.update(|state| {
            let why = self.inner.verdict(state).unwrap_or(why);
            state.ended.get_or_insert(why).clone()
        })
    }

    /// Ends it for the reason that was announced, else for `why`, unless it is over already; returns the reason
    /// that counts.
    pub(crate) fn end_announced(&self, why: Loss) -> Loss {
        let announced = self.inner.state.read(|state| state.closing.clone());
        self.end(announced.unwrap_or(why))
    }

    /// Ends it because its driver was dropped, unless it is over already. Without work under way the reason is the one
    /// that was announced, else `why`. Work under way has lost the mutex, whatever was announced.
    pub(crate) fn abandon(&self, why: Loss) {
        self.inner.state.update(|state| {
            let announced = state.closing.clone().unwrap_or(why);
            let why = if state.work == 0 { announced } else { Loss::Vanished };
            let why = self.inner.verdict(state).unwrap_or(why);
            state.ended.get_or_insert(why);
        });
    }

    /// Completes when the end is announced or reached.
    pub(crate) async fn closing(&self) {
        let told = |state: &State| state.closing.is_some() || state.ended.is_some();
        self.reached(|state| state.deadline, told).await;
    }

    /// Waits while the tenure is expiring: `true` once a renewal has moved the deadline, `false` once the end is
    /// announced or reached.
    pub(crate) async fn renewed(&self) -> bool {
        let Inner { state, clock, .. } = &*self.inner;
        tokio::select! {
            biased;
            () = self.closing() => false,
            () = state.until(|state| (clock.now() < state.expiring()).then_some(())) => true,
        }
    }

    /// Completes when the tenure is over.
    fn over(&self) -> impl Future<Output = ()> + Send {
        self.reached(|state| state.deadline, |state| state.ended.is_some())
    }

    /// Whether work was under way at least once, such as that of a guard.
    pub(crate) fn was_used(&self) -> bool {
        self.inner.state.read(|state| state.used)
    }

    /// Whether work may start under it.
    pub(crate) fn is_open(&self) -> bool {
        self.inner.state.read(|state| state.closing.is_none() && self.inner.verdict(state).is_none())
    }

    /// Starts work that a graceful end waits for; `None` once the end is announced or reached.
    pub(crate) fn begin(&self) -> Option<Work> {
        self.inner.state.update_quietly(|state| {
            let open = state.closing.is_none() && self.inner.verdict(state).is_none();
            open.then(|| {
                state.work += 1;
                state.used = true;
            })
        })?;
        Some(Work { tenure: self.clone() })
    }

    /// Whether both are clones of one tenure.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Completes when no work is under way, or when the mutex is lost.
    pub(crate) fn wound_up(&self) -> impl Future<Output = ()> + Send {
        self.reached(|state| state.deadline, |state| state.work == 0 || state.ended.is_some())
    }
}

impl Inner {
    /// The one place that judges validity. The clock is read under the lock: once it showed the deadline
    /// to anyone, no renewal that comes later is accepted.
    fn verdict(&self, state: &State) -> Option<Loss> {
        if state.ended.is_some() {
            return state.ended.clone();
        }
        if self.clock.now() < state.deadline || seeded::on(Bug::NoDeadline) {
            return None;
        }
        Some(if self.cap == Some(state.deadline) { Loss::MaxHold } else { Loss::Deadline })
    }
}

/// Limits a grant to the longest allowed hold, which ends at `cap`. A short one keeps three quarters of itself for
/// the work.
fn limited(
    deadline: Moment,
    grace: Duration,
    acquired_at: Moment,
    cap: Option<Moment>,
) -> (Moment, Duration) {
    match cap {
        Some(cap) => (deadline.min(cap), grace.min((cap - acquired_at) / 4)),
        None => (deadline, grace),
    }
}

impl State {
    fn expiring(&self) -> Moment {
        self.deadline.saturating_sub(self.grace)
    }

    /// When work that did not stop by itself is dropped.
    fn last_call(&self) -> Moment {
        self.deadline.saturating_sub(self.grace / 4)
    }
}

/// Work under way. A graceful end waits until it is dropped.
#[derive(Debug)]
pub(crate) struct Work {
    tenure: Tenure,
}

impl Work {
    /// Completes when no other work is under way, or the tenure is over.
    pub(crate) async fn alone(&self) {
        tokio::select! {
            biased;
            () = self.tenure.inner.state.until(|state| (state.work <= 1).then_some(())) => {}
            () = self.tenure.over() => {}
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.tenure.inner.state.update(|state| state.work -= 1);
    }
}

impl fmt::Debug for Tenure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tenure")
            .field("mutex", self.mutex())
            .field("contender", self.contender())
            .field("token", &self.token())
            .field("remaining", &self.remaining())
            .finish_non_exhaustive()
    }
}
