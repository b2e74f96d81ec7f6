//! The handle that everything starts from.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use crate::backend::Backend;
use crate::clock::{Clock, Moment, SystemClock, by, within};
use crate::closing::Closing;
use crate::contention::Contention;
use crate::engine::Rides;
use crate::error::{Error, ErrorKind, Result};
use crate::locker::Locker;
use crate::observer::Observer;
use crate::operate::Operate;
use crate::scheduler::Scheduler;
use crate::types::{Lease, MutexName};

/// A handle on one store: lock, lead, schedule and observe through it.
///
/// Cheap to clone; all clones share the backend and its connections. A service makes one and keeps it.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// use simba_core::{MemoryBackend, Simba};
///
/// let simba = Simba::new(MemoryBackend::new());
/// let guard = simba.locker("orders").lock().await?;
/// // … work under the mutex, with guard.token() for every resource it touches …
/// guard.release().await?;
/// simba.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Simba {
    core: Arc<Core>,
    lease: Lease,
}

/// What all handles, drivers and observers of one store share.
pub(crate) struct Core {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) closing: Closing,
    pub(crate) rides: Arc<Rides>,
    tasks: TaskTracker,
    runtime: Option<Handle>,
    random: Mutex<fastrand::Rng>,
    /// The longest lease that was used, in nanoseconds.
    longest_lease: AtomicU64,
    /// The latest deadline of all tenures, in nanoseconds since the clock's zero. A store may grant more than the lease.
    latest_deadline: AtomicU64,
}

/// Makes a [`Simba`] on another clock, another runtime, or with known randomness.
///
/// # Default
///
/// The machine's [`SystemClock`], the runtime that each call is made on, the system's randomness.
#[derive(Debug)]
#[must_use]
pub struct SimbaBuilder {
    backend: Arc<dyn Backend>,
    clock: Arc<dyn Clock>,
    runtime: Option<Handle>,
    seed: Option<u64>,
    lease: Lease,
}

impl SimbaBuilder {
    /// Tells time by this clock.
    pub fn clock(self, clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// Runs the engine on this runtime, so that code that blocks the caller's delays no renewal.
    pub fn runtime(self, runtime: Handle) -> Self {
        Self { runtime: Some(runtime), ..self }
    }

    /// Draws all jitter from this seed, so that a run can be repeated.
    pub fn seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Uses this lease unless a call says otherwise.
    pub fn lease(self, lease: Lease) -> Self {
        Self { lease, ..self }
    }

    /// The handle.
    #[must_use]
    pub fn build(self) -> Simba {
        let Self { backend, clock, runtime, seed, lease } = self;
        let seed = seed.or_else(|| getrandom::u64().ok()).unwrap_or_else(|| fastrand::u64(..));
        let core = Core {
            backend,
            clock,
            closing: Closing::default(),
            rides: Arc::default(),
            tasks: TaskTracker::new(),
            runtime,
            random: Mutex::new(fastrand::Rng::with_seed(seed)),
            longest_lease: AtomicU64::new(0),
            latest_deadline: AtomicU64::new(0),
        };
        Simba { core: Arc::new(core), lease }
    }
}

impl Simba {
    /// A handle on `backend` with the default lease.
    #[must_use]
    pub fn new(backend: impl Backend) -> Self {
        Self::builder(Arc::new(backend)).build()
    }

    /// A handle with other than the default surroundings.
    pub fn builder(backend: Arc<dyn Backend>) -> SimbaBuilder {
        SimbaBuilder {
            backend,
            clock: Arc::new(SystemClock),
            runtime: None,
            seed: None,
            lease: Lease::default(),
        }
    }

    /// The same store with another lease.
    #[must_use]
    pub fn with_lease(&self, lease: Lease) -> Self {
        Self { core: Arc::clone(&self.core), lease }
    }

    /// A locker on this mutex. A wrong name is an error of its first lock.
    pub fn locker<N>(&self, name: N) -> Locker
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Locker::new(Arc::clone(&self.core), name.try_into().map_err(Into::into), self.lease)
    }

    /// A contention for this mutex, not started yet. A wrong name is an error of its start.
    pub fn contend<N>(&self, name: N) -> Contention
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Contention::new(Arc::clone(&self.core), name.try_into().map_err(Into::into), self.lease)
    }

    /// A scheduler whose job runs on the holder of this mutex only. A wrong name is an error of its start.
    pub fn scheduler<N>(&self, name: N) -> Scheduler
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Scheduler::new(self.contend(name))
    }

    /// Watches who owns this mutex without ever contending for it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for a wrong name or outside a runtime, [`ErrorKind::Closed`] after a shutdown.
    pub fn observe<N>(&self, name: N) -> Result<Observer>
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Observer::start(&self.core, name.try_into().map_err(Into::into)?, self.lease)
    }

    /// What operators need of the store: list, read, evict, probe, schema.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the backend offers nothing to operators.
    pub fn operate(&self) -> Result<&dyn Operate> {
        self.core.backend.operate().ok_or_else(|| {
            Error::new(ErrorKind::Config, "this backend offers nothing to operators")
                .with_backend(self.core.backend.name())
        })
    }

    /// The backend's name.
    #[must_use]
    pub fn backend(&self) -> &'static str {
        self.core.backend.name()
    }

    /// The lease used unless a call says otherwise.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// This moment on the handle's clock, to judge a [`MutexOwner`](crate::MutexOwner) by.
    #[must_use]
    pub fn now(&self) -> Moment {
        self.core.clock.now()
    }

    /// Stops everything that was started through this handle and its clones, and waits for it: work is told
    /// to stop and waited for until its deadline at most, every mutex is freed, every queue left, the
    /// connections closed.
    ///
    /// It waits for one lease at most, the longest that was used or is this handle's, and longer only if the store
    /// granted more: until the latest deadline of all tenures. By then every mutex is lost or free. What has not ended
    /// by then, such as a contender on a runtime that nobody drives, is left behind with a warning.
    ///
    /// # Cancel safety
    ///
    /// A dropped call goes on in the background except for closing the connections; call it again.
    pub async fn shutdown(&self) {
        self.core.closing.begin();
        self.core.rides.leave_all();
        self.core.tasks.close();
        self.core.uses(&self.lease);
        if !self.core.all_ended().await {
            let (backend, contenders) = (self.core.backend.name(), self.core.tasks.len());
            tracing::warn!(backend, contenders, "some contenders have not ended by the last deadline");
        }
        within(&*self.core.clock, self.lease.ttl(), self.core.backend.close()).await;
    }
}

impl Core {
    /// Runs a task of the engine; refused after a shutdown and where no runtime is at hand.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.refuse_when_closed()?;
        self.tasks.spawn_on(task, &self.runtime()?);
        Ok(())
    }

    /// The caller's runtime, if the engine runs on that; refused as [`spawn`](Self::spawn) is.
    pub(crate) fn runtime_of_caller(&self) -> Result<Option<Handle>> {
        self.refuse_when_closed()?;
        if self.runtime.is_some() { Ok(None) } else { self.runtime().map(Some) }
    }

    /// Runs a task of the engine that began before, on its own runtime.
    pub(crate) fn spawn_on(&self, task: impl Future<Output = ()> + Send + 'static, runtime: &Handle) {
        self.tasks.spawn_on(task, runtime);
    }

    /// A shutdown waits for whoever has it.
    pub(crate) fn token(&self) -> TaskTrackerToken {
        self.tasks.token()
    }

    fn refuse_when_closed(&self) -> Result<()> {
        if self.closing.has_begun() {
            return Err(
                Error::new(ErrorKind::Closed, "the handle was shut down").with_backend(self.backend.name())
            );
        }
        Ok(())
    }

    /// Runs user code: like [`spawn`](Self::spawn), but a shutdown does not wait for it.
    pub(crate) fn spawn_detached(&self, task: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.runtime()?.spawn(task);
        Ok(())
    }

    fn runtime(&self) -> Result<Handle> {
        match &self.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => Handle::try_current().map_err(|error| {
                Error::invalid("no tokio runtime here: call from one, or use simba_core::blocking")
                    .with_source(error)
            }),
        }
    }

    /// Notes that this lease is used.
    pub(crate) fn uses(&self, lease: &Lease) {
        let total = u64::try_from(lease.total().as_nanos()).unwrap_or(u64::MAX);
        self.longest_lease.fetch_max(total, Ordering::Relaxed);
    }

    /// Notes that a mutex is held until `deadline` at the latest.
    pub(crate) fn held_until(&self, deadline: Moment) {
        let nanos = u64::try_from(deadline.since_zero().as_nanos()).unwrap_or(u64::MAX);
        self.latest_deadline.fetch_max(nanos, Ordering::SeqCst);
    }

    /// Waits until all tasks have ended; `false` if some have not when one lease and the latest deadline are over.
    async fn all_ended(&self) -> bool {
        let mut end = self.clock.now() + Duration::from_nanos(self.longest_lease.load(Ordering::Relaxed));
        loop {
            end = end.max(self.latest_deadline());
            if by(&*self.clock, end, self.tasks.wait()).await.is_some() {
                return true;
            }
            // A call that was under way when the shutdown began may have won or renewed a mutex since.
            if self.latest_deadline() <= end {
                return false;
            }
        }
    }

    fn latest_deadline(&self) -> Moment {
        Moment::ZERO + Duration::from_nanos(self.latest_deadline.load(Ordering::SeqCst))
    }

    /// A seed for one contender's jitter.
    pub(crate) fn seed(&self) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).u64(..)
    }
}

impl fmt::Debug for Simba {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Simba")
            .field("backend", &self.core.backend)
            .field("lease", &self.lease)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("backend", &self.backend).finish_non_exhaustive()
    }
}
