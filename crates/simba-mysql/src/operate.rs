use std::cmp::Ordering;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::{ContenderId, Error, ErrorKind, FencingToken, MutexName, Result};

use crate::backend::MySqlBackend;
use crate::connection::Connection;
use crate::error::NAME;
use crate::probe::probe;
use crate::row::Row;
use crate::statements::{Kind, Target, Terms};

const LIMIT: Duration = Duration::from_secs(5);
/// How often an eviction is tried again after a concurrent change of the row.
const MAX_ATTEMPTS: usize = 4;

impl MySqlBackend {
    async fn row(&self, connection: &mut Connection, mutex: &MutexName) -> Result<Option<Row>> {
        let text = self.shared.statements.read([mutex.as_str()]);
        let rows = connection.rows(LIMIT, &text).await?;
        Ok(rows.into_iter().next())
    }

    /// Tries once; `None` if the row changed meanwhile.
    async fn try_evict(
        &self,
        connection: &mut Connection,
        mutex: &MutexName,
        condition: &EvictIf,
    ) -> Result<Option<Eviction>> {
        let Some(row) = self.row(connection, mutex).await?.filter(Row::is_held) else {
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
        let target = Target { mutex: mutex.as_str(), owner: &row.owner, version: row.version };
        let text = self.shared.statements.write(Kind::Free, Terms { ttl: 0, total: 0 }, &[target], false);
        let freed = connection.execute(LIMIT, &text).await?;
        if freed.changed == 0 {
            return Ok(None);
        }
        self.shared.wakeups.released(mutex, row.version + 1, self.shared.clock.now());
        Ok(Some(Eviction::Freed { owner, window: row.remaining() }))
    }
}

#[async_trait]
impl Operate for MySqlBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        self.shape().await?;
        let mut connection = self.operator().await?;
        let rows = connection.each_row(LIMIT, &self.shared.statements.list()).await?;
        // A row whose name or values are not valid is not a mutex.
        let valid = rows.iter().flatten();
        let named = valid.filter_map(|row| Some(record(MutexName::legacy(&row.mutex).ok()?, row)));
        let mut records: Vec<_> = named.collect();
        records.sort_by(|one, other| one.mutex.cmp(&other.mutex));
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        self.shape().await?;
        let mut connection = self.operator().await?;
        let row = self.row(&mut connection, mutex).await?;
        Ok(row.map_or_else(|| MutexRecord::free(mutex.clone()), |row| record(mutex.clone(), &row)))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        self.shape().await?;
        let mut connection = self.operator().await?;
        for _ in 0..MAX_ATTEMPTS {
            if let Some(eviction) = self.try_evict(&mut connection, mutex, &condition).await? {
                return Ok(eviction);
            }
        }
        let message = "the row changes faster than it can be freed";
        Err(Error::new(ErrorKind::Unavailable, message).with_backend(NAME).with_mutex(mutex))
    }

    async fn probe(&self) -> Result<Probe> {
        let mut connection = self.operator().await?;
        probe(&mut connection, &self.shared).await
    }

    fn schema(&self) -> Option<&str> {
        Some(&self.shared.schema)
    }

    /// Creates the table unless it exists. If it does, the right to create is not needed.
    async fn apply_schema(&self) -> Result<()> {
        match self.shape().await {
            Err(error) if error.kind() == ErrorKind::Config => {}
            outcome => return outcome.map(drop),
        }
        let mut connection = self.operator().await?;
        connection.execute(LIMIT, &self.shared.schema).await?;
        // Fails if a table of another shape exists.
        self.shape().await.map(drop)
    }
}

/// Returns whether the holder of the row has this token, which is the version of the first write of its
/// tenure.
///
/// # Errors
///
/// `Invalid` if the row does not tell: it was written since, by renewals of that tenure or by a later tenure.
fn is_token(token: FencingToken, row: &Row) -> Result<bool> {
    match token.get().cmp(&row.version) {
        Ordering::Equal => Ok(true),
        Ordering::Greater => Ok(false),
        Ordering::Less => {
            let message = format!(
                "the row does not tell whether `{}` has token {token}: renewals increase the version too; name \
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
    fn only_a_row_not_written_since_shows_its_token() {
        let row = Row::from(("m".into(), 0, 2_000, 3_000, "x".into(), 7, 1_000));
        assert!(is_token(FencingToken::new(7), &row).unwrap());
        assert!(!is_token(FencingToken::new(8), &row).unwrap());
        let error = is_token(FencingToken::new(6), &row).unwrap_err();
        assert!(error.kind() == ErrorKind::Invalid && error.to_string().contains("--if-owner x"), "{error}");
    }
}
