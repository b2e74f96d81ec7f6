use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::session::MemorySession;
use super::store::Store;
use crate::backend::{Backend, Claim, Session};
use crate::clock::{Clock, SystemClock};
use crate::error::Result;
use crate::operate::{EvictIf, Eviction, Finding, MutexRecord, Operate, Probe};
use crate::types::MutexName;

/// A backend in the memory of this process: for tests and examples, and as the reference for other backends.
///
/// Clones share one store, as two processes share a server. Waiters acquire in FIFO order. A release wakes exactly the
/// next waiter. Tokens increase as long as the clock does.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// use simba_core::{MemoryBackend, Simba};
///
/// let store = MemoryBackend::new();
/// let (one, other) = (Simba::new(store.clone()), Simba::new(store));
/// let guard = one.locker("orders").lock().await?;
/// assert!(other.locker("orders").try_lock().await?.is_none());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct MemoryBackend {
    store: Arc<Store>,
}

impl MemoryBackend {
    /// Creates an empty store on the machine's clock.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(SystemClock)
    }

    /// Creates an empty store on this clock. It may differ from the clock of the handle, as that of a server does.
    #[must_use]
    pub fn with_clock(clock: impl Clock) -> Self {
        Self { store: Arc::new(Store::new(Arc::new(clock))) }
    }

    /// Deletes every owner and every waiter, like the restart of a server without persistence.
    ///
    /// For tests. Holders lose the mutex at their next renewal; tokens still increase.
    pub fn lose_all(&self) {
        self.store.lose_all();
    }
}

impl Default for MemoryBackend {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for MemoryBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryBackend").finish_non_exhaustive()
    }
}

#[async_trait]
impl Backend for MemoryBackend {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(MemorySession::new(Arc::clone(&self.store), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }
}

#[async_trait]
impl Operate for MemoryBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        Ok(self.store.list())
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        Ok(self.store.read(mutex))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        Ok(self.store.evict(mutex, &condition))
    }

    async fn probe(&self) -> Result<Probe> {
        let clock = &*self.store.clock;
        let before = clock.now();
        self.store.list();
        let finding = Finding::new(
            "only this process has these mutexes: another process can hold them at the same time",
            "use sqlite:PATH on one host, or a server",
        );
        Ok(Probe { server: "memory".into(), round_trip: clock.now() - before, findings: vec![finding] })
    }
}
