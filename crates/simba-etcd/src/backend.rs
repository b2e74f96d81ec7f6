//! The backend: one connection, and one lease at the store for each length, for any number of mutexes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use simba_core::spi::{Backend, Claim, Operate, Session};
use simba_core::{Clock, Result, SystemClock};
use simba_net::PerLease;
use simba_net::queue::QueueSession;

use crate::NAME;
use crate::client::Client;
use crate::config::EtcdConfig;
use crate::layout;
use crate::lease::SharedLease;
use crate::session::EtcdQueue;

/// A backend that keeps mutexes in an etcd cluster.
///
/// # Examples
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// use simba_core::Simba;
/// use simba_etcd::{EtcdBackend, EtcdConfig};
///
/// let config = EtcdConfig::from_url(&"etcd://etcd1,etcd2,etcd3".parse()?)?;
/// let simba = Simba::new(EtcdBackend::connect(config).await?);
/// let guard = simba.locker("orders").lock().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct EtcdBackend {
    config: Arc<EtcdConfig>,
    client: Arc<Client>,
    /// By their requested length. Dropping the last reference revokes a lease.
    leases: PerLease<SharedLease>,
}

impl EtcdBackend {
    /// Connects, and checks that the credentials are accepted and a quorum answers.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](simba_core::ErrorKind::Unavailable) if no member answers;
    /// [`ErrorKind::Denied`](simba_core::ErrorKind::Denied) or
    /// [`ErrorKind::Config`](simba_core::ErrorKind::Config) until the setup is fixed;
    /// [`ErrorKind::Invalid`](simba_core::ErrorKind::Invalid) if the settings name no member.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves no connection behind.
    pub async fn connect(config: EtcdConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Connects like [`connect`](Self::connect), with another clock.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: EtcdConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let config = Arc::new(config);
        let client = Arc::new(Client::start(Arc::clone(&config), clock));
        client.ready().await.map_err(|error| error.with_backend(NAME))?;
        Ok(Self { config, client, leases: PerLease::default() })
    }

    pub(crate) fn config(&self) -> &EtcdConfig {
        &self.config
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// Returns the lease for mutexes with this length of lease.
    pub(crate) fn shared_lease(&self, length: Duration) -> Result<Arc<SharedLease>> {
        self.leases.get(length, || SharedLease::start(Arc::clone(&self.client), length))
    }
}

impl fmt::Debug for EtcdBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

#[async_trait]
impl Backend for EtcdBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        layout::check(&claim.mutex)?;
        let lease = self.shared_lease(claim.lease.total())?;
        let prefix = self.config.keys().mutex(&claim.mutex);
        Ok(Box::new(QueueSession::new(EtcdQueue::new(lease, prefix), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        let leases = self.leases.close();
        futures_util::future::join_all(leases.iter().map(|lease| lease.close())).await;
        self.client.close();
    }
}
