//! The handle on a store, from which all other types are created.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use crate::backend::Backend;
use crate::clock::{Clock, Moment, SystemClock, within};
use crate::contention::Contention;
use crate::engine::Core;
use crate::error::{Error, ErrorKind, Result};
use crate::locker::Locker;
use crate::observer::Observer;
use crate::operate::Operate;
use crate::scheduler::Scheduler;
use crate::types::{Lease, MutexName};

/// A handle on one store, to lock, lead, schedule and observe.
///
/// Cheap to clone; all clones share the backend and its connections. A service creates one and keeps it.
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
/// // … work under the mutex, with guard.token() for every resource that it writes to …
/// guard.release().await?;
/// simba.shutdown().await;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Simba {
    core: Arc<Core>,
    lease: Lease,
}

/// Builds a [`Simba`] with another clock, another runtime, or a seeded random source.
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
    /// Sets the clock.
    pub fn with_clock(self, clock: impl Clock) -> Self {
        Self { clock: Arc::new(clock), ..self }
    }

    /// Runs the engine on this runtime, so that code that blocks the caller's runtime delays no renewal.
    pub fn with_runtime(self, runtime: Handle) -> Self {
        Self { runtime: Some(runtime), ..self }
    }

    /// Sets the seed of all jitter, so that a run can be repeated.
    pub fn with_seed(self, seed: u64) -> Self {
        Self { seed: Some(seed), ..self }
    }

    /// Sets the default lease.
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { lease, ..self }
    }

    /// Builds the handle.
    #[must_use]
    pub fn build(self) -> Simba {
        let Self { backend, clock, runtime, seed, lease } = self;
        let seed = seed.or_else(|| getrandom::u64().ok()).unwrap_or_else(|| fastrand::u64(..));
        Simba { core: Arc::new(Core::new(backend, clock, runtime, seed)), lease }
    }
}

impl Simba {
    /// Creates a handle on `backend` with the default lease.
    #[must_use]
    pub fn new(backend: impl Backend) -> Self {
        Self::builder(backend).build()
    }

    /// Returns a builder for a handle on `backend` with other settings than the default. An `Arc` of a backend is a
    /// backend as well.
    pub fn builder(backend: impl Backend) -> SimbaBuilder {
        SimbaBuilder {
            backend: Arc::new(backend),
            clock: Arc::new(SystemClock),
            runtime: None,
            seed: None,
            lease: Lease::default(),
        }
    }

    /// Returns a handle on the same store with another lease.
    #[must_use]
    pub fn with_lease(&self, lease: Lease) -> Self {
        Self { core: Arc::clone(&self.core), lease }
    }

    /// Returns a locker for this mutex. An invalid name is an error of its first lock.
    pub fn locker(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Locker {
        Locker::new(Arc::clone(&self.core), name.try_into().map_err(Into::into), self.lease)
    }

    /// Returns a contention for this mutex, not started yet. An invalid name is an error of its start.
    pub fn contend(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Contention {
        Contention::new(Arc::clone(&self.core), name.try_into().map_err(Into::into), self.lease)
    }

    /// Returns a scheduler whose job runs only on the holder of this mutex. An invalid name is an error of its start.
    pub fn scheduler(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Scheduler {
        Scheduler::new(self.contend(name))
    }

    /// Observes the owner of this mutex without contending for it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an invalid name or outside a runtime, [`ErrorKind::Closed`] after a shutdown.
    pub fn observe(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Result<Observer> {
        Observer::start(&self.core, name.try_into().map_err(Into::into)?, self.lease)
    }

    /// Returns the operators' calls of the store: list, read, evict, probe, schema.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the backend has no operators' calls.
    pub fn operate(&self) -> Result<&dyn Operate> {
        self.core.backend.operate().ok_or_else(|| {
            Error::new(ErrorKind::Config, "this backend has no calls for operators")
                .with_backend(self.core.backend.name())
        })
    }

    /// Returns the name of the backend.
    #[must_use]
    pub fn backend_name(&self) -> &'static str {
        self.core.backend.name()
    }

    /// Returns the default lease.
    pub fn lease(&self) -> Lease {
        self.lease
    }

    /// Returns the current moment of the handle's clock, for the predicates of [`MutexOwner`](crate::MutexOwner).
    #[must_use]
    pub fn now(&self) -> Moment {
        self.core.clock.now()
    }

    /// Stops all contenders and observers of this handle and its clones, and waits for their end: work is notified
    /// to stop and awaited until its deadline at most, every mutex is freed, every queue left, the
    /// connections closed.
    ///
    /// It waits for the contenders for at most one lease, the longest that was used or is this handle's, or until the
    /// latest deadline of all tenures, if the store granted more. By then every mutex is lost or free. A contender that
    /// has not ended by then, such as one on a runtime that is not polled, is left behind with a warning. Closing the
    /// connections takes at most another ttl of this handle's lease.
    ///
    /// # Cancel safety
    ///
    /// A dropped call continues in the background, except that it does not close the connections. Call it again.
    pub async fn shutdown(&self) {
        self.core.uses(&self.lease);
        self.core.shutdown(self.lease.ttl()).await;
    }

    /// Shuts down like [`shutdown`](Self::shutdown), and waits for at most `timeout`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Timeout`] if it takes longer. It continues in the background, and mutexes that are not freed by the
    /// end of the process are freed when their lease ends.
    pub async fn shutdown_timeout(&self, timeout: Duration) -> Result<()> {
        let ended = within(&*self.core.clock, timeout, self.shutdown()).await;
        ended.ok_or_else(|| {
            let message = format!("the shutdown did not end within {timeout:?}");
            Error::new(ErrorKind::Timeout, message).with_backend(self.core.backend.name())
        })
    }
}
