//! Wrong settings and foreign servers: typed errors, and no hot loop.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::peers::{in_time, long};
use common::raw::Raw;
use common::{Zookeeper, as_least, connect};
use simba_core::{ContenderId, ErrorKind, Lease, Simba};
use simba_servers::{Setup, shared};
use simba_tck::{Network as _, Proxies};
use simba_test_support::http_server;
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::{Instant, sleep};

fn address() -> String {
    shared("SIMBA_TCK_ZOOKEEPER").strip_prefix("zookeeper://").unwrap().to_owned()
}

#[tokio::test]
async fn connect_fails_without_servers() {
    let config = ZookeeperConfig::new(Vec::<(String, u16)>::new());
    let error = ZookeeperBackend::connect(config).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    assert!(error.to_string().contains("name at least one"), "no fix: {error}");
}

#[tokio::test]
async fn connect_fails_if_the_chroot_does_not_exist() {
    let error = connect(&format!("zookeeper://{}/no/such/chroot", address())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("/no/such/chroot"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lock_fails_if_the_chroot_was_deleted() {
    let chroot = format!("/gone-{}", fastrand::u32(..));
    let with_raw = |act: fn(&mut Raw, &str)| {
        let chroot = chroot.clone();
        tokio::task::spawn_blocking(move || act(&mut Raw::connect(&*address()), &chroot))
    };
    with_raw(|raw, chroot| assert_eq!(raw.create(chroot), 0)).await.unwrap();
    let simba = Simba::new(connect(&format!("zookeeper://{}{chroot}", address())).await.unwrap());
    with_raw(|raw, chroot| assert_eq!(raw.delete(chroot), 0)).await.unwrap();
    let error = simba.locker("orders").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error:?}");
}

#[tokio::test]
async fn a_server_that_is_not_zookeeper_is_reported() {
    let error = connect(&format!("zookeeper://{}", http_server().await)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error:?}");
}

/// Starts a server that grants a session to every client. It answers the first connection, and closes all others.
async fn server_that_closes_connections(connections: Arc<AtomicUsize>) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let first = connections.fetch_add(1, Ordering::SeqCst) == 0;
            tokio::spawn(async move {
                let mut granted = vec![0, 0, 0, 36, 0, 0, 0, 0];
                granted.extend(10_000_i32.to_be_bytes());
                granted.extend(7_i64.to_be_bytes());
                granted.extend([0, 0, 0, 16]);
                granted.extend([1; 16]);
                let _ = stream.read(&mut [0; 64]).await;
                let _ = stream.write_all(&granted).await;
                let mut request = [0; 256];
                while first && matches!(stream.read(&mut request).await, Ok(1..)) {
                    let mut done = vec![0, 0, 0, 16];
                    done.extend(&request[4..8]);
                    done.extend([0; 12]);
                    let _ = stream.write_all(&done).await;
                }
            });
        }
    });
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_grants_and_closes_gets_few_connections() {
    let connections = Arc::new(AtomicUsize::new(0));
    let address = server_that_closes_connections(Arc::clone(&connections)).await;
    let simba = Simba::new(connect(&format!("zookeeper://{address}")).await.unwrap());
    let contention = simba.contend("orders");
    contention.start().unwrap();
    in_time("a server that closes connections is tried again", async {
        while connections.load(Ordering::SeqCst) < 3 {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    let before = connections.load(Ordering::SeqCst);
    sleep(Duration::from_secs(3)).await;
    let opened = connections.load(Ordering::SeqCst) - before;
    assert!(opened < 30, "broken: {opened} connections in three seconds");
}

/// Checks that at most ten requests per second are sent.
async fn sends_few_requests(network: &Proxies) {
    let (began, before) = (Instant::now(), network.requests());
    sleep(Duration::from_secs(2)).await;
    // The sleep may have taken longer.
    let (sent, time) = (network.requests() - before, began.elapsed());
    let most = 10.0 * time.as_secs_f64();
    assert!(sent as f64 <= most, "broken: no hot loop, but {sent} requests in {time:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_rights_few_requests_are_sent() {
    let _ = as_least();
    let (backend, network) = Zookeeper::at(format!("zookeeper://{}/least-rights", address())).proxied().await;
    let simba = Simba::new(backend);
    let contention = simba.contend("denied");
    contention.start().unwrap();
    in_time("a contender without rights gets an error", async {
        while contention.last_error().is_none_or(|error| error.kind() != ErrorKind::Denied) {
            sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    sends_few_requests(&network).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_child_counts_as_a_contender() {
    let mutex = format!("foreign-{}", fastrand::u32(..));
    let path = format!("/simba/{mutex}");
    let (backend, network) = Zookeeper::single().proxied().await;
    let simba = Simba::new(backend);
    let with_raw = |child: &str, delete: bool| {
        let child = format!("{path}/{child}");
        tokio::task::spawn_blocking(move || {
            let mut raw = Raw::connect(&*address());
            if delete { raw.delete(&child) } else { raw.create(&child) }
        })
    };
    // The server deletes the node of a mutex without children. So the first child is created while the mutex is held.
    let guard = simba.locker(&*mutex).lock().await.unwrap();
    // Sorts after all numbers, so it does not block the mutex.
    assert_eq!(with_raw("zebra", false).await.unwrap(), 0);
    guard.release().await.unwrap();
    let guard = simba.locker(&*mutex).lock().await.unwrap();
    guard.release().await.unwrap();
    // Sorts before all numbers, so it holds the mutex, as it does for Curator.
    assert_eq!(with_raw("#first", false).await.unwrap(), 0);
    let locker = simba.locker(&*mutex);
    assert!(locker.try_lock().await.unwrap().is_none());
    assert_eq!(locker.last_holder().id.as_ref().map(ContenderId::as_str), Some("#first"));
    // The poll interval is too long to explain the acquisition.
    let contention = simba.contend(&*mutex).with_lease(long());
    contention.start().unwrap();
    in_time("a waiter observes the foreign child", async {
        while contention.owner().id.as_ref().map(ContenderId::as_str) != Some("#first") {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    sends_few_requests(&network).await;
    assert_eq!(with_raw("#first", true).await.unwrap(), 0);
    in_time("the waiter acquires once the foreign child is deleted", contention.acquired()).await.unwrap();
    contention.stop().await.unwrap();
    with_raw("zebra", true).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_outside_the_bounds_lasts_as_long_as_the_server_grants() {
    let bounds = "minSessionTimeout=9000\nmaxSessionTimeout=15000";
    let server = Setup::zookeeper().with_setting(bounds).start().unwrap();
    let simba = Simba::new(connect(&server.url()).await.unwrap());
    let short = Lease::new(Duration::from_secs(2), Duration::from_secs(1)).unwrap();
    for (lease, granted) in [(Lease::default(), 15_000), (short, 9_000)] {
        let locker = simba.locker("bounds").with_lease(lease).with_patience(Duration::from_secs(30));
        let guard = locker.lock().await.unwrap();
        let deadline = guard.deadline();
        let held = deadline - guard.tenure().acquired_at();
        let most = Duration::from_millis(granted) / 3 * 2;
        assert!(held <= most && held >= most / 2, "{held:?} for a session of {granted} ms");
        // The renewal is due in time for the granted timeout.
        in_time("a lease outside the bounds is renewed", async {
            while guard.is_held() && guard.deadline() <= deadline {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        assert!(guard.is_held(), "broken: a lease outside the bounds is renewed in time");
        guard.release().await.unwrap();
    }
    let probe = simba.operate().unwrap().probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.problem.contains("15s")), "{probe:?}");
}
