//! A SQLite file in a temporary folder.

use std::path::Path;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result};
use rusqlite::Connection;
use simba_core::spi::{Backend, async_trait};
use simba_core::{Clock, Moment, MutexName, SystemClock};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use tempfile::TempDir;

use simba_measure::{Caller, Target};

/// The embedded default.
#[derive(Debug)]
pub(crate) struct Sqlite;

/// Returns the folder of this process; each child process has another one.
fn folder() -> Result<&'static Path> {
    static FOLDER: OnceLock<TempDir> = OnceLock::new();
    match FOLDER.get() {
        Some(folder) => Ok(folder.path()),
        None => {
            let folder = TempDir::new()?;
            Ok(FOLDER.get_or_init(|| folder).path())
        }
    }
}

#[async_trait]
impl Target for Sqlite {
    fn name(&self) -> &'static str {
        "sqlite"
    }

    async fn connect(&self) -> Result<Arc<dyn Backend>> {
        let config = SqliteConfig::new(folder()?.join("simba.db"));
        Ok(Arc::new(SqliteBackend::connect(config).await?))
    }

    async fn raw(&self, _: &Arc<dyn Backend>, mutex: MutexName) -> Result<Box<dyn Caller>> {
        Ok(Box::new(RawCaller { connection: raw_connection()?, mutex }))
    }

    fn raw_waits(&self) -> bool {
        false
    }

    fn many(&self) -> usize {
        10_000
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(2)
    }
}

/// Returns the raw connection, to another file. All callers share it, as all sessions of the backend share one.
fn raw_connection() -> Result<Arc<Mutex<Connection>>> {
    static CONNECTION: OnceLock<Arc<Mutex<Connection>>> = OnceLock::new();
    if let Some(connection) = CONNECTION.get() {
        return Ok(Arc::clone(connection));
    }
    let connection = Connection::open(folder()?.join("raw.db"))?;
    connection.execute_batch(
        "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL;
         CREATE TABLE lock (mutex TEXT PRIMARY KEY, owner TEXT, until INTEGER, token INTEGER) STRICT, WITHOUT ROWID;",
    )?;
    Ok(Arc::clone(CONNECTION.get_or_init(|| Arc::new(Mutex::new(connection)))))
}

/// The minimal statements of a lock, on the caller's thread.
struct RawCaller {
    connection: Arc<Mutex<Connection>>,
    mutex: MutexName,
}

const TAKE: &str = "\
INSERT INTO lock (mutex, owner, until, token) VALUES (?1, ?2, ?3, 1)
ON CONFLICT (mutex) DO UPDATE SET owner = ?2, until = ?3, token = token + 1 WHERE until <= ?4";
const FREE: &str = "UPDATE lock SET owner = NULL, until = 0 WHERE mutex = ?1 AND owner = ?2";

impl RawCaller {
    fn take(&self) -> Result<bool> {
        let now = i64::try_from(SystemClock.now().since_zero().as_micros())?;
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        let mut take = connection.prepare_cached(TAKE)?;
        let taken = take.execute((self.mutex.as_str(), "raw", now + 16_000_000, now))?;
        connection.prepare_cached("COMMIT")?.execute([])?;
        Ok(taken > 0)
    }

    fn free(&self) -> Result<()> {
        let connection = self.connection.lock().unwrap_or_else(PoisonError::into_inner);
        connection.prepare_cached("BEGIN IMMEDIATE")?.execute([])?;
        connection.prepare_cached(FREE)?.execute((self.mutex.as_str(), "raw"))?;
        connection.prepare_cached("COMMIT")?.execute([])?;
        Ok(())
    }
}

#[async_trait]
impl Caller for RawCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.acquire().await?;
            self.free()?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        self.take()?.then_some(()).context("the mutex is held, and a raw caller cannot wait")?;
        Ok(SystemClock.now())
    }

    async fn release(&mut self) -> Result<()> {
        self.free()
    }
}
