//! The reference backend behind switches.

use std::sync::Arc;

use simba_core::{MemoryBackend, SystemClock};
use simba_tck::{Connection, FaultyBackend, Fixture, Profile, Switch, async_trait};

pub(crate) struct Memory(MemoryBackend);

impl Memory {
    pub(crate) fn new() -> Self {
        Self(MemoryBackend::new())
    }
}

#[async_trait]
impl Fixture for Memory {
    async fn connect(&self) -> Connection {
        let network = Switch::new();
        let backend = FaultyBackend::new(self.0.clone(), SystemClock, Arc::<Switch>::clone(&network));
        Connection::new(backend, network)
    }

    fn profile(&self) -> Profile {
        Profile::default().with_survives_restart(false)
    }

    async fn restart(&self) -> bool {
        self.0.lose_all();
        true
    }
}
