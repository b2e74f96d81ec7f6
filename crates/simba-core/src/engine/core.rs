//! The state that all contenders and observers of one handle share.

use std::fmt;
use std::future::Future;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::runtime::Handle;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TrackedFuture;

use super::closing::Closing;
use super::inline::InlineDrivers;
use crate::backend::Backend;
use crate::clock::{Clock, Moment, by, nanos, within};
use crate::error::{Error, ErrorKind, Result};
use crate::types::Lease;

/// The store, the clock and the tasks of one handle and its clones.
pub(crate) struct Core {
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) closing: Closing,
    pub(super) inline: InlineDrivers,
    tasks: TaskTracker,
    runtime: Option<Handle>,
    random: Mutex<fastrand::Rng>,
    /// The longest lease that was used, in nanoseconds.
    longest_lease: AtomicU64,
    /// The latest deadline of all tenures, in nanoseconds since the clock's zero. A store may grant more than a lease.
    latest_deadline: AtomicU64,
}

impl Core {
    /// Creates the state of a handle. `runtime` is the one that the engine runs on; by default that of each caller.
    pub(crate) fn new(
        backend: Arc<dyn Backend>,
        clock: Arc<dyn Clock>,
        runtime: Option<Handle>,
        seed: u64,
    ) -> Self {
        Self {
            backend,
            clock,
            closing: Closing::default(),
            inline: InlineDrivers::default(),
            tasks: TaskTracker::new(),
            runtime,
            random: Mutex::new(fastrand::Rng::with_seed(seed)),
            longest_lease: AtomicU64::new(0),
            latest_deadline: AtomicU64::new(0),
        }
    }

    /// Spawns a task of the engine. Fails after a shutdown and outside a runtime.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.refuse_when_closed()?;
        self.tasks.spawn_on(task, &self.runtime()?);
        Ok(())
    }

    /// Returns the caller's runtime if the engine runs on it, else `None`. Fails like [`spawn`](Self::spawn).
    pub(super) fn runtime_of_caller(&self) -> Result<Option<Handle>> {
        self.refuse_when_closed()?;
        if self.runtime.is_some() { Ok(None) } else { self.runtime().map(Some) }
    }

    /// Makes a shutdown wait for this future.
    pub(super) fn track<F: Future>(&self, future: F) -> TrackedFuture<F> {
        self.tasks.track_future(future)
    }

    fn refuse_when_closed(&self) -> Result<()> {
        if self.closing.has_begun() {
            let error = Error::new(ErrorKind::Closed, "the handle was shut down");
            return Err(error.with_backend(self.backend.name()));
        }
        Ok(())
    }

    /// Spawns user code: like [`spawn`](Self::spawn), but a shutdown does not wait for it.
    pub(crate) fn spawn_detached(&self, task: impl Future<Output = ()> + Send + 'static) -> Result<()> {
        self.runtime()?.spawn(task);
        Ok(())
    }

    fn runtime(&self) -> Result<Handle> {
        match &self.runtime {
            Some(runtime) => Ok(runtime.clone()),
            None => Handle::try_current().map_err(|error| {
                Error::invalid("no tokio runtime: call it inside one, or use simba_core::blocking")
                    .with_source(error)
            }),
        }
    }

    /// Records that this lease is used.
    pub(crate) fn uses(&self, lease: &Lease) {
        self.longest_lease.fetch_max(nanos(lease.total()), Ordering::Relaxed);
    }

    /// Records that a mutex is held until `deadline` at the latest.
    pub(super) fn held_until(&self, deadline: Moment) {
        self.latest_deadline.fetch_max(nanos(deadline.since_zero()), Ordering::SeqCst);
    }

    /// Stops all contenders and observers, waits for them, and closes the connections, for which `limit` is the time.
    pub(crate) async fn shutdown(&self, limit: Duration) {
        self.closing.begin();
        self.inline.spawn_all();
        self.tasks.close();
        if !self.all_ended().await {
            let (backend, contenders) = (self.backend.name(), self.tasks.len());
            tracing::warn!(backend, contenders, "some contenders have not ended by the last deadline");
        }
        within(&*self.clock, limit, self.backend.close()).await;
    }

    /// Waits until all tasks have ended. Returns `false` if some have not after one lease and the latest deadline.
    async fn all_ended(&self) -> bool {
        let mut end = self.clock.now() + Duration::from_nanos(self.longest_lease.load(Ordering::Relaxed));
        loop {
            end = end.max(self.latest_deadline());
            if by(&*self.clock, end, self.tasks.wait()).await.is_some() {
                return true;
            }
            // A call that was in flight when the shutdown began may have acquired or renewed a mutex since.
            if self.latest_deadline() <= end {
                return false;
            }
        }
    }

    fn latest_deadline(&self) -> Moment {
        Moment::ZERO + Duration::from_nanos(self.latest_deadline.load(Ordering::SeqCst))
    }

    /// Returns a seed for the jitter of one contender.
    pub(crate) fn seed(&self) -> u64 {
        self.random.lock().unwrap_or_else(PoisonError::into_inner).u64(..)
    }
}

impl fmt::Debug for Core {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Core").field("backend", &self.backend).finish_non_exhaustive()
    }
}
