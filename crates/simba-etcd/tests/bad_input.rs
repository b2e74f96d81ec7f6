//! What a person got wrong: typed errors, and no hot loop.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::time::Duration;

use common::{connect, ctl};
use simba_core::{Backend as _, Claim, ContenderId, ErrorKind, Lease, MutexName, Operate as _, Simba};
use simba_servers::{Setup, shared};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{sleep, timeout};

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
    let error = connect(&format!("etcd://{address}")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("check the port"), "no cure: {error}");
}

/// Reads a connection's frames until a request has come.
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

/// Room for a message is reserved as soon as its length is known.
#[tokio::test]
async fn a_message_of_200_megabytes_is_refused_by_its_header() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let mut reply = vec![0, 0, 0, 4, 0, 0, 0, 0, 0];
    // `:status: 200`, `content-type: application/grpc`, on the first stream.
    reply.extend([0, 0, 19, 1, 4, 0, 0, 0, 1, 0x88, 0x5f, 16]);
    reply.extend(b"application/grpc");
    // The length of a message, and nothing more.
    reply.extend([0, 0, 5, 0, 0, 0, 0, 0, 1, 0]);
    reply.extend(200_000_000_u32.to_be_bytes());
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            let reply = reply.clone();
            tokio::spawn(async move {
                until_request(&mut stream).await.unwrap();
                stream.write_all(&reply).await.unwrap();
                // The message never comes, and the connection stays.
                sleep(Duration::from_secs(60)).await;
            });
        }
    });
    let error = connect(&format!("etcd://{address}")).await.unwrap_err();
    assert!(error.to_string().contains("too large"), "broken: it waits for the message: {error}");
}

#[tokio::test]
async fn nobody_there_and_nobody_who_answers_are_out_of_reach() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent = listener.local_addr().unwrap();
    for address in ["127.0.0.1:1".to_owned(), silent.to_string(), "no-such-host.invalid".to_owned()] {
        let url = format!("etcd://{address}");
        let error = timeout(Duration::from_secs(20), connect(&url)).await.expect("it ends").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    }
}

#[tokio::test]
async fn the_members_that_are_there_are_enough() {
    let url = shared("SIMBA_TCK_ETCD").replacen("etcd://", "etcd://127.0.0.1:1,", 1);
    for _ in 0..4 {
        let simba = Simba::new(connect(&url).await.unwrap());
        simba.locker("members").lock().await.unwrap().release().await.unwrap();
    }
}

#[tokio::test]
async fn a_name_whose_keys_lie_among_another_s_is_refused() {
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    let mutex = MutexName::legacy("a/b").unwrap();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
    let error = backend.open(claim).await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert_eq!(backend.read(&mutex).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_outside_the_server_s_bounds_is_held_by_what_it_grants() {
    // One and a half elections, in whole seconds, are the least.
    let setup =
        Setup::etcd().with_setting("--election-timeout=3000").with_setting("--heartbeat-interval=300");
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    let simba = Simba::new(connect(&server.url()).await.unwrap());
    let short = Lease::new(Duration::from_millis(100), Duration::from_millis(60)).unwrap();
    let guard = simba.locker("bounds").with_lease(short).lock().await.unwrap();
    let held = guard.deadline() - guard.tenure().acquired_at();
    assert!(held > Duration::from_secs(4) && held <= Duration::from_secs(5), "{held:?}");
    guard.release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_full_store_is_told_and_does_not_last() {
    let setup = Setup::etcd().with_setting("--quota-backend-bytes=100000");
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    let simba = Simba::new(connect(&server.url()).await.unwrap());
    let value = "x".repeat(60_000);
    for at in 0..10 {
        // Refused at last, which is what it is for.
        let mut command = common::etcdctl(&server.url());
        command.args(["put", &format!("filler-{at}"), &value]);
        tokio::task::spawn_blocking(move || drop(command.output())).await.unwrap();
    }
    let contention = simba.contend("full");
    contention.start().unwrap();
    let told = async {
        while contention.last_error().is_none() {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(Duration::from_secs(10), told).await.expect("broken: a full store is told");
    let error = contention.last_error().unwrap();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error:?}");
    assert!(error.to_string().contains("alarm disarm"), "no cure: {error}");
    let probe = simba.operate().unwrap().probe().await;
    assert!(probe.is_err() || !probe.unwrap().findings.is_empty(), "broken: a probe finds it");
    let url = server.url();
    ctl(&url, &["del", "--prefix", "filler-"]).await;
    let status = ctl(&url, &["endpoint", "status", "-w", "json"]).await;
    let revision = status.split("\"revision\":").nth(1).unwrap();
    let revision: String = revision.chars().take_while(char::is_ascii_digit).collect();
    ctl(&url, &["compact", &revision]).await;
    ctl(&url, &["defrag"]).await;
    ctl(&url, &["alarm", "disarm"]).await;
    timeout(Duration::from_secs(20), contention.acquired()).await.expect("broken: it goes on").unwrap();
    contention.stop().await.unwrap();
}

#[tokio::test]
async fn a_closed_backend_says_so() {
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    backend.close().await;
    assert_eq!(backend.list().await.unwrap_err().kind(), ErrorKind::Closed);
}
