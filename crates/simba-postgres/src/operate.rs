//! Operators' calls: list, read, evict, schema.

use std::time::SystemTime;

use simba_core::operate::{EvictIf, Eviction, MutexRecord, Probe};
use simba_core::spi::{Operate, async_trait};
use simba_core::{Error, ErrorKind, MutexName, Result};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::{LockedRetry, PostgresBackend, Shared};
use crate::connection::{Connection, Param};
use crate::error::protocol;
use crate::probe::probe;
use crate::schema::{COLUMNS, Shape};
use crate::settings::{Pooling, Settings, session_settings};
use crate::statements::{Query, contender, get, time_until, token};
use crate::supervisor::{Task, wake};

/// The key of the advisory lock that serialises the creation of the tables.
const SETUP_LOCK: i64 = 0x5369_6d62;

#[async_trait]
impl Operate for PostgresBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let rows = Operator::open(&self.shared).await?.call(Query::List, &[]).await?;
        rows.iter().map(record).collect()
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        let rows = Operator::open(&self.shared).await?.call(Query::Read, &[&mutex.as_str()]).await?;
        let mut free = MutexRecord::free(mutex.clone());
        free.waiters = Some(0);
        rows.first().map_or(Ok(free), record)
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        let (owner, token) = match &condition {
            EvictIf::Any => (None, None),
            EvictIf::Owner(owner) => (Some(owner.as_str()), None),
            // A token outside the range of the column matches no row.
            EvictIf::Token(token) => (None, Some(i64::try_from(token.get()).unwrap_or(-1))),
            _ => return Err(Error::new(ErrorKind::Invalid, "an unknown condition evicts no holder")),
        };
        let (shared, params): (_, [Param<'_>; 3]) = (&self.shared, [&mutex.as_str(), &owner, &token]);
        let mut locked = LockedRetry::new(&shared.settings);
        loop {
            let rows = shared.call(Query::Evict, &params).await?;
            let Some(row) = rows.first() else { return Ok(Eviction::Vacant) };
            if get(row, 4)? {
                locked.pause(&*shared.settings.clock).await?;
                continue;
            }
            let owner = contender(get(row, 0)?)?;
            if !get::<bool>(row, 3)? {
                return Ok(Eviction::Other(owner));
            }
            let window = time_until(get(row, 1)?, get(row, 2)?);
            if let Err(error) = wake(shared, mutex).await {
                tracing::debug!(%error, "the next waiter is notified in the background");
                shared.start(Task::Wake(mutex.clone()));
            }
            return Ok(Eviction::Freed { owner, window });
        }
    }

    async fn probe(&self) -> Result<Probe> {
        probe(&self.shared).await
    }

    fn schema(&self) -> Option<&str> {
        Some(&self.shared.ddl)
    }

    /// Creates the tables. Needs no privilege if the tables exist and are valid.
    async fn apply_schema(&self) -> Result<()> {
        let shared = &self.shared;
        let operator = Operator::open(shared).await?;
        match operator.shape().await? {
            Shape::Valid => {}
            Shape::Mismatch(what) => {
                let message = format!(
                    "{what}: it was not created by this version of Simba; rename it, or choose another prefix in the URL"
                );
                return Err(Error::new(ErrorKind::Config, message).with_backend(crate::NAME));
            }
            Shape::Missing => {
                operator.execute(&setup_script(shared)).await?;
            }
        }
        // Statements that failed to prepare without the tables can be prepared now.
        shared.prepare_wanted.notify_one();
        Ok(())
    }
}

/// Returns the script that creates the tables. An advisory lock serialises concurrent runs, since concurrent
/// `IF NOT EXISTS` statements fail with a conflict.
///
/// The script is one transaction, and the lock ends with it. The advisory lock is waited for up to the statement
/// timeout, the tables only up to the lock timeout, since other statements queue behind a waiting table lock.
fn setup_script(shared: &Shared) -> String {
    let (config, ddl) = (&shared.settings.config, &shared.ddl);
    let [lock, statement] =
        [config.lock_timeout, config.statement_timeout].map(|time| time.as_millis().max(1));
    format!(
        "SET LOCAL statement_timeout = {statement}; SET LOCAL lock_timeout = 0; \
         SELECT pg_advisory_xact_lock({SETUP_LOCK}); SET LOCAL lock_timeout = {lock}; {ddl}"
    )
}

fn record(row: &Row) -> Result<MutexRecord> {
    let mutex = MutexName::legacy(get::<&str>(row, 0)?)
        .map_err(|error| protocol("a mutex has an invalid name").with_source(error))?;
    let mut record = MutexRecord::free(mutex);
    record.waiters = Some(usize::try_from(get::<i64>(row, 7)?).unwrap_or(0));
    let (until, now): (SystemTime, SystemTime) = (get(row, 5)?, get(row, 6)?);
    if until > now {
        record.owner = Some(contender(get(row, 1)?)?);
        record.token = Some(token(get(row, 2)?)?);
        record.acquired_at = Some(get(row, 3)?);
        record.remaining = Some(time_until(until, now));
        record.in_transition = Some(get::<SystemTime>(row, 4)? <= now);
    }
    Ok(record)
}

/// A connection for one operator's call. Such a call may be slow, and must not delay renewals.
pub(crate) struct Operator<'a> {
    settings: &'a Settings,
    connection: Connection,
}

impl<'a> Operator<'a> {
    /// Connects to the server that the commands use.
    pub(crate) async fn open(shared: &'a Shared) -> Result<Self> {
        let settings = &shared.settings;
        let endpoint = settings.with_timeout(shared.connection()).await?.endpoint();
        let connection = Connection::open(settings, endpoint, true, None).await?;
        let operator = Self { settings, connection };
        if settings.pooling() == Pooling::Session {
            // The server ends a statement whose caller has given up.
            operator.execute(&session_settings(&settings.config)).await?;
        }
        Ok(operator)
    }

    async fn call(&self, query: Query, params: &[Param<'_>]) -> Result<Vec<Row>> {
        self.answer(self.connection.rows(query, params)).await
    }

    pub(crate) async fn query(&self, text: &str, params: &[(Param<'_>, Type)]) -> Result<Vec<Row>> {
        self.answer(self.connection.query(text, params)).await
    }

    async fn execute(&self, text: &str) -> Result<()> {
        self.answer(self.connection.execute(text)).await
    }

    /// Waits for an answer, for at most the call timeout. Giving up before the answer resets the connection.
    async fn answer<T>(&self, statement: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let answered = async {
            let in_flight = self.connection.in_flight();
            let answer = statement.await;
            in_flight.answered();
            answer
        };
        // Boxed to keep the futures of the operators' calls small.
        self.settings.with_timeout(Box::pin(answered)).await
    }

    /// Compares the tables with what they should be.
    pub(crate) async fn shape(&self) -> Result<Shape> {
        let tables = &self.settings.config.tables;
        let names = vec![tables.mutex(), tables.waiter()];
        let rows = self.query(COLUMNS, &[(&names, Type::TEXT_ARRAY)]).await?;
        let column = |row: &Row| Ok((get(row, 0)?, get(row, 1)?, get(row, 2)?));
        let columns: Vec<_> = rows.iter().map(column).collect::<Result<_>>()?;
        Ok(Shape::from_columns(tables, &columns))
    }
}
