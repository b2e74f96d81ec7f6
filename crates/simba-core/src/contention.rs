//! Leading: contend for ever, be told when it is your turn and when it is over.

use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt;

use crate::engine::{Driver, Link, Mode, Order};
use crate::error::{Error, ErrorKind, Result};
use crate::simba::Core;
use crate::tenure::Tenure;
use crate::types::{ContenderId, Label, Lease, MutexName, MutexOwner, MutexState};

/// Is notified when it gains the mutex, when it should stop, and when it has lost the mutex.
///
/// Every `on_acquired` is followed by exactly one `on_released` of the same tenure, in order, even when the
/// first takes longer than the tenure. Between the two comes at least one `on_expiring`. A tenure that came and
/// went while a callback was busy is skipped altogether. Callbacks run beside the engine: however long they
/// take, renewals go on.
///
/// Callbacks run one at a time, since each has `&mut self`. One that comes due while another runs is called
/// right after it. So an `on_acquired` that returns late must itself watch [`Tenure::expiring`], which
/// completes on time in any case, or do its work under [`Tenure::run`].
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
    /// The mutex was gained; `state` is the change of owners.
    fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) -> impl Future<Output = ()> + Send;

    /// Stops the work, which the mutex may soon not cover any more: it is called when [`Tenure::expiring`]
    /// completes, which is `grace` before the deadline even while the store hangs, or when the end is announced.
    ///
    /// A renewal may still succeed. Then the tenure goes on, [`Tenure::is_expiring`] is false again, and this is
    /// called again before the next deadline. Does nothing by default.
    fn on_expiring(&mut self, tenure: &Tenure) -> impl Future<Output = ()> + Send {
        let _ = tenure;
        std::future::ready(())
    }

    /// The tenure is over, or its end is announced and the work under [`Tenure::run`] has ended: stop what
    /// else depends on it before returning.
    fn on_released(&mut self, tenure: &Tenure, state: &MutexState) -> impl Future<Output = ()> + Send;
}

/// Contends for one mutex for as long as it is started: tenure after tenure, through every outage.
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
    contender: Option<SharedContender>,
    running: Mutex<Option<Running>>,
}

type SharedContender = Arc<tokio::sync::Mutex<Box<dyn ErasedContender>>>;

/// One start. Dropping it asks its driver to stop.
struct Running {
    link: Link,
}

/// Where a contention stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// Not started, stopped, or ended by an error that [`Contention::last_error`] tells.
    Idle,
    /// Contending or leading.
    Running,
    /// Asked to stop and not through with it.
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
            contender: None,
            running: Mutex::default(),
        }
    }

    /// Calls this contender back.
    pub fn with_contender(self, contender: impl Contender) -> Self {
        let contender: Box<dyn ErasedContender> = Box::new(contender);
        Self { contender: Some(Arc::new(tokio::sync::Mutex::new(contender))), ..self }
    }

    /// Contends with this lease instead of the handle's.
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { lease, ..self }
    }

    /// Begins the contender's ids with this label. See [`Locker::with_label`](crate::Locker::with_label). A wrong
    /// label is an error of the start.
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { label: Label::new(label.as_ref()).map(Some), ..self }
    }

    /// Waits this long after a start before it first contends, to stagger a cold start; default zero.
    pub fn with_initial_delay(self, initial_delay: Duration) -> Self {
        Self { initial_delay, ..self }
    }

    /// Starts contending, after a stop that is not through if there is one. Does nothing if it runs already.
    /// It contends for as long as this value lives.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a wrong name or label or outside a runtime, [`ErrorKind::Closed`] after a
    /// shutdown.
    pub fn start(&self) -> Result<()> {
        let mutex = self.name.clone()?;
        let label = self.label.clone().map_err(|error| error.with_mutex(&mutex))?;
        let mut running = self.running();
        if running.as_ref().is_some_and(|running| running.status() == Status::Running) {
            return Ok(());
        }
        let link = Link::new();
        let order = Order {
            mutex,
            label,
            lease: self.lease,
            mode: Mode::Forever,
            initial_delay: self.initial_delay,
            max_hold: None,
            min_hold: Duration::ZERO,
        };
        // A stop that is not through goes first.
        Driver::start(&self.core, order, &link, running.as_ref().map(|running| running.link.clone()))?;
        if let Some(contender) = &self.contender {
            self.core.spawn_detached(dispatch(Arc::clone(contender), link.clone()))?;
        }
        *running = Some(Running { link });
        Ok(())
    }

    /// Stops contending: tells the work to stop, waits for it until the deadline at most, calls
    /// `on_released`, frees the mutex and wakes the next. May be called in any state, any number of times; from
    /// within a callback or the work itself it would wait for its caller until the deadline.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the store did not confirm; the lease then runs out by itself.
    ///
    /// # Cancel safety
    ///
    /// A dropped call goes on in the background.
    pub async fn stop(&self) -> Result<()> {
        let Some(link) = self.link() else { return Ok(()) };
        if link.is_done() {
            return Ok(());
        }
        link.stop();
        link.done().await
    }

    /// Gives the mutex up in order and stays away for `cooldown`, so that another can lead.
    pub fn step_down(&self, cooldown: Duration) {
        if let Some(link) = self.link() {
            link.step_down(cooldown);
        }
    }

    /// Waits until this contender holds the mutex; at once if it does.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] if it is not started or was stopped; what ended it otherwise.
    ///
    /// # Cancel safety
    ///
    /// Only listens.
    pub async fn acquired(&self) -> Result<Tenure> {
        let closed = || Error::new(ErrorKind::Closed, "the contention is not running: start it first");
        let Some(link) = self.link() else { return Err(closed()) };
        link.acquired().await.map_err(|outcome| match outcome {
            Err(error) if !link.is_stopped() => error,
            _ => closed(),
        })
    }

    /// Where it stands.
    #[must_use]
    pub fn status(&self) -> Status {
        self.running().as_ref().map_or(Status::Idle, Running::status)
    }

    /// The current tenure, if this contender holds the mutex.
    #[must_use]
    pub fn tenure(&self) -> Option<Tenure> {
        self.link()?.tenure().filter(Tenure::is_held)
    }

    /// Whether this contender holds the mutex at this moment, in its ttl or in the transition after it.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        self.tenure().is_some()
    }

    /// Whether this contender holds the mutex and its ttl is not over: the renewals come through.
    #[must_use]
    pub fn is_in_ttl(&self) -> bool {
        self.is_owner() && self.owner().is_in_ttl(self.core.clock.now())
    }

    /// The owner as last seen, this contender or another.
    #[must_use]
    pub fn owner(&self) -> MutexOwner {
        self.link().map_or(MutexOwner::none(), |link| link.owner())
    }

    /// The last change of owners that this contender saw.
    #[must_use]
    pub fn state(&self) -> MutexState {
        self.link().map_or(MutexState::none(), |link| link.state())
    }

    /// Returns the label of its ids, if it has one.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.label.as_ref().ok()?.as_ref().map(Label::as_str)
    }

    /// Returns the id that it contends under: a new one after every start and every step-down.
    #[must_use]
    pub fn id(&self) -> Option<ContenderId> {
        self.link()?.contender()
    }

    /// What went wrong in the last call to the store; `None` once one succeeds.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.link().and_then(|link| link.error())
    }

    /// Asks for a stop without waiting for it.
    pub(crate) fn stop_soon(&self) {
        if let Some(link) = self.link() {
            link.stop();
        }
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
        match (self.link.is_done(), self.link.is_wanted()) {
            (true, _) => Status::Idle,
            (false, true) => Status::Running,
            (false, false) => Status::Stopping,
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.link.stop();
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

/// [`Contender`] behind a pointer.
trait ErasedContender: Send {
    fn acquired<'a>(&'a mut self, tenure: &'a Tenure, state: &'a MutexState) -> Callback<'a>;
    fn expiring<'a>(&'a mut self, tenure: &'a Tenure) -> Callback<'a>;
    fn released<'a>(&'a mut self, tenure: &'a Tenure, state: &'a MutexState) -> Callback<'a>;
}

type Callback<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

impl<C: Contender> ErasedContender for C {
    fn acquired<'a>(&'a mut self, tenure: &'a Tenure, state: &'a MutexState) -> Callback<'a> {
        Box::pin(self.on_acquired(tenure, state))
    }

    fn expiring<'a>(&'a mut self, tenure: &'a Tenure) -> Callback<'a> {
        Box::pin(self.on_expiring(tenure))
    }

    fn released<'a>(&'a mut self, tenure: &'a Tenure, state: &'a MutexState) -> Callback<'a> {
        Box::pin(self.on_released(tenure, state))
    }
}

/// Calls the contender back for every tenure of the driver behind `link`, one after the other.
async fn dispatch(contender: SharedContender, link: Link) {
    // A restart waits here for the last callback of the run before.
    let mut contender = contender.lock().await;
    let mut last = None;
    while let Some((tenure, state)) = link.next(last.as_ref()).await {
        // A graceful end waits for this work, so the mutex is freed after `on_released` only.
        if let Some(work) = tenure.begin() {
            reported(&tenure, async { contender.acquired(&tenure, &state).await }).await;
            loop {
                tenure.expiring().await;
                reported(&tenure, async { contender.expiring(&tenure).await }).await;
                if !tenure.renewed().await {
                    break;
                }
            }
            work.alone().await;
            let state = MutexState::new(state.after, other_owner(&link, &tenure));
            reported(&tenure, async { contender.released(&tenure, &state).await }).await;
        }
        last = Some(tenure);
    }
}

/// Who owns the mutex after `tenure`, as far as it is known: not its own holder.
fn other_owner(link: &Link, tenure: &Tenure) -> MutexOwner {
    let owner = link.owner();
    if owner.is_owner(tenure.contender()) { MutexOwner::none() } else { owner }
}

/// A panic of a callback is reported and ends nothing else.
async fn reported(tenure: &Tenure, callback: impl Future<Output = ()> + Send) {
    if AssertUnwindSafe(callback).catch_unwind().await.is_err() {
        tracing::error!(mutex = %tenure.mutex(), contender = %tenure.contender(), "a contender's callback panicked");
    }
}
