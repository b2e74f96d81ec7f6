//! What it takes to measure a store.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use simba_core::{Backend, MutexName, async_trait};

use crate::caller::{Caller, SessionCaller};

/// A store to measure, ours against raw.
#[async_trait]
pub(crate) trait Target: fmt::Debug + Sync {
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

    /// How many hand-overs to measure in a round, of those that are asked for: fewer on a store that is polled.
    fn samples(&self, asked: usize) -> usize {
        asked
    }

    /// How long each of so many hand-overs took a peer on the same store, if there is one to compare with.
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
pub(crate) struct Peer {
    pub(crate) name: &'static str,
    pub(crate) handovers: Vec<Duration>,
}
