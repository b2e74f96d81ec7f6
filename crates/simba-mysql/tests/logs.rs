//! The log output of the backend at every level: it contains the warnings and no secrets.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use simba_core::Simba;
use simba_core::spi::Backend;
use simba_mysql::{MySqlBackend, MySqlConfig};
use simba_servers::Setup;
use simba_test_support::{Logs, error_text, with_server_clock};
use tokio::time::timeout;

const CANARY: &str = "canary-7f3a0c-in-the-coal-mine";

/// Row 64: a password is in no error, no `Debug` and no log, at any level.
#[tokio::test(flavor = "multi_thread")]
async fn row_64_no_secret_is_shown() {
    let logs = Logs::capture();
    let address = common::shared().await;
    let mut admin = common::admin(&common::admin_url()).await;
    for statement in [
        format!("CREATE USER IF NOT EXISTS 'canary'@'%' IDENTIFIED BY '{CANARY}'"),
        "GRANT SELECT, INSERT, UPDATE ON simba.simba_mutex TO 'canary'@'%'".to_owned(),
    ] {
        admin.query_drop(statement).await.unwrap();
    }
    let mut texts = Vec::new();
    let good = format!("mysql://canary:{CANARY}@{address}/simba");
    let config = common::config;
    texts.push(format!("{:?} {:#?}", config(&good), config(&good)));
    let backend = MySqlBackend::connect(config(&good)).await.unwrap();
    texts.push(format!("{backend:?} {backend:#?}"));
    let simba = Simba::builder(Arc::new(backend)).build();
    simba.locker(common::name("canary")).lock().await.unwrap().release().await.unwrap();
    texts.push(format!("{simba:?}"));
    simba.shutdown().await;
    let (refusing, _socket) = common::refusing_address();
    for url in [
        format!("mysql://canary:{CANARY}x@{address}/simba"),
        format!("mysql://nobody:{CANARY}@{address}/simba"),
        format!("mysql://canary:{CANARY}@{address}/missing"),
        format!("mysql://canary:{CANARY}@{refusing}/simba"),
        format!("mysql://canary:{CANARY}@{address}/simba?ssl-mode=VERIFY_IDENTITY"),
        format!("mysql://canary:{CANARY}@{address}/simba?ssl-mode=REQUIRED&ssl-cert=/no&ssl-key=/{CANARY}"),
    ] {
        let error =
            MySqlBackend::connect(config(&url)).await.err().unwrap_or_else(|| panic!("{url} connects"));
        let masked = if url.contains("ssl-key") {
            error_text(&error).replace(&format!("/{CANARY}"), "")
        } else {
            error_text(&error)
        };
        texts.push(masked);
    }
    for url in [
        format!("mysql://canary:{CANARY}@{address}/simba?tabel=x"),
        format!("mysql://canary:{CANARY}@{address}"),
        format!("mysql://canary:{CANARY}@{address}/simba?poll=x"),
    ] {
        texts.push(error_text(&MySqlConfig::from_url(&url.parse().unwrap()).unwrap_err()));
    }
    let missing = config(&format!("{good}?table=missing"));
    let backend = MySqlBackend::connect(missing).await.unwrap();
    texts.push(error_text(&backend.operate().unwrap().list().await.unwrap_err()));
    texts.push(format!("{:?}", backend.operate().unwrap().probe().await.unwrap()));
    assert!(logs.text().contains("connected"), "tracing output is captured");
    logs.assert_without(CANARY, &texts);
}

/// Row 43: a step of the server's clock is logged within five ttls.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_a_step_of_the_server_s_clock_is_logged() {
    let logs = Logs::capture();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let server = common::private(with_server_clock(Setup::mariadb(), &file, true)).await;
    let backend = common::connect(&common::least_url(server.address())).await;
    let simba = Simba::builder(Arc::new(backend)).with_lease(common::lease()).build();
    let contention = simba.contend(common::name("step"));
    contention.start().unwrap();
    contention.acquired().await.unwrap();
    let warnings = || logs.count("the clock of the MySQL server was set");
    tokio::time::sleep(common::lease().total()).await;
    let before = warnings();
    assert_eq!(before, 0, "an unchanged clock is no step: {}", logs.text());
    for (step, offset) in ["-30m", "+30m"].into_iter().enumerate() {
        std::fs::write(&file, offset).unwrap();
        timeout(common::lease().ttl() * 5, async {
            while warnings() <= before + step {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("a step of {offset} is not logged"));
    }
    simba.shutdown().await;
}

/// A name in upper case equals its lower case in most collations: that is logged once.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_in_upper_case_logs_a_warning() {
    let logs = Logs::capture();
    let backend = common::connect(&common::least_url(common::shared().await)).await;
    let simba = Simba::builder(Arc::new(backend)).build();
    let lower = common::name("case");
    let upper = simba_core::MutexName::new(lower.as_str().to_uppercase()).unwrap();
    let guard = simba.locker(upper.clone()).lock().await.unwrap();
    assert!(simba.locker(lower).try_lock().await.unwrap().is_none(), "both names are one row");
    guard.release().await.unwrap();
    simba.locker(upper.clone()).lock().await.unwrap().release().await.unwrap();
    let warnings = logs
        .text()
        .lines()
        .filter(|line| line.contains("use lower case") && line.contains(upper.as_str()))
        .count();
    assert_eq!(warnings, 1);
}
