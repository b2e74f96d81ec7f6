//! Backend: one handle to one store.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::spi::{Backend, Claim, Intent, Operate, Session};
use simba_core::{Clock, ErrorKind, Result, SystemClock};
use tokio::task::AbortHandle;

use crate::config::RedisConfig;
use crate::error;
use crate::probe;
use crate::route::Route;
use crate::session::RedisSession;
use crate::supervisor::Context;
use crate::wakeups::{self, Subscriptions};

/// Maximum `wait_timeout`. The engine drops a call after a third of the ttl, at most 5 s. Two `WAIT` of this time, or of
/// a seventh of the ttl, leave at least a tenth of that for the round trips.
const MAX_REPLICA_WAIT: Duration = Duration::from_millis(2250);
/// How many times `wait_timeout` must fit into the ttl.
const REPLICA_WAITS_PER_TTL: u32 = 7;

/// Backend on Redis or Valkey.
///
/// Uses one connection for commands, whatever the number of mutexes, and one for wake-ups after the first session waits
/// or observes. On a cluster it uses one command connection to every node in use. Dropping the backend and its last
/// session closes the connections as [`close`](Backend::close) does.
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

/// State that the sessions of one handle share.
pub(crate) struct Shared {
    pub(crate) context: Arc<Context>,
    pub(crate) route: Arc<Route>,
    pub(crate) subscriptions: Arc<Subscriptions>,
    subscriber: AbortHandle,
    closed: AtomicBool,
}

impl RedisBackend {
    /// Connects to the store, and logs a warning for each server setting that endangers mutexes.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`] if the server cannot be reached, [`ErrorKind::Denied`] if it refuses the login,
    /// [`ErrorKind::Protocol`] if it is not a Redis server, [`ErrorKind::Config`] if it does not match the URL.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a dropped call leaves no connection open.
    ///
    /// # Panics
    ///
    /// Panics outside a tokio runtime.
    pub async fn connect(config: RedisConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Connects like [`connect`](Self::connect), with `clock` for the backend's timers.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect).
    ///
    /// # Panics
    ///
    /// Panics outside a tokio runtime.
    pub async fn connect_with_clock(config: RedisConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let description = format!("{config:?}");
        let context = Arc::new(Context::new(config.settings, clock));
        let route = Arc::new(Route::connect(config.topology, Arc::clone(&context)).await?);
        let subscriptions = Arc::new(Subscriptions::new());
        let subscriber =
            tokio::spawn(wakeups::run(Arc::clone(&subscriptions), Arc::clone(&route), Arc::clone(&context)));
        let subscriber = subscriber.abort_handle();
        let shared =
            Arc::new(Shared { context, route, subscriptions, subscriber, closed: AtomicBool::new(false) });
        probe::warn_of_findings(&shared).await;
        Ok(Self { shared, description })
    }

    /// Refuses a `wait_timeout` of which two do not fit into a call: an acquisition waits for at most two `WAIT`, one sent
    /// before it and one that covers it. A call that the engine drops neither reports the missing replicas nor releases
    /// the mutex.
    fn check_replica_wait(&self, claim: &Claim) -> Result<()> {
        let Some(wait) = self.shared.context.settings.wait else { return Ok(()) };
        let ttl = claim.lease.ttl();
        let limit = (ttl / REPLICA_WAITS_PER_TTL).min(MAX_REPLICA_WAIT);
        if claim.intent == Intent::Observe || wait.timeout <= limit {
            return Ok(());
        }
        let mut message = format!(
            "`wait_timeout` is {:?}, too long for a ttl of {ttl:?}: an acquisition may wait twice as long, and the call is \
             dropped before that. Set `wait_timeout` in the URL to at most {limit:?}",
            wait.timeout
        );
        if wait.timeout <= MAX_REPLICA_WAIT {
            message += &format!(", or the ttl to at least {:?}", wait.timeout * REPLICA_WAITS_PER_TTL);
        }
        Err(error::new(ErrorKind::Invalid, message))
    }
}

impl Shared {
    fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
        self.subscriber.abort();
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
        if self.shared.closed.load(Ordering::Relaxed) {
            return Err(error::closed());
        }
        if self.shared.route.is_cluster() && claim.mutex.as_str().starts_with('}') {
            let message = "a name that begins with `}` has no hash tag, so its keys are in different slots: choose \
                           another name for a cluster";
            return Err(error::new(ErrorKind::Invalid, message));
        }
        let retention = self.shared.context.settings.fence_retention;
        if claim.lease.total() > retention {
            let message = format!(
                "the lease lasts {:?}, longer than the fencing token is kept ({retention:?}): set `fence_retention` in \
                 the URL to at least the duration of the lease",
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
