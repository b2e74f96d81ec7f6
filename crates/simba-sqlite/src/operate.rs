use async_trait::async_trait;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::{MutexName, Result, within};

use crate::backend::{LIMIT, SqliteBackend, unanswered};
use crate::job::{Job, Read, Reply, Write};
use crate::schema::SCHEMA;

impl SqliteBackend {
    async fn ask<T: Send>(&self, job: impl FnOnce(Reply<T>) -> Job + Send) -> Result<T> {
        self.check_open()?;
        within(&*self.clock, LIMIT, self.handle.ask(job)).await.unwrap_or_else(|| Err(unanswered()))
    }
}

#[async_trait]
impl Operate for SqliteBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        self.ask(|reply| Job::Read(Read::List(reply))).await
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        let read = Read::Record;
        let mutex = mutex.clone();
        self.ask(|reply| Job::Read(read(mutex, reply))).await
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        let mutex = mutex.clone();
        self.ask(|reply| Job::Write(Write::Evict { mutex, condition, reply })).await
    }

    async fn probe(&self) -> Result<Probe> {
        let findings = self.ask(|reply| Job::Read(Read::Findings(reply))).await?;
        let before = self.clock.now();
        // A change that changes nothing: it needs the lock that every acquisition needs.
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
        self.ask(|reply| Job::Write(Write::ApplySchema(reply))).await
    }
}
