//! The public compatibility kit on a backend from outside.

use outside_backend::TableBackend;
use simba_core::SystemClock;
use simba_tck::{Connection, FaultyBackend, Fixture, Profile, Switch, async_trait};

struct Table(TableBackend);

#[async_trait]
impl Fixture for Table {
    async fn connect(&self) -> Connection {
        let network = Switch::new();
        Connection::new(FaultyBackend::new(self.0.clone(), SystemClock, network.clone()), network)
    }

    fn profile(&self) -> Profile {
        // A table wakes nobody and knows no queue.
        Profile::default().with_push(false).with_fifo(false)
    }
}

simba_tck::suite!(Table(TableBackend::default()));
