use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::{Backend, Claim, Operate, Session, async_trait, within};
use simba_core::{Clock, Moment, Result, SystemClock};
use simba_net::Backoff;
use simba_net::supervise::{State, Supervised};
use tokio::sync::{Notify, mpsc, watch};
use tokio_postgres::Row;

use crate::batch::{Calls, Numbers, Reply, Request, limits};
use crate::config::PostgresConfig;
use crate::connection::{Connection, Param};
use crate::error::{closed, is_locked, locked};
use crate::session::PostgresSession;
use crate::settings::Settings;
use crate::statements::Query;
use crate::supervisor::{self, Task};
use crate::wakeups::Notifications;

/// How long the last background tasks may take when a handle is closed.
pub(crate) const CLOSE_TIMEOUT: Duration = Duration::from_secs(1);

/// The pauses between the attempts of a call whose row is locked. A statement of another handle locks a row for some
/// milliseconds, until it is on the disk.
const LOCKED_PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// The backend for PostgreSQL.
///
/// One value serves any number of mutexes over two connections: one for commands and one for wakeups, which is opened
/// when the first contender has to wait. Dropping it closes both.
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
    pub(crate) shared: Arc<Shared>,
}

impl PostgresBackend {
    /// Connects, and reconnects whenever the connection breaks. The tables need not exist yet.
    ///
    /// # Errors
    ///
    /// No server of the configuration is reachable, accepts the login and accepts writes.
    ///
    /// # Panics
    ///
    /// Panics outside a tokio runtime.
    pub async fn connect(config: PostgresConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Connects with another clock for timeouts and reconnects.
    ///
    /// # Errors
    ///
    /// See [`connect`](Self::connect).
    pub async fn connect_with_clock(config: PostgresConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let (background, tasks) = mpsc::unbounded_channel();
        let backend = Self { shared: Arc::new(Shared::new(config, clock, background)) };
        tokio::spawn(supervisor::run(Arc::clone(&backend.shared), tasks));
        backend.shared.connection().await?.check().await?;
        Ok(backend)
    }
}

#[async_trait]
impl Backend for PostgresBackend {
    fn name(&self) -> &'static str {
        crate::NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        if *self.shared.closing.borrow() {
            return Err(closed());
        }
        Ok(Box::new(PostgresSession::new(Arc::clone(&self.shared), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.shared.closing.send_replace(true);
        let mut states = self.shared.commands.states();
        let ended = states.wait_for(|state| matches!(state, State::Closed));
        // A supervisor whose runtime was shut down before it started does not update the state.
        if within(&*self.shared.settings.clock, CLOSE_TIMEOUT * 2, ended).await.is_none() {
            self.shared.commands.close();
        }
    }
}

impl fmt::Debug for PostgresBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let config = &self.shared.settings.config;
        f.debug_struct("PostgresBackend").field("config", config).finish_non_exhaustive()
    }
}

impl Drop for PostgresBackend {
    fn drop(&mut self) {
        self.shared.closing.send_replace(true);
    }
}

/// The state that the sessions, operators and supervisor of one handle share.
pub(crate) struct Shared {
    pub(crate) settings: Arc<Settings>,
    pub(crate) ddl: String,
    /// The connection for commands, shared by all mutexes.
    pub(crate) commands: Supervised<Connection>,
    pub(crate) notifications: Arc<Notifications>,
    /// Sends acquisitions and renewals.
    pub(crate) takes: Calls,
    /// Sends releases.
    pub(crate) releases: Calls,
    pub(crate) background: mpsc::UnboundedSender<Task>,
    /// Requests that the statements be prepared.
    pub(crate) prepare_wanted: Notify,
    pub(crate) closing: watch::Sender<bool>,
}

impl Shared {
    fn new(config: PostgresConfig, clock: Arc<dyn Clock>, background: mpsc::UnboundedSender<Task>) -> Self {
        let (ddl, limits) = (config.tables.ddl(), limits(&config));
        let settings = Arc::new(Settings::new(config, Arc::clone(&clock)));
        Self {
            ddl,
            commands: Supervised::new(),
            notifications: Arc::new(Notifications::new(Arc::clone(&settings))),
            takes: Calls::new(Arc::clone(&clock), limits),
            releases: Calls::new(clock, limits),
            background,
            prepare_wanted: Notify::new(),
            closing: watch::Sender::new(false),
            settings,
        }
    }

    /// Returns the connection for commands. Waits while one is being opened.
    ///
    /// # Errors
    ///
    /// No connection can be opened, or the handle is closed.
    pub(crate) async fn connection(&self) -> Result<Connection> {
        self.commands.connection().await.map_err(|error| error.with_backend(crate::NAME))
    }

    /// Sends a statement immediately and waits for its rows, for at most the call timeout.
    pub(crate) async fn call(&self, query: Query, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let rows = async { self.connection().await?.call(query, params).await };
        self.settings.with_timeout(rows).await
    }

    /// Sends a statement immediately and waits for its rows. Returns `None` if it failed because another transaction has
    /// locked what it needs.
    pub(crate) async fn call_unless_locked(
        &self,
        query: Query,
        params: &[Param<'_>],
    ) -> Result<Option<Vec<Row>>> {
        match self.call(query, params).await {
            Err(error) if is_locked(&error) => Ok(None),
            answer => answer.map(Some),
        }
    }

    /// Sends a request, alone or in a batch, in a statement that is built after this call was made. Returns `None` if no
    /// row matches or the row is locked.
    ///
    /// # Cancel safety
    ///
    /// A dropped call that was not sent yet is never sent: it waits for a connection here, and not in a batch.
    pub(crate) async fn batched(&self, calls: &Calls, request: Request) -> Result<Option<Numbers>> {
        loop {
            self.connection().await?;
            let reply = calls.call(self, request.clone()).await;
            match reply.map_err(|error| error.with_backend(crate::NAME))? {
                Reply::NotSent => {}
                Reply::NoRow => return Ok(None),
                Reply::Row(numbers) => return Ok(Some(numbers)),
            }
        }
    }

    /// Waits until the handle is being closed.
    pub(crate) async fn closing(&self) {
        // The sender is a field of this value.
        let _ = self.closing.subscribe().wait_for(|closing| *closing).await;
    }

    /// Starts a background task. A closed handle runs none; a leftover entry expires.
    pub(crate) fn start(&self, task: Task) {
        let _ = self.background.send(task);
    }
}

/// Spaces the attempts of a call whose row is locked, for at most `lock_timeout`.
pub(crate) struct LockedRetry {
    backoff: Backoff,
    end: Moment,
}

impl LockedRetry {
    pub(crate) fn new(settings: &Settings) -> Self {
        let (first, longest) = LOCKED_PAUSES;
        let end = settings.clock.now() + settings.config.lock_timeout;
        Self { backoff: Backoff::new(first, longest), end }
    }

    /// Waits before the next attempt.
    ///
    /// # Errors
    ///
    /// The row stays locked.
    pub(crate) async fn pause(&mut self, clock: &dyn Clock) -> Result<()> {
        let now = clock.now();
        if now >= self.end {
            return Err(locked());
        }
        clock.sleep_until(now + self.backoff.pause()).await;
        Ok(())
    }
}
