use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::{Backend, Claim, Clock, Error, ErrorKind, Operate, Result, Session, SystemClock, within};

use crate::config::SqliteConfig;
use crate::error::{NAME, closed};
use crate::handle::Handle;
use crate::job::Job;
use crate::session::SqliteSession;

/// The longest that an operator's call, opening or closing may take: far more than it needs on a disk that works.
pub(crate) const LIMIT: Duration = Duration::from_secs(10);

/// Mutexes in a SQLite file, for all processes of this machine.
///
/// One value uses one thread and one connection, and a second thread while sessions wait, whatever the number of
/// mutexes.
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
    pub(crate) handle: Arc<Handle>,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) config: SqliteConfig,
    closed: AtomicBool,
}

impl SqliteBackend {
    /// Opens the file; makes it, and its folder, if they are not there.
    ///
    /// # Errors
    ///
    /// - [`ErrorKind::Protocol`]: the file is not ours, or damaged. It is left as it is.
    /// - [`ErrorKind::Config`]: it lies where mutexes cannot be kept, such as on a network file system.
    /// - [`ErrorKind::Denied`]: it cannot be read or written.
    /// - [`ErrorKind::Unavailable`]: the disk is full, or another process keeps the file locked.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may leave an empty file of ours behind.
    pub async fn connect(config: SqliteConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Like [`connect`](Self::connect), with the clock for limits and for the time of day. Leases are always
    /// told by the machine's own clock, since other processes have no other.
    ///
    /// # Errors
    ///
    /// As [`connect`](Self::connect).
    pub async fn connect_with_clock(config: SqliteConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        let started = within(&*clock, LIMIT, Handle::start(config.path(), Arc::clone(&clock))).await;
        let handle = started.unwrap_or_else(|| Err(unanswered()))?;
        Ok(Self { handle, clock, config, closed: AtomicBool::new(false) })
    }

    pub(crate) fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) { Err(closed()) } else { Ok(()) }
    }
}

pub(crate) fn unanswered() -> Error {
    let message = format!("the file did not answer within {LIMIT:?}: see whether the disk hangs");
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
        Ok(Box::new(SqliteSession::new(Arc::clone(&self.handle), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.closed.store(true, Ordering::Release);
        // An error means that it is closed already.
        let _ = within(&*self.clock, LIMIT, self.handle.ask(|reply| Job::End(Some(reply)))).await;
    }
}
