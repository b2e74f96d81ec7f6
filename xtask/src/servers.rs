//! The servers that all tests share.
//!
//! They outlive this program; what is needed to find them again is in `target/servers`.

use std::fs;
use std::path::Path;
use std::thread;

use anyhow::{Context, Result, anyhow};
use simba_servers::{Certificates, Ensemble, Record, Setup};

use crate::workspace::{Variable, Workspace};

/// The variable with the directory of certificates.
const TLS: &str = "SIMBA_TCK_TLS";

/// A zone whose clocks are set back in autumn.
const ZONE: &str = "America/Los_Angeles";

/// A server that tests find by a variable.
struct Shared {
    name: &'static str,
    variable: &'static str,
    setup: fn(&Certificates) -> Setup,
}

/// Those that need no other. A new one is a new entry.
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

/// The one that stands in front of another.
const POSTGRES: &str = "SIMBA_TCK_POSTGRES";
const POOLER: (&str, &str) = ("pgbouncer", "SIMBA_TCK_PGBOUNCER");

/// Three that need each other, and that tests find by one variable.
struct Together {
    names: [&'static str; 3],
    variable: &'static str,
    start: fn() -> Result<Ensemble>,
}

/// Their programs are those of [`SERVERS`].
const ENSEMBLES: &[Together] = &[
    Together {
        names: ["zookeeper-1", "zookeeper-2", "zookeeper-3"],
        variable: "SIMBA_TCK_ZOOKEEPER_ENSEMBLE",
        start: Ensemble::start,
    },
    Together {
        names: ["etcd-1", "etcd-2", "etcd-3"],
        variable: "SIMBA_TCK_ETCD_CLUSTER",
        start: Ensemble::start_etcd,
    },
];

/// Does something with the servers running, and stops them however it went.
pub(crate) fn around(workspace: Workspace, act: impl FnOnce(&Workspace) -> Result<()>) -> Result<()> {
    // A server that does not come up is a failure and never a skip.
    let variables = up(&workspace)?;
    let workspace = workspace.with_variables(variables);
    let outcome = act(&workspace);
    outcome.and(down(&workspace))
}

/// Starts the servers that do not run yet and says where all of them are.
pub(crate) fn up(workspace: &Workspace) -> Result<Vec<Variable>> {
    let state = &*workspace.scratch("servers");
    fs::create_dir_all(state).with_context(|| format!("cannot create {}", state.display()))?;
    let tls = state.join("tls");
    let certificates = &Certificates::create(&tls)?;
    // One after the other: two of them cannot install packages at the same time.
    for server in SERVERS {
        (server.setup)(certificates).install()?;
    }
    let records = start_all(state, certificates)?;
    let mut variables = vec![(TLS, tls.display().to_string())];
    for (server, record) in SERVERS.iter().zip(records) {
        if server.variable == POSTGRES {
            let pooler = bring_up(state, POOLER.0, || Setup::pgbouncer(record.address))?;
            variables.push((POOLER.1, pooler.url));
        }
        variables.push((server.variable, record.url));
    }
    for ensemble in ENSEMBLES {
        variables.push((ensemble.variable, bring_up_ensemble(state, ensemble)?));
    }
    Ok(variables)
}

/// Starts an ensemble, unless all of its servers run; gives the URL with all of them.
fn bring_up_ensemble(state: &Path, &Together { names, start, .. }: &Together) -> Result<String> {
    let mut there = Vec::new();
    for name in names {
        there.extend(Record::load(state, name)?.map(|record| (name, record)));
    }
    if there.len() < names.len() || !there.iter().all(|(_, record)| record.is_alive()) {
        for (name, record) in there.drain(..) {
            bring_down(state, name, &record)?;
        }
        for (name, server) in names.into_iter().zip(start()?.into_servers()) {
            let record = server.leave_running();
            record.save(state, name)?;
            eprintln!("{name}: started, pid {}, in {}", record.pid, record.dir.display());
            there.push((name, record));
        }
    }
    Ok(Ensemble::url_of(there.iter().map(|(_, record)| record.url.as_str())))
}

/// Starts all of [`SERVERS`] at once: each of them waits for its disk.
fn start_all(state: &Path, certificates: &Certificates) -> Result<Vec<Record>> {
    thread::scope(|scope| {
        let start = |server: &'static Shared| {
            scope.spawn(move || bring_up(state, server.name, || (server.setup)(certificates)))
        };
        let starts: Vec<_> = SERVERS.iter().map(start).collect();
        starts.into_iter().map(|start| start.join().map_err(|_| anyhow!("a start panicked"))?).collect()
    })
}

/// Stops the servers that run.
pub(crate) fn down(workspace: &Workspace) -> Result<()> {
    let state = workspace.scratch("servers");
    for name in names() {
        match Record::load(&state, name)? {
            Some(record) => bring_down(&state, name, &record)?,
            None => eprintln!("{name}: does not run"),
        }
    }
    Ok(())
}

/// All names, whoever stands in front of another first.
fn names() -> impl Iterator<Item = &'static str> {
    let together = ENSEMBLES.iter().flat_map(|ensemble| ensemble.names);
    std::iter::once(POOLER.0).chain(together).chain(SERVERS.iter().map(|server| server.name))
}

fn bring_up(state: &Path, name: &str, setup: impl FnOnce() -> Setup) -> Result<Record> {
    if let Some(record) = Record::load(state, name)? {
        if record.is_alive() {
            eprintln!("{name}: runs already, pid {}", record.pid);
            return Ok(record);
        }
        // Ended without us: it makes room for a new one.
        bring_down(state, name, &record)?;
    }
    let record = setup().start()?.leave_running();
    record.save(state, name)?;
    eprintln!("{name}: started, pid {}, in {}", record.pid, record.dir.display());
    Ok(record)
}

fn bring_down(state: &Path, name: &str, record: &Record) -> Result<()> {
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
        let together = ENSEMBLES.iter().map(|ensemble| ensemble.variable);
        let variables: HashSet<_> = shared.chain(together).chain([TLS, POOLER.1]).collect();
        assert_eq!(names.len(), SERVERS.len() + 3 * ENSEMBLES.len() + 1);
        assert_eq!(variables.len(), SERVERS.len() + ENSEMBLES.len() + 2);
    }
}
