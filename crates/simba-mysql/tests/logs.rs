//! What is written down about the backend, at every level: warnings that must be there, and secrets that must not.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::Write;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use mysql_async::prelude::Queryable;
use simba_core::{Backend, Error, Simba};
use simba_mysql::{MySqlBackend, MySqlConfig};
use simba_servers::Setup;
use tokio::time::timeout;
use tracing_subscriber::filter::LevelFilter;

const CANARY: &str = "canary-7f3a0c-in-the-coal-mine";

/// Everything that was logged so far, by any test of this file.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// What the driver and its parts write by the `log` crate.
impl log::Log for Log {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {} {}\n", record.level(), record.target(), record.args());
        self.0.lock().unwrap().extend(line.as_bytes());
    }

    fn flush(&self) {}
}

impl Log {
    fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().unwrap()).into_owned()
    }
}

fn log() -> Log {
    static LOG: OnceLock<Log> = OnceLock::new();
    let install = || {
        let log = Log::default();
        let writer = log.clone();
        tracing_subscriber::fmt()
            .with_max_level(LevelFilter::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .init();
        log::set_boxed_logger(Box::new(log.clone())).unwrap();
        log::set_max_level(log::LevelFilter::Trace);
        log
    };
    LOG.get_or_init(install).clone()
}

/// An error with all that it can be made to say.
fn said(error: &Error) -> String {
    let mut said = format!("{error} {error:?} {error:#?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        said.push_str(&format!(" {cause} {cause:?}"));
        source = cause.source();
    }
    said
}

/// Row 64: a password is in no error, no `Debug` and no log, at any level.
#[tokio::test(flavor = "multi_thread")]
async fn row_64_no_secret_is_shown() {
    let log = log();
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
    let config = |url: &str| MySqlConfig::from_url(&url.parse().unwrap()).unwrap();
    texts.push(format!("{:?} {:#?}", config(&good), config(&good)));
    let backend = MySqlBackend::connect(config(&good)).await.unwrap();
    texts.push(format!("{backend:?} {backend:#?}"));
    let simba = Simba::builder(Arc::new(backend)).build();
    simba.locker(common::name("canary")).lock().await.unwrap().release().await.unwrap();
    texts.push(format!("{simba:?}"));
    simba.shutdown().await;
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    for url in [
        format!("mysql://canary:{CANARY}x@{address}/simba"),
        format!("mysql://nobody:{CANARY}@{address}/simba"),
        format!("mysql://canary:{CANARY}@{address}/missing"),
        format!("mysql://canary:{CANARY}@{nobody}/simba"),
        format!("mysql://canary:{CANARY}@{address}/simba?ssl-mode=VERIFY_IDENTITY"),
        format!("mysql://canary:{CANARY}@{address}/simba?ssl-mode=REQUIRED&ssl-cert=/no&ssl-key=/{CANARY}"),
    ] {
        let error =
            MySqlBackend::connect(config(&url)).await.err().unwrap_or_else(|| panic!("{url} connects"));
        let masked = if url.contains("ssl-key") {
            said(&error).replace(&format!("/{CANARY}"), "")
        } else {
            said(&error)
        };
        texts.push(masked);
    }
    for url in [
        format!("mysql://canary:{CANARY}@{address}/simba?tabel=x"),
        format!("mysql://canary:{CANARY}@{address}"),
        format!("mysql://canary:{CANARY}@{address}/simba?poll=x"),
    ] {
        texts.push(said(&MySqlConfig::from_url(&url.parse().unwrap()).unwrap_err()));
    }
    let missing = config(&format!("{good}?table=missing"));
    let backend = MySqlBackend::connect(missing).await.unwrap();
    texts.push(said(&backend.operate().unwrap().list().await.unwrap_err()));
    texts.push(format!("{:?}", backend.operate().unwrap().probe().await.unwrap()));
    for text in texts.iter().chain([&log.text()]) {
        assert!(!text.contains(CANARY), "a secret is shown: {text}");
    }
    assert!(log.text().contains("connected"), "what we write is heard");
    log::trace!("by the other way");
    assert!(log.text().contains("by the other way"), "what the driver writes is heard");
}

/// Row 43: a step of the server's clock is told within a ttl.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_a_step_of_the_server_s_clock_is_told() {
    let log = log();
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let setup = Setup::mariadb()
        .with_env("LD_PRELOAD", simba_servers::faketime_library(true))
        .with_env("FAKETIME_TIMESTAMP_FILE", &file)
        .with_env("FAKETIME_NO_CACHE", "1")
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let server = common::private(setup).await;
    let backend = common::connect(&common::least_url(server.address())).await;
    let simba = Simba::builder(Arc::new(backend)).lease(common::lease()).build();
    let contention = simba.contend(common::name("step"));
    contention.start().unwrap();
    contention.acquired().await.unwrap();
    let told = || log.text().matches("the clock of the MySQL server was set").count();
    tokio::time::sleep(common::lease().total()).await;
    let before = told();
    assert_eq!(before, 0, "a clock that nobody touches is no step: {}", log.text());
    for (step, offset) in ["-30m", "+30m"].into_iter().enumerate() {
        std::fs::write(&file, offset).unwrap();
        timeout(common::lease().ttl() * 5, async {
            while told() <= before + step {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        })
        .await
        .unwrap_or_else(|_| panic!("a step of {offset} is told"));
    }
    simba.shutdown().await;
}

/// A name in upper case is one with its lower case in most collations: that is said once.
#[tokio::test(flavor = "multi_thread")]
async fn a_name_in_upper_case_is_warned_of() {
    let log = log();
    let backend = common::connect(&common::least_url(common::shared().await)).await;
    let simba = Simba::builder(Arc::new(backend)).build();
    let lower = common::name("case");
    let upper = simba_core::MutexName::new(lower.as_str().to_uppercase()).unwrap();
    let guard = simba.locker(upper.clone()).lock().await.unwrap();
    assert!(simba.locker(lower).try_lock().await.unwrap().is_none(), "both names are one row");
    guard.release().await.unwrap();
    simba.locker(upper.clone()).lock().await.unwrap().release().await.unwrap();
    let warnings = log
        .text()
        .lines()
        .filter(|line| line.contains("use lower case") && line.contains(upper.as_str()))
        .count();
    assert_eq!(warnings, 1);
}
