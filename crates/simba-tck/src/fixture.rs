//! What a backend author gives to the kit: connections to the store under test, and what the store can do.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Backend, Lease, async_trait};

use crate::{Network, Profile};

/// One store under test.
///
/// Every case gets a fixture of its own; all of them may lead to the same server, since each case draws names
/// of its own. A server that is not there is a failure: [`connect`](Self::connect) panics and says how to
/// start it.
///
/// # Examples
///
/// See the [crate's documentation](crate).
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// A fresh connection to the one store under test, as another process would have, with a network that can
    /// be broken.
    async fn connect(&self) -> Connection;

    /// Returns the lease that the cases hold mutexes by; default 2 s + 3 s.
    ///
    /// Short, since many cases wait for its end, and long enough that a machine which stands still for two seconds
    /// loses nothing. A store with slower leases, such as one with sessions, overrides it.
    fn lease(&self) -> Lease {
        usual_lease()
    }

    /// What the store can do; default: everything, and its memory survives a restart.
    fn profile(&self) -> Profile {
        Profile::default()
    }

    /// Restarts the store and returns once it answers again; false if it cannot be restarted.
    async fn restart(&self) -> bool {
        false
    }
}

/// A connection to the store, as one process has it.
#[derive(Clone)]
#[allow(clippy::exhaustive_structs)]
pub struct Connection {
    /// The backend under test.
    pub backend: Arc<dyn Backend>,
    /// What lies between it and the store.
    pub network: Arc<dyn Network>,
}

impl Connection {
    /// A backend and the network that it reaches its store through.
    pub fn new(backend: impl Backend, network: Arc<dyn Network>) -> Self {
        Self { backend: Arc::new(backend), network }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// The lease of a fixture that asks for none of its own.
pub(crate) fn usual_lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).expect("the default is in order")
}
