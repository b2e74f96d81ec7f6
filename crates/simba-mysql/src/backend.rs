use std::fmt;
use std::sync::{Arc, OnceLock};

use async_trait::async_trait;
use simba_core::spi::{Backend, Claim, Operate, Session};
use simba_core::{Clock, Result, SystemClock};
use tokio::sync::Mutex;
use tokio::task::JoinHandle;

use crate::calls::Calls;
use crate::config::MySqlConfig;
use crate::connection::Connection;
use crate::error::{NAME, closed};
use crate::poll::Poller;
use crate::schema::Shape;
use crate::session::MySqlSession;
use crate::shared::Shared;
use crate::statements::FOR_READS;
use crate::supervisor::Pool;

/// A [`Backend`] that keeps mutexes in a table of MySQL or MariaDB: see the [crate's documentation](crate).
///
/// One value serves any number of mutexes over a constant number of connections. Its tasks run on the runtime
/// that it was connected on, and end when it is closed or dropped.
///
/// # Examples
///
/// ```no_run
/// # async fn run() -> simba_core::Result<()> {
/// use simba_core::Simba;
/// use simba_mysql::{MySqlBackend, MySqlConfig};
///
/// let config = MySqlConfig::from_url(&"mysql://app:secret@localhost/app".parse()?)?;
/// let simba = Simba::new(MySqlBackend::connect(config).await?);
/// let guard = simba.locker("orders").lock().await?;
/// # Ok(())
/// # }
/// ```
pub struct MySqlBackend {
    pub(crate) shared: Arc<Shared>,
    calls: Arc<Calls>,
    /// The connection of the poller, which also reads the shape of the table.
    poller: Arc<Mutex<Connection>>,
    shape: Arc<OnceLock<Shape>>,
    tasks: [JoinHandle<()>; 2],
}

impl MySqlBackend {
    /// Opens all connections, so that wrong settings fail here.
    ///
    /// A missing table is reported later, when a session is opened, since the caller may be about to run
    /// [`Operate::apply_schema`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](simba_core::ErrorKind::Unavailable) if the server does not answer, `Denied`
    /// for a wrong user or password, `Config` for a missing database or for TLS that cannot be established.
    pub async fn connect(config: MySqlConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// Connects as [`connect`](Self::connect) does, on the given clock.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect).
    pub async fn connect_with_clock(config: MySqlConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        config.check_files()?;
        let shared = Arc::new(Shared::new(config, clock));
        let mut poller = Connection::new(Arc::clone(&shared), FOR_READS);
        poller.ready().await?;
        // Read ahead of the first session. If this fails, `open` reads it again and returns the error.
        let shape = Arc::new(Shape::read(&mut poller, &shared).await.map(OnceLock::from).unwrap_or_default());
        let poller = Arc::new(Mutex::new(poller));
        let calls = Arc::new(Calls::new(Arc::clone(&shared), Pool::connect(&shared).await?));
        let tasks = [
            tokio::spawn(Arc::clone(&calls).run()),
            tokio::spawn(Poller::new(Arc::clone(&shared), Arc::clone(&poller)).run()),
        ];
        Ok(Self { shared, calls, poller, shape, tasks })
    }

    /// Opens a connection for one operator's call. Such a call can take seconds; on the poller's connection
    /// it would delay all wake-ups.
    ///
    /// # Errors
    ///
    /// Why the connection could not be made.
    pub(crate) async fn operator(&self) -> Result<Connection> {
        let mut connection = Connection::new(Arc::clone(&self.shared), FOR_READS);
        connection.ready().await.map(|()| connection)
    }

    /// Returns the shape of the table, and reads it until that succeeds once.
    ///
    /// # Errors
    ///
    /// `Config` if the table is missing or is not Simba's.
    pub(crate) async fn shape(&self) -> Result<Shape> {
        if let Some(shape) = self.shape.get() {
            return Ok(*shape);
        }
        let (shared, poller, shape) =
            (Arc::clone(&self.shared), Arc::clone(&self.poller), Arc::clone(&self.shape));
        // The read continues if the caller is dropped, so a caller with a short timeout gets the shape at its
        // next try.
        let read = tokio::spawn(async move {
            let read = Shape::read(&mut *poller.lock().await, &shared).await?;
            Ok(*shape.get_or_init(|| read))
        });
        read.await.unwrap_or_else(|_| Err(closed()))
    }

    fn end(&self) {
        self.calls.close();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

#[async_trait]
impl Backend for MySqlBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        self.shape().await?.fits(&claim, &self.shared)?;
        self.shared.note_name(&claim.mutex);
        Ok(Box::new(MySqlSession::new(Arc::clone(&self.shared), Arc::clone(&self.calls), claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.end();
    }
}

impl Drop for MySqlBackend {
    fn drop(&mut self) {
        self.end();
    }
}

impl fmt::Debug for MySqlBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlBackend").field("config", &self.shared.config).finish_non_exhaustive()
    }
}
