//! The rows of the fault matrix about processes, against the shared server.

mod common;

use common::Store;
use simba_tck::processes::Shared;

impl Shared for Store {
    fn start() -> Self {
        Self::shared()
    }

    fn address(&self) -> String {
        simba_servers::shared("SIMBA_TCK_POSTGRES")
    }

    fn attach(address: &str) -> Self {
        Self::at(address)
    }
}

simba_tck::processes!(Store);
