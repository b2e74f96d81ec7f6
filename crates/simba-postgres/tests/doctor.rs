//! Findings of a probe on several servers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{Private, Store, soon};
use simba_core::spi::Operate as _;
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;

/// Connects to two servers.
async fn either(one: &Store, two: &Store) -> PostgresBackend {
    let (user, password) = (one.admin.user().unwrap(), one.admin_password());
    let hosts = format!("{},{}", one.address(), two.address());
    // A server that does not answer in time is not compared.
    let keys = format!("schema={}&connect_timeout=20s&statement_timeout=20s", common::SCHEMA);
    let url = format!("postgres://{user}:{password}@{hosts}/postgres?{keys}");
    PostgresBackend::connect(PostgresConfig::from_url(&url.parse().unwrap()).unwrap()).await.unwrap()
}

async fn problems(backend: &PostgresBackend) -> Vec<String> {
    let probe = backend.probe().await.unwrap();
    probe.findings.into_iter().map(|finding| finding.problem.to_string()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn servers_with_different_clocks_are_reported() {
    let ahead = Setup::postgres()
        .with_env("LD_PRELOAD", simba_servers::faketime_library(false))
        .with_env("FAKETIME", "+1m")
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let (one, two) = (Private::start(Setup::postgres()).await, Private::start(ahead).await);
    let same = Store::shared();
    let found = problems(&either(&one.store, &two.store).await).await;
    let ahead = format!("the clock of {} is", two.store.address());
    assert!(found.iter().any(|problem| problem.contains(&ahead)), "{found:?}");
    let found = problems(&either(&same, &one.store).await).await;
    assert!(!found.iter().any(|problem| problem.contains("ahead of")), "{found:?}");
}

/// Returns the path of `pg_receivewal`, of any installed version. It acts as a standby.
fn receiver() -> std::path::PathBuf {
    let versions = std::fs::read_dir("/usr/lib/postgresql").unwrap();
    let mut programs = versions.map(|version| version.unwrap().path().join("bin/pg_receivewal"));
    programs.find(|program| program.exists()).expect("the tools of PostgreSQL are installed")
}

#[tokio::test(flavor = "multi_thread")]
async fn an_asynchronous_standby_is_reported() {
    let private = Private::start(Setup::postgres()).await;
    let backend = private.store.backend().await;
    let asynchronous = |found: &[String]| found.iter().any(|problem| problem.contains("asynchronously"));
    assert!(!asynchronous(&problems(&backend).await));
    let (address, wal) = (private.store.address(), tempfile::tempdir().unwrap());
    let mut standby = tokio::process::Command::new(receiver());
    standby.args(["--host", &address.ip().to_string(), "--port", &address.port().to_string()]);
    standby.args(["--username", private.store.admin.user().unwrap(), "--directory"]).arg(wal.path());
    standby.env("PGPASSWORD", private.store.admin_password()).kill_on_drop(true);
    let _standby = standby.spawn().unwrap();
    let found = async {
        while !asynchronous(&problems(&backend).await) {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    soon("the standby is reported", found).await;
}
