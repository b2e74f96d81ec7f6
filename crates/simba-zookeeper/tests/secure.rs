//! TLS, credentials and rights.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::raw::Raw;
use common::sasl::{SASL_PASSWORD, sasl_server, write_users};
use common::{Zookeeper, as_least, connect};
use simba_core::{ErrorKind, Simba};
use simba_servers::{Certificates, Server, Setup, shared};
use simba_tck::run_sample;
use simba_test_support::follows_password_file;
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::time::timeout;

fn tls_file(name: &str) -> String {
    Path::new(&shared("SIMBA_TCK_TLS")).join(name).display().to_string()
}

/// Starts a server with TLS, and performs a handshake. On a busy machine the first handshake of a JVM takes longer than
/// the limit for a connection.
async fn tls_server() -> Server {
    let certificates = Certificates::create(Path::new(&shared("SIMBA_TCK_TLS"))).unwrap();
    let server = Setup::zookeeper().with_tls(&certificates).start().unwrap();
    let url = format!("zookeepers://127.0.0.1:{}?tls=nothing", server.address().port());
    let connected = async {
        while let Err(error) = connect(&url).await {
            assert!(error.is_transient(), "{error:?}");
        }
    };
    timeout(Duration::from_secs(60), connected).await.expect("broken: a server supports TLS");
    server
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kit_runs_over_tls() {
    let server = tls_server().await;
    let (port, ca) = (server.address().port(), tls_file("ca.pem"));
    run_sample(&Zookeeper::at(format!("zookeepers://localhost:{port}?tls-ca={ca}"))).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_66_a_server_with_a_wrong_certificate_is_rejected() {
    let server = tls_server().await;
    let port = server.address().port();
    let (ca, other) = (tls_file("ca.pem"), tls_file("other-ca.pem"));
    let kind = async |url: String| connect(&url).await.map(drop).map_err(|error| error.kind());
    assert_eq!(kind(format!("zookeepers://localhost:{port}?tls-ca={ca}")).await, Ok(()));
    let wrong_ca = kind(format!("zookeepers://localhost:{port}?tls-ca={other}")).await;
    assert_eq!(wrong_ca, Err(ErrorKind::Config), "the wrong authority");
    let wrong_host = format!("zookeepers://127.0.0.1:{port}?tls-ca={ca}");
    assert_eq!(kind(wrong_host).await, Err(ErrorKind::Config), "the wrong host");
    let error = connect(&format!("zookeepers://localhost:{port}?tls-ca={other}")).await.unwrap_err();
    assert!(error.to_string().contains("check its certificate"), "the error names the fix: {error}");
    let unknown = kind(format!("zookeepers://localhost:{port}")).await;
    assert_eq!(unknown, Err(ErrorKind::Config), "no public authority signed it");
    // The name and the authority can be verified separately.
    assert_eq!(kind(format!("zookeepers://127.0.0.1:{port}?tls-ca={ca}&tls=ca")).await, Ok(()));
    assert_eq!(kind(format!("zookeepers://127.0.0.1:{port}?tls-ca={ca}&tls-name=localhost")).await, Ok(()));
    assert_eq!(kind(format!("zookeepers://127.0.0.1:{port}?tls=nothing")).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_66_a_plain_server_is_rejected_if_tls_is_required() {
    let plain = shared("SIMBA_TCK_ZOOKEEPER");
    let address = plain.strip_prefix("zookeeper://").unwrap();
    let error = connect(&format!("zookeepers://{address}?tls=nothing")).await.unwrap_err();
    assert!(matches!(error.kind(), ErrorKind::Config | ErrorKind::Unavailable), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_kit_runs_with_sasl() {
    let dir = tempfile::tempdir().unwrap();
    let server = sasl_server(dir.path());
    let address = server.address();
    let url = format!("zookeeper://tck:{SASL_PASSWORD}@{address}?auth=sasl&acl=creator");
    run_sample(&Zookeeper::at(url)).await;
    let error = connect(&format!("zookeeper://{address}")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    assert!(error.to_string().contains("requires a login"), "the error names the fix: {error}");
    for wrong in ["tck:wrong", "nobody:wrong"] {
        let error = connect(&format!("zookeeper://{wrong}@{address}?auth=sasl")).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(
            error.to_string().contains("check the user and its password"),
            "the error names the fix: {error}"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_without_a_user_list_is_reported() {
    let plain = shared("SIMBA_TCK_ZOOKEEPER");
    let address = plain.strip_prefix("zookeeper://").unwrap();
    let error = connect(&format!("zookeeper://tck:any@{address}?auth=sasl")).await.unwrap_err();
    assert!(!error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("check"), "the error names the fix: {error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_65_a_user_without_rights_is_denied() {
    // The whole kit runs as a user with rights; see tck.rs.
    let _ = as_least();
    let url = shared("SIMBA_TCK_ZOOKEEPER");
    let address = url.strip_prefix("zookeeper://").unwrap();
    let owner = format!("zookeeper://tck:tck-password@{address}/least-rights?acl=creator");
    let owner = Simba::new(connect(&owner).await.unwrap());
    let _held = owner.locker("allowed").lock().await.unwrap();
    for login in ["", "tck:wrong@", "other:tck-password@"] {
        let simba = Simba::new(connect(&format!("zookeeper://{login}{address}/least-rights")).await.unwrap());
        let error = simba.locker("denied").lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
        assert!(error.to_string().contains("check the credentials"), "the error names the fix: {error}");
        let error = simba.operate().unwrap().list().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied, "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_with_the_creator_acl_are_closed_to_others() {
    let _ = as_least();
    let url = shared("SIMBA_TCK_ZOOKEEPER");
    let address = url.strip_prefix("zookeeper://").unwrap().to_owned();
    let owner = format!("zookeeper://tck:tck-password@{address}/least-rights?acl=creator");
    let simba = Simba::new(connect(&owner).await.unwrap());
    let guard = simba.locker("closed").lock().await.unwrap();
    let path = "/least-rights/simba/closed";
    let seen = tokio::task::spawn_blocking(move || Raw::connect(&*address).children(path)).await.unwrap();
    assert!(seen.is_empty(), "another client cannot list them");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_mutex_that_a_user_may_not_read_is_omitted_from_the_list() {
    let url = shared("SIMBA_TCK_ZOOKEEPER");
    let address = url.strip_prefix("zookeeper://").unwrap().to_owned();
    let chroot = format!("/mixed-rights-{}", fastrand::u32(..));
    let (at, path) = (address.clone(), chroot.clone());
    let created = tokio::task::spawn_blocking(move || Raw::connect(&*at).create(&path)).await.unwrap();
    assert_eq!(created, 0);
    let simba = Simba::new(connect(&format!("zookeeper://{address}{chroot}")).await.unwrap());
    let open = simba.locker("open").lock().await.unwrap();
    let owner = format!("zookeeper://tck:tck-password@{address}{chroot}?acl=creator");
    let owner = Simba::new(connect(&owner).await.unwrap());
    let closed = owner.locker("closed").lock().await.unwrap();
    let listed = async |simba: &Simba| {
        let records = simba.operate().unwrap().list().await.unwrap();
        records.into_iter().map(|record| record.mutex.to_string()).collect::<Vec<_>>()
    };
    assert_eq!(listed(&simba).await, ["open"]);
    assert_eq!(listed(&owner).await, ["closed", "open"]);
    closed.release().await.unwrap();
    open.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_password_file_is_read_at_every_connection() {
    let dir = tempfile::tempdir().unwrap();
    let server = Arc::new(Mutex::new(sasl_server(dir.path())));
    let address = server.lock().unwrap().address();
    let change = |password: &'static str| {
        let (server, users) = (Arc::clone(&server), dir.path().join("users"));
        let restart = move || {
            write_users(&users, password);
            server.lock().unwrap().restart().unwrap();
        };
        async { tokio::task::spawn_blocking(restart).await.unwrap() }
    };
    let connect = |url| ZookeeperBackend::connect(ZookeeperConfig::from_url(&url).unwrap());
    let url = |address| format!("zookeeper://tck@{address}?auth=sasl");
    follows_password_file(address, url, change, connect).await;
}
