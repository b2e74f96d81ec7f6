//! What operators do: list, read, evict, probe, schema.

use std::time::{Duration, SystemTime};

use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord, Probe};
use simba_core::{Error, ErrorKind, Moment, MutexName, Operate, Result, async_trait};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::PostgresBackend;
use crate::config::Place;
use crate::errands;
use crate::handle::{Handle, Nature};
use crate::line::open;
use crate::rows::{contender, get, left, token};
use crate::schema::{COLUMNS, Shape};
use crate::statements::Query;
use crate::wire::Param;

/// How far the server's clock may be from ours before that is a finding.
const OFFSET: Duration = Duration::from_secs(5);

/// The number of the lock that whoever makes the tables holds meanwhile.
const SETTING_UP: i64 = 0x5369_6d62;

#[async_trait]
impl Operate for PostgresBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let rows = self.handle().ask_all(Query::List, &[]).await?;
        rows.iter().map(record).collect()
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        let handle = self.handle();
        let rows = handle.in_time(handle.ask(mutex, Query::Read, &[&mutex.as_str()])).await?;
        match rows.first() {
            Some(row) => record(row),
            None => {
                let mut free = MutexRecord::free(mutex.clone());
                free.waiters = Some(0);
                Ok(free)
            }
        }
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        let (owner, token) = match &condition {
            EvictIf::Any => (None, None),
            EvictIf::Owner(owner) => (Some(owner.as_str()), None),
            // A token that the table cannot hold is nobody's.
            EvictIf::Token(token) => (None, Some(i64::try_from(token.get()).unwrap_or(-1))),
            _ => return Err(Error::new(ErrorKind::Invalid, "an unknown condition evicts nobody")),
        };
        let handle = self.handle();
        let params: [Param<'_>; 3] = [&mutex.as_str(), &owner, &token];
        let rows = handle.in_time(handle.ask(mutex, Query::Evict, &params)).await?;
        let Some(row) = rows.first() else { return Ok(Eviction::Vacant) };
        let owner = contender(row, 0)?;
        if !get::<bool>(row, 3)? {
            return Ok(Eviction::Other(owner));
        }
        let window = left(get(row, 1)?, get(row, 2)?);
        handle.in_time(errands::wake(handle, mutex)).await?;
        Ok(Eviction::Freed { owner, window })
    }

    async fn probe(&self) -> Result<Probe> {
        let handle = self.handle();
        let before = handle.clock.now();
        let rows = handle.in_time(text(handle, PROBE, &[])).await?;
        let round_trip = handle.clock.now() - before;
        let row =
            rows.first().ok_or_else(|| crate::error::protocol("the server says nothing about itself"))?;
        let mut findings = settings(handle, row)?;
        findings.extend(offset(handle, row, round_trip)?);
        findings.extend(clocks(handle).await);
        findings.extend(tables(handle).await?);
        let mut probe = Probe::default();
        probe.server = format!("PostgreSQL {}", get::<&str>(row, 0)?);
        (probe.round_trip, probe.findings) = (round_trip, findings);
        Ok(probe)
    }

    fn schema(&self) -> Option<&str> {
        Some(&self.handle().ddl)
    }

    /// Makes the tables. Where they are as they should be, it needs no right to make any.
    async fn apply_schema(&self) -> Result<()> {
        let handle = self.handle();
        match shape(handle).await? {
            Shape::Right => {}
            Shape::Foreign(what) => return Err(foreign(&what)),
            Shape::Missing => {
                let made = async {
                    let wire = handle.wire().await?;
                    wire.batch(&setting_up(handle)).await.map_err(|trouble| handle.failed(&wire, trouble))
                };
                handle.in_time(made).await?;
            }
        }
        // What could not be prepared without tables can be now.
        handle.proven.notify_one();
        Ok(())
    }
}

/// Makes the tables, one after the other: the server takes `IF NOT EXISTS` of two at once for a clash.
///
/// All of it is one transaction, which the lock ends with. Whoever comes second waits for as long as a statement
/// may take; only the tables themselves are waited for as rows are, since others wait behind who waits for those.
fn setting_up(handle: &Handle) -> String {
    let (ddl, patience) = (&handle.ddl, handle.config.lock_timeout.as_millis().max(1));
    format!(
        "SET LOCAL lock_timeout = 0; SELECT pg_advisory_xact_lock({SETTING_UP}); \
         SET LOCAL lock_timeout = {patience}; {ddl}"
    )
}

fn foreign(what: &str) -> Error {
    let message = format!(
        "{what}: it is not ours or of another version; move it away, or choose another prefix in the URL"
    );
    Error::new(ErrorKind::Config, message).with_backend(crate::NAME)
}

fn record(row: &Row) -> Result<MutexRecord> {
    let mutex = MutexName::legacy(get::<&str>(row, 0)?)
        .map_err(|error| crate::error::protocol("a mutex has no name: it is not ours").with_source(error))?;
    let mut record = MutexRecord::free(mutex);
    record.waiters = Some(usize::try_from(get::<i64>(row, 7)?).unwrap_or(0));
    let (until, now): (SystemTime, SystemTime) = (get(row, 5)?, get(row, 6)?);
    if until > now {
        record.owner = Some(contender(row, 1)?);
        record.token = Some(token(row, 2)?);
        record.acquired_at = Some(get(row, 3)?);
        record.remaining = Some(left(until, now));
        record.in_transition = Some(get::<SystemTime>(row, 4)? <= now);
    }
    Ok(record)
}

async fn text(handle: &Handle, text: &str, params: &[(Param<'_>, Type)]) -> Result<Vec<Row>> {
    let wire = handle.wire().await?;
    let rows = wire.text(text, params).await;
    rows.map_err(|trouble| handle.failed(&wire, trouble))
}

async fn shape(handle: &Handle) -> Result<Shape> {
    let tables = &handle.config.tables;
    let names = vec![tables.mutex(), tables.waiter()];
    let params: [(Param<'_>, Type); 1] = [(&names, Type::TEXT_ARRAY)];
    let rows = handle.in_time(text(handle, COLUMNS, &params)).await?;
    let column = |row: &Row| Ok((get(row, 0)?, get(row, 1)?, get(row, 2)?));
    let columns: Vec<_> = rows.iter().map(column).collect::<Result<_>>()?;
    Ok(Shape::of(tables, &columns))
}

const PROBE: &str = "SELECT current_setting('server_version'), \
     current_setting('synchronous_standby_names') = '' AND EXISTS (SELECT FROM pg_stat_replication), \
     current_setting('fsync'), current_setting('full_page_writes'), current_setting('autovacuum'), \
     clock_timestamp(), \
     coalesce(extract(epoch FROM clock_timestamp() - (SELECT min(xact_start) FROM pg_stat_activity \
         WHERE state <> 'idle' AND backend_type = 'client backend'))::float8, 0)";

/// A transaction that is open for this long keeps old versions of our rows alive.
const OLD: f64 = 3600.0;

fn settings(handle: &Handle, row: &Row) -> Result<Vec<Finding>> {
    let mut findings = Vec::new();
    let mut find = |wrong: bool, problem: &str, cure: &str| {
        if wrong {
            findings.push(Finding::new(problem, cure));
        }
    };
    find(
        get(row, 1)?,
        "standbys replicate asynchronously: a failover to one forgets the last acquisitions, and two may hold",
        "set synchronous_standby_names, or fence off what the mutex protects by its token",
    );
    find(
        get::<&str>(row, 2)? == "off" || get::<&str>(row, 3)? == "off",
        "fsync or full_page_writes is off: a power cut can destroy the tables and with them the tokens",
        "set fsync = on and full_page_writes = on in postgresql.conf",
    );
    find(
        get::<&str>(row, 4)? == "off",
        "autovacuum is off: the tables grow with every renewal",
        "set autovacuum = on in postgresql.conf",
    );
    find(
        get::<f64>(row, 6)? > OLD,
        "a transaction is open for over an hour: the tables grow for as long as it lasts",
        "find it in pg_stat_activity and end it",
    );
    find(
        handle.nature() == Nature::Pooled,
        "a transaction pooler stands in front of the server: waiters are not woken, they poll",
        "connect to the server itself, or to a pool in session mode",
    );
    Ok(findings)
}

fn offset(handle: &Handle, row: &Row, round_trip: Duration) -> Result<Option<Finding>> {
    let (server, here): (SystemTime, SystemTime) = (get(row, 5)?, handle.clock.wall());
    let apart = left(server, here).max(left(here, server)).saturating_sub(round_trip);
    Ok((apart > OFFSET).then(|| {
        Finding::new(
            format!(
                "the server's clock and ours are {apart:.1?} apart: a step of it ends leases early or late"
            ),
            "let both follow the same time servers (chrony, systemd-timesyncd)",
        )
    }))
}

/// How far apart the clocks of two servers may be: leases of a second have less margin than this.
const APART: Duration = Duration::from_millis(100);

/// Compares the clocks of all servers of the URL. One that does not answer has no clock to compare.
async fn clocks(handle: &Handle) -> Option<Finding> {
    if handle.config.places.len() < 2 {
        return None;
    }
    let start = handle.clock.now();
    let mut seen: Vec<(SystemTime, SystemTime, &Place)> = Vec::new();
    for place in &handle.config.places {
        match handle.in_time(clock(handle, place)).await {
            // What the server's clock showed at the start, at the earliest and at the latest.
            Ok((before, server, after)) => {
                let start_by = |now: Moment| server.checked_sub(now - start);
                if let (Some(least), Some(most)) = (start_by(after), start_by(before)) {
                    seen.push((least, most, place));
                }
            }
            Err(error) => tracing::debug!(%error, %place, "the clock of a server cannot be compared"),
        }
    }
    let (latest, _, ahead) = seen.iter().max_by_key(|(least, ..)| *least)?;
    let (_, earliest, behind) = seen.iter().min_by_key(|(_, most, _)| *most)?;
    let apart = left(*latest, *earliest);
    (apart > APART).then(|| {
        Finding::new(
            format!(
                "the clock of {ahead} is {apart:.1?} ahead of the one of {behind}: after a failover leases end that \
                 much earlier or later"
            ),
            "let all servers follow the same time servers (chrony, systemd-timesyncd)",
        )
    })
}

/// Reads the clock of one server, between two moments of ours.
async fn clock(handle: &Handle, place: &Place) -> Result<(Moment, SystemTime, Moment)> {
    let line = open(&handle.config, &*handle.clock, place).await?;
    let before = handle.clock.now();
    let rows = line.client.query_typed("SELECT clock_timestamp()", &[]).await;
    let rows = rows.map_err(|fault| crate::error::of_fault(fault, &handle.config))?;
    let after = handle.clock.now();
    let row = rows.first().ok_or_else(|| crate::error::protocol("the server does not tell the time"))?;
    Ok((before, get(row, 0)?, after))
}

const RIGHTS: &str = "SELECT has_table_privilege($1, 'SELECT') AND has_table_privilege($1, 'INSERT') \
     AND has_table_privilege($1, 'UPDATE') AND has_table_privilege($2, 'SELECT') \
     AND has_table_privilege($2, 'INSERT') AND has_table_privilege($2, 'UPDATE') \
     AND has_table_privilege($2, 'DELETE')";

/// What is wrong with the tables.
async fn tables(handle: &Handle) -> Result<Option<Finding>> {
    let tables = &handle.config.tables;
    match shape(handle).await? {
        Shape::Missing => {
            return Ok(Some(Finding::new(
                format!("there is no table {} or {}", tables.mutex(), tables.waiter()),
                "run `simba schema --apply`",
            )));
        }
        Shape::Foreign(what) => {
            return Ok(Some(Finding::new(what, "move it away, or choose another prefix in the URL")));
        }
        Shape::Right => {}
    }
    let names = (tables.mutex(), tables.waiter());
    let params: [(Param<'_>, Type); 2] = [(&names.0, Type::TEXT), (&names.1, Type::TEXT)];
    let rows = handle.in_time(text(handle, RIGHTS, &params)).await?;
    if rows.first().map_or(Ok(true), |row| get(row, 0))? {
        return Ok(None);
    }
    let user = &handle.config.user;
    Ok(Some(Finding::new(format!("the user `{user}` lacks a right on the tables"), tables.grants(user))))
}
