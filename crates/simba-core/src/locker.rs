//! A mutex in the manner of `std` and tokio: lock, guard, release.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::{Moment, within};
use crate::engine::{Driver, Link, Mode, Order, Ride};
use crate::error::{Error, ErrorKind, Result};
use crate::seeded::{self, Bug};
use crate::simba::Core;
use crate::telemetry;
use crate::tenure::{Loss, Tenure, Work};
use crate::types::{ContenderId, FencingToken, Label, Lease, MutexName, MutexOwner};

/// Locks one mutex, one guard at a time.
///
/// Not re-entrant and not `Clone`: a second lock while a guard lives or a lock is awaited is refused with
/// [`ErrorKind::Reentered`] instead of waiting for itself. Two lockers of one name contend as two processes
/// would.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
/// let locker = simba.locker("orders");
/// let guard = locker.lock().await?;
/// assert!(simba.locker("orders").try_lock().await?.is_none());
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct Locker {
    core: Arc<Core>,
    name: Result<MutexName>,
    lease: Lease,
    label: Result<Option<Label>>,
    patience: Option<Duration>,
    max_hold: Option<Duration>,
    min_hold: Duration,
    /// The last attempt or guard of this locker.
    last: Mutex<Option<Link>>,
}

impl Locker {
    pub(crate) fn new(core: Arc<Core>, name: Result<MutexName>, lease: Lease) -> Self {
        Self {
            core,
            name,
            lease,
            label: Ok(None),
            patience: None,
            max_hold: None,
            min_hold: Duration::ZERO,
            last: Mutex::default(),
        }
    }

    /// Locks with this lease instead of the handle's.
    #[must_use]
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { lease, ..self }
    }

    /// Begins the contender's ids with this label instead of the process and host: `<label>.<12 random characters>`.
    ///
    /// Every lock contends under a new id, whatever the label, so two lockers with one label never share a hold. A
    /// label is 1 to 19 characters of `a-z 0-9 . _ : -`. A wrong one is an error of the first lock and is never cut.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> simba_core::Result<()> {
    /// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
    /// let locker = simba.locker("orders").with_label("billing-3");
    /// let guard = locker.lock().await?;
    /// assert!(guard.contender().as_str().starts_with("billing-3."));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { label: Label::new(label.as_ref()).map(Some), ..self }
    }

    /// Gives the mutex up after `max_hold` at the latest, should the work hang while renewals go on.
    #[must_use]
    pub fn with_max_hold(self, max_hold: Duration) -> Self {
        Self { max_hold: Some(max_hold), ..self }
    }

    /// Keeps the mutex for `min_hold` at the least, so that a short job does not run again on a host whose
    /// clock is behind. A release waits for it; a shutdown cuts it short. A lock that was cancelled before it
    /// returned a guard keeps nothing.
    #[must_use]
    pub fn with_min_hold(self, min_hold: Duration) -> Self {
        Self { min_hold, ..self }
    }

    /// Gives up waiting once the store could not be reached for this long; default: one lease.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Waits for the mutex.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Invalid`]: a wrong name or label, or contradictory settings
    /// - [`ErrorKind::Unavailable`]: the store could not be reached for the whole
    ///   [patience](Self::with_patience)
    /// - [`ErrorKind::Config`], [`ErrorKind::Denied`], [`ErrorKind::Protocol`]: somebody has to mend the
    ///   store first
    /// - [`ErrorKind::Lost`]: it was won and lost again before this call could return
    /// - [`ErrorKind::Reentered`]: this locker holds or awaits its mutex already
    /// - [`ErrorKind::Closed`]: the handle was shut down
    ///
    /// # Cancel safety
    ///
    /// Drop it at any time: the place in the queue is given up, and a mutex that is won meanwhile is freed. Until
    /// the store has answered once it goes on only while it is polled; from then on a waiter keeps its place, and
    /// a winner its mutex, in the background.
    pub async fn lock(&self) -> Result<Guard> {
        let began = self.begin();
        let guard = self.attempt(Mode::Once(self.patience()))?.guard().await?.ok_or_else(|| self.closed())?;
        self.waited_since(began);
        Ok(guard)
    }

    /// Takes the mutex if it is to be had at once; `None` if another holds it or waited before us, or if the
    /// guard that this locker gave before still keeps it.
    ///
    /// [`last_holder`](Self::last_holder) tells who. It ends within three calls to the store, each of which is
    /// bounded.
    ///
    /// # Errors
    ///
    /// As for [`lock`](Self::lock), at the first failed call.
    ///
    /// # Cancel safety
    ///
    /// As for [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        let guard = self.attempt(Mode::Try)?.guard().await?;
        if guard.is_none() && self.core.closing.has_begun() {
            return Err(self.closed());
        }
        Ok(guard)
    }

    /// Waits for the mutex for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As for [`lock`](Self::lock), and [`ErrorKind::Timeout`] naming the holder if it is still held by
    /// then; if the store could not be reached lately, that error instead.
    ///
    /// # Cancel safety
    ///
    /// As for [`lock`](Self::lock).
    pub async fn lock_timeout(&self, timeout: Duration) -> Result<Guard> {
        if timeout.is_zero() {
            let attempt = self.attempt(Mode::Try)?;
            let link = attempt.hold.link.clone();
            return attempt.guard().await?.ok_or_else(|| self.timed_out(&link, timeout));
        }
        let began = self.begin();
        let attempt = self.attempt(Mode::Once(self.patience().max(timeout)))?;
        let tenure = match within(&*self.core.clock, timeout, attempt.acquired()).await {
            Some(Ok(tenure)) => tenure,
            Some(Err(outcome)) => return Err(outcome.err().unwrap_or_else(|| self.closed())),
            None => match attempt.hold.link.acquired_now() {
                // Won at the last moment counts.
                Some(tenure) => tenure,
                None => return Err(self.timed_out(&attempt.hold.link, timeout)),
            },
        };
        let guard = attempt.guarded(tenure)?;
        self.waited_since(began);
        Ok(guard)
    }

    /// When a wait that is measured began.
    fn begin(&self) -> Option<Moment> {
        telemetry::ON.then(|| self.core.clock.now())
    }

    fn waited_since(&self, began: Option<Moment>) {
        if let Some(began) = began {
            telemetry::waited(self.core.backend.name(), self.core.clock.now() - began);
        }
    }

    /// Returns the label of its ids, if it has one.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_ref().ok()?.as_ref().map(Label::as_str)
    }

    /// Who held the mutex when this locker last looked.
    #[must_use]
    pub fn last_holder(&self) -> MutexOwner {
        self.last().as_ref().map_or(MutexOwner::none(), Link::owner)
    }

    fn patience(&self) -> Duration {
        self.patience.unwrap_or_else(|| self.lease.total())
    }

    /// Starts an attempt, unless a guard lives or a lock is awaited.
    fn attempt(&self, mode: Mode) -> Result<Attempt> {
        let order = self.order(mode)?;
        let mut last = self.last();
        if last.as_ref().is_some_and(Link::is_wanted) {
            let message = "this locker holds or awaits its mutex already: release the guard first, or use another locker";
            return Err(self.about(Error::new(ErrorKind::Reentered, message)));
        }
        let link = Link::new();
        // The release of the guard before goes first, or this lock would find the mutex held.
        let ride = Driver::ride(&self.core, order, &link, last.clone())?;
        *last = Some(link.clone());
        Ok(Attempt { hold: Hold { link, ride } })
    }

    fn order(&self, mode: Mode) -> Result<Order> {
        let mutex = self.name.clone()?;
        let label = self.label.clone().map_err(|error| error.with_mutex(&mutex))?;
        if self.max_hold.is_some_and(|max_hold| max_hold.is_zero() || max_hold <= self.min_hold) {
            let message = "the longest hold must be longer than zero and than the shortest hold";
            return Err(Error::invalid(message).with_mutex(&mutex));
        }
        Ok(Order {
            mutex,
            label,
            lease: self.lease,
            mode,
            initial_delay: Duration::ZERO,
            max_hold: self.max_hold,
            min_hold: self.min_hold,
        })
    }

    fn closed(&self) -> Error {
        self.about(Error::new(ErrorKind::Closed, "the handle was shut down"))
    }

    /// Why a wait that ran out was in vain: the store was out of reach, or somebody holds the mutex.
    fn timed_out(&self, link: &Link, timeout: Duration) -> Error {
        if let Some(error) = link.error() {
            return error;
        }
        // A timeout says that another holds the mutex, which only an answer can tell.
        let (kind, message) = match link.is_answered() {
            true => (ErrorKind::Timeout, format!("not acquired within {timeout:?}")),
            false => (ErrorKind::Unavailable, format!("the store did not answer within {timeout:?}")),
        };
        let error = self.about(Error::new(kind, message));
        match link.owner().id {
            Some(holder) => error.with_holder(holder),
            None => error,
        }
    }

    fn about(&self, error: Error) -> Error {
        let error = error.with_backend(self.core.backend.name());
        match &self.name {
            Ok(name) => error.with_mutex(name),
            Err(_) => error,
        }
    }

    fn last(&self) -> std::sync::MutexGuard<'_, Option<Link>> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for Locker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Locker").field("name", &self.name).field("lease", &self.lease).finish_non_exhaustive()
    }
}

/// A lock under way. Dropping it ends it, whatever it has won.
struct Attempt {
    hold: Hold,
}

impl Attempt {
    /// Waits until the mutex is won, or the driver ended: refused (`Ok`), or for an error.
    async fn acquired(&self) -> Result<Tenure, Result<()>> {
        if let Some(ride) = &self.hold.ride {
            ride.first_call().await;
        }
        self.hold.link.acquired().await
    }

    /// Hands the mutex over to a guard; `None` if it was refused.
    async fn guard(self) -> Result<Option<Guard>> {
        match self.acquired().await {
            Ok(tenure) => self.guarded(tenure).map(Some),
            Err(outcome) => outcome.map(|()| None),
        }
    }

    /// Makes a guard of the tenure, which may be over since it was handed over.
    fn guarded(self, tenure: Tenure) -> Result<Guard> {
        let Some(work) = tenure.begin() else { return Err(lost(&tenure)) };
        Ok(Guard { work: Some(work), hold: self.hold, tenure })
    }
}

/// What is wanted of a driver. Dropping it ends that.
struct Hold {
    link: Link,
    /// Dropped after the stop was asked for: a driver that goes on by itself knows that nobody wants it any more.
    ride: Option<Ride>,
}

impl Drop for Hold {
    fn drop(&mut self) {
        if seeded::on(Bug::LeakOnDrop) {
            return;
        }
        self.link.stop();
    }
}

fn lost(tenure: &Tenure) -> Error {
    let why = tenure.loss().unwrap_or(Loss::Released);
    Error::new(ErrorKind::Lost, format!("the mutex is lost: {why}")).with_mutex(tenure.mutex())
}

/// A held mutex.
///
/// The engine renews it in the background until the guard is released or dropped, or the mutex is lost.
/// Holding the guard is not holding the mutex: ask [`is_held`](Self::is_held) before every step that counts,
/// or let [`run`](Self::run) do it, and hand [`token`](Self::token) to the resources that you write to.
///
/// # Drop
///
/// Dropping it frees the mutex in the background: in its own time, without saying whether it worked, and not
/// at all if the runtime ends first; then the lease runs out. It never blocks and never panics, with or
/// without a runtime. Use [`release`](Self::release) to know.
#[must_use = "if unused the mutex is released at once"]
pub struct Guard {
    // Order of drop: the work is over before the stop is asked for.
    work: Option<Work>,
    hold: Hold,
    tenure: Tenure,
}

impl Guard {
    /// The number to hand to every resource that the work touches.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.tenure.token()
    }

    /// Returns the id that the mutex is held under.
    #[must_use]
    pub fn contender(&self) -> &ContenderId {
        self.tenure.contender()
    }

    /// Whether the mutex is held at this moment. Reads the clock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.tenure.is_held()
    }

    /// How long the mutex stays held without a renewal; zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.tenure.remaining()
    }

    /// When the mutex is lost unless a renewal comes first.
    #[must_use]
    pub fn deadline(&self) -> Moment {
        self.tenure.deadline()
    }

    /// The hold as a value to hand to other tasks.
    #[must_use]
    pub fn tenure(&self) -> Tenure {
        self.tenure.clone()
    }

    /// Completes when the work should stop: `grace` before the deadline. See [`Tenure::expiring`].
    ///
    /// # Cancel safety
    ///
    /// Only listens.
    pub async fn expiring(&self) {
        self.tenure.expiring().await;
    }

    /// Completes when the mutex is lost, with the reason. See [`Tenure::lost`].
    ///
    /// # Cancel safety
    ///
    /// Only listens.
    pub async fn lost(&self) -> Loss {
        self.tenure.lost().await
    }

    /// Runs `work` for as long as the mutex is held. See [`Tenure::run`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Lost`] if the work was dropped or never started.
    ///
    /// # Cancel safety
    ///
    /// Dropping the call drops the work; the guard stays.
    pub async fn run<F: Future>(&self, work: F) -> Result<F::Output> {
        self.tenure.run(work).await
    }

    /// Frees the mutex and waits until the store has done so; first for work under [`Tenure::run`] of a clone,
    /// until the deadline at most.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Lost`]: it had been lost before, so the end of the work may not have been covered
    /// - [`ErrorKind::Unavailable`]: the store did not confirm; the lease runs out by itself
    ///
    /// # Cancel safety
    ///
    /// A dropped call goes on in the background.
    pub async fn release(mut self) -> Result<()> {
        let loss = self.tenure.loss();
        self.work = None;
        self.hold.link.stop();
        if let Some(ride) = &self.hold.ride {
            ride.last_call().await;
        }
        let freed = self.hold.link.done().await;
        match (loss, freed) {
            (None | Some(Loss::Released), freed) => freed,
            // The runtime ended: that says more than what it did to the tenure.
            (_, Err(error)) if error.kind() == ErrorKind::Closed => Err(error),
            _ => Err(lost(&self.tenure)),
        }
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("tenure", &self.tenure).finish_non_exhaustive()
    }
}
