use std::future::Future;
use std::sync::Arc;

use super::contention::Contention;
use super::engine::Engine;
use super::locker::Locker;
use super::observer::Observer;
use super::scheduler::Scheduler;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::types::{Lease, MutexName};

/// A handle on one store for programs without a runtime. See [`crate::Simba`].
#[derive(Clone, Debug)]
pub struct Simba {
    inner: crate::Simba,
    engine: Arc<Engine>,
}

impl Simba {
    /// A handle on `backend` with the default lease, and its engine thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the system starts no thread.
    pub fn new(backend: impl Backend) -> Result<Self> {
        Self::connect(async { Ok(Arc::new(backend) as Arc<dyn Backend>) })
    }

    /// A handle on the backend that `connect` makes, which runs on the engine thread.
    ///
    /// # Errors
    ///
    /// What `connect` says, or [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the system starts
    /// no thread.
    pub fn connect<F>(connect: F) -> Result<Self>
    where
        F: Future<Output = Result<Arc<dyn Backend>>> + Send + 'static,
    {
        let (engine, served) = Engine::start()?;
        let backend = engine.run(connect)??;
        let inner = crate::Simba::builder(backend).runtime(engine.handle().clone()).build();
        // The thread waits for its last handle to go before it takes this one.
        let _ = served.send(inner.clone());
        Ok(Self { inner, engine: Arc::new(engine) })
    }

    /// The same store with another lease.
    #[must_use]
    pub fn with_lease(&self, lease: Lease) -> Self {
        Self { inner: self.inner.with_lease(lease), engine: Arc::clone(&self.engine) }
    }

    /// A locker on this mutex. A wrong name is an error of its first lock.
    pub fn locker<N>(&self, name: N) -> Locker
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Locker::new(self.inner.locker(name), Arc::clone(&self.engine))
    }

    /// A contention for this mutex, not started yet. A wrong name is an error of its start.
    pub fn contend<N>(&self, name: N) -> Contention
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Contention::new(self.inner.contend(name), Arc::clone(&self.engine))
    }

    /// A scheduler whose job runs on the holder of this mutex only. A wrong name is an error of its start.
    pub fn scheduler<N>(&self, name: N) -> Scheduler
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Scheduler::new(self.inner.scheduler(name), Arc::clone(&self.engine))
    }

    /// Watches who owns this mutex without ever contending for it.
    ///
    /// # Errors
    ///
    /// As for [`crate::Simba::observe`].
    pub fn observe<N>(&self, name: N) -> Result<Observer>
    where
        N: TryInto<MutexName>,
        N::Error: Into<Error>,
    {
        Ok(Observer::new(self.inner.observe(name)?, Arc::clone(&self.engine)))
    }

    /// The async handle, for what this module does not wrap; its futures run with [`run`](Self::run).
    #[must_use]
    pub fn as_async(&self) -> &crate::Simba {
        &self.inner
    }

    /// Runs any future on the engine thread and waits for it. The future must not itself make blocking calls
    /// on this handle: it would wait for its own thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) if the future panicked.
    ///
    /// # Examples
    ///
    /// ```
    /// # use simba_core::{MemoryBackend, blocking};
    /// # let simba = blocking::Simba::new(MemoryBackend::new())?;
    /// let handle = simba.as_async().clone();
    /// let records = simba.run(async move { handle.operate()?.list().await })??;
    /// assert!(records.is_empty());
    /// # Ok::<(), simba_core::Error>(())
    /// ```
    pub fn run<F>(&self, future: F) -> Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        self.engine.run(future)
    }

    /// Stops everything and waits for it. See [`crate::Simba::shutdown`].
    pub fn shutdown(&self) {
        let simba = self.inner.clone();
        // An engine that ended before has shut down.
        let _ = self.engine.run(async move { simba.shutdown().await });
    }
}
