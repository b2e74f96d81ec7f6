//! The memory of this process.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use simba_core::MemoryBackend;
use simba_core::spi::{Backend, async_trait};

use simba_measure::Target;

/// The memory of this process: the cost of the engine alone.
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

    fn many(&self) -> usize {
        100_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(1)
    }
}
