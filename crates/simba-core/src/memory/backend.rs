use std::fmt;
use std::sync::Arc;

use async_trait::async_trait;

use super::session::MemorySession;
use super::store::Store;
use crate::backend::{Backend, Claim, Session};
use crate::clock::{Clock, SystemClock};
use crate::error::Result;
use crate::operate::Operate;

/// Mutexes in the memory of this process: for tests, examples, and as the model for other backends.
///
/// Clones share one store, as two processes share a server. Fair: waiters get the mutex in the order in which
/// they came. Wakes exactly the next waiter. Tokens grow for the life of the clock.
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
    /// An empty store on the machine's clock.
    #[must_use]
    pub fn new() -> Self {
        Self::with_clock(SystemClock)
    }

    /// An empty store that tells time by this clock: a store has one of its own.
    #[must_use]
    pub fn with_clock(clock: impl Clock) -> Self {
        Self { store: Arc::new(Store::new(Arc::new(clock))) }
    }

    /// Forgets every owner and every waiter, as a server that restarts without persistence does.
    ///
    /// For tests. Holders find out at their next renewal; tokens still grow.
    pub fn lose_all(&self) {
        self.store.lose_all();
    }

    pub(super) fn store(&self) -> &Store {
        &self.store
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
