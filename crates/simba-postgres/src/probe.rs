//! The findings of a probe: settings, clocks and tables that endanger mutexes.

use std::time::{Duration, SystemTime};

use simba_core::operate::{Finding, Probe};
use simba_core::{Moment, Result};
use tokio_postgres::Row;
use tokio_postgres::types::Type;

use crate::backend::Shared;
use crate::config::Endpoint;
use crate::connection::{Connection, Param};
use crate::error::protocol;
use crate::operate::Operator;
use crate::schema::Shape;
use crate::settings::Pooling;
use crate::statements::{get, time_until};

/// The largest difference between the server's and the local clock that is not reported.
const MAX_OFFSET: Duration = Duration::from_secs(5);

/// Reads the server's version and settings, and returns what endangers mutexes.
pub(crate) async fn probe(shared: &Shared) -> Result<Probe> {
    let operator = Operator::open(shared).await?;
    let before = shared.settings.clock.now();
    let rows = operator.query(PROBE, &[]).await?;
    let round_trip = shared.settings.clock.now() - before;
    let row = rows.first().ok_or_else(|| protocol("the server returned no row for the probe"))?;
    let mut findings = settings(shared, row)?;
    findings.extend(clock_offset(shared, row, round_trip)?);
    findings.extend(clock_skew(shared).await);
    findings.extend(table_finding(shared, &operator).await?);
    let mut probe = Probe::default();
    probe.server = format!("PostgreSQL {}", get::<&str>(row, 0)?);
    (probe.round_trip, probe.findings) = (round_trip, findings);
    Ok(probe)
}

const PROBE: &str = "SELECT current_setting('server_version'), \
     current_setting('synchronous_standby_names') = '' AND EXISTS (SELECT FROM pg_stat_replication), \
     current_setting('fsync'), current_setting('full_page_writes'), current_setting('autovacuum'), \
     clock_timestamp(), \
     coalesce(extract(epoch FROM clock_timestamp() - (SELECT min(xact_start) FROM pg_stat_activity \
         WHERE state <> 'idle' AND backend_type = 'client backend'))::float8, 0)";

/// How many seconds a transaction may be open before it is reported: it keeps old versions of rows alive.
const LONG_TRANSACTION: f64 = 3600.0;

fn settings(shared: &Shared, row: &Row) -> Result<Vec<Finding>> {
    let checks = [
        (
            get(row, 1)?,
            "standbys replicate asynchronously: a failover loses the last acquisitions, and two may hold a mutex",
            "set synchronous_standby_names, or check the fencing token in the protected resource",
        ),
        (
            get::<&str>(row, 2)? == "off" || get::<&str>(row, 3)? == "off",
            "fsync or full_page_writes is off: a power failure can destroy the tables and the tokens",
            "set fsync = on and full_page_writes = on in postgresql.conf",
        ),
        (
            get::<&str>(row, 4)? == "off",
            "autovacuum is off: the tables grow with every renewal",
            "set autovacuum = on in postgresql.conf",
        ),
        (
            get::<f64>(row, 6)? > LONG_TRANSACTION,
            "a transaction has been open for over an hour: the tables grow until it ends",
            "find it in pg_stat_activity and end it",
        ),
        (
            shared.settings.pooling() == Pooling::Transaction,
            "a transaction pooler is in front of the server: waiters poll instead of being notified",
            "connect to the server itself, or to a pool in session mode",
        ),
    ];
    let wrong = checks.into_iter().filter(|(is_wrong, ..)| *is_wrong);
    Ok(wrong.map(|(_, problem, fix)| Finding::new(problem, fix)).collect())
}

fn clock_offset(shared: &Shared, row: &Row, round_trip: Duration) -> Result<Option<Finding>> {
    let (server, here): (SystemTime, SystemTime) = (get(row, 5)?, shared.settings.clock.wall());
    let offset = time_until(server, here).max(time_until(here, server)).saturating_sub(round_trip);
    Ok((offset > MAX_OFFSET).then(|| {
        Finding::new(
            format!(
                "the server's clock and the local clock differ by {offset:.1?}: a step ends leases early or late"
            ),
            "synchronise both with the same time servers (chrony, systemd-timesyncd)",
        )
    }))
}

/// The largest difference between the clocks of two servers that is not reported; a 1 s lease has less margin.
const MAX_SKEW: Duration = Duration::from_millis(100);

/// Compares the clocks of all endpoints. An endpoint that does not answer is skipped.
async fn clock_skew(shared: &Shared) -> Option<Finding> {
    if shared.settings.config.endpoints.len() < 2 {
        return None;
    }
    let start = shared.settings.clock.now();
    let mut readings: Vec<(SystemTime, SystemTime, &Endpoint)> = Vec::new();
    for (at, endpoint) in shared.settings.config.endpoints.iter().enumerate() {
        match shared.settings.with_timeout(read_clock(shared, at)).await {
            // The bounds of the server's time at `start`.
            Ok((before, server, after)) => {
                let start_by = |now: Moment| server.checked_sub(now - start);
                if let (Some(least), Some(most)) = (start_by(after), start_by(before)) {
                    readings.push((least, most, endpoint));
                }
            }
            Err(error) => tracing::debug!(%error, %endpoint, "the clock of a server cannot be read"),
        }
    }
    let (latest, _, ahead) = readings.iter().max_by_key(|(least, ..)| *least)?;
    let (_, earliest, behind) = readings.iter().min_by_key(|(_, most, _)| *most)?;
    let skew = time_until(*latest, *earliest);
    (skew > MAX_SKEW).then(|| {
        Finding::new(
            format!(
                "the clock of {ahead} is {skew:.1?} ahead of the clock of {behind}: after a failover leases end that \
                 much earlier or later"
            ),
            "synchronise all servers with the same time servers (chrony, systemd-timesyncd)",
        )
    })
}

/// Reads the clock of one server, between two moments of the local clock.
async fn read_clock(shared: &Shared, endpoint: usize) -> Result<(Moment, SystemTime, Moment)> {
    let connection = Connection::open(&shared.settings, endpoint, false, None).await?;
    let before = shared.settings.clock.now();
    let in_flight = connection.in_flight();
    let rows = connection.query_unchecked("SELECT clock_timestamp()").await?;
    in_flight.answered();
    let after = shared.settings.clock.now();
    let row = rows.first().ok_or_else(|| protocol("the server returned no time"))?;
    Ok((before, get(row, 0)?, after))
}

const PRIVILEGES: &str = "SELECT has_table_privilege($1, 'SELECT') AND has_table_privilege($1, 'INSERT') \
     AND has_table_privilege($1, 'UPDATE') AND has_table_privilege($2, 'SELECT') \
     AND has_table_privilege($2, 'INSERT') AND has_table_privilege($2, 'UPDATE') \
     AND has_table_privilege($2, 'DELETE')";

/// Returns what is wrong with the tables.
async fn table_finding(shared: &Shared, operator: &Operator<'_>) -> Result<Option<Finding>> {
    let (tables, user) = (&shared.settings.config.tables, &shared.settings.config.user);
    let (mutex, waiter) = (tables.mutex(), tables.waiter());
    let (problem, fix) = match operator.shape().await? {
        Shape::Missing => {
            (format!("there is no table {mutex} or {waiter}"), "run `simba schema --apply`".into())
        }
        Shape::Mismatch(what) => (what, "rename it, or choose another prefix in the URL".into()),
        Shape::Valid => {
            let params: [(Param<'_>, Type); 2] = [(&mutex, Type::TEXT), (&waiter, Type::TEXT)];
            let rows = operator.query(PRIVILEGES, &params).await?;
            if rows.first().map_or(Ok(true), |row| get(row, 0))? {
                return Ok(None);
            }
            (format!("the user `{user}` lacks a privilege on the tables"), tables.grants(user))
        }
    };
    Ok(Some(Finding::new(problem, fix)))
}
