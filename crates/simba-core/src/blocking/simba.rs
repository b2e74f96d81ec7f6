use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::contention::Contention;
use super::engine::Engine;
use super::locker::Locker;
use super::observer::Observer;
use super::scheduler::Scheduler;
use crate::backend::Backend;
use crate::error::{Error, Result};
use crate::simba::SimbaBuilder;
use crate::types::{Lease, MutexName};

/// A handle on one store for programs without a runtime. See [`crate::Simba`].
#[derive(Clone, Debug)]
pub struct Simba {
    inner: crate::Simba,
    engine: Arc<Engine>,
}

impl Simba {
    /// Creates a handle on `backend` with the default lease, and starts its engine thread.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the system cannot start a thread.
    pub fn new(backend: impl Backend) -> Result<Self> {
        Self::connect(async { Ok(Arc::new(backend) as Arc<dyn Backend>) })
    }

    /// Creates a handle on the backend that `connect` returns. `connect` runs on the engine thread.
    ///
    /// # Errors
    ///
    /// The error of `connect`, or [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the system cannot start
    /// a thread.
    pub fn connect<F>(connect: F) -> Result<Self>
    where
        F: Future<Output = Result<Arc<dyn Backend>>> + Send + 'static,
    {
        Self::connect_with(connect, |builder| builder)
    }

    /// Creates a handle on the backend that `connect` returns, with other settings than the default.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect).
    ///
    /// # Examples
    ///
    /// ```
    /// use std::sync::Arc;
    /// use simba_core::{Lease, MemoryBackend, blocking, spi::Backend};
    ///
    /// let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    /// let lease = Lease::default();
    /// let simba = blocking::Simba::connect_with(async { Ok(backend) }, |builder| builder.with_lease(lease).with_seed(7))?;
    /// # simba.shutdown();
    /// # Ok::<(), simba_core::Error>(())
    /// ```
    pub fn connect_with<F>(connect: F, settings: impl FnOnce(SimbaBuilder) -> SimbaBuilder) -> Result<Self>
    where
        F: Future<Output = Result<Arc<dyn Backend>>> + Send + 'static,
    {
        let (engine, sender) = Engine::start()?;
        let backend = engine.run(connect)??;
        // The runtime last: the engine of a blocking handle runs on its own thread.
        let inner = settings(crate::Simba::builder(backend)).with_runtime(engine.handle().clone()).build();
        // The thread receives this handle after the engine is dropped, and shuts it down.
        let _ = sender.send(inner.clone());
        Ok(Self { inner, engine: Arc::new(engine) })
    }

    /// Returns a handle on the same store with another lease.
    #[must_use]
    pub fn with_lease(&self, lease: Lease) -> Self {
        Self { inner: self.inner.with_lease(lease), engine: Arc::clone(&self.engine) }
    }

    /// Returns a locker for this mutex. An invalid name is an error of its first lock.
    pub fn locker(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Locker {
        Locker { inner: self.inner.locker(name), engine: Arc::clone(&self.engine) }
    }

    /// Returns a contention for this mutex, not started yet. An invalid name is an error of its start.
    pub fn contend(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Contention {
        Contention { inner: self.inner.contend(name), _engine: Arc::clone(&self.engine) }
    }

    /// Returns a scheduler whose job runs only on the holder of this mutex. An invalid name is an error of its start.
    pub fn scheduler(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Scheduler {
        Scheduler { inner: self.inner.scheduler(name), engine: Arc::clone(&self.engine) }
    }

    /// Observes the owner of this mutex without contending for it.
    ///
    /// # Errors
    ///
    /// As for [`crate::Simba::observe`].
    pub fn observe(&self, name: impl TryInto<MutexName, Error: Into<Error>>) -> Result<Observer> {
        Ok(Observer { inner: self.inner.observe(name)?, _engine: Arc::clone(&self.engine) })
    }

    /// Returns the async handle, for methods that this module does not have. Run its futures with [`run`](Self::run).
    #[must_use]
    pub fn as_async(&self) -> &crate::Simba {
        &self.inner
    }

    /// Runs a future on the engine thread and waits for it. The future must not make blocking calls
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

    /// Stops all contenders and observers and waits for their end. See [`crate::Simba::shutdown`].
    pub fn shutdown(&self) {
        let simba = self.inner.clone();
        // An error means that the engine ended, after its own shutdown.
        let _ = self.engine.run(async move { simba.shutdown().await });
    }

    /// Shuts down like [`shutdown`](Self::shutdown), and waits for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As for [`crate::Simba::shutdown_timeout`].
    pub fn shutdown_timeout(&self, timeout: Duration) -> Result<()> {
        let simba = self.inner.clone();
        self.engine.run(async move { simba.shutdown_timeout(timeout).await })?
    }
}
