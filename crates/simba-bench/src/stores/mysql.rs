//! MySQL or MariaDB. The floor is the two prepared updates that a lock/unlock cycle needs.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, OptsBuilder};
use simba_core::spi::{Backend, async_trait};
use simba_core::{Moment, MutexName};
use simba_mysql::{MySqlBackend, MySqlConfig};
use tokio::sync::{Mutex, OnceCell};

use super::url;
use simba_measure::{Caller, Target};

const VARIABLE: &str = "SIMBA_TCK_MARIADB";
/// The number of raw connections: as many as the backend uses for its calls.
const CONNECTIONS: usize = 4;

const TAKE: &str = "UPDATE simba_mutex SET acquired_at = 1, ttl_at = 2, transition_at = 3, owner_id = ?, \
                    version = LAST_INSERT_ID(version + 1) WHERE mutex = ? AND transition_at = 0";
const FREE: &str = "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                    version = version + 1 WHERE mutex = ? AND owner_id = ? AND version = ?";

/// A server that all callers share.
#[derive(Debug)]
pub(crate) struct MySql;

#[async_trait]
impl Target for MySql {
    fn name(&self) -> &'static str {
        "mysql"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        let backend = MySqlBackend::connect(MySqlConfig::from_url(&url(VARIABLE)?)?).await?;
        backend.operate().context("the backend has operators' calls")?.apply_schema().await?;
        Ok(Arc::new(backend))
    }

    async fn raw(&self, _: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        static RAW: OnceCell<Vec<Arc<Mutex<Conn>>>> = OnceCell::const_new();
        static NEXT: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let connections = RAW.get_or_try_init(connections).await?;
        let next = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let conn = Arc::clone(&connections[next % connections.len()]);
        let insert = "INSERT IGNORE INTO simba_mutex VALUES (?, 0, 0, 0, '', 0)";
        conn.lock().await.exec_drop(insert, (mutex.as_str(),)).await?;
        Ok(Box::new(Raw { conn, mutex, version: 0 }))
    }

    fn raw_waits(&self) -> bool {
        false
    }

    fn samples(&self, requested: usize) -> usize {
        requested.min(60)
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(20)
    }
}

async fn connections() -> Result<Vec<Arc<Mutex<Conn>>>> {
    let mut connections = Vec::new();
    for _ in 0..CONNECTIONS {
        let opts = OptsBuilder::from_opts(Opts::from_url(&std::env::var(VARIABLE)?)?).prefer_socket(false);
        let mut conn = Conn::new(opts).await?;
        conn.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await?;
        connections.push(Arc::new(Mutex::new(conn)));
    }
    Ok(connections)
}

/// A raw caller: two statements, prepared once per connection.
struct Raw {
    conn: Arc<Mutex<Conn>>,
    mutex: MutexName,
    version: u64,
}

#[async_trait]
impl Caller for Raw {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.acquire().await?;
            self.release().await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        let mut conn = self.conn.lock().await;
        conn.exec_drop(TAKE, ("raw", self.mutex.as_str())).await?;
        ensure!(conn.affected_rows() == 1, "an uncontended mutex was refused");
        self.version = conn.last_insert_id().unwrap_or_default();
        Ok(Moment::ZERO)
    }

    async fn release(&mut self) -> Result<()> {
        let mut conn = self.conn.lock().await;
        Ok(conn.exec_drop(FREE, (self.mutex.as_str(), "raw", self.version)).await?)
    }
}
