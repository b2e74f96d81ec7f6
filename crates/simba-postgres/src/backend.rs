use std::fmt;
use std::sync::Arc;

use simba_core::{Backend, Claim, Clock, Operate, Result, Session, SystemClock, async_trait};

use crate::config::PostgresConfig;
use crate::error::closed;
use crate::handle::{Handle, State};
use crate::session::PostgresSession;
use crate::supervisor;

/// Mutexes on a PostgreSQL server.
///
/// One value serves any number of mutexes over two connections: one for commands, one for wake-ups, which is
/// opened when the first contender has to wait. Dropping it closes both.
///
/// # Examples
///
/// ```no_run
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// use simba_core::Simba;
/// use simba_postgres::{PostgresBackend, PostgresConfig};
///
/// let config = PostgresConfig::from_url(&"postgres://app@localhost/app".parse()?)?;
/// let simba = Simba::new(PostgresBackend::connect(config).await?);
/// let guard = simba.locker("orders").lock().await?;
/// guard.release().await?;
/// # Ok(())
/// # }
/// ```
pub struct PostgresBackend {
    handle: Arc<Handle>,
}

impl PostgresBackend {
    /// Connects, and keeps connected from then on. The tables need not be there yet.
    ///
    /// # Errors
    ///
    /// No server of the configuration can be reached, lets us in, or takes writes.
    ///
    /// # Panics
    ///
    /// Outside a tokio runtime.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// The same with another clock for timeouts and reconnects.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: PostgresConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let (handle, errands) = Handle::new(config, clock);
        let handle = Arc::new(handle);
        let wire = supervisor::connect(&handle).await?;
        supervisor::prepare(&handle, &wire).await;
        handle.state.send_replace(State::Up(Arc::clone(&wire)));
        tokio::spawn(supervisor::run(Arc::clone(&handle), wire, errands));
        Ok(Self { handle })
    }

    pub(crate) fn handle(&self) -> &Handle {
        &self.handle
    }
}

#[async_trait]
impl Backend for PostgresBackend {
    fn name(&self) -> &'static str {
        crate::NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        if *self.handle.closing.borrow() {
            return Err(closed());
        }
        Ok(Box::new(PostgresSession::new(Arc::clone(&self.handle), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.handle.close();
        self.handle.closed().await;
    }
}

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresBackend").field("config", &self.handle.config).finish_non_exhaustive()
    }
}

impl Drop for PostgresBackend {
    fn drop(&mut self) {
        self.handle.close();
    }
}
