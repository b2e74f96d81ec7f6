use async_trait::async_trait;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::spi::within;
use simba_core::{MutexName, Result};

use crate::backend::{LIMIT, SqliteBackend, timed_out};
use crate::schema::{self, SCHEMA};
use crate::statements as sql;
use crate::tables::{Fault, Row, Tables, to_token};
use crate::worker::Worker;

impl SqliteBackend {
    async fn limited<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        self.check_open()?;
        within(&*self.clock, LIMIT, call).await.unwrap_or_else(|| Err(timed_out()))
    }
}

#[async_trait]
impl Operate for SqliteBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        self.limited(self.connection.read(|worker| worker.database.read(|tables| tables.list()))).await
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        let mutex = mutex.clone();
        self.limited(self.connection.read(move |worker| worker.database.read(|tables| tables.read(&mutex))))
            .await
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        let mutex = mutex.clone();
        self.limited(self.connection.write(None, move |tables| tables.evict(&mutex, &condition))).await
    }

    async fn probe(&self) -> Result<Probe> {
        let findings = self.limited(self.connection.read(Worker::findings)).await?;
        let before = self.clock.now();
        // A write that changes nothing, to measure a call that takes the same lock as every acquisition.
        self.apply_schema().await?;
        let mut probe = Probe::default();
        probe.round_trip = self.clock.now() - before;
        probe.server = format!("SQLite {}, {}", rusqlite::version(), self.config.path().display());
        probe.findings = findings;
        Ok(probe)
    }

    fn schema(&self) -> Option<&str> {
        Some(SCHEMA)
    }

    async fn apply_schema(&self) -> Result<()> {
        self.limited(self.connection.write(None, |tables| Ok(schema::apply(tables.connection)?))).await
    }
}

impl Tables<'_> {
    fn list(&self) -> Result<Vec<MutexRecord>, Fault> {
        let mut statement = self.statement(sql::ROWS)?;
        let mut rows = statement.query((self.boot, self.now))?;
        let mut records = Vec::new();
        while let Some(row) = rows.next()? {
            match self.listed(row) {
                Ok(record) => records.push(record),
                // A row that Simba did not write must not fail the whole list.
                Err(fault) => tracing::warn!(?fault, "sqlite: a mutex is omitted from the list"),
            }
        }
        Ok(records)
    }

    /// Decodes a row of [`sql::ROWS`].
    fn listed(&self, row: &rusqlite::Row<'_>) -> Result<MutexRecord, Fault> {
        let mutex = MutexName::legacy(row.get_ref(8)?.as_str().unwrap_or_default()).map_err(Fault::Row)?;
        Ok(self.record(mutex, self.decode(row)?, row.get(9)?))
    }

    fn read(&self, mutex: &MutexName) -> Result<MutexRecord, Fault> {
        let count = (mutex.as_str(), self.boot, self.now);
        let waiters = self.statement(sql::WAITERS)?.query_row(count, |row| row.get(0))?;
        Ok(self.record(mutex.clone(), self.row(mutex)?, waiters))
    }

    fn record(&self, mutex: MutexName, row: Row, waiters: i64) -> MutexRecord {
        let mut record = MutexRecord::free(mutex);
        record.waiters = Some(usize::try_from(waiters).unwrap_or_default());
        if let Some(owner) = row.owner {
            record.token = Some(to_token(row.token));
            record.acquired_at = owner.since;
            record.remaining = Some(self.remaining(&owner));
            record.in_transition = Some(owner.ttl_at <= self.now);
            record.owner = Some(owner.id);
        }
        record
    }

    fn evict(&mut self, mutex: &MutexName, condition: &EvictIf) -> Result<Eviction, Fault> {
        let row = self.row(mutex)?;
        let Some(owner) = row.owner else { return Ok(Eviction::Vacant) };
        if !condition.holds_for(&owner.id, Some(to_token(row.token))) {
            return Ok(Eviction::Other(owner.id));
        }
        self.free(owner.session, mutex, row.token)?;
        Ok(Eviction::Freed { window: self.remaining(&owner), owner: owner.id })
    }
}
