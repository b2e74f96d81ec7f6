//! The interface to a store that is measured.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use simba_core::spi::{Backend, async_trait};
use simba_core::{MutexName, Simba};

use crate::caller::{Caller, SessionCaller};

/// A store to measure, through Simba and raw.
#[async_trait]
pub trait Target: fmt::Debug + Sync {
    /// Returns the name of the store in the report.
    fn name(&self) -> &'static str;

    /// Connects to the store through the backend.
    async fn connect(&self) -> Result<Arc<dyn Backend>>;

    /// Returns a caller of the store without Simba: the floor. For a store without a raw client it is a session without
    /// the engine.
    async fn raw(&self, backend: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        Ok(Box::new(SessionCaller::new(Arc::clone(backend), mutex)))
    }

    /// Returns whether a raw caller can wait for a wake-up. If not, a hand-over has no floor.
    fn raw_waits(&self) -> bool {
        true
    }

    /// Returns the goal of the design for a hand-over to one waiter, as text.
    fn handover_goal(&self) -> &'static str {
        ""
    }

    /// Returns a handle on the store. An implementation can keep a clone, to shut the handle down early.
    fn handle(&self, backend: &Arc<dyn Backend>) -> Simba {
        Simba::builder(Arc::clone(backend)).build()
    }

    /// Returns the name of a mutex to measure with. It must differ from the names that earlier processes used.
    ///
    /// # Errors
    ///
    /// The name is invalid.
    fn mutex(&self, kind: &str, n: usize) -> Result<MutexName> {
        Ok(MutexName::new(format!("bench:{kind}:{}:{n}", std::process::id()))?)
    }

    /// Returns how many tasks lock and release concurrently, each on its own mutex.
    fn tasks(&self) -> usize {
        64
    }

    /// Returns the number of waiters for the hand-over among many.
    fn waiters(&self) -> usize {
        1_000
    }

    /// Returns how many of the requested hand-overs to measure in a round: fewer on a store that is polled.
    fn samples(&self, requested: usize) -> usize {
        requested
    }

    /// Measures the given number of hand-overs of a peer on the same store. Returns `None` if there is no peer.
    ///
    /// # Errors
    ///
    /// The peer cannot be measured.
    async fn peer(&self, _samples: usize) -> Result<Option<Peer>> {
        Ok(None)
    }

    /// Returns a note about the store for readers of the report.
    fn note(&self) -> Option<&'static str> {
        None
    }

    /// Returns how many mutexes one process holds at once on this store.
    fn many(&self) -> usize;

    /// Returns how long a caller holds the mutex between hand-overs: long enough for the holder before it to join the
    /// queue again.
    fn requeue(&self) -> Duration;
}

/// The results of a peer.
#[derive(Clone, Debug)]
pub struct Peer {
    /// The name of the peer.
    pub name: &'static str,
    /// The times of its hand-overs.
    pub handovers: Vec<Duration>,
}

#[cfg(test)]
pub(crate) mod tests {
    use simba_core::MemoryBackend;

    use super::*;

    /// The memory of this process, with small numbers of waiters, samples and mutexes.
    #[derive(Debug)]
    pub(crate) struct Memory;

    #[async_trait]
    impl Target for Memory {
        fn name(&self) -> &'static str {
            "memory"
        }

        async fn connect(&self) -> Result<Arc<dyn Backend>> {
            Ok(Arc::new(MemoryBackend::new()))
        }

        fn waiters(&self) -> usize {
            3
        }

        fn samples(&self, requested: usize) -> usize {
            requested.min(5)
        }

        fn many(&self) -> usize {
            10
        }

        fn requeue(&self) -> Duration {
            Duration::from_millis(1)
        }
    }
}
