//! The backend: one session per length of lease, whatever the number of mutexes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::{Backend, Claim, Clock, Lease, Operate, Result, Session, SystemClock};

use crate::NAME;
use crate::client::{Client, Request};
use crate::config::ZookeeperConfig;
use crate::error::{closed, failed, no_chroot};
use crate::paths;
use crate::session::ZookeeperSession;

/// How many lengths of lease are kept connected without a user.
const MOST_IDLE: usize = 8;

/// Mutexes in a ZooKeeper ensemble.
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
    /// By what they ask for in milliseconds; none once closed.
    clients: Mutex<Option<HashMap<u128, Arc<Client>>>>,
}

impl ZookeeperBackend {
    /// Connects, and checks that the credentials are accepted and the chroot exists.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](simba_core::ErrorKind::Unavailable) if no server grants a session;
    /// [`ErrorKind::Denied`](simba_core::ErrorKind::Denied),
    /// [`ErrorKind::Config`](simba_core::ErrorKind::Config) or
    /// [`ErrorKind::Protocol`](simba_core::ErrorKind::Protocol) for what a person has to mend.
    pub async fn connect(config: ZookeeperConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// The same on another clock.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: ZookeeperConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let this = Self { config: Arc::new(config), clock, clients: Mutex::new(Some(HashMap::new())) };
        this.check().await.map_err(|error| error.with_backend(NAME))?;
        Ok(this)
    }

    /// Checks that the store lets us in, by a session that ends at once. A server that requires a login grants a
    /// session without one, and refuses the first request.
    async fn check(&self) -> Result<()> {
        let client =
            Client::start(Arc::clone(&self.config), Lease::default().total(), Arc::clone(&self.clock));
        client.ready().await?;
        let chroot = self.config.chroot_or_root();
        let there = client.call(Request::Exists { path: chroot.to_owned(), watch: false }).await;
        there.map_err(|failure| match failure.is_no_node() {
            true => no_chroot(chroot),
            false => failed("read the chroot", failure),
        })?;
        client.close().await;
        Ok(())
    }

    /// Returns the longest session that a server grants, by one that ends at once.
    pub(crate) async fn longest_session(&self) -> Result<Duration> {
        let client = Client::start(Arc::clone(&self.config), Duration::MAX, Arc::clone(&self.clock));
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

    /// The session for leases of this length.
    pub(crate) fn client(&self, timeout: Duration) -> Result<Arc<Client>> {
        let mut clients = self.clients();
        let clients = clients.as_mut().ok_or_else(closed)?;
        let wanted = timeout.as_millis();
        if !clients.contains_key(&wanted) && clients.len() >= MOST_IDLE {
            // Who drops the last of it ends the session.
            clients.retain(|_, client| Arc::strong_count(client) > 1);
        }
        let start = || Arc::new(Client::start(Arc::clone(&self.config), timeout, Arc::clone(&self.clock)));
        Ok(Arc::clone(clients.entry(wanted).or_insert_with(start)))
    }

    /// A session for what operators ask: any that is there.
    pub(crate) fn any_client(&self) -> Result<Arc<Client>> {
        let there = self.clients().as_ref().and_then(|clients| clients.values().next().map(Arc::clone));
        there.map_or_else(|| self.client(Lease::default().total()), Ok)
    }

    fn clients(&self) -> MutexGuard<'_, Option<HashMap<u128, Arc<Client>>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
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
        paths::check(&claim.mutex)?;
        let client = self.client(claim.lease.total())?;
        Ok(Box::new(ZookeeperSession::new(client, claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        let clients = self.clients().take().unwrap_or_default();
        futures_util::future::join_all(clients.values().map(|client| client.close())).await;
    }
}
