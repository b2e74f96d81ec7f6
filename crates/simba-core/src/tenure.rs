//! The tenure: one hold of a mutex, with its deadline, its token and the reason of its end.

use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::block;
use crate::clock::{Clock, Moment};
use crate::error::{Error, ErrorKind, Result};
use crate::seeded::{self, Bug};
use crate::types::{ContenderId, FencingToken, Loss, MutexName};
use crate::watched::Watched;

/// One uninterrupted hold of a mutex by one contender.
///
/// Validity is a deadline, never a flag: [`is_held`](Self::is_held) reads the clock, and
/// [`expiring`](Self::expiring) and [`lost`](Self::lost) wait on the machine's timers, so both complete on time
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
    /// The end of the maximum hold.
    cap: Option<Moment>,
    state: Watched<State>,
}

#[derive(Debug)]
struct State {
    deadline: Moment,
    grace: Duration,
    /// The announced reason: work should stop, and no work may start.
    announced: Option<Loss>,
    ended: Option<Loss>,
    /// The number of running pieces of work that a graceful end waits for.
    work: u32,
    /// Work was started at least once.
    used: bool,
}

impl Tenure {
    /// Returns the mutex.
    #[must_use]
    pub fn mutex(&self) -> &MutexName {
        &self.inner.mutex
    }

    /// Returns the id of the holder.
    #[must_use]
    pub fn contender(&self) -> &ContenderId {
        &self.inner.contender
    }

    /// Returns the fencing token to pass to every resource that the work writes to.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.inner.token
    }

    /// Returns the moment at which the request that acquired the mutex was sent.
    #[must_use]
    pub fn acquired_at(&self) -> Moment {
        self.inner.acquired_at
    }

    /// Returns the moment at which the mutex is lost unless it is renewed before.
    #[must_use]
    pub fn deadline(&self) -> Moment {
        self.inner.state.read(|state| state.deadline)
    }

    /// Returns when the work should stop and when the mutex is lost, unless it is renewed before: the moments of
    /// [`expiring`](Self::expiring) and of [`lost`](Self::lost). The time between them is the grace of the lease, or
    /// shorter in proportion if the store granted a shorter time than requested.
    #[must_use]
    pub fn ends_at(&self) -> (Moment, Moment) {
        self.inner.state.read(|state| (state.expiring(), state.deadline))
    }

    /// Returns whether the mutex is held now. Reads the clock. Call it before every step that needs the mutex.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.loss().is_none()
    }

    /// Returns whether the work should stop: the end is announced, less than `grace` away, or past.
    #[must_use]
    pub fn is_expiring(&self) -> bool {
        self.inner.state.read(|state| state.is_ending() || self.inner.clock.now() >= state.expiring())
    }

    /// Returns how long the mutex stays held without a renewal; zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.inner.state.read(|state| match state.ended {
            Some(_) => Duration::ZERO,
            None => state.deadline - self.inner.clock.now(),
        })
    }

    /// Returns why the tenure ended; `None` while the mutex is held.
    #[must_use]
    pub fn loss(&self) -> Option<Loss> {
        self.inner.state.read(|state| self.inner.current_loss(state))
    }

    /// Completes when the work should stop: `grace` before the deadline, or when the end is announced.
    ///
    /// Advisory: the engine keeps renewing, and if a renewal succeeds, the tenure stays valid. A later call
    /// then waits for the next such moment.
    ///
    /// Once the mutex is lost, this and [`lost`](Self::lost) are both ready at the first poll. A task that is woken
    /// after the deadline and has to stop its work before it handles the loss polls this one first:
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
    /// Cancel safe: dropping it has no effect.
    pub async fn expiring(&self) {
        let at = if seeded::on(Bug::NoExpiring) { |state: &State| state.deadline } else { State::expiring };
        self.reached(at, State::is_ending).await;
    }

    /// Completes when the mutex is lost, and returns the reason. Completes at the deadline at the latest, even if the
    /// store hangs. Ready at the first poll if the mutex is lost already, so a loop may call it in every iteration.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping it has no effect.
    pub async fn lost(&self) -> Loss {
        self.over().await;
        self.loss().unwrap_or(Loss::Deadline)
    }

    /// Runs `work` for as long as the mutex is held.
    ///
    /// Work that has to stop cleanly awaits [`expiring`](Self::expiring) on a clone of this tenure. Work that still
    /// runs when a quarter of the grace is left is dropped, before another contender can hold the mutex. A graceful
    /// stop of the contention waits for the work.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] if the work was dropped or never started.
    ///
    /// # Cancel safety
    ///
    /// Dropping the call drops the work.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        let Some(_running) = self.begin_work() else { return Err(self.lost_error()) };
        let mut work = pin!(work);
        tokio::select! {
            biased;
            () = self.reached(State::drop_work_at, |state| state.ended.is_some()) => Err(self.lost_error()),
            output = &mut work => Ok(output),
        }
    }

    /// Returns a token that is cancelled when the work should stop, see [`expiring`](Self::expiring). For work that takes
    /// a token, such as a server's graceful shutdown. A renewal that succeeds afterwards does not undo it.
    ///
    /// Each call spawns a task, which ends with the tenure at the latest.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    #[must_use]
    pub fn cancellation_token(&self) -> CancellationToken {
        let token = CancellationToken::new();
        let (tenure, cancelled) = (self.clone(), token.clone());
        drop(tokio::spawn(async move {
            tenure.expiring().await;
            cancelled.cancel();
        }));
        token
    }

    /// Calls `act` from a separate thread if the mutex is lost, even while the runtime is blocked.
    ///
    /// For a last resort such as `std::process::abort`. `act` is not called if the holder releases the mutex or steps
    /// down.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the system cannot start a thread.
    pub fn watchdog(&self, act: impl FnOnce(Loss) + Send + 'static) -> Result<()> {
        let tenure = self.clone();
        let watch = move || match block::wait(tenure.lost()) {
            Loss::Released | Loss::SteppedDown => {}
            loss => act(loss),
        };
        thread::Builder::new().name("simba-watchdog".into()).spawn(watch).map(drop).map_err(|error| {
            Error::new(ErrorKind::Unavailable, "the system cannot start a watchdog thread").with_source(error)
        })
    }

    /// Waits until the moment that `at` returns is reached or `condition` holds, however often the moment moves.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    fn reached(
        &self,
        at: fn(&State) -> Moment,
        condition: fn(&State) -> bool,
    ) -> impl Future<Output = ()> + Send {
        async move {
            let Inner { state, clock, .. } = &*self.inner;
            let never = |_: &State| Moment::ZERO + Duration::from_secs(1 << 30);
            let at = if seeded::on(Bug::NoDeadline) { never } else { at };
            loop {
                // The clock is read under the lock. Otherwise a renewal could move the deadline after it was read and
                // before the clock is read.
                let (until, over) = state.read(|state| {
                    let until = at(state);
                    (until, condition(state) || clock.now() >= until)
                });
                if over {
                    return;
                }
                tokio::select! {
                    biased;
                    () = state.until(|state| (condition(state) || at(state) < until).then_some(())) => {}
                    () = clock.sleep_until(until) => {}
                }
            }
        }
    }

    fn lost_error(&self) -> Error {
        let why = self.inner.state.read(|state| state.ended.clone().or_else(|| state.announced.clone()));
        Error::lost(why.unwrap_or(Loss::Deadline)).with_mutex(self.mutex())
    }
}

// ===== the engine's side =====

/// The lease that one answer of the store grants, in moments of the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) token: FencingToken,
    pub(crate) sent: Moment,
    pub(crate) renew_at: Moment,
    pub(crate) deadline: Moment,
    pub(crate) grace: Duration,
}

impl Tenure {
    pub(crate) fn new(
        clock: Arc<dyn Clock>,
        mutex: MutexName,
        contender: ContenderId,
        grant: Grant,
        max_hold: Option<Duration>,
    ) -> Self {
        let Grant { token, sent: acquired_at, deadline, grace, .. } = grant;
        let cap = max_hold.map(|max_hold| acquired_at + max_hold);
        let state = State { deadline, grace, announced: None, ended: None, work: 0, used: false };
        let state = Watched::new(state);
        Self { inner: Arc::new(Inner { mutex, contender, token, clock, acquired_at, cap, state }) }
    }

    /// Moves the deadline and sets the grace after a renewal. Returns `false` once the tenure has ended: a lost tenure
    /// stays lost.
    pub(crate) fn extend(&self, deadline: Moment, grace: Duration) -> bool {
        let (extended, notify) = self.inner.state.update_quietly(|state| {
            if self.inner.current_loss(state).is_some() && !seeded::on(Bug::Resurrect) {
                return (false, false);
            }
            let (before, expiring) = (state.deadline, state.expiring());
            (state.deadline, state.grace) = (deadline, grace);
            // A task that sleeps until the old moment checks again then, so it is woken only if the new moment is
            // earlier. A contender whose `on_expiring` was called waits for this renewal.
            let earlier = deadline < before || state.expiring() < expiring;
            (true, earlier || self.inner.clock.now() >= expiring)
        });
        if notify {
            self.inner.state.notify();
        }
        extended
    }

    /// Announces the end: work should stop, and no work may start. Returns the reason that was announced first.
    pub(crate) fn announce_end(&self, why: Loss) -> Loss {
        self.inner.state.update(|state| state.announced.get_or_insert(why).clone())
    }

    /// Ends the tenure with reason `why`, unless it has ended already. Returns the reason in effect.
    pub(crate) fn end(&self, why: Loss) -> Loss {
        self.inner.state.update(|state| {
            let why = self.inner.current_loss(state).unwrap_or(why);
            state.ended.get_or_insert(why).clone()
        })
    }

    /// Ends the tenure because its driver was dropped, unless it has ended already. If no work is running, the reason
    /// is the announced one, or `why`. Running work has lost the mutex, whatever was announced.
    pub(crate) fn abandon(&self, why: Loss) {
        self.inner.state.update(|state| {
            let announced = state.announced.clone().unwrap_or(why);
            let why = if state.work == 0 { announced } else { Loss::Vanished };
            let why = self.inner.current_loss(state).unwrap_or(why);
            state.ended.get_or_insert(why);
        });
    }

    /// Completes when the end is announced or reached.
    pub(crate) async fn end_announced(&self) {
        self.reached(|state| state.deadline, State::is_ending).await;
    }

    /// Waits while the tenure is expiring. Returns `true` once a renewal has moved the deadline, `false` once the end
    /// is announced or reached.
    pub(crate) async fn renewed(&self) -> bool {
        let Inner { state, clock, .. } = &*self.inner;
        tokio::select! {
            biased;
            () = self.end_announced() => false,
            () = state.until(|state| (clock.now() < state.expiring()).then_some(())) => true,
        }
    }

    /// Completes when the tenure has ended.
    fn over(&self) -> impl Future<Output = ()> + Send {
        self.reached(|state| state.deadline, |state| state.ended.is_some())
    }

    /// Returns whether work was started at least once, such as that of a guard.
    pub(crate) fn was_used(&self) -> bool {
        self.inner.state.read(|state| state.used)
    }

    /// Returns whether work may start under it.
    pub(crate) fn is_open(&self) -> bool {
        self.inner.state.read(|state| self.inner.is_open(state))
    }

    /// Starts work that a graceful end waits for. Returns `None` once the end is announced or reached.
    pub(crate) fn begin_work(&self) -> Option<Work> {
        self.inner.state.update_quietly(|state| {
            self.inner.is_open(state).then(|| {
                state.work += 1;
                state.used = true;
            })
        })?;
        Some(Work { tenure: self.clone() })
    }

    /// Returns whether both are clones of one tenure.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.inner, &other.inner)
    }

    /// Completes when no work is running, or when the mutex is lost.
    pub(crate) fn work_ended(&self) -> impl Future<Output = ()> + Send {
        self.reached(|state| state.deadline, |state| state.work == 0 || state.ended.is_some())
    }
}

impl Inner {
    fn is_open(&self, state: &State) -> bool {
        state.announced.is_none() && self.current_loss(state).is_none()
    }

    /// Returns the reason of the end, or `None` while the tenure is valid. The only place that decides validity. The
    /// clock is read under the lock: after any caller has found the deadline passed, no renewal is accepted.
    fn current_loss(&self, state: &State) -> Option<Loss> {
        if state.ended.is_some() {
            return state.ended.clone();
        }
        if self.clock.now() < state.deadline || seeded::on(Bug::NoDeadline) {
            return None;
        }
        Some(if self.cap == Some(state.deadline) { Loss::MaxHold } else { Loss::Deadline })
    }
}

impl State {
    /// Returns whether the end was announced or reached.
    fn is_ending(&self) -> bool {
        self.announced.is_some() || self.ended.is_some()
    }

    fn expiring(&self) -> Moment {
        self.deadline.saturating_sub(self.grace)
    }

    /// Returns when work that still runs is dropped.
    fn drop_work_at(&self) -> Moment {
        self.deadline.saturating_sub(self.grace / 4)
    }
}

/// A running piece of work. A graceful end waits until it is dropped.
#[derive(Debug)]
pub(crate) struct Work {
    tenure: Tenure,
}

impl Work {
    /// Completes when no other work is running, or the tenure has ended.
    pub(crate) async fn others_ended(&self) {
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
