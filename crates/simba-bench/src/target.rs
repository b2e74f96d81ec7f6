//! The stores that are measured.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use simba_core::{Backend, MemoryBackend, MutexName, async_trait};

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

    /// How many mutexes one process is to hold at once on this store.
    fn many(&self) -> usize;

    /// How long a holder of a hand-over keeps the mutex, so that the one before it is back in the queue.
    fn requeue(&self) -> Duration;
}

/// All of them, in the order of the report.
pub(crate) const TARGETS: &[&dyn Target] = &[&Memory];

/// The target of this name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Target> {
    TARGETS.iter().copied().find(|target| target.name() == name)
}

/// The memory of this process: what the engine costs by itself.
#[derive(Debug)]
struct Memory;

#[async_trait]
impl Target for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(MemoryBackend::new()))
    }

    fn many(&self) -> usize {
        100_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(1)
    }
}
