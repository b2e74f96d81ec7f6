//! Wrong input and setups: typed errors, and no hot loop.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::{connect, ctl, soon};
use simba_core::spi::{Backend as _, Claim, Operate as _};
use simba_core::{ContenderId, ErrorKind, Lease, MutexName, Simba};
use simba_etcd::{EtcdBackend, EtcdConfig};
use simba_servers::{Setup, shared};
use simba_test_support::http_server;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

#[tokio::test]
async fn connect_fails_without_members() {
    let config = EtcdConfig::new(Vec::<(String, u16)>::new());
    let error = EtcdBackend::connect(config).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid, "{error:?}");
    assert!(error.to_string().contains("name at least one"), "no fix: {error}");
}

#[tokio::test]
async fn a_server_of_another_kind_is_reported() {
    let error = connect(&format!("etcd://{}", http_server().await)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("check the port"), "no fix: {error}");
}

/// Reads the frames of a connection up to a request.
async fn until_request(stream: &mut TcpStream) -> std::io::Result<()> {
    const HEADERS: u8 = 1;
    stream.read_exact(&mut [0; b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".len()]).await?;
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).await?;
        let length = usize::from(head[0]) << 16 | usize::from(head[1]) << 8 | usize::from(head[2]);
        stream.read_exact(&mut vec![0; length]).await?;
        if head[3] == HEADERS {
            return Ok(());
        }
    }
}

/// Memory for a message is reserved as soon as its length is known.
#[tokio::test]
async fn a_message_of_200_megabytes_is_refused_by_its_header() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut reply = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    // `:status: 200`, `content-type: application/grpc`, on the first stream.
    reply.extend([0, 0, 19, 1, 4, 0, 0, 0, 1, 0x88, 0x5f, 16]);
    reply.extend(b"application/grpc");
    // The length of a message, without the message.
    reply.extend([0, 0, 5, 0, 0, 0, 0, 0, 1, 0]);
    reply.extend(200_000_000_u32.to_be_bytes());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let reply = reply.clone();
            tokio::spawn(async move {
                until_request(&mut stream).await.unwrap();
                stream.write_all(&reply).await.unwrap();
                // The message is never sent, and the connection stays open.
                sleep(Duration::from_secs(60)).await;
            });
        }
    });
    let error = connect(&format!("etcd://{address}")).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "broken: the client waits for the message: {error}");
}

#[tokio::test]
async fn a_member_that_is_down_is_skipped() {
    let url = shared("SIMBA_TCK_ETCD").replacen("etcd://", "etcd://127.0.0.1:1,", 1);
    for _ in 0..4 {
        let simba = Simba::new(connect(&url).await.unwrap());
        simba.locker("members").lock().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_name_whose_keys_would_be_among_those_of_another_mutex_is_refused() {
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    let mutex = MutexName::legacy("a/b").unwrap();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
    let error = backend.open(claim).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(backend.read(&mutex).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_below_the_minimum_of_the_server_is_held_for_the_granted_time() {
    // The minimum is one and a half election timeouts, in whole seconds: nine.
    let setup =
        Setup::etcd().with_setting("--election-timeout=6000").with_setting("--heartbeat-interval=600");
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    let simba = Simba::new(connect(&server.url()).await.unwrap());
    let short = Lease::new(Duration::from_millis(3_200), Duration::from_millis(800)).unwrap();
    let locker = simba.locker("bounds").with_lease(short).with_patience(Duration::from_secs(30));
    let guard = locker.lock().await.unwrap();
    let held = guard.deadline() - guard.tenure().acquired_at();
    // On a busy machine up to half of it is over when the mutex is acquired.
    assert!(held > short.total() && held <= Duration::from_secs(9), "{held:?}");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_is_reported_and_contending_continues_once_it_has_space() {
    let setup = Setup::etcd().with_setting("--quota-backend-bytes=100000");
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    let simba = Simba::new(connect(&server.url()).await.unwrap());
    let value = "x".repeat(60_000);
    for at in 0..10 {
        // Repeated until the server refuses it.
        let mut command = common::etcdctl(&server.url());
        command.args(["put", &format!("filler-{at}"), &value]);
        tokio::task::spawn_blocking(move || drop(command.output())).await.unwrap();
    }
    let contention = simba.contend("full");
    contention.start().unwrap();
    // The error that names the fix. A call that timed out has another one.
    let reported = async {
        loop {
            let error = contention.last_error();
            if let Some(error) = error.filter(|error| error.to_string().contains("alarm disarm")) {
                return error;
            }
            sleep(Duration::from_millis(20)).await;
        }
    };
    let error = timeout(Duration::from_secs(30), reported).await.expect("broken: it is reported");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    // A server that pauses breaks the connection, and a probe on it.
    let probe = async {
        loop {
            match simba.operate().unwrap().probe().await {
                Ok(probe) => break probe,
                Err(error) => assert!(error.is_transient(), "broken: {error}"),
            }
        }
    };
    let probe = soon("a probe is answered", probe).await;
    let is_reported = probe.findings.iter().any(|finding| finding.problem.contains("NOSPACE"));
    assert!(is_reported, "broken: a probe reports it: {probe:?}");
    let url = server.url();
    ctl(&url, &["del", "--prefix", "filler-"]).await;
    let status = ctl(&url, &["endpoint", "status", "-w", "json"]).await;
    let revision = status.split("\"revision\":").nth(1).unwrap();
    let revision: String = revision.chars().take_while(char::is_ascii_digit).collect();
    ctl(&url, &["compact", &revision]).await;
    ctl(&url, &["defrag"]).await;
    ctl(&url, &["alarm", "disarm"]).await;
    timeout(Duration::from_secs(30), contention.acquired()).await.expect("broken: it is acquired").unwrap();
    contention.stop().await.unwrap();
}
