//! The backend: one handle to one store.

use std::fmt;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use simba_core::{Backend, Claim, Clock, ErrorKind, Intent, Operate, Result, Session, SystemClock};
use tokio::task::AbortHandle;

use crate::config::RedisConfig;
use crate::error;
use crate::health;
use crate::node::Context;
use crate::route::Route;
use crate::session::RedisSession;
use crate::subscriber::{self, Ears};

/// Mutexes on a Redis or Valkey.
///
/// One connection for commands and, once somebody waits, one for wake-ups, whatever the number of mutexes; on a
/// cluster one for commands to every node that is needed. Dropping it closes them as [`close`](Backend::close)
/// does, once its last session is dropped.
///
/// # Examples
///
/// ```no_run
/// # async fn example() -> simba_core::Result<()> {
/// use simba_core::Simba;
/// use simba_redis::{RedisBackend, RedisConfig};
///
/// let config = RedisConfig::from_url(&"redis://127.0.0.1".parse()?)?;
/// let simba = Simba::new(RedisBackend::connect(config).await?);
/// let guard = simba.locker("orders").lock().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct RedisBackend {
    pub(crate) shared: Arc<Shared>,
    description: String,
}

/// What the sessions of one handle share.
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) route: Arc<Route>,
    pub(crate) ears: Arc<Ears>,
    hearing: AbortHandle,
    closed: OnceLock<()>,
}

impl RedisBackend {
    /// Connects, and warns of what endangers mutexes on this store.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the server cannot be reached, [`ErrorKind::Denied`] if it refuses us,
    /// [`ErrorKind::Protocol`] if it is no Redis, [`ErrorKind::Config`] if it is not as the URL says.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves no connection behind.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Like [`connect`](Self::connect), with another clock for its own timers.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect).
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn connect_with_clock(config: RedisConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let description = format!("{config:?}");
        let context = Arc::new(Context::new(config.settings, clock));
        let route = Arc::new(Route::connect(config.topology, Arc::clone(&context)).await?);
        let ears = Arc::new(Ears::new());
        let hearing =
            tokio::spawn(subscriber::hear(Arc::clone(&ears), Arc::clone(&route), Arc::clone(&context)));
        let hearing = hearing.abort_handle();
        let shared = Arc::new(Shared { context, route, ears, hearing, closed: OnceLock::new() });
        health::warn(&shared).await;
        Ok(Self { shared, description })
    }
}

impl RedisBackend {
    /// Refuses a `wait_timeout` that could cost holders their lease: while the server waits for replicas, it answers
    /// no renewal of the handle, and the next wait may come right behind.
    fn check_replica_wait(&self, claim: &Claim) -> Result<()> {
        let Some(wait) = self.shared.context.settings.wait else { return Ok(()) };
        let (ttl, most) = (claim.lease.ttl(), claim.lease.ttl() / 6);
        if claim.intent == Intent::Observe || wait.timeout <= most {
            return Ok(());
        }
        let message = format!(
            "`wait_timeout` is {:?}, more than a sixth of the ttl ({ttl:?}): renewals wait meanwhile. Set \
             `wait_timeout` in the URL to at most {most:?}, or the ttl to at least {:?}",
            wait.timeout,
            wait.timeout * 6
        );
        Err(error::new(ErrorKind::Invalid, message))
    }
}

impl Shared {
    fn close(&self) {
        self.closed.get_or_init(|| ());
        self.hearing.abort();
        self.route.close();
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.close();
    }
}

impl fmt::Debug for RedisBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisBackend({})", self.description)
    }
}

#[async_trait]
impl Backend for RedisBackend {
    fn name(&self) -> &'static str {
        crate::NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        if self.shared.closed.get().is_some() {
            return Err(error::closed());
        }
        if self.shared.route.is_cluster() && claim.mutex.as_str().starts_with('}') {
            let message = "a name that begins with `}` has no one slot in a cluster: take another";
            return Err(error::new(ErrorKind::Invalid, message));
        }
        let retention = self.shared.context.settings.fence_retention;
        if claim.lease.total() > retention {
            let message = format!(
                "the lease lasts {:?}, longer than the fencing token is kept ({retention:?}): set `fence_retention` in \
                 the URL to the lease at least",
                claim.lease.total()
            );
            return Err(error::new(ErrorKind::Invalid, message));
        }
        self.check_replica_wait(&claim)?;
        Ok(Box::new(RedisSession::new(Arc::clone(&self.shared), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.shared.close();
    }
}
