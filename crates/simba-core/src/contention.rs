//! Leader election: contends until stopped, and notifies a contender of every gain and loss.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;

use crate::engine::{Core, Driver, DriverConfig, Link, Mode, Settings};
use crate::error::{Error, ErrorKind, Result};
use crate::tenure::Tenure;
use crate::types::{ContenderId, Label, Lease, MutexName, MutexOwner, MutexState};

/// Is notified when it gains the mutex, when it should stop, and when it has lost the mutex.
///
/// Every `on_acquired` is followed by exactly one `on_released` of the same tenure, in order, even if the
/// first takes longer than the tenure. Between the two there is at least one `on_expiring`. A tenure that began and
/// ended while a callback was running is skipped. Callbacks run in a separate task: however long they
/// take, renewals continue.
///
/// Callbacks run one at a time, since each has `&mut self`. A callback that is due while another runs is called
/// right after it. So an `on_acquired` that returns late must await [`Tenure::expiring`], which
/// always completes on time, or do its work under [`Tenure::run`].
///
/// A graceful stop waits for the callbacks, until the deadline at most, before it frees the mutex.
///
/// # Examples
///
/// ```
/// use simba_core::{Contender, MutexState, Tenure};
///
/// struct Leader;
///
/// impl Contender for Leader {
///     async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
///         println!("leading with token {}", tenure.token());
///     }
///
///     async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
///         println!("not leading any more: {:?}", tenure.loss());
///     }
/// }
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a `Contender`",
    note = "implement `on_acquired` and `on_released`, or use `Contention::acquired` without callbacks"
)]
pub trait Contender: Send + 'static {
    /// Called when the mutex was acquired; `state` is the change of owners.
    fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) -> impl Future<Output = ()> + Send;

    /// Called when the work should stop. That is when [`Tenure::expiring`]
    /// completes: `grace` before the deadline even while the store hangs, or when the end is announced.
    ///
    /// A renewal may still succeed. Then the tenure stays valid, [`Tenure::is_expiring`] is false again, and this is
    /// called again before the next deadline. Does nothing by default.
    fn on_expiring(&mut self, tenure: &Tenure) -> impl Future<Output = ()> + Send {
        let _ = tenure;
        std::future::ready(())
    }

    /// Called when the tenure has ended, or its end is announced and the work under [`Tenure::run`] has ended. Stop
    /// everything else that depends on the tenure before returning.
    fn on_released(&mut self, tenure: &Tenure, state: &MutexState) -> impl Future<Output = ()> + Send;
}

/// Contends for one mutex from start to stop, again after every tenure and through every outage.
///
/// Settings take effect at the next [`start`](Self::start): one that is changed while it runs applies after a stop.
///
/// # Drop
///
/// Dropping it stops it in the background.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
/// let contention = simba.contend("leader");
/// contention.start()?;
/// let tenure = contention.acquired().await?;
/// assert!(contention.is_owner() && tenure.is_held());
/// contention.stop().await?;
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it stops it"]
pub struct Contention {
    core: Arc<Core>,
    name: Result<MutexName>,
    lease: Lease,
    label: Result<Option<Label>>,
    initial_delay: Duration,
    dispatch: Option<Dispatch>,
    running: Mutex<Option<Running>>,
}

/// Calls a contender's callbacks for the driver of one start.
type Dispatch = Box<dyn Fn(Link) -> BoxFuture<'static, ()> + Send + Sync>;

/// The driver of one start. Dropping it stops the driver.
struct Running {
    link: Link,
    /// The drivers of earlier starts whose stop was not complete at this one.
    previous: Vec<Link>,
}

/// The status of a contention.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Not started, stopped, or ended by an error that [`Contention::last_error`] returns.
    Idle,
    /// Contending or leading.
    Running,
    /// A stop was requested and is not complete.
    Stopping,
}

impl Contention {
    pub(crate) fn new(core: Arc<Core>, name: Result<MutexName>, lease: Lease) -> Self {
        Self {
            core,
            name,
            lease,
            label: Ok(None),
            initial_delay: Duration::ZERO,
            dispatch: None,
            running: Mutex::default(),
        }
    }

    /// Sets the contender whose callbacks are called.
    pub fn with_contender(self, contender: impl Contender) -> Self {
        let contender = Arc::new(tokio::sync::Mutex::new(contender));
        let start = move |link| dispatch(Arc::clone(&contender), link).boxed();
        Self { dispatch: Some(Box::new(start)), ..self }
    }

    /// Contends with this lease instead of the handle's.
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { lease, ..self }
    }

    /// Sets the label of the contender's ids. See [`Locker::with_label`](crate::Locker::with_label). An invalid
    /// label is an error of the start.
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { label: Label::new(label.as_ref()).map(Some), ..self }
    }

    /// Sets the delay between a start and the first call to the store, to stagger a cold start; default zero.
    pub fn with_initial_delay(self, initial_delay: Duration) -> Self {
        Self { initial_delay, ..self }
    }

    /// Starts contending. Does nothing if it runs already. It contends until this value is dropped.
    ///
    /// If a stop is not complete, this start waits for it, but for no longer than the time limit of one call: a third of
    /// the ttl, at most five seconds. Then it contends like any other contender, and waits while the stop keeps the mutex.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an invalid name or label or outside a runtime, [`ErrorKind::Closed`] after a
    /// shutdown.
    pub fn start(&self) -> Result<()> {
        let mutex = self.name.clone()?;
        let label = self.label.clone().map_err(|error| error.with_mutex(&mutex))?;
        let mut running = self.running();
        if running.as_ref().is_some_and(|running| running.status() == Status::Running) {
            return Ok(());
        }
        let link = Link::new();
        let settings = Settings::new(Mode::Forever, self.lease);
        let config = DriverConfig { mutex, label, settings, initial_delay: self.initial_delay };
        // A stop that is not complete goes first.
        Driver::start(&self.core, config, &link, running.as_ref().map(|running| running.link.clone()))?;
        if let Some(dispatch) = &self.dispatch {
            self.core.spawn_detached(dispatch(link.clone()))?;
        }
        let previous = running.as_ref().map(Running::unfinished).unwrap_or_default();
        *running = Some(Running { link, previous });
        Ok(())
    }

    /// Stops contending: notifies the work to stop, waits for it until the deadline at most, calls
    /// `on_released`, frees the mutex and wakes the next waiter. May be called in any state, any number of times. A
    /// call from within a callback or the work itself would wait for its caller until the deadline.
    ///
    /// Waits for earlier stops as well that were not complete when it was started again.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the store did not confirm; the mutex then stays held until its lease ends.
    ///
    /// # Cancel safety
    ///
    /// A dropped call continues in the background.
    pub async fn stop(&self) -> Result<()> {
        let unfinished = self.running().as_ref().map(Running::unfinished).unwrap_or_default();
        unfinished.iter().for_each(Link::stop);
        let mut stopped = Ok(());
        for link in unfinished {
            stopped = stopped.and(link.done().await);
        }
        stopped
    }

    /// Releases the mutex gracefully and does not contend for `cooldown`, so that another contender can lead.
    pub fn step_down(&self, cooldown: Duration) {
        if let Some(link) = self.link() {
            link.step_down(cooldown);
        }
    }

    /// Waits until this contender holds the mutex. Completes at once if it does.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] if it is not started or was stopped, else the error that ended it.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping it has no effect.
    pub async fn acquired(&self) -> Result<Tenure> {
        let closed = || Error::new(ErrorKind::Closed, "the contention is not running: start it first");
        let Some(link) = self.link() else { return Err(closed()) };
        link.acquired().await.map_err(|outcome| match outcome {
            Err(error) if !link.is_stopped() => error,
            _ => closed(),
        })
    }

    /// Starts contending and runs `work` in every tenure, until a run completes. Then stops, frees the mutex, and returns
    /// the output of that run.
    ///
    /// A run that its tenure does not outlast is dropped, as by [`Tenure::run`], and the next tenure begins another one.
    /// A panic of `work` stops the contention in the background.
    ///
    /// # Errors
    ///
    /// Those of [`start`](Self::start) and [`acquired`](Self::acquired): [`ErrorKind::Closed`] once the contention is
    /// stopped. That of [`stop`](Self::stop) if the store did not confirm the release.
    ///
    /// # Cancel safety
    ///
    /// Dropping the call drops the work. The contention goes on until it is stopped or dropped.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> simba_core::Result<()> {
    /// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
    /// let leader = simba.contend("orders");
    /// let token = leader.lead(|tenure| async move { tenure.token() }).await?;
    /// println!("led under token {token}");
    /// # Ok(())
    /// # }
    /// ```
    pub async fn lead<W, F>(&self, mut work: W) -> Result<F::Output>
    where
        W: FnMut(Tenure) -> F,
        F: Future,
    {
        self.start()?;
        let _stop = self.stop_on_panic();
        loop {
            let tenure = self.acquired().await?;
            if let Ok(output) = tenure.run(work(tenure.clone())).await {
                self.stop().await?;
                return Ok(output);
            }
            // The work was dropped before the deadline. A late renewal keeps the tenure, otherwise the next one begins.
            tenure.renewed().await;
        }
    }

    /// Returns the status.
    #[must_use]
    pub fn status(&self) -> Status {
        self.running().as_ref().map_or(Status::Idle, Running::status)
    }

    /// Returns the current tenure, if this contender holds the mutex.
    #[must_use]
    pub fn tenure(&self) -> Option<Tenure> {
        self.link()?.tenure().filter(Tenure::is_held)
    }

    /// Returns whether this contender holds the mutex now, in its ttl or in the transition after it.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        self.tenure().is_some()
    }

    /// Returns whether this contender holds the mutex and its ttl has not ended, so renewals succeed.
    #[must_use]
    pub fn is_in_ttl(&self) -> bool {
        self.is_owner() && self.owner().is_in_ttl(self.core.clock.now())
    }

    /// Returns the owner in the last answer of the store, this contender or another.
    #[must_use]
    pub fn owner(&self) -> MutexOwner {
        self.link().map_or(MutexOwner::none(), |link| link.owner())
    }

    /// Returns the last change of owners that this contender observed.
    #[must_use]
    pub fn state(&self) -> MutexState {
        self.link().map_or(MutexState::none(), |link| link.state())
    }

    /// Returns the label of the contender's ids, if one is set.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_ref().ok()?.as_ref().map(Label::as_str)
    }

    /// Returns the contender's id: a new one after every start and every step-down.
    #[must_use]
    pub fn id(&self) -> Option<ContenderId> {
        self.link()?.contender()
    }

    /// Returns the error of the last call to the store; `None` if it succeeded.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.link().and_then(|link| link.error())
    }

    /// Requests a stop without waiting for it.
    pub(crate) fn request_stop(&self) {
        if let Some(link) = self.link() {
            link.stop();
        }
    }

    /// Returns a value that requests a stop if it is dropped by a panic: nothing uses the mutex from then on.
    pub(crate) fn stop_on_panic(&self) -> StopOnPanic<'_> {
        StopOnPanic(self)
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    fn link(&self) -> Option<Link> {
        self.running().as_ref().map(|running| running.link.clone())
    }

    fn running(&self) -> MutexGuard<'_, Option<Running>> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    fn status(&self) -> Status {
        match (self.unfinished().is_empty(), self.link.is_active()) {
            (true, _) => Status::Idle,
            (false, true) => Status::Running,
            (false, false) => Status::Stopping,
        }
    }

    /// Returns the drivers that have not left the store, in the order of their start.
    fn unfinished(&self) -> Vec<Link> {
        self.previous.iter().chain([&self.link]).filter(|link| !link.is_done()).cloned().collect()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.link.stop();
    }
}

/// Requests a stop of a contention when it is dropped during a panic.
pub(crate) struct StopOnPanic<'a>(&'a Contention);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.request_stop();
        }
    }
}

impl fmt::Debug for Contention {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contention")
            .field("name", &self.name)
            .field("lease", &self.lease)
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}

// ===== callbacks =====

/// Calls the contender's callbacks for every tenure of the driver of `link`, one after the other.
async fn dispatch<C: Contender>(contender: Arc<tokio::sync::Mutex<C>>, link: Link) {
    // After a restart, waits here for the last callback of the previous run.
    let mut contender = contender.lock().await;
    let mut last = None;
    while let Some((tenure, state)) = link.next(last.as_ref()).await {
        // A graceful end waits for this work, so the mutex is freed only after `on_released`.
        if let Some(work) = tenure.begin_work() {
            run_callback(&tenure, async { contender.on_acquired(&tenure, &state).await }).await;
            loop {
                tenure.expiring().await;
                run_callback(&tenure, async { contender.on_expiring(&tenure).await }).await;
                if !tenure.renewed().await {
                    break;
                }
            }
            work.others_ended().await;
            let state = MutexState::new(state.after, other_owner(&link, &tenure));
            run_callback(&tenure, async { contender.on_released(&tenure, &state).await }).await;
        }
        last = Some(tenure);
    }
}

/// Returns the owner of the mutex after `tenure`, if it is known and not the holder of `tenure`.
fn other_owner(link: &Link, tenure: &Tenure) -> MutexOwner {
    let owner = link.owner();
    if owner.is_owner(tenure.contender()) { MutexOwner::none() } else { owner }
}

/// Runs a callback and logs its panic, which ends nothing else.
async fn run_callback(tenure: &Tenure, callback: impl Future<Output = ()> + Send) {
    if AssertUnwindSafe(callback).catch_unwind().await.is_err() {
        tracing::error!(mutex = %tenure.mutex(), contender = %tenure.contender(), "a contender's callback panicked");
    }
}
