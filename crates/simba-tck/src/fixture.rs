//! What a backend author implements: connections to the store under test, and its capabilities.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use simba_core::Lease;
use simba_core::spi::{Backend, async_trait};

use crate::{Network, Profile};

/// One store under test.
///
/// Every case gets its own fixture; all of them may use the same server, since each case generates its own mutex
/// names. A missing server is a failure: [`connect`](Self::connect) panics with a message that says how to start it.
///
/// # Examples
///
/// See the [crate's documentation](crate).
#[async_trait]
pub trait Fixture: Send + Sync + 'static {
    /// Opens a new connection to the store under test, as another process would have, with a network that can inject
    /// faults.
    async fn connect(&self) -> Connection;

    /// Returns the lease that the cases use. The default has a ttl of 2 s and a transition of 3 s.
    ///
    /// It is short, because many cases wait for its end. It is long enough that the machine may pause for two seconds
    /// without a loss. A store that needs longer leases, such as one with sessions, overrides it.
    fn lease(&self) -> Lease {
        default_lease()
    }

    /// Returns the capabilities of the store; default: all.
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
    /// The network between the backend and the store.
    pub network: Arc<dyn Network>,
}

impl Connection {
    /// Combines a backend and the network to its store.
    pub fn new(backend: impl Backend, network: Arc<dyn Network>) -> Self {
        Self { backend: Arc::new(backend), network }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("backend", &self.backend).finish_non_exhaustive()
    }
}

/// Returns the default of [`Fixture::lease`].
pub(crate) fn default_lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).expect("the default lease is valid")
}
