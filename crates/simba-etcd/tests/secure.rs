//! TLS and credentials.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::path::Path;
use std::time::Duration;

use common::login::{PASSWORD, server_with_auth, server_without_auth};
use common::{Etcd, connect, contend, ctl, leads, lease, long, sees, soon};
use simba_core::{ErrorKind, MutexName, Simba};
use simba_etcd::{EtcdBackend, EtcdConfig};
use simba_servers::{Certificates, Server, Setup, shared};
use simba_tck::{FaultProxy, Network as _, run_sample};
use simba_test_support::follows_password_file;
use tokio::time::{Instant, sleep, timeout};

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
async fn the_suite_runs_over_tls() {
    let server = tls_server(&[]).await;
    let (port, ca) = (server.address().port(), tls_file("ca.pem"));
    run_sample(&Etcd::at(format!("etcds://localhost:{port}?tls-ca={ca}"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_66_a_server_without_a_valid_certificate_is_refused() {
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
    assert_eq!(unknown, Err(ErrorKind::Config), "not signed by a public authority");
    // The name and the authority are checked independently.
    assert_eq!(kind(format!("etcds://127.0.0.1:{port}?tls-ca={ca}&tls=ca")).await, Ok(()));
    assert_eq!(kind(format!("etcds://127.0.0.1:{port}?tls-ca={ca}&tls-name=localhost")).await, Ok(()));
    assert_eq!(kind(format!("etcds://127.0.0.1:{port}?tls=nothing")).await, Ok(()));
    // A plain connection to a TLS server fails, and TLS to a plain one.
    let plain = kind(format!("etcd://localhost:{port}")).await;
    assert_eq!(plain, Err(ErrorKind::Unavailable), "a server with TLS");
    let plain = shared("SIMBA_TCK_ETCD").replacen("etcd", "etcds", 1);
    let error = connect(&format!("{plain}?tls=nothing")).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Config | ErrorKind::Unavailable), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_66_a_client_certificate_is_sent_to_a_server_that_requires_it() {
    let server = tls_server(&["--client-cert-auth", "--trusted-ca-file=ca.pem"]).await;
    let (port, ca) = (server.address().port(), tls_file("ca.pem"));
    let (certificate, key) = (tls_file("client.pem"), tls_file("client.key"));
    let url = format!("etcds://localhost:{port}?tls-ca={ca}");
    let simba = Simba::new(connect(&format!("{url}&tls-cert={certificate}&tls-key={key}")).await.unwrap());
    simba.locker("certified").lock().await.unwrap().release().await.unwrap();
    assert!(connect(&url).await.is_err(), "broken: a client without a certificate is refused");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_the_suite_runs_with_the_documented_permissions() {
    let server = server_with_auth().await;
    let address = server.address();
    run_sample(&Etcd::at(format!("etcd://tck:{PASSWORD}@{address}/teams"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_a_user_without_permissions_is_denied() {
    let server = server_with_auth().await;
    let address = server.address();
    for (login, fix) in [("", "into the URL"), ("tck:wrong@", "password"), ("no:no@", "password")] {
        let error = connect(&format!("etcd://{login}{address}/teams")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(error.to_string().contains(fix), "no fix: {error}");
    }
    let error = connect(&format!("etcd://tck:{PASSWORD}@{address}/elsewhere")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("readwrite"), "no fix: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_expired_login_is_repeated() {
    let server = server_with_auth().await;
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let simba = Simba::new(connect(&url).await.unwrap());
    let guard = simba.locker("again").lock().await.unwrap();
    for round in 0..3 {
        // Setting a password ends the logins of its user.
        set_password(&server.url(), PASSWORD).await;
        simba.locker(format!("other-{round}")).lock().await.unwrap().release().await.unwrap();
    }
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// An expired token is replaced on the same connection: other calls and watches continue.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_is_renewed_without_another_connection() {
    let server = server_with_auth().await;
    let proxy = FaultProxy::start(server.address()).await.unwrap().for_http2();
    let simba =
        Simba::new(connect(&format!("etcd://tck:{PASSWORD}@{}/teams", proxy.address())).await.unwrap());
    let root = Simba::new(connect(&format!("etcd://root:root@{}/teams", server.address())).await.unwrap());
    for round in 0..3 {
        // A waiter opens the stream of watches before the login expires.
        let (before, after) = (format!("before-{round}"), format!("after-{round}"));
        let held = [root.locker(&*before).lock().await.unwrap(), root.locker(&*after).lock().await.unwrap()];
        let first = contend(&simba, &MutexName::new(before).unwrap(), long());
        sees(&first, &held[0].tenure()).await;
        set_password(&server.url(), PASSWORD).await;
        let second = contend(&simba, &MutexName::new(after).unwrap(), long());
        sees(&second, &held[1].tenure()).await;
        for guard in held {
            guard.release().await.unwrap();
        }
        // Woken by a watch: the poll interval is longer than the limit.
        leads(&first).await;
        leads(&second).await;
        first.stop().await.unwrap();
        second.stop().await.unwrap();
    }
    // A handle with nothing but a waiter sends health checks, and learns from them that its login has expired.
    let held = root.locker("quiet").lock().await.unwrap();
    let waiter = contend(&simba, &MutexName::new("quiet").unwrap(), long());
    sees(&waiter, &held.tenure()).await;
    set_password(&server.url(), PASSWORD).await;
    // The health check, the login, and the next call of the waiter.
    let expected = proxy.requests() + 3;
    soon("a waiter sends a health check", proxy.until(|counts| counts.requests >= expected)).await;
    held.release().await.unwrap();
    leads(&waiter).await;
    assert_eq!(proxy.accepted(), 1, "broken: the login is renewed on the same connection");
}

/// Runs `etcdctl`, which reads the password from its standard input.
async fn set_password(url: &str, password: &'static str) {
    use std::io::Write as _;
    use std::process::Stdio;
    let mut command = common::etcdctl(url);
    command.args(["--user", "root:root", "user", "passwd", "tck", "--interactive=false"]);
    command.stdin(Stdio::piped()).stdout(Stdio::null());
    let set = move || {
        let mut process = command.spawn().unwrap();
        writeln!(process.stdin.take().unwrap(), "{password}").unwrap();
        assert!(process.wait().unwrap().success());
    };
    tokio::task::spawn_blocking(set).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn credentials_are_used_once_the_server_requires_them() {
    let server = server_without_auth().await;
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let simba = Simba::new(connect(&url).await.unwrap());
    let guard = simba.locker("before").lock().await.unwrap();
    ctl(&server.url(), &["auth", "enable"]).await;
    simba.locker("after").lock().await.unwrap().release().await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// The holder loses at its deadline. Its key is deleted too, though the holder has no permission to do so.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_revoked_permission_is_reported_and_the_mutex_becomes_free() {
    let server = server_with_auth().await;
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let (backend, network) = Etcd::at(url).proxied().await;
    let simba = Simba::new(backend);
    let held = simba.locker("denied").with_lease(lease()).lock().await.unwrap();
    ctl(&server.url(), &["--user", "root:root", "user", "revoke-role", "tck", "simba"]).await;
    soon("a holder without permissions has lost", held.tenure().lost()).await;
    let root = Simba::new(connect(&format!("etcd://root:root@{}/teams", server.address())).await.unwrap());
    let other = timeout(6 * lease().total(), root.locker("denied").with_lease(lease()).lock()).await;
    other.expect("broken: the mutex becomes free").unwrap().release().await.unwrap();
    let contention = simba.contend("denied");
    contention.start().unwrap();
    soon("a contender without permissions gets an error", async {
        while contention.last_error().is_none_or(|error| error.kind() != ErrorKind::Denied) {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let (began, before) = (Instant::now(), network.requests());
    sleep(Duration::from_secs(2)).await;
    // The sleep may have taken longer.
    let (requests, time) = (network.requests() - before, began.elapsed());
    let max = 20.0 * time.as_secs_f64();
    assert!(requests as f64 <= max, "broken: no hot loop, but {requests} requests in {time:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_password_file_is_read_at_every_login() {
    let server = server_with_auth().await;
    let admin = server.url();
    let change = |password: &'static str| {
        let admin = admin.clone();
        async move { set_password(&admin, password).await }
    };
    let connect = |url| EtcdBackend::connect(EtcdConfig::from_url(&url).unwrap());
    follows_password_file(server.address(), |address| format!("etcd://tck@{address}/teams"), change, connect)
        .await;
}
