//! TLS, credentials, and what must never be told.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{Etcd, connect, ctl};
use simba_core::{Error, ErrorKind, Simba};
use simba_servers::{Certificates, Server, Setup, shared};
use simba_tck::{Network as _, run_sample};
use tokio::time::sleep;

fn tls_file(name: &str) -> String {
    Path::new(&shared("SIMBA_TCK_TLS")).join(name).display().to_string()
}

async fn tls_server(settings: &'static [&'static str]) -> Server {
    let start = move || {
        let certificates = Certificates::create(Path::new(&shared("SIMBA_TCK_TLS"))).unwrap();
        let setup = settings.iter().fold(Setup::etcd(), |setup, line| setup.with_setting(*line));
        setup.with_tls(&certificates).start().unwrap()
    };
    tokio::task::spawn_blocking(start).await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kit_runs_over_tls() {
    let server = tls_server(&[]).await;
    let (port, ca) = (server.address().port(), tls_file("ca.pem"));
    run_sample(&Etcd::at(format!("etcds://localhost:{port}?tls-ca={ca}"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_66_whom_the_certificate_does_not_prove_is_refused() {
    let server = tls_server(&[]).await;
    let port = server.address().port();
    let (ca, other) = (tls_file("ca.pem"), tls_file("other-ca.pem"));
    let kind = async |url: String| connect(&url).await.map(drop).map_err(|error| error.kind());
    assert_eq!(kind(format!("etcds://localhost:{port}?tls-ca={ca}")).await, Ok(()));
    let wrong_ca = kind(format!("etcds://localhost:{port}?tls-ca={other}")).await;
    assert_eq!(wrong_ca, Err(ErrorKind::Config), "the wrong authority");
    let wrong_host = format!("etcds://127.0.0.1:{port}?tls-ca={ca}");
    assert_eq!(kind(wrong_host).await, Err(ErrorKind::Config), "the wrong host");
    let unknown = kind(format!("etcds://localhost:{port}")).await;
    assert_eq!(unknown, Err(ErrorKind::Config), "no public authority knows it");
    // The name and the authority can be told apart from each other.
    assert_eq!(kind(format!("etcds://127.0.0.1:{port}?tls-ca={ca}&tls=ca")).await, Ok(()));
    assert_eq!(kind(format!("etcds://127.0.0.1:{port}?tls-ca={ca}&tls-name=localhost")).await, Ok(()));
    assert_eq!(kind(format!("etcds://127.0.0.1:{port}?tls=nothing")).await, Ok(()));
    // And it takes nothing else.
    let plain = kind(format!("etcd://localhost:{port}")).await;
    assert_eq!(plain, Err(ErrorKind::Unavailable), "a server with TLS");
    let plain = shared("SIMBA_TCK_ETCD").replacen("etcd", "etcds", 1);
    let error = connect(&format!("{plain}?tls=nothing")).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Config | ErrorKind::Unavailable), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_66_a_server_that_wants_a_certificate_gets_it() {
    let server = tls_server(&["--client-cert-auth", "--trusted-ca-file=ca.pem"]).await;
    let (port, ca) = (server.address().port(), tls_file("ca.pem"));
    let (certificate, key) = (tls_file("client.pem"), tls_file("client.key"));
    let url = format!("etcds://localhost:{port}?tls-ca={ca}");
    let simba = Simba::new(connect(&format!("{url}&tls-cert={certificate}&tls-key={key}")).await.unwrap());
    simba.locker("certified").lock().await.unwrap().release().await.unwrap();
    assert!(connect(&url).await.is_err(), "broken: nobody without one gets in");
}

const PASSWORD: &str = "canary-etcd";

/// A server that lets nobody in without a password, and a user with no more rights than it takes, under a prefix.
async fn guarded() -> Server {
    let server = tokio::task::spawn_blocking(|| Setup::etcd().start().unwrap()).await.unwrap();
    let url = server.url();
    for line in [
        "user add root:root",
        "user grant-role root root",
        "role add simba",
        "role grant-permission --prefix=true simba readwrite teams/simba/",
        &format!("user add tck:{PASSWORD}"),
        "user grant-role tck simba",
        "auth enable",
    ] {
        ctl(&url, &line.split(' ').collect::<Vec<_>>()).await;
    }
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_the_kit_runs_with_no_more_rights_than_it_takes() {
    let server = guarded().await;
    let address = server.address();
    run_sample(&Etcd::at(format!("etcd://tck:{PASSWORD}@{address}/teams"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_who_has_no_rights_is_denied() {
    let server = guarded().await;
    let address = server.address();
    for (login, cure) in [("", "the URL has none"), ("tck:wrong@", "password"), ("no:no@", "password")] {
        let error = connect(&format!("etcd://{login}{address}/teams")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(error.to_string().contains(cure), "no cure: {error}");
    }
    let error = connect(&format!("etcd://tck:{PASSWORD}@{address}/elsewhere")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("readwrite"), "no cure: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_that_has_ended_is_made_again() {
    let server = guarded().await;
    let (backend, _network) =
        Etcd::at(format!("etcd://tck:{PASSWORD}@{}/teams", server.address())).proxied().await;
    let simba = Simba::new(backend);
    let guard = simba.locker("again").lock().await.unwrap();
    // A change of rights ends all that was read under the old ones; a restart forgets all logins.
    let server = tokio::task::spawn_blocking(move || {
        let mut server = server;
        server.restart().unwrap();
        server
    })
    .await
    .unwrap();
    simba.locker("other").lock().await.unwrap().release().await.unwrap();
    guard.release().await.unwrap();
    drop(server);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_that_is_taken_away_is_told_and_nobody_storms_the_server() {
    let server = guarded().await;
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let (backend, network) = Etcd::at(url).proxied().await;
    let simba = Simba::new(backend);
    ctl(&server.url(), &["--user", "root:root", "user", "revoke-role", "tck", "simba"]).await;
    let contention = simba.contend("denied");
    contention.start().unwrap();
    sleep(Duration::from_secs(2)).await;
    let error = contention.last_error().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    let before = network.requests();
    sleep(Duration::from_secs(2)).await;
    let asked = network.requests() - before;
    assert!(asked <= 40, "broken: no hot loop, but {asked} requests in two seconds");
}

/// All that is logged, as one text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn texts(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}

#[tokio::test]
async fn row_64_no_text_shows_the_password() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    // For all threads: what the others log meanwhile may not show it either.
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let server = guarded().await;
    let (guarded, plain) = (server.address(), shared("SIMBA_TCK_ETCD"));
    let plain = plain.strip_prefix("etcd://").unwrap();
    let mut shown = String::new();
    for url in [
        format!("etcd://tck:{PASSWORD}@{guarded}/teams"),
        format!("etcd://wrong:{PASSWORD}@{guarded}/teams"),
        format!("etcd://tck:{PASSWORD}@{guarded}/elsewhere"),
        format!("etcd://wrong:{PASSWORD}@{plain}"),
        format!("etcd://wrong:{PASSWORD}@127.0.0.1:1"),
        format!("etcds://wrong:{PASSWORD}@{plain}"),
        format!("etcd://wrong:{PASSWORD}@{plain}?auth=other"),
    ] {
        match connect(&url).await {
            Err(error) => shown += &texts(&error),
            Ok(backend) => {
                shown += &format!("{backend:?}");
                let simba = Simba::new(backend);
                let locked = simba.locker("secret").lock().await;
                shown += &locked.map_or_else(|error| texts(&error), |_| String::new());
                simba.shutdown().await;
            }
        }
    }
    let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(logged.contains("simba_"), "something was logged");
    assert!(!shown.contains(PASSWORD) && !logged.contains(PASSWORD));
}
