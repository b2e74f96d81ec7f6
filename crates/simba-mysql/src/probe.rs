//! Finds settings of this server that endanger mutexes, and names the fixes.

use std::time::{Duration, UNIX_EPOCH};

use simba_core::operate::{Finding, Probe};
use simba_core::{Error, ErrorKind, Result};

use crate::connection::Connection;
use crate::schema::Shape;
use crate::shared::{JVM_MAX, Shared};
use crate::statements::literal;

const LIMIT: Duration = Duration::from_secs(5);
/// The offset of two clocks from which on it is reported.
const OFFSET: Duration = Duration::from_secs(1);

const SERVER: &str = "SELECT CONCAT(@@version_comment, ' ', @@version), @@global.time_zone, @@system_time_zone, \
    CAST(@@global.read_only AS UNSIGNED), CAST(@@global.innodb_flush_log_at_trx_commit AS UNSIGNED), \
    CAST(@@global.log_bin AS UNSIGNED), @@global.binlog_format, \
    CAST(UNIX_TIMESTAMP(CURRENT_TIMESTAMP(3)) * 1000 AS UNSIGNED)";
type Server = (String, String, String, u64, u64, u64, String, u64);

/// Reads whether other servers take writes too. A server without these settings returns no rows.
const WRITERS: &str =
    "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('wsrep_on', 'group_replication_single_primary_mode')";

const ENGINE: &str = "SELECT COALESCE(engine, '') FROM information_schema.tables \
    WHERE table_schema = DATABASE() AND table_name = ?";

/// Measures a round trip and collects the findings about server and table.
pub(crate) async fn probe(connection: &mut Connection, shared: &Shared) -> Result<Probe> {
    let mut probe = Probe::default();
    let before = shared.clock.now();
    connection.execute(LIMIT, "SELECT 1").await?;
    probe.round_trip = shared.clock.now() - before;
    let wall = shared.clock.wall();
    let servers: Vec<Server> = connection.query(LIMIT, SERVER).await?;
    if let Some(server) = servers.into_iter().next() {
        let ours = wall.duration_since(UNIX_EPOCH).unwrap_or_default();
        probe.findings.extend(check_server(&server, ours));
        probe.server = server.0;
    }
    let writers: Vec<(String, String)> = connection.query(LIMIT, WRITERS).await?;
    probe.findings.extend(check_writers(&writers));
    if shared.config.is_exposed() {
        let problem = "the connection is not encrypted and leaves this machine";
        probe.findings.push(Finding::new(problem, "add ssl-mode=VERIFY_IDENTITY to the URL"));
    }
    probe.findings.extend(check_table(connection, shared).await?);
    Ok(probe)
}

fn check_server(server: &Server, wall: Duration) -> Vec<Finding> {
    let (_, zone, system, read_only, flush, log_bin, binlog, now) = server;
    let zone = if zone == "SYSTEM" { system } else { zone };
    let offset = wall.abs_diff(Duration::from_millis(*now));
    let checks = [
        (
            !matches!(zone.as_str(), "+00:00" | "UTC" | "GMT" | "Etc/UTC"),
            format!(
                "the server's time zone is {zone}: JVM peers count leases in it, off by an hour when clocks go back"
            ),
            "give JVM peers sessionVariables=time_zone='+00:00' in their JDBC URL, or run the server in UTC",
        ),
        (
            *read_only != 0,
            "the server is read-only: no mutex can be taken".to_owned(),
            "name the primary, or turn read_only off",
        ),
        (
            *flush != 1,
            format!(
                "innodb_flush_log_at_trx_commit is {flush}: a power cut can lose acknowledged writes, and tokens with them"
            ),
            "set it to 1",
        ),
        (
            *log_bin != 0 && binlog == "STATEMENT",
            "binlog_format is STATEMENT: the server refuses our writes".to_owned(),
            "set it to ROW or MIXED",
        ),
        (
            offset > OFFSET,
            format!(
                "the server's clock and ours differ by {offset:?}: this is harmless, but a step of a clock is not"
            ),
            "synchronise both by NTP, slewing instead of stepping",
        ),
    ];
    let found = checks.into_iter().filter(|(is_found, ..)| *is_found);
    found.map(|(_, problem, fix)| Finding::new(problem, fix)).collect()
}

/// Finds servers that take writes beside others. Each server counts leases by its own clock, so a clock that
/// is ahead by more than the margin frees a mutex too early.
fn check_writers(settings: &[(String, String)]) -> Option<Finding> {
    let is = |name: &str, value: &str| {
        settings.iter().any(|(key, set)| key.eq_ignore_ascii_case(name) && set.eq_ignore_ascii_case(value))
    };
    let what = if is("wsrep_on", "ON") {
        "the server is a node of a Galera cluster (wsrep_on)"
    } else if is("group_replication_single_primary_mode", "OFF") {
        "group replication has several writers (group_replication_single_primary_mode is OFF)"
    } else {
        return None;
    };
    Some(Finding::new(
        format!("{what}: leases are counted by the clock of each server that takes writes"),
        "point all services at the same server, and keep the clocks of all servers in step",
    ))
}

async fn check_table(connection: &mut Connection, shared: &Shared) -> Result<Vec<Finding>> {
    let table = &shared.config.table;
    let shape = match Shape::read(connection, shared).await {
        Ok(shape) => shape,
        Err(error) if matches!(error.kind(), ErrorKind::Config | ErrorKind::Denied) => {
            return Ok(vec![Finding::new(
                error.to_string(),
                "run `simba schema --apply`, or fix the grants",
            )]);
        }
        Err(error) => return Err(error),
    };
    let mut findings = Vec::new();
    let engines: Vec<(String,)> =
        connection.query(LIMIT, &ENGINE.replace('?', &literal(table.as_str()))).await?;
    if let Some((engine,)) =
        engines.into_iter().next().filter(|(engine,)| !engine.eq_ignore_ascii_case("innodb"))
    {
        findings.push(Finding::new(
            format!("{table} uses the engine {engine}: its writes neither survive a crash nor lock rows"),
            format!("ALTER TABLE {table} ENGINE = InnoDB"),
        ));
    }
    for (right, text) in [
        ("UPDATE", format!("UPDATE {table} SET version = version + 1 WHERE mutex = '' AND 1 = 0")),
        ("INSERT", format!("INSERT INTO {table} SELECT * FROM {table} WHERE 1 = 0")),
    ] {
        match connection.execute(LIMIT, &text).await.map_err(Error::from) {
            Err(error) if error.kind() == ErrorKind::Denied => findings.push(Finding::new(
                format!("the user lacks {right} on {table}"),
                format!("GRANT SELECT, INSERT, UPDATE ON {table} TO it"),
            )),
            _ => {}
        }
    }
    findings.extend(check_versions(connection, shared, &shape).await?);
    Ok(findings)
}

async fn check_versions(
    connection: &mut Connection,
    shared: &Shared,
    shape: &Shape,
) -> Result<Option<Finding>> {
    let table = &shared.config.table;
    let text = format!("SELECT CAST(COALESCE(MAX(version), 0) AS UNSIGNED) FROM {table}");
    let greatest: Vec<(u64,)> = connection.query(LIMIT, &text).await?;
    let greatest = greatest.first().map_or(0, |(greatest,)| *greatest);
    Ok(near_limit(greatest, shape.max_version).map(|(limit, consequence)| {
        Finding::new(
            format!("the greatest version is {greatest}, and {consequence} at {limit}"),
            format!("ALTER TABLE {table} MODIFY version BIGINT UNSIGNED NOT NULL, and retire JVM peers before that"),
        )
    }))
}

/// Returns the limit that a version is within 10 % of, and what happens there.
fn near_limit(version: u64, max: u64) -> Option<(u64, &'static str)> {
    let near = |limit: u64| version > limit - limit / 10;
    [(max, "its column ends"), (JVM_MAX, "JVM peers stop reading")]
        .into_iter()
        .find(|(limit, _)| near(*limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server() -> Server {
        ("x".into(), "+00:00".into(), "UTC".into(), 0, 1, 0, "MIXED".into(), 1_000_000)
    }

    fn problems(change: impl FnOnce(&mut Server)) -> Vec<String> {
        let mut server = server();
        change(&mut server);
        check_server(&server, Duration::from_secs(1_000)).into_iter().map(|finding| finding.problem).collect()
    }

    #[test]
    fn a_well_configured_server_gives_no_finding() {
        assert_eq!(problems(|_| {}), Vec::<String>::new());
    }

    #[test]
    fn each_dangerous_setting_is_found() {
        let found = [
            (problems(|server| server.1 = "America/Los_Angeles".into()), "time zone"),
            (problems(|server| (server.1, server.2) = ("SYSTEM".into(), "PST".into())), "PST"),
            (problems(|server| server.3 = 1), "read-only"),
            (problems(|server| server.4 = 2), "power cut"),
            (problems(|server| (server.5, server.6) = (1, "STATEMENT".into())), "STATEMENT"),
            (problems(|server| server.7 = 5_000_000), "differ"),
        ];
        for (problems, word) in found {
            assert!(problems.len() == 1 && problems[0].contains(word), "{word}: {problems:?}");
        }
    }

    #[test]
    fn several_writers_are_found() {
        let set = |name: &str, value: &str| vec![(name.to_owned(), value.to_owned())];
        assert_eq!(check_writers(&[]), None);
        assert_eq!(check_writers(&set("wsrep_on", "OFF")), None);
        assert_eq!(check_writers(&set("group_replication_single_primary_mode", "ON")), None);
        assert!(check_writers(&set("wsrep_on", "ON")).unwrap().problem.contains("Galera"));
        let several = check_writers(&set("group_replication_single_primary_mode", "OFF")).unwrap();
        assert!(several.problem.contains("several writers"), "{several:?}");
    }

    #[test]
    fn a_version_near_a_limit_is_reported() {
        let int = u64::from(u32::MAX);
        assert_eq!(near_limit(1_000, int), None);
        assert_eq!(near_limit(JVM_MAX - 5, int).unwrap().0, JVM_MAX);
        assert_eq!(near_limit(int - 5, int).unwrap().0, int);
    }
}
