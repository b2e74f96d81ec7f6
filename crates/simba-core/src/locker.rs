//! A mutex with the interface of `std` and tokio: lock, guard, release.

use std::fmt;
use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use crate::clock::{Moment, within};
use crate::delegate::delegate;
use crate::engine::{Core, Driver, DriverConfig, Inline, Link, Mode, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::seeded::{self, Bug};
use crate::telemetry;
use crate::tenure::{Tenure, Work};
use crate::types::{ContenderId, FencingToken, Label, Lease, Loss, MutexName, MutexOwner};

/// Locks one mutex, one guard at a time.
///
/// Not re-entrant and not `Clone`: a second lock while a guard exists or a lock is awaited fails with
/// [`ErrorKind::Reentered`] instead of waiting for itself. Two lockers of one name contend like two processes.
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

    /// Sets the label of the contender's ids, which replaces process and host: `<label>.<12 random characters>`.
    ///
    /// Every lock contends under a new id, whatever the label, so two lockers with one label never share a hold. A
    /// label is 1 to 19 characters of `a-z 0-9 . _ : -`. An invalid label is an error of the first lock and is never
    /// truncated.
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

    /// Limits a hold to `max_hold`, in case the work hangs while renewals succeed.
    #[must_use]
    pub fn with_max_hold(self, max_hold: Duration) -> Self {
        Self { max_hold: Some(max_hold), ..self }
    }

    /// Keeps the mutex for at least `min_hold`, so that a short job does not run again on a host whose
    /// clock is behind. A release waits for it; a shutdown does not. A lock that was cancelled before it
    /// returned a guard has no minimum hold.
    #[must_use]
    pub fn with_min_hold(self, min_hold: Duration) -> Self {
        Self { min_hold, ..self }
    }

    /// Sets how long a lock waits for a store that cannot be reached; default: one lease, or the timeout of
    /// [`lock_timeout`](Self::lock_timeout) if that is longer.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience: Some(patience), ..self }
    }

    /// Waits for the mutex.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Invalid`]: an invalid name or label, or contradictory settings
    /// - [`ErrorKind::Unavailable`]: the store could not be reached for the whole
    ///   [patience](Self::with_patience)
    /// - [`ErrorKind::Config`], [`ErrorKind::Denied`], [`ErrorKind::Protocol`]: permanent until the store's setup is
    ///   fixed
    /// - [`ErrorKind::Lost`]: the mutex was acquired and lost before this call could return
    /// - [`ErrorKind::Reentered`]: this locker already holds or waits for its mutex
    /// - [`ErrorKind::Closed`]: the handle was shut down
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a dropped call leaves the queue, and a mutex that it acquires meanwhile is freed. The call makes
    /// progress only while it is polled, until the store has answered once or 10 ms have passed. From then on the engine
    /// keeps the queue entry or renews the mutex in the background.
    pub async fn lock(&self) -> Result<Guard> {
        let began = self.core.clock.now();
        let hold = self.attempt(Mode::Once(self.patience.unwrap_or(self.lease.total())))?;
        let acquired = hold.acquired().await;
        self.locked(hold, acquired, began)
    }

    /// Acquires the mutex if that is possible at once. Returns `None` if another contender holds it or is queued for
    /// it, or if the previous guard of this locker still keeps it.
    ///
    /// [`last_holder`](Self::last_holder) returns the holder. This makes at most three calls to the store, each with a
    /// time limit.
    ///
    /// # Errors
    ///
    /// As for [`lock`](Self::lock), at the first failed call.
    ///
    /// # Cancel safety
    ///
    /// As for [`lock`](Self::lock).
    pub async fn try_lock(&self) -> Result<Option<Guard>> {
        Ok(self.try_once().await?.ok())
    }

    /// Waits for the mutex for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As for [`lock`](Self::lock), and [`ErrorKind::Timeout`] with the holder if the mutex is still held after
    /// `timeout`. If the last call to the store failed, the error of that call.
    ///
    /// # Cancel safety
    ///
    /// As for [`lock`](Self::lock).
    pub async fn lock_timeout(&self, timeout: Duration) -> Result<Guard> {
        if timeout.is_zero() {
            return self.try_once().await?.map_err(|link| self.timed_out(&link, timeout));
        }
        let began = self.core.clock.now();
        let patience = self.patience.unwrap_or(self.lease.total().max(timeout));
        let hold = self.attempt(Mode::Once(patience))?;
        let acquired = match within(&*self.core.clock, timeout, hold.acquired()).await {
            Some(acquired) => acquired,
            // It may have been acquired while the timeout passed.
            None => Ok(hold.link.acquired_now().ok_or_else(|| self.timed_out(&hold.link, timeout))?),
        };
        self.locked(hold, acquired, began)
    }

    /// Makes one attempt without waiting. Returns the link of its driver if the mutex was refused.
    async fn try_once(&self) -> Result<Result<Guard, Link>> {
        let hold = self.attempt(Mode::Try)?;
        match hold.acquired().await {
            Ok(tenure) => hold.guarded(tenure).map(Ok),
            Err(Err(error)) => Err(error),
            Err(Ok(())) if self.core.closing.has_begun() => Err(self.closed()),
            Err(Ok(())) => Ok(Err(hold.link.clone())),
        }
    }

    /// Returns the guard after a wait that started at `began`.
    fn locked(&self, hold: Hold, acquired: Result<Tenure, Result<()>>, began: Moment) -> Result<Guard> {
        let tenure = acquired.map_err(|outcome| outcome.err().unwrap_or_else(|| self.closed()))?;
        let guard = hold.guarded(tenure)?;
        telemetry::waited(self.core.backend.name(), self.core.clock.now() - began);
        Ok(guard)
    }

    /// Returns the label of the contender's ids, if one is set.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_ref().ok()?.as_ref().map(Label::as_str)
    }

    /// Returns the holder of the mutex at the last call of this locker to the store.
    #[must_use]
    pub fn last_holder(&self) -> MutexOwner {
        self.last().as_ref().map_or(MutexOwner::none(), Link::owner)
    }

    /// Starts an attempt. Fails if a guard exists or a lock is awaited.
    fn attempt(&self, mode: Mode) -> Result<Hold> {
        let config = self.config(mode)?;
        let mut last = self.last();
        if last.as_ref().is_some_and(Link::is_active) {
            let message = "this locker holds or awaits its mutex already: release the guard first, or use another locker";
            return Err(self.with_context(Error::new(ErrorKind::Reentered, message)));
        }
        let link = Link::new();
        // The release of the previous guard goes first, or this lock would find the mutex held.
        let driver = Driver::start_inline(&self.core, config, &link, last.clone())?;
        *last = Some(link.clone());
        Ok(Hold { link, driver })
    }

    fn config(&self, mode: Mode) -> Result<DriverConfig> {
        let mutex = self.name.clone()?;
        let label = self.label.clone().map_err(|error| error.with_mutex(&mutex))?;
        if self.max_hold.is_some_and(|max_hold| max_hold.is_zero() || max_hold <= self.min_hold) {
            let message = "the maximum hold must be longer than zero and longer than the minimum hold";
            return Err(Error::invalid(message).with_mutex(&mutex));
        }
        let (max_hold, min_hold) = (self.max_hold, self.min_hold);
        let settings = Settings { max_hold, min_hold, ..Settings::new(mode, self.lease) };
        Ok(DriverConfig { mutex, label, settings, initial_delay: Duration::ZERO })
    }

    fn closed(&self) -> Error {
        self.with_context(Error::new(ErrorKind::Closed, "the handle was shut down"))
    }

    /// Returns the error of a wait that timed out: the store could not be reached, or the mutex is held.
    fn timed_out(&self, link: &Link, timeout: Duration) -> Error {
        if let Some(error) = link.error() {
            return error;
        }
        // `Timeout` says that another contender holds the mutex, which is known only after an answer.
        let (kind, message) = match link.is_answered() {
            true => (ErrorKind::Timeout, format!("not acquired within {timeout:?}")),
            false => (ErrorKind::Unavailable, format!("the store did not answer within {timeout:?}")),
        };
        let error = self.with_context(Error::new(kind, message));
        match link.owner().id {
            Some(holder) => error.with_holder(holder),
            None => error,
        }
    }

    fn with_context(&self, error: Error) -> Error {
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

/// The driver of a lock, in progress or held. Dropping it cancels the lock and releases what it has acquired.
struct Hold {
    link: Link,
    /// Dropped after the stop was requested, so that the spawned driver sees the request.
    driver: Option<Inline>,
}

impl Hold {
    /// Waits until the mutex is acquired. Returns `Err` with the driver's outcome if it ended instead: `Ok` if the
    /// mutex was refused, else the error.
    async fn acquired(&self) -> Result<Tenure, Result<()>> {
        self.until(self.link.acquired()).await
    }

    /// Creates a guard for the tenure. Fails if the tenure has ended meanwhile.
    fn guarded(self, tenure: Tenure) -> Result<Guard> {
        let Some(work) = tenure.begin_work() else { return Err(lost(&tenure)) };
        Ok(Guard { work: Some(work), hold: self, tenure })
    }

    /// Waits until `end` completes, and runs the driver meanwhile unless it has a task.
    async fn until<F: Future>(&self, end: F) -> F::Output {
        match &self.driver {
            Some(driver) => driver.until(end).await,
            None => end.await,
        }
    }
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
    Error::lost(tenure.loss().unwrap_or(Loss::Released)).with_mutex(tenure.mutex())
}

/// A held mutex.
///
/// The engine renews it in the background until the guard is released or dropped, or the mutex is lost.
/// A guard can exist after the mutex is lost: call [`is_held`](Self::is_held) before every step that needs the mutex,
/// or use [`run`](Self::run), and pass [`token`](Self::token) to the resources that you write to.
///
/// # Drop
///
/// Dropping it frees the mutex in the background, without a report of the result. If the runtime ends first, the mutex
/// stays held until its lease ends. Dropping never blocks and never panics, with or
/// without a runtime. Use [`release`](Self::release) to get the result.
#[must_use = "if unused the mutex is released at once"]
pub struct Guard {
    // Order of drop: the work ends before the stop is requested.
    work: Option<Work>,
    hold: Hold,
    tenure: Tenure,
}

impl Guard {
    delegate! {
        tenure {
            /// Returns the fencing token to pass to every resource that the work writes to.
            fn token(&self) -> FencingToken;

            /// Returns the id that the mutex is held under.
            fn contender(&self) -> &ContenderId;

            /// Returns whether the mutex is held now. Reads the clock.
            fn is_held(&self) -> bool;

            /// Returns whether the work should stop. See [`Tenure::is_expiring`].
            fn is_expiring(&self) -> bool;

            /// Returns how long the mutex stays held without a renewal; zero once it is lost.
            fn remaining(&self) -> Duration;

            /// Returns the moment at which the mutex is lost unless it is renewed before.
            fn deadline(&self) -> Moment;
        }
    }

    /// Returns the tenure, a value to pass to other tasks.
    #[must_use]
    pub fn tenure(&self) -> Tenure {
        self.tenure.clone()
    }

    /// Completes when the work should stop: `grace` before the deadline. See [`Tenure::expiring`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping it has no effect.
    pub async fn expiring(&self) {
        self.tenure.expiring().await;
    }

    /// Completes when the mutex is lost, and returns the reason. See [`Tenure::lost`].
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping it has no effect.
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

    /// Releases the mutex and waits for the confirmation of the store. Before that, waits for work under
    /// [`Tenure::run`] of a clone, until the deadline at most.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Lost`]: the mutex was lost before, so the end of the work may not have been covered
    /// - [`ErrorKind::Unavailable`]: the store did not confirm; the mutex stays held until its lease ends
    ///
    /// # Cancel safety
    ///
    /// A dropped call continues in the background.
    pub async fn release(mut self) -> Result<()> {
        let loss = self.tenure.loss();
        self.work = None;
        self.hold.link.stop();
        let freed = self.hold.until(self.hold.link.done()).await;
        match (loss, freed) {
            (None | Some(Loss::Released), freed) => freed,
            // The runtime ended, which is the cause of the loss.
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
