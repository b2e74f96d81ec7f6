use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::spi::{Backend, Claim, Operate, Session, within};
use simba_core::{Clock, Error, ErrorKind, Result, SystemClock};

use crate::config::SqliteConfig;
use crate::connection::Connection;
use crate::error::{NAME, closed};
use crate::session::SqliteSession;

/// The limit for an operator's call, for opening and for closing: far more than they take on a working disk.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// A backend that keeps mutexes in a SQLite file, for all processes of this machine.
///
/// A backend uses one thread and one connection, and a second thread while sessions wait, for any number of mutexes.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use simba_core::Simba;
/// use simba_sqlite::{SqliteBackend, SqliteConfig};
///
/// # let folder = tempfile::tempdir()?;
/// let config = SqliteConfig::new(folder.path().join("simba.db"));
/// let simba = Simba::new(SqliteBackend::connect(config).await?);
/// let guard = simba.locker("orders").lock().await?;
/// guard.release().await?;
/// simba.shutdown().await;
/// # Ok(())
/// # }
/// ```
pub struct SqliteBackend {
    pub(crate) connection: Arc<Connection>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: SqliteConfig,
    closed: AtomicBool,
}

impl SqliteBackend {
    /// Opens the file. Creates it and its folder if they do not exist.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Protocol`]: the file is not a Simba database, or it is damaged. It is not changed.
    /// - [`ErrorKind::Config`]: the file is where mutexes cannot be kept, such as on a network file system.
    /// - [`ErrorKind::Denied`]: the file cannot be read or written.
    /// - [`ErrorKind::Unavailable`]: the disk is full, or another process keeps the file locked.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may leave a new database without mutexes behind.
    pub async fn connect(config: SqliteConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Opens the file like [`connect`](Self::connect), with a clock for limits and for the time of day. Leases always
    /// use the machine's own clock, the only one that all processes share.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: SqliteConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let opened = within(&*clock, LIMIT, Connection::open(config.path(), Arc::clone(&clock))).await;
        let connection = opened.unwrap_or_else(|| Err(timed_out()))?;
        Ok(Self { connection, clock, config, closed: AtomicBool::new(false) })
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(closed()) } else { Ok(()) }
    }
}

pub(crate) fn timed_out() -> Error {
    let message = format!("a call on the file did not end within {LIMIT:?}: check whether the disk hangs");
    Error::new(ErrorKind::Unavailable, message).with_backend(NAME)
}

impl fmt::Debug for SqliteBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SqliteBackend").field("path", &self.config.path()).finish_non_exhaustive()
    }
}

#[async_trait]
impl Backend for SqliteBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        self.check_open()?;
        Ok(Box::new(SqliteSession::new(Arc::clone(&self.connection), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // Without a reply within the limit, the worker closes the file when the disk no longer hangs.
        let _ = within(&*self.clock, LIMIT, self.connection.close()).await;
    }
}
