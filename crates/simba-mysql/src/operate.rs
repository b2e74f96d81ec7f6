use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use mysql_async::Value;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::{ContenderId, Error, ErrorKind, MutexName, Result};

use crate::backend::MySqlBackend;
use crate::error::{Fault, NAME};
use crate::link::Link;
use crate::probe::probe;
use crate::row::Row;

const LIMIT: Duration = Duration::from_secs(5);
/// How often an eviction looks again after the row changed under it.
const ROUNDS: usize = 4;

impl MySqlBackend {
    async fn row(&self, link: &mut Link, mutex: &MutexName) -> Result<Option<Row>> {
        let values = vec![Value::from(mutex.as_str())];
        let rows = link.rows(LIMIT, &self.site.statements.read, values).await.map_err(Fault::into_error)?;
        Ok(rows.into_iter().next())
    }

    /// One try; `None` if the row changed meanwhile.
    async fn try_evict(
        &self,
        link: &mut Link,
        mutex: &MutexName,
        condition: &EvictIf,
    ) -> Result<Option<Eviction>> {
        let Some(row) = self.row(link, mutex).await?.filter(Row::is_held) else {
            return Ok(Some(Eviction::Vacant));
        };
        let owner = ContenderId::foreign(&row.owner)?;
        if !condition.holds_for(&owner, None) {
            return Ok(Some(Eviction::Other(owner)));
        }
        let values = vec![mutex.as_str().into(), row.owner.as_str().into(), row.version.into()];
        let written =
            link.write(LIMIT, &self.site.statements.evict, values).await.map_err(Fault::into_error)?;
        if written.rows == 0 {
            return Ok(None);
        }
        self.site.waiters.freed(mutex, row.version + 1, self.site.clock.now());
        Ok(Some(Eviction::Freed { owner, window: row.remaining() }))
    }
}

#[async_trait]
impl Operate for MySqlBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        self.control.shape().await?;
        let mut link = self.control.link.lock().await;
        link.ready().await?;
        let rows =
            link.rows(LIMIT, &self.site.statements.list, Vec::new()).await.map_err(Fault::into_error)?;
        // What cannot be a name is not ours to list.
        let named = rows.iter().filter_map(|row| Some(record(MutexName::legacy(&row.mutex).ok()?, row)));
        let mut records: Vec<_> = named.collect();
        records.sort_by(|one, other| one.mutex.cmp(&other.mutex));
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        self.control.shape().await?;
        let mut link = self.control.link.lock().await;
        link.ready().await?;
        let row = self.row(&mut link, mutex).await?;
        Ok(row.map_or_else(|| MutexRecord::free(mutex.clone()), |row| record(mutex.clone(), &row)))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        self.control.shape().await?;
        let mut link = self.control.link.lock().await;
        link.ready().await?;
        for _ in 0..ROUNDS {
            if let Some(eviction) = self.try_evict(&mut link, mutex, &condition).await? {
                return Ok(eviction);
            }
        }
        let message = "the row changes faster than it can be freed";
        Err(Error::new(ErrorKind::Unavailable, message).with_backend(NAME).with_mutex(mutex))
    }

    async fn probe(&self) -> Result<Probe> {
        let mut link = self.control.link.lock().await;
        link.ready().await?;
        probe(&mut link, &self.site).await
    }

    fn schema(&self) -> Option<&str> {
        Some(&self.site.schema)
    }

    /// Makes the table unless it is there; what is there already takes no right to create.
    async fn apply_schema(&self) -> Result<()> {
        match self.control.shape().await {
            Err(error) if error.kind() == ErrorKind::Config => {}
            outcome => return outcome.map(drop),
        }
        let mut link = self.control.link.lock().await;
        link.ready().await?;
        link.command(LIMIT, &self.site.schema).await.map_err(Fault::into_error)?;
        drop(link);
        // A table of another shape is still there.
        self.control.shape().await.map(drop)
    }
}

fn record(mutex: MutexName, row: &Row) -> MutexRecord {
    let mut record = MutexRecord::free(mutex);
    if row.is_held() {
        record.owner = ContenderId::foreign(&row.owner).ok();
        record.acquired_at = since_1970(row.acquired_at);
        record.remaining = Some(row.remaining());
        record.in_transition = Some(row.ttl_at <= row.now);
    }
    record
}

fn since_1970(ms: u64) -> Option<SystemTime> {
    UNIX_EPOCH.checked_add(Duration::from_millis(ms))
}
