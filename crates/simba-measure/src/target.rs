//! What it takes to measure a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use simba_core::{Backend, MutexName, Simba, async_trait};

use crate::caller::{Caller, SessionCaller};

/// A store to measure, ours against raw.
#[async_trait]
pub trait Target: fmt::Debug + Sync {
    /// What the figures are filed under.
    fn name(&self) -> &'static str;

    /// The store through our backend.
    async fn connect(&self) -> Result<Arc<dyn Backend>>;

    /// One caller of the store with nothing of ours in between: the floor. Where the store has no client of
    /// its own, that is a session without the engine.
    async fn raw(&self, backend: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        Ok(Box::new(SessionCaller::new(Arc::clone(backend), mutex)))
    }

    /// Whether a raw caller can wait to be woken; without it a hand-over has no floor.
    fn raw_waits(&self) -> bool {
        true
    }

    /// What the design asks of a hand-over to one waiter, in words.
    fn handover_goal(&self) -> &'static str {
        ""
    }

    /// A handle on the store: whoever has to end early can keep a clone, and shut it down.
    fn handle(&self, backend: &Arc<dyn Backend>) -> Simba {
        Simba::builder(Arc::clone(backend)).build()
    }

    /// A name to measure with. What an earlier process left behind must not be in the way.
    ///
    /// # Errors
    ///
    /// It is no name.
    fn mutex(&self, kind: &str, n: usize) -> Result<MutexName> {
        Ok(MutexName::new(format!("bench:{kind}:{}:{n}", std::process::id()))?)
    }

    /// How many tasks make pairs at once, each on a mutex of its own.
    fn tasks(&self) -> usize {
        64
    }

    /// How many wait for one mutex where many do.
    fn waiters(&self) -> usize {
        1_000
    }

    /// How many hand-overs to measure in a round, of those that are asked for: fewer on a store that is polled.
    fn samples(&self, asked: usize) -> usize {
        asked
    }

    /// How long each of so many hand-overs took a peer on the same store, if there is one to compare with.
    ///
    /// # Errors
    ///
    /// The peer cannot be measured.
    async fn peer(&self, _samples: usize) -> Result<Option<Peer>> {
        Ok(None)
    }

    /// What a reader of the figures has to know about the store.
    fn note(&self) -> Option<&'static str> {
        None
    }

    /// How many mutexes one process is to hold at once on this store.
    fn many(&self) -> usize;

    /// How long a holder of a hand-over keeps the mutex, so that the one before it is back in the queue.
    fn requeue(&self) -> Duration;
}

/// A peer at work.
#[derive(Clone, Debug)]
pub struct Peer {
    /// What it is called.
    pub name: &'static str,
    /// How long its hand-overs took.
    pub handovers: Vec<Duration>,
}

#[cfg(test)]
pub(crate) mod tests {
    use simba_core::MemoryBackend;

    use super::*;

    /// The memory of this process, with little of everything.
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

        fn samples(&self, asked: usize) -> usize {
            asked.min(5)
        }

        fn many(&self) -> usize {
            10
        }

        fn requeue(&self) -> Duration {
            Duration::from_millis(1)
        }
    }
}
