//! TLS and credentials.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::path::Path;
use std::time::Duration;

use common::login::{PASSWORD, guarded, open_to_all};
use common::peer::{contend, leads, long, sees, soon};
use common::{Etcd, connect, ctl, lease};
use simba_core::{ErrorKind, MutexName, Simba};
use simba_servers::{Certificates, Server, Setup, shared};
use simba_tck::{FaultProxy, Network as _, run_sample};
use tokio::time::{sleep, timeout};

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
    for (login, cure) in [("", "into the URL"), ("tck:wrong@", "password"), ("no:no@", "password")] {
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
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let simba = Simba::new(connect(&url).await.unwrap());
    let guard = simba.locker("again").lock().await.unwrap();
    for round in 0..3 {
        // Whoever has logged in as a user whose password is set is logged out.
        let words = ["--user", "root:root", "user", "passwd", "tck", "--interactive=false"];
        set_password(&server.url(), &words).await;
        simba.locker(format!("other-{round}")).lock().await.unwrap().release().await.unwrap();
    }
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// A token that has ended is replaced on the same connection: calls and watches of others go on.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_login_is_renewed_without_another_connection() {
    let server = guarded().await;
    let proxy = FaultProxy::start(server.address()).await.unwrap().for_http2();
    let simba =
        Simba::new(connect(&format!("etcd://tck:{PASSWORD}@{}/teams", proxy.address())).await.unwrap());
    let root = Simba::new(connect(&format!("etcd://root:root@{}/teams", server.address())).await.unwrap());
    for round in 0..3 {
        // A waiter opens the stream of watches before the login ends.
        let (before, after) = (format!("before-{round}"), format!("after-{round}"));
        let held = [root.locker(&*before).lock().await.unwrap(), root.locker(&*after).lock().await.unwrap()];
        let early = contend(&simba, &MutexName::new(before).unwrap(), long());
        sees(&early, &held[0].tenure()).await;
        let words = ["--user", "root:root", "user", "passwd", "tck", "--interactive=false"];
        set_password(&server.url(), &words).await;
        let late = contend(&simba, &MutexName::new(after).unwrap(), long());
        sees(&late, &held[1].tenure()).await;
        for guard in held {
            guard.release().await.unwrap();
        }
        // Their poll is far too long to explain it.
        leads(&early).await;
        leads(&late).await;
        early.stop().await.unwrap();
        late.stop().await.unwrap();
    }
    // A handle that only waits asks the server at times, and hears that its login has ended.
    let held = root.locker("quiet").lock().await.unwrap();
    let waiter = contend(&simba, &MutexName::new("quiet").unwrap(), long());
    sees(&waiter, &held.tenure()).await;
    let words = ["--user", "root:root", "user", "passwd", "tck", "--interactive=false"];
    set_password(&server.url(), &words).await;
    sleep(Duration::from_secs(8)).await;
    held.release().await.unwrap();
    leads(&waiter).await;
    assert_eq!(proxy.accepted(), 1, "broken: the login is renewed on the same connection");
}

/// It is read from the standard input.
async fn set_password(url: &str, words: &[&str]) {
    use std::io::Write as _;
    use std::process::Stdio;
    let mut command = common::etcdctl(url);
    command.args(words).stdin(Stdio::piped()).stdout(Stdio::null());
    let set = move || {
        let mut process = command.spawn().unwrap();
        writeln!(process.stdin.take().unwrap(), "{PASSWORD}").unwrap();
        assert!(process.wait().unwrap().success());
    };
    tokio::task::spawn_blocking(set).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn whoever_has_credentials_uses_them_once_they_are_asked_for() {
    let server = open_to_all().await;
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let simba = Simba::new(connect(&url).await.unwrap());
    let guard = simba.locker("before").lock().await.unwrap();
    ctl(&server.url(), &["auth", "enable"]).await;
    simba.locker("after").lock().await.unwrap().release().await.unwrap();
    assert!(guard.is_held());
    guard.release().await.unwrap();
}

/// The holder has lost by its deadline; what it has at the store ends too, though it cannot delete it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_right_that_is_taken_away_is_told_and_keeps_nobody_out_for_long() {
    let server = guarded().await;
    let url = format!("etcd://tck:{PASSWORD}@{}/teams", server.address());
    let (backend, network) = Etcd::at(url).proxied().await;
    let simba = Simba::new(backend);
    let held = simba.locker("denied").with_lease(lease()).lock().await.unwrap();
    ctl(&server.url(), &["--user", "root:root", "user", "revoke-role", "tck", "simba"]).await;
    soon("a holder without rights has lost", held.tenure().lost()).await;
    let root = Simba::new(connect(&format!("etcd://root:root@{}/teams", server.address())).await.unwrap());
    let other = timeout(6 * lease().total(), root.locker("denied").with_lease(lease()).lock()).await;
    other.expect("broken: it keeps nobody out for long").unwrap().release().await.unwrap();
    let contention = simba.contend("denied");
    contention.start().unwrap();
    soon("a contender without rights is told", async {
        while contention.last_error().is_none() {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let error = contention.last_error().unwrap();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    let before = network.requests();
    sleep(Duration::from_secs(2)).await;
    let asked = network.requests() - before;
    assert!(asked <= 40, "broken: no hot loop, but {asked} requests in two seconds");
}
