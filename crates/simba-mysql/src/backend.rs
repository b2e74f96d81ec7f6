use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use simba_core::{Backend, Claim, Clock, Operate, Result, Session, SystemClock};
use tokio::task::JoinHandle;

use crate::config::MySqlConfig;
use crate::control::Control;
use crate::error::{NAME, closed};
use crate::poller::Poller;
use crate::session::MySqlSession;
use crate::site::Site;
use crate::worker::{Way, Worker};

/// Mutexes in a table of MySQL or MariaDB: see the [crate's documentation](crate).
///
/// One value serves any number of mutexes over a constant number of connections. Its tasks run on the runtime
/// that it was connected on, and end with it.
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
    pub(crate) site: Arc<Site>,
    pub(crate) control: Arc<Control>,
    /// The ways to the workers; none once it is closed.
    workers: Mutex<Vec<Way>>,
    tasks: Vec<JoinHandle<()>>,
}

impl MySqlBackend {
    /// Connects, with all connections at once, so that what is wrong shows here.
    ///
    /// Whether the table is there shows when a session is opened, since [`Operate::apply_schema`] may be what
    /// this is for.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](simba_core::ErrorKind::Unavailable) if the server does not answer, `Denied`
    /// for a wrong user or password, `Config` for a missing database or for TLS that cannot be had.
    pub async fn connect(config: MySqlConfig) -> Result<Self> {
        Self::connect_with_clock(config, Arc::new(SystemClock)).await
    }

    /// As [`connect`](Self::connect), on another clock.
    ///
    /// # Errors
    ///
    /// As for [`connect`](Self::connect).
    pub async fn connect_with_clock(config: MySqlConfig, clock: Arc<dyn Clock>) -> Result<Self> {
        config.check_files()?;
        let connections = config.connections;
        let site = Arc::new(Site::new(config, clock));
        let control = Arc::new(Control::new(Arc::clone(&site)));
        control.link.lock().await.ready().await?;
        // Known ahead if all is well; if not, whoever opens a session is told.
        drop(control.shape().await);
        let (mut starts, mut workers) = (Vec::new(), Vec::new());
        for _ in 0..connections {
            let (mut worker, way) = Worker::new(Arc::clone(&site));
            workers.push(way);
            starts.push(tokio::spawn(async move { worker.connect().await.map(|()| worker) }));
        }
        let mut tasks = Vec::new();
        for start in starts {
            let worker = start.await.unwrap_or_else(|_| Err(closed()))?;
            tasks.push(tokio::spawn(worker.run()));
        }
        tasks.push(tokio::spawn(Poller::new(Arc::clone(&site), Arc::clone(&control.link)).run()));
        Ok(Self { site, control, workers: Mutex::new(workers), tasks })
    }

    /// The way to the worker with the least to do, and then with the fewest sessions. A session stays with it, so
    /// that its calls keep their order; and who locks again and again stays where the server is still warm.
    fn worker(&self) -> Result<Way> {
        let workers = self.workers.lock().unwrap_or_else(PoisonError::into_inner);
        workers.iter().min_by_key(|way| (way.load(), way.sessions())).cloned().ok_or_else(closed)
    }
}

#[async_trait]
impl Backend for MySqlBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        self.control.shape().await?.fits(&claim, &self.site)?;
        let worker = self.worker()?;
        self.site.note_name(&claim.mutex);
        self.site.serve(&claim.lease);
        Ok(Box::new(MySqlSession::new(Arc::clone(&self.site), worker, claim)))
    }

    fn operate(&self) -> Option<&dyn Operate> {
        Some(self)
    }

    async fn close(&self) {
        self.workers.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl Drop for MySqlBackend {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

impl fmt::Debug for MySqlBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MySqlBackend").field("config", &self.site.config).finish_non_exhaustive()
    }
}
