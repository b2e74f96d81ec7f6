//! Secrets in errors and logs. A program of its own, because it captures the logs of the whole process.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{LONG_TIMEOUT, Private, SCHEMA, USER, connect, name, soon};
use simba_core::spi::{Backend, Claim, Operate, Prior};
use simba_core::{ContenderId, Error, Lease};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;
use simba_test_support::{Logs, error_text};

#[tokio::test(flavor = "multi_thread")]
async fn row_64_no_error_log_or_debug_text_contains_a_password() {
    const CANARY: &str = "canary-8f3b";
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let address = store.address();
    let role = format!(
        "CREATE ROLE canary LOGIN PASSWORD '{CANARY}'; {}",
        store.config(address).grants().replace(USER, "canary")
    );
    admin.batch_execute(&role).await.unwrap();
    // Not before this point: the driver logs all statements, also the one that creates the role.
    let logs = Logs::capture();
    let url = |user: &str, password: &str, host: &str, rest: &str| {
        format!("postgres://{user}:{password}@{host}/postgres?schema={SCHEMA}{rest}")
    };
    let mut texts = Vec::new();
    let mut note = |error: &Error| texts.push(error_text(error));
    let server = address.to_string();
    let wrong = [
        url("canary", &format!("{CANARY}-wrong"), &server, ""),
        url("nobody", CANARY, &server, ""),
        url("canary", CANARY, "127.0.0.1:1", ""),
        url("canary", CANARY, "no-such-host.invalid", "&connect_timeout=1s"),
        url("canary", CANARY, &server, "&sslmode=require"),
        url("canary", CANARY, &server, "&sslmode=prefer"),
        url("canary", CANARY, &server, "&nonsense=1"),
    ];
    for url in wrong {
        note(&connect(&url).await.unwrap_err());
    }
    let config = PostgresConfig::from_url(&url("canary", CANARY, &server, "").parse().unwrap()).unwrap();
    let config = config.with_connect_timeout(LONG_TIMEOUT).with_statement_timeout(LONG_TIMEOUT);
    let shown = format!("{config:?}");
    let backend = PostgresBackend::connect(config).await.unwrap();
    let shown = format!("{shown} {backend:?} {:?}", backend.probe().await.unwrap());
    let claim = Claim::new(name("logs"), ContenderId::generate(), Lease::default());
    let mut session = backend.open(claim).await.unwrap();
    session.contend(Prior::Nothing).await.unwrap();
    // Also the errors of a reconnect.
    admin
        .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'canary'", &[])
        .await
        .unwrap();
    admin.batch_execute("REVOKE ALL ON simba_mutex FROM canary").await.unwrap();
    let reported = async {
        loop {
            match session.contend(Prior::Unknown).await {
                Err(error) if !error.is_transient() => return error,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    note(&soon("a revoked privilege is reported", reported).await);
    backend.close().await;
    let log = logs.text();
    assert!(log.contains("simba_postgres"), "logs of the backend are captured");
    assert!(log.contains(" tokio_postgres::"), "logs of the driver are captured");
    for text in texts.iter().chain([&shown, &log]) {
        assert!(!text.contains(CANARY), "the password is in: {text}");
    }
}
