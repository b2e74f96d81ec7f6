use std::cmp::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use mysql_async::Value;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::{ContenderId, Error, ErrorKind, FencingToken, MutexName, Result};

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

    /// Tries once; `None` if the row changed meanwhile.
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
        let met = match condition {
            EvictIf::Token(token) => is_token(*token, &row).map_err(|error| error.with_mutex(mutex))?,
            condition => condition.holds_for(&owner, None),
        };
        if !met {
            return Ok(Some(Eviction::Other(owner)));
        }
        let values = vec![mutex.as_str().into(), row.owner.as_str().into(), row.version.into()];
        let written =
            link.write(LIMIT, &self.site.statements.evict, values).await.map_err(Fault::into_error)?;
        if written.rows == 0 {
            return Ok(None);
        }
        self.site.freed(mutex, row.version + 1);
        Ok(Some(Eviction::Freed { owner, window: row.remaining() }))
    }
}

#[async_trait]
impl Operate for MySqlBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        self.control.shape().await?;
        let mut link = self.control.operator().await?;
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
        let mut link = self.control.operator().await?;
        let row = self.row(&mut link, mutex).await?;
        Ok(row.map_or_else(|| MutexRecord::free(mutex.clone()), |row| record(mutex.clone(), &row)))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        self.control.shape().await?;
        let mut link = self.control.operator().await?;
        for _ in 0..ROUNDS {
            if let Some(eviction) = self.try_evict(&mut link, mutex, &condition).await? {
                return Ok(eviction);
            }
        }
        let message = "the row changes faster than it can be freed";
        Err(Error::new(ErrorKind::Unavailable, message).with_backend(NAME).with_mutex(mutex))
    }

    async fn probe(&self) -> Result<Probe> {
        let mut link = self.control.operator().await?;
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
        let mut link = self.control.operator().await?;
        link.command(LIMIT, &self.site.schema).await.map_err(Fault::into_error)?;
        // A table of another shape is still there.
        self.control.shape().await.map(drop)
    }
}

/// Returns whether the holder of the row has this token, which is the version of the first write of its tenure.
///
/// # Errors
///
/// The row does not tell: it was written since, by renewals of that tenure or by a later one.
fn is_token(token: FencingToken, row: &Row) -> Result<bool> {
    match token.get().cmp(&row.version) {
        Ordering::Equal => Ok(true),
        Ordering::Greater => Ok(false),
        Ordering::Less => {
            let message = format!(
                "the row does not tell whether `{}` has token {token}: a renewal counts the version up as well; name \
                 the holder by its id instead (`--if-owner {}`)",
                row.owner, row.owner
            );
            Err(Error::new(ErrorKind::Invalid, message).with_backend(NAME))
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_told_only_by_a_row_that_was_not_written_since() {
        let row = Row::from(("m".into(), 0, 2_000, 3_000, "x".into(), 7, 1_000));
        assert!(is_token(FencingToken::new(7), &row).unwrap());
        assert!(!is_token(FencingToken::new(8), &row).unwrap());
        let error = is_token(FencingToken::new(6), &row).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("--if-owner x"), "{error}");
    }
}
