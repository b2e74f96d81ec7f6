//! The backend: one session per length of lease, for any number of mutexes.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use simba_core::spi::{Backend, Claim, Operate, Session};
use simba_core::{Clock, Lease, Result, SystemClock};
use simba_net::PerLease;
use simba_net::queue::QueueSession;
use tokio::runtime::Handle;

use crate::NAME;
use crate::client::{Client, Request};
use crate::config::ZookeeperConfig;
use crate::entry::Entry;
use crate::error::{found, no_chroot};
use crate::layout;
use crate::session::ZookeeperQueue;

/// A backend that keeps mutexes in a ZooKeeper ensemble.
///
/// # Examples
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// use simba_core::Simba;
/// use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
///
/// let config = ZookeeperConfig::from_url(&"zookeeper://zk1,zk2,zk3".parse()?)?;
/// let simba = Simba::new(ZookeeperBackend::connect(config).await?);
/// let guard = simba.locker("orders").lock().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct ZookeeperBackend {
    config: Arc<ZookeeperConfig>,
    clock: Arc<dyn Clock>,
    /// The sessions by their requested timeout. Dropping the last reference ends a session.
    clients: PerLease<Client>,
    /// The runtime of the connect. A session is shared by contenders on any runtime, so it must not end with theirs.
    runtime: Handle,
}

impl ZookeeperBackend {
    /// Connects, and checks that the credentials are accepted and the chroot exists.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](simba_core::ErrorKind::Unavailable) if no server grants a session;
    /// [`ErrorKind::Denied`](simba_core::ErrorKind::Denied),
    /// [`ErrorKind::Config`](simba_core::ErrorKind::Config) or
    /// [`ErrorKind::Protocol`](simba_core::ErrorKind::Protocol) if the setup has to be fixed first;
    /// [`ErrorKind::Invalid`](simba_core::ErrorKind::Invalid) if the settings name no server.
    pub async fn connect(config: ZookeeperConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Connects as [`connect`](Self::connect) does, with another clock.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: ZookeeperConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let (config, clients) = (Arc::new(config), PerLease::default());
        let this = Self { config, clock, clients, runtime: Handle::current() };
        this.check().await.map_err(|error| error.with_backend(NAME))?;
        Ok(this)
    }

    /// Checks the login and the chroot with a temporary session. A server that requires a login grants a session
    /// without one, and refuses the first request.
    async fn check(&self) -> Result<()> {
        let client = self.start(Lease::default().total());
        client.ready().await?;
        let chroot = self.config.chroot_or_root();
        let exists = client.call(Request::Exists { path: chroot.to_owned(), watch: false }).await;
        found("read the chroot", exists)?.ok_or_else(|| no_chroot(chroot))?;
        client.close().await;
        Ok(())
    }

    /// Returns the longest timeout that a server grants. Requests it with a temporary session.
    pub(crate) async fn longest_session(&self) -> Result<Duration> {
        let client = self.start(Duration::MAX);
        client.ready().await?;
        let granted = client.timeout();
        client.close().await;
        Ok(granted)
    }

    pub(crate) fn config(&self) -> &ZookeeperConfig {
        &self.config
    }

    pub(crate) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    /// Returns the session for leases of this length.
    pub(crate) fn client(&self, timeout: Duration) -> Result<Arc<Client>> {
        self.clients.get(timeout, || Arc::new(self.start(timeout)))
    }

    fn start(&self, timeout: Duration) -> Client {
        Client::start(Arc::clone(&self.config), timeout, Arc::clone(&self.clock), &self.runtime)
    }

    /// Returns any session, for calls of operators.
    pub(crate) fn any_client(&self) -> Result<Arc<Client>> {
        self.clients.any().map_or_else(|| self.client(Lease::default().total()), Ok)
    }
}

impl fmt::Debug for ZookeeperBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ZookeeperBackend").field("config", &self.config).finish_non_exhaustive()
    }
}

#[async_trait]
impl Backend for ZookeeperBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        layout::check(&claim.mutex)?;
        let client = self.client(claim.lease.total())?;
        let queue = ZookeeperQueue::new(Entry::new(client, claim.mutex.clone()));
        Ok(Box::new(QueueSession::new(queue, claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        let clients = self.clients.close();
        futures_util::future::join_all(clients.iter().map(|client| client.close())).await;
    }
}
