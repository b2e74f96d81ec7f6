//! The backend: one connection, and one lease for each length, whatever the number of mutexes.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::{Backend, Claim, Clock, Error, ErrorKind, Operate, Result, Session, SystemClock};

use crate::NAME;
use crate::client::Client;
use crate::config::EtcdConfig;
use crate::error::closed;
use crate::keys;
use crate::session::EtcdSession;
use crate::tenancy::Tenancy;

/// How many lengths of lease are kept alive without a user.
const MOST_IDLE: usize = 8;

/// Mutexes in an etcd cluster.
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
    /// By what they ask for in milliseconds; none once closed.
    tenancies: Mutex<Option<HashMap<u128, Arc<Tenancy>>>>,
}

impl EtcdBackend {
    /// Connects, and checks that the credentials are accepted and a quorum answers.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](simba_core::ErrorKind::Unavailable) if no member answers;
    /// [`ErrorKind::Denied`](simba_core::ErrorKind::Denied) or
    /// [`ErrorKind::Config`](simba_core::ErrorKind::Config) for what a person has to mend.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves no connection behind.
    pub async fn connect(config: EtcdConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// The same on another clock.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: EtcdConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        if config.places.is_empty() {
            let message = "no member to connect to: name at least one";
            return Err(Error::new(ErrorKind::Invalid, message).with_backend(NAME));
        }
        let config = Arc::new(config);
        let client = Arc::new(Client::start(Arc::clone(&config), clock));
        client.ready().await.map_err(|error| error.with_backend(NAME))?;
        Ok(Self { config, client, tenancies: Mutex::new(Some(HashMap::new())) })
    }

    pub(crate) fn config(&self) -> &EtcdConfig {
        &self.config
    }

    pub(crate) fn client(&self) -> &Client {
        &self.client
    }

    /// The lease for mutexes that are held for so long at a time.
    pub(crate) fn tenancy(&self, lease: Duration) -> Result<Arc<Tenancy>> {
        let mut tenancies = self.tenancies();
        let tenancies = tenancies.as_mut().ok_or_else(closed)?;
        let wanted = lease.as_millis();
        if !tenancies.contains_key(&wanted) && tenancies.len() >= MOST_IDLE {
            // Who drops the last of it ends the lease.
            tenancies.retain(|_, tenancy| Arc::strong_count(tenancy) > 1);
        }
        let start = || Tenancy::start(Arc::clone(&self.client), lease);
        Ok(Arc::clone(tenancies.entry(wanted).or_insert_with(start)))
    }

    fn tenancies(&self) -> MutexGuard<'_, Option<HashMap<u128, Arc<Tenancy>>>> {
        self.tenancies.lock().unwrap_or_else(PoisonError::into_inner)
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
        keys::check(&claim.mutex)?;
        let tenancy = self.tenancy(claim.lease.total())?;
        let prefix = self.config.keys().mutex(&claim.mutex);
        Ok(Box::new(EtcdSession::new(tenancy, prefix, claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        let tenancies = self.tenancies().take().unwrap_or_default();
        futures_util::future::join_all(tenancies.values().map(|tenancy| tenancy.close())).await;
        self.client.close();
    }
}
