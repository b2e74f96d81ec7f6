//! What a person got wrong: typed errors, and no hot loop.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::Zookeeper;
use common::raw::Raw;
use simba_core::{Backend as _, ContenderId, ErrorKind, Lease, Operate as _, Result, Simba};
use simba_servers::{Setup, shared};
use simba_tck::Network as _;
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};

async fn connect(url: &str) -> Result<ZookeeperBackend> {
    ZookeeperBackend::connect(ZookeeperConfig::from_url(&url.parse()?)?).await
}

fn address() -> String {
    shared("SIMBA_TCK_ZOOKEEPER").strip_prefix("zookeeper://").unwrap().to_owned()
}

#[tokio::test]
async fn a_chroot_that_is_not_there_is_told_at_once() {
    let error = connect(&format!("zookeeper://{}/no/such/chroot", address())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("/no/such/chroot"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chroot_that_goes_away_is_told_too() {
    let chroot = format!("/gone-{}", fastrand::u32(..));
    let by_hand = |act: fn(&mut Raw, &str)| {
        let chroot = chroot.clone();
        tokio::task::spawn_blocking(move || act(&mut Raw::connect(&*address()), &chroot))
    };
    by_hand(|raw, chroot| assert_eq!(raw.create(chroot), 0)).await.unwrap();
    let simba = Simba::new(connect(&format!("zookeeper://{}{chroot}", address())).await.unwrap());
    by_hand(|raw, chroot| assert_eq!(raw.delete(chroot), 0)).await.unwrap();
    let error = simba.locker("orders").lock().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error:?}");
}

#[tokio::test]
async fn a_server_of_another_kind_is_told() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            tokio::spawn(async move {
                let _ = stream.read(&mut [0; 64]).await;
                let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await;
                sleep(Duration::from_secs(1)).await;
            });
        }
    });
    let error = connect(&format!("zookeeper://{address}")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Protocol, "{error:?}");
}

/// Grants a session to everybody. Answers the first connection, and closes all others at once.
async fn server_that_hangs_up(connections: Arc<AtomicUsize>) -> SocketAddr {
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
async fn a_server_that_grants_and_hangs_up_sees_few_connections() {
    let connections = Arc::new(AtomicUsize::new(0));
    let address = server_that_hangs_up(Arc::clone(&connections)).await;
    let simba = Simba::new(connect(&format!("zookeeper://{address}")).await.unwrap());
    let contention = simba.contend("orders");
    contention.start().unwrap();
    sleep(Duration::from_secs(3)).await;
    let asked = connections.load(Ordering::SeqCst);
    assert!((3..30).contains(&asked), "broken: {asked} connections in three seconds");
}

#[tokio::test]
async fn nobody_there_and_nobody_who_answers_are_out_of_reach() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = listener.local_addr().unwrap();
    for address in ["127.0.0.1:1".to_owned(), silent.to_string(), "no-such-host.invalid".to_owned()] {
        let url = format!("zookeeper://{address}");
        let error = timeout(Duration::from_secs(20), connect(&url)).await.expect("it ends").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_rights_the_server_is_asked_seldom() {
    let _ = Zookeeper::as_least();
    let (backend, network) = Zookeeper::at(format!("zookeeper://{}/least-rights", address())).proxied().await;
    let simba = Simba::new(backend);
    let contention = simba.contend("denied");
    contention.start().unwrap();
    sleep(Duration::from_secs(1)).await;
    assert_eq!(contention.last_error().unwrap().kind(), ErrorKind::Denied);
    let before = network.requests();
    sleep(Duration::from_secs(2)).await;
    let asked = network.requests() - before;
    assert!(asked <= 20, "broken: no hot loop, but {asked} requests in two seconds");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_child_counts_as_a_contender() {
    let mutex = format!("foreign-{}", fastrand::u32(..));
    let path = format!("/simba/{mutex}");
    let (backend, network) = Zookeeper::single().proxied().await;
    let simba = Simba::new(backend);
    simba.locker(&*mutex).lock().await.unwrap().release().await.unwrap();
    let by_hand = |child: &str, delete: bool| {
        let (path, child) = (path.clone(), format!("{path}/{child}"));
        tokio::task::spawn_blocking(move || {
            let mut raw = Raw::connect(&*address());
            raw.create("/simba");
            raw.create(&path);
            if delete { raw.delete(&child) } else { raw.create(&child) }
        })
    };
    // After all numbers: in nobody's way.
    assert_eq!(by_hand("zebra", false).await.unwrap(), 0);
    let guard = simba.locker(&*mutex).lock().await.unwrap();
    guard.release().await.unwrap();
    // Before all numbers: it holds the mutex, as it does for every peer.
    assert_eq!(by_hand("#first", false).await.unwrap(), 0);
    let locker = simba.locker(&*mutex);
    assert!(locker.try_lock().await.unwrap().is_none());
    assert_eq!(locker.last_holder().id.as_ref().map(ContenderId::as_str), Some("#first"));
    let contention = simba.contend(&*mutex);
    contention.start().unwrap();
    sleep(Duration::from_millis(500)).await;
    let before = network.requests();
    sleep(Duration::from_secs(2)).await;
    let asked = network.requests() - before;
    assert!(asked <= 20, "broken: no hot loop, but {asked} requests in two seconds");
    assert_eq!(by_hand("#first", true).await.unwrap(), 0);
    let led = timeout(Duration::from_secs(5), contention.acquired()).await;
    assert!(led.expect("broken: it leads once the foreign child is gone").is_ok());
    contention.stop().await.unwrap();
    by_hand("zebra", true).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_outside_the_server_s_bounds_is_held_by_what_it_grants() {
    let bounds = "minSessionTimeout=6000\nmaxSessionTimeout=9000";
    let server = Setup::zookeeper().with_setting(bounds).start().unwrap();
    let simba = Simba::new(connect(&server.url()).await.unwrap());
    let short = Lease::new(Duration::from_secs(2), Duration::from_secs(1)).unwrap();
    for (lease, granted) in [(short, 6_000), (Lease::default(), 9_000)] {
        let guard = simba.locker("bounds").with_lease(lease).lock().await.unwrap();
        let held = guard.deadline() - guard.tenure().acquired_at();
        let most = Duration::from_millis(granted) / 3 * 2;
        assert!(held <= most && held >= most / 2, "{held:?} for a session of {granted} ms");
        // Renewed in time, by what was granted.
        sleep(Duration::from_millis(granted)).await;
        assert!(guard.is_held(), "broken: a lease outside the bounds is renewed in time");
        guard.release().await.unwrap();
    }
    let probe = simba.operate().unwrap().probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.problem.contains("9s")), "{probe:?}");
}

#[tokio::test]
async fn a_closed_backend_says_so() {
    let backend = connect(&shared("SIMBA_TCK_ZOOKEEPER")).await.unwrap();
    backend.close().await;
    assert_eq!(backend.list().await.unwrap_err().kind(), ErrorKind::Closed);
}
