//! The open file with everything that its transactions need.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use rusqlite::Connection;
use simba_core::{Clock, Error, Result};

use crate::connection::Write;
use crate::error::explain;
use crate::machine::{BootClock, WaiterThread};
use crate::names::Names;
use crate::statements as sql;
use crate::tables::{Fault, MutexState, Tables};
use crate::{busy_timeout, file};

/// An open Simba database, used by one thread.
pub(crate) struct Database {
    pub(crate) connection: Connection,
    /// Without links.
    pub(crate) path: PathBuf,
    names: Names,
    boot: BootClock,
    /// This thread, as other processes identify it.
    thread: Option<WaiterThread>,
    clock: Arc<dyn Clock>,
    /// Whether the expired queue entries of all mutexes were deleted, which is done once.
    expired_deleted: bool,
}

impl Database {
    /// Opens the file for this thread, which keeps the queue entries of its sessions alive.
    pub(crate) fn open(path: &Path, clock: Arc<dyn Clock>) -> Result<Self> {
        let boot = BootClock::read()?;
        let (connection, path) = file::open(path)?;
        let (names, thread) = (Names::find(&path)?, WaiterThread::current());
        Ok(Self { connection, path, names, boot, thread, clock, expired_deleted: false })
    }

    /// Returns the tables at the current time.
    pub(crate) fn tables(&self) -> Tables<'_> {
        let (now, wall) = (self.boot.now(), self.clock.wall());
        let (connection, boot, thread) = (&self.connection, self.boot.boot(), self.thread.as_ref());
        Tables { connection, boot, thread, now, wall, states: Vec::new() }
    }

    /// Reads the tables, outside of a transaction.
    pub(crate) fn read<T>(&self, read: impl FnOnce(&Tables<'_>) -> Result<T, Fault>) -> Result<T> {
        self.names.check()?;
        read(&self.tables()).map_err(|fault| self.to_error(fault))
    }

    /// Applies all changes in one transaction, or none of them. Returns the states of the mutexes that may have changed.
    /// Waits for a transaction of another process at most for the time that the callers' shortest ttl allows.
    pub(crate) fn write(
        &mut self,
        writes: &mut [Box<dyn Write>],
        ttl: Option<Duration>,
    ) -> Result<Vec<MutexState>> {
        self.names.check()?;
        busy_timeout::limit(ttl);
        let written = self.transaction(writes);
        busy_timeout::limit(None);
        written
    }

    fn transaction(&mut self, writes: &mut [Box<dyn Write>]) -> Result<Vec<MutexState>> {
        self.execute(sql::BEGIN)?;
        let applied = self.apply(writes).map_err(|fault| self.to_error(fault));
        let committed = applied.and_then(|states| self.execute(sql::COMMIT).map(|()| states));
        match &committed {
            Ok(_) => self.expired_deleted = true,
            Err(_) => self.roll_back(),
        }
        committed
    }

    fn apply(&self, writes: &mut [Box<dyn Write>]) -> Result<Vec<MutexState>, Fault> {
        let mut tables = self.tables();
        if !self.expired_deleted {
            tables.delete_expired()?;
        }
        writes.iter_mut().try_for_each(|write| write.apply(&mut tables))?;
        Ok(tables.states)
    }

    fn roll_back(&self) {
        // SQLite may have rolled back already.
        if !self.connection.is_autocommit()
            && let Err(error) = self.execute(sql::ROLLBACK)
        {
            tracing::warn!(%error, "a failed transaction cannot be rolled back");
        }
    }

    fn execute(&self, statement: &str) -> Result<()> {
        let executed = self.connection.prepare_cached(statement).and_then(|mut ready| ready.execute([]));
        executed.map(drop).map_err(|error| explain(&self.path, error))
    }

    pub(crate) fn to_error(&self, fault: Fault) -> Error {
        match fault {
            Fault::Sqlite(error) => explain(&self.path, error),
            Fault::Row(error) => error,
        }
    }
}
