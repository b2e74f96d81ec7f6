//! The servers that all tests share.
//!
//! They outlive this program; the files to find them again are in `target/servers`.

use std::fs;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow};
use simba_servers::{Certificates, Ensemble, Record, Setup};

use crate::workspace::{Variable, Workspace};

/// The variable with the directory of certificates.
const TLS: &str = "SIMBA_TCK_TLS";

/// A time zone with a clock change in autumn.
const ZONE: &str = "America/Los_Angeles";

/// A server that tests find by a variable.
struct Shared {
    name: &'static str,
    variable: &'static str,
    setup: fn(&Certificates) -> Setup,
}

/// The servers that do not depend on another.
const SERVERS: &[Shared] = &[
    Shared { name: "redis", variable: "SIMBA_TCK_REDIS", setup: |tls| Setup::redis().with_tls(tls) },
    Shared {
        name: "redis-sentinel",
        variable: "SIMBA_TCK_REDIS_SENTINEL",
        setup: |_| Setup::redis_sentinel(),
    },
    Shared {
        name: "redis-cluster",
        variable: "SIMBA_TCK_REDIS_CLUSTER",
        setup: |tls| Setup::redis_cluster().with_tls(tls),
    },
    Shared { name: "valkey", variable: "SIMBA_TCK_VALKEY", setup: |_| Setup::valkey() },
    Shared { name: "mariadb", variable: "SIMBA_TCK_MARIADB", setup: |tls| Setup::mariadb().with_tls(tls) },
    Shared { name: "mysql", variable: "SIMBA_TCK_MYSQL", setup: |tls| Setup::mysql().with_tls(tls) },
    Shared {
        name: "mariadb-zone",
        variable: "SIMBA_TCK_MARIADB_ZONE",
        setup: |_| Setup::mariadb().with_zone(ZONE),
    },
    Shared { name: "zookeeper", variable: "SIMBA_TCK_ZOOKEEPER", setup: |_| Setup::zookeeper() },
    Shared { name: "etcd", variable: "SIMBA_TCK_ETCD", setup: |_| Setup::etcd() },
    Shared { name: "postgres", variable: POSTGRES, setup: |tls| Setup::postgres().with_tls(tls) },
];

/// The variable of PostgreSQL, the server behind the pooler.
const POSTGRES: &str = "SIMBA_TCK_POSTGRES";
/// The name and variable of the pooler.
const POOLER: (&str, &str) = ("pgbouncer", "SIMBA_TCK_PGBOUNCER");

/// Three servers that form an ensemble, and that tests find by one variable.
struct SharedEnsemble {
    names: [&'static str; 3],
    variable: &'static str,
    start: fn() -> Result<Ensemble>,
}

/// The ensembles. Their programs are those of [`SERVERS`].
const ENSEMBLES: &[SharedEnsemble] = &[
    SharedEnsemble {
        names: ["zookeeper-1", "zookeeper-2", "zookeeper-3"],
        variable: "SIMBA_TCK_ZOOKEEPER_ENSEMBLE",
        start: Ensemble::start,
    },
    SharedEnsemble {
        names: ["etcd-1", "etcd-2", "etcd-3"],
        variable: "SIMBA_TCK_ETCD_CLUSTER",
        start: Ensemble::start_etcd,
    },
];

/// Starts the servers, calls `act`, and stops them also if it fails.
pub(crate) fn with_servers(workspace: Workspace, act: impl FnOnce(&Workspace) -> Result<()>) -> Result<()> {
    // A server that does not start is a failure and never a skip.
    let variables = up(&workspace)?;
    let workspace = workspace.with_variables(variables);
    let outcome = act(&workspace);
    outcome.and(down(&workspace))
}

/// Starts the servers that do not run yet and returns the variables of all.
pub(crate) fn up(workspace: &Workspace) -> Result<Vec<Variable>> {
    let state = &*workspace.scratch("servers");
    fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
    let tls = state.join("tls");
    let certificates = &Certificates::create(&tls)?;
    // One after the other: two package installations cannot run at the same time.
    for server in SERVERS {
        (server.setup)(certificates).install()?;
    }
    let records = start_all(state, certificates)?;
    let mut variables = vec![(TLS, tls.display().to_string())];
    for (server, record) in SERVERS.iter().zip(records) {
        if server.variable == POSTGRES {
            let pooler = start_server(state, POOLER.0, || Setup::pgbouncer(record.address))?;
            variables.push((POOLER.1, pooler.url));
        }
        variables.push((server.variable, record.url));
    }
    for ensemble in ENSEMBLES {
        variables.push((ensemble.variable, start_ensemble(state, ensemble)?));
    }
    Ok(variables)
}

/// Starts an ensemble, unless all of its servers run. Returns the URL with all of them.
fn start_ensemble(state: &Path, &SharedEnsemble { names, start, .. }: &SharedEnsemble) -> Result<String> {
    let mut running = Vec::new();
    for name in names {
        running.extend(Record::load(state, name)?.map(|record| (name, record)));
    }
    if running.len() < names.len() || !running.iter().all(|(_, record)| record.is_alive()) {
        for (name, record) in running.drain(..) {
            stop_server(state, name, &record)?;
        }
        for (name, server) in names.into_iter().zip(start()?.into_servers()) {
            let record = server.leave_running();
            record.save(state, name)?;
            eprintln!("{name}: started, pid {}, in {}", record.pid, record.dir.display());
            running.push((name, record));
        }
    }
    Ok(Ensemble::url_of(running.iter().map(|(_, record)| record.url.as_str())))
}

/// Starts all of [`SERVERS`] at once: each of them waits for its disk.
fn start_all(state: &Path, certificates: &Certificates) -> Result<Vec<Record>> {
    thread::scope(|scope| {
        let start = |server: &'static Shared| {
            scope.spawn(move || start_server(state, server.name, || (server.setup)(certificates)))
        };
        let starts: Vec<_> = SERVERS.iter().map(start).collect();
        starts
            .into_iter()
            .map(|start| start.join().map_err(|_| anyhow!("a server start panicked"))?)
            .collect()
    })
}

/// Stops the servers that run.
pub(crate) fn down(workspace: &Workspace) -> Result<()> {
    let state = workspace.scratch("servers");
    for name in names() {
        match Record::load(&state, name)? {
            Some(record) => stop_server(&state, name, &record)?,
            None => eprintln!("{name}: not running"),
        }
    }
    Ok(())
}

/// Returns all names. A server comes before the one that it depends on.
fn names() -> impl Iterator<Item = &'static str> {
    let ensembles = ENSEMBLES.iter().flat_map(|ensemble| ensemble.names);
    std::iter::once(POOLER.0).chain(ensembles).chain(SERVERS.iter().map(|server| server.name))
}

fn start_server(state: &Path, name: &str, setup: impl FnOnce() -> Setup) -> Result<Record> {
    if let Some(record) = Record::load(state, name)? {
        if record.is_alive() {
            eprintln!("{name}: already running, pid {}", record.pid);
            return Ok(record);
        }
        // It ended by itself: remove its record before a new start.
        stop_server(state, name, &record)?;
    }
    let record = setup().start()?.leave_running();
    record.save(state, name)?;
    eprintln!("{name}: started, pid {}, in {}", record.pid, record.dir.display());
    Ok(record)
}

fn stop_server(state: &Path, name: &str, record: &Record) -> Result<()> {
    record.stop().with_context(|| format!("{name} did not stop"))?;
    record.forget(state, name)?;
    eprintln!("{name}: stopped, pid {}", record.pid);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn no_two_servers_share_a_name_or_a_variable() {
        let names: HashSet<_> = names().collect();
        let shared = SERVERS.iter().map(|server| server.variable);
        let ensembles = ENSEMBLES.iter().map(|ensemble| ensemble.variable);
        let variables: HashSet<_> = shared.chain(ensembles).chain([TLS, POOLER.1]).collect();
        assert_eq!(names.len(), SERVERS.len() + 3 * ENSEMBLES.len() + 1);
        assert_eq!(variables.len(), SERVERS.len() + ENSEMBLES.len() + 2);
    }
}
