//! What a server can do wrong, and what people get wrong: typed errors with a cure, no panic, no hot loop.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::resp::{self, Reply};
use common::{Encrypted, Store, lead, lease, long, name, simba, soon, until, wait, within};
use simba_core::{Error, ErrorKind, Lease, MutexName, Simba};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_tck::rounds;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

fn store() -> Store {
    Store::private(Setup::redis())
}

async fn refused(url: &str) -> Error {
    let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap();
    soon("a refusal is told", RedisBackend::connect(config)).await.expect_err("a refusal")
}

async fn open(address: SocketAddr) -> Simba {
    let config = RedisConfig::from_url(&format!("redis://{address}").parse().unwrap()).unwrap();
    simba(RedisBackend::connect(config).await.expect("a connection"), lease())
}

async fn error_of(simba: &Simba, mutex: &MutexName) -> Error {
    soon("an error is told", simba.locker(mutex.clone()).try_lock()).await.expect_err("an error")
}

#[tokio::test]
async fn a_wrong_password_is_denied() {
    let store = store();
    store.admin().admit();
    let error = refused(&format!("redis://{}:wrong@{}", common::USER, store.address)).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_eq!(store.admin().ask(&["CONFIG", "SET", "requirepass", "secret"]), Reply::Status("OK".into()));
    let error = refused(&format!("redis://{}", store.address)).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("login"), "{error}");
}

#[tokio::test]
async fn a_missing_right_is_denied() {
    let store = store();
    let mut admin = store.admin();
    admin.admit();
    admin.ask(&["ACL", "SETUSER", common::USER, "-evalsha"]);
    let simba = simba(store.backend_as_is().await, lease());
    let error = error_of(&simba, &name()).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("ACL"), "{error}");
}

#[tokio::test]
async fn a_wrong_database_is_told() {
    let store = store();
    let error = refused(&format!("redis://{}/99", store.address)).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("database"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_no_redis_is_told() {
    for greeting in ["HTTP/1.1 400 Bad Request\r\n\r\n", "SSH-2.0-OpenSSH_9\r\n"] {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                let _ = stream.write_all(greeting.as_bytes()).await;
                let _ = stream.read(&mut [0; 64]).await;
            }
        });
        let error = refused(&format!("redis://{address}")).await;
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
    }
}

#[tokio::test]
async fn a_server_that_says_nothing_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let error = refused(&format!("redis://{}", listener.local_addr().unwrap())).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
}

#[tokio::test]
async fn a_closed_port_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    assert_eq!(refused(&format!("redis://{address}")).await.kind(), ErrorKind::Unavailable);
    assert_eq!(refused("redis+unix:/nowhere/redis.sock").await.kind(), ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_part_of_a_cluster_is_told_from_a_server_alone() {
    let cluster = simba_servers::shared("SIMBA_TCK_REDIS_CLUSTER");
    let first = cluster.trim_start_matches("redis+cluster://").split(',').next().unwrap();
    let config = RedisConfig::from_url(&format!("redis://{first}").parse().unwrap()).unwrap();
    let simba = simba(RedisBackend::connect(config).await.unwrap(), lease());
    // One of many names is on another node.
    let mut errors = Vec::new();
    for _ in 0..20 {
        errors.extend(simba.locker(name()).try_lock().await.err());
    }
    let error = errors.first().expect("a name on another node");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("redis+cluster"), "{error}");
    let alone = refused(&format!("redis+cluster://{}", store().address)).await;
    assert!(!alone.is_transient() || alone.kind() == ErrorKind::Unavailable, "{alone}");
}

#[tokio::test]
async fn sentinels_that_watch_another_master_are_told() {
    let sentinels = simba_servers::shared("SIMBA_TCK_REDIS_SENTINEL").replace("/mymaster", "/other");
    let error = refused(&sentinels).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("`other`"), "{error}");
}

#[tokio::test]
async fn a_socket_of_the_file_system_works() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let _store = Store::private(Setup::redis().with_arg("--unixsocket").with_arg(&socket));
    let url = format!("redis+unix:{}?db=3", socket.display());
    let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap();
    let simba = simba(RedisBackend::connect(config).await.unwrap(), lease());
    simba.locker(name()).lock().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_34_a_server_that_cannot_serve_is_unavailable() {
    let store = store();
    let mut admin = store.admin();
    let simba = open(store.address).await;
    let mutex = name();
    admin.ask(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = error_of(&simba, &mutex).await;
    admin.ask(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(full.is_transient() && full.to_string().contains("maxmemory"), "{full}");

    admin.ask(&["CONFIG", "SET", "busy-reply-threshold", "1"]);
    let mut busy = store.admin();
    busy.send(&["EVAL", "while true do end", "0"]);
    let is_busy = |reply: Reply| matches!(reply, Reply::Error(words) if words.starts_with("BUSY"));
    until("the server is busy", || is_busy(admin.ask(&["PING"]))).await;
    let error = busy_error(&simba, &mutex).await;
    assert_eq!(admin.ask(&["SCRIPT", "KILL"]), Reply::Status("OK".into()));
    assert!(error.to_string().contains("SCRIPT KILL"), "{error}");
    until("the script ends", || !is_busy(admin.ask(&["PING"]))).await;

    assert_eq!(admin.ask(&["REPLICAOF", "127.0.0.1", "1"]), Reply::Status("OK".into()));
    let replica = error_of(&simba, &mutex).await;
    admin.ask(&["REPLICAOF", "NO", "ONE"]);
    assert!(replica.is_transient() && replica.to_string().contains("replica"), "{replica}");
    // All of it passes.
    let guard = soon("a server that serves again serves us", simba.locker(mutex).lock()).await;
    guard.unwrap().release().await.unwrap();
}

/// The server takes a moment to notice that it is busy.
async fn busy_error(simba: &Simba, mutex: &MutexName) -> Error {
    loop {
        let error = error_of(simba, mutex).await;
        assert!(error.is_transient(), "broken: a busy server is no final refusal: {error}");
        if error.to_string().contains("busy") {
            return error;
        }
    }
}

/// Starts a server that lets everyone in and answers one command always with the same reply; counts these.
async fn fake(name: &'static str, reply: impl Into<String>) -> (SocketAddr, Arc<AtomicUsize>) {
    let fixed = reply.into();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let calls = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&calls);
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let (calls, fixed) = (Arc::clone(&counted), fixed.clone());
            tokio::spawn(async move {
                let mut buffer = Vec::new();
                while stream.read_buf(&mut buffer).await.is_ok_and(|read| read > 0) {
                    while let Ok(Some((command, length))) = resp::parse(&buffer) {
                        buffer.drain(..length);
                        let reply = match command.array().and_then(|words| words[0].text()) {
                            Some(word) if word == name => {
                                calls.fetch_add(1, Ordering::SeqCst);
                                fixed.clone()
                            }
                            Some("SCRIPT") => format!("$40\r\n{}\r\n", "a".repeat(40)),
                            Some("INFO") => "$0\r\n\r\n".into(),
                            _ => "+OK\r\n".into(),
                        };
                        if stream.write_all(reply.as_bytes()).await.is_err() {
                            return;
                        }
                    }
                }
            });
        }
    });
    (address, calls)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_34_a_server_that_loads_or_has_lost_its_master_is_unavailable() {
    for words in ["LOADING Redis is loading the dataset in memory", "MASTERDOWN Link with MASTER is down"] {
        let (address, _) = fake("EVALSHA", format!("-{words}\r\n")).await;
        let error = error_of(&open(address).await, &name()).await;
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

/// A reply to `TIME` that no clock has must not end the task that keeps the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_time_beyond_all_bounds_leaves_the_connection_alone() {
    let number = "$20\r\n18446744073709551615\r\n";
    let (address, times) = fake("TIME", format!("*2\r\n{number}{number}")).await;
    let config = RedisConfig::from_url(&format!("redis://{address}?ping=50ms").parse().unwrap()).unwrap();
    let _backend = RedisBackend::connect(config).await.unwrap();
    until("the clock is read again", || times.load(Ordering::SeqCst) >= 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_refusal_is_tried_more_than_twice_a_second() {
    let refusals = ["NOPERM no", "WRONGTYPE no", "ERR something new", "MOVED 1 127.0.0.1:1"];
    for words in refusals {
        let (address, calls) = fake("EVALSHA", format!("-{words}\r\n")).await;
        let contention = open(address).await.contend(name());
        contention.start().unwrap();
        until("it is told", || contention.last_error().is_some()).await;
        let before = calls.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let tries = calls.load(Ordering::SeqCst) - before;
        assert!(tries <= 5, "broken: at most two tries a second, not {tries} in two, after {words}");
    }
}

/// How many scripts the server has run so far.
fn calls(admin: &mut common::Admin) -> i64 {
    let info = admin.text(&["INFO", "commandstats"]).unwrap_or_default();
    let count = |line: &str| line.split("calls=").nth(1)?.split(',').next()?.parse::<i64>().ok();
    info.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(count).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_36_a_key_that_is_not_ours_is_told_and_left_alone() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, Lease::default());
    let mutex = name();
    let key = format!("simba:{{{mutex}}}");
    let foreign: [&[&str]; 3] =
        [&["RPUSH", &key, "x"], &["SADD", &key, "x"], &["SET", &key, "a\nb", "PX", "60000"]];
    for words in foreign {
        admin.ask(words);
        let error = error_of(&simba, &mutex).await;
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(mutex.as_str()), "broken: it is named: {error}");
        assert_eq!(admin.int(&["EXISTS", &key]), 1, "broken: what is not ours is left alone");
        let contention = simba.contend(mutex.clone());
        contention.start().unwrap();
        until("it is told", || contention.last_error().is_some()).await;
        let before = calls(&mut admin);
        tokio::time::sleep(Duration::from_secs(2)).await;
        let tries = calls(&mut admin) - before;
        assert!(tries <= 5, "broken: at most two tries a second, not {tries} in two");
        admin.int(&["DEL", &key]);
        soon("it works once it is mended", contention.acquired()).await.unwrap();
        contention.stop().await.unwrap();
        admin.int(&["DEL", &key]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_36_a_key_without_an_end_is_looked_at_now_and_then() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, Lease::default());
    let mutex = name();
    admin.ask(&["SET", &format!("simba:{{{mutex}}}"), "7:7@stranger"]);
    let contention = simba.contend(mutex);
    contention.start().unwrap();
    until("its owner is named", || contention.owner().has_owner(simba.now())).await;
    // The look after the subscription is one more.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = calls(&mut admin);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let looks = calls(&mut admin) - before;
    assert!(looks <= 4, "broken: at most two looks a second, not {looks} in two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_values_beside_the_mutex_do_no_harm() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, lease());
    for fence in [
        "",
        "x",
        "-1 a 1 b",
        "99999999999999999999 ab 1 me",
        "1 zz 1 me",
        "18014398509481984 ab 1 me",
        "!",
        "!9",
        "!1 2 3",
        "!99999999999999 5 me",
        "!99999999999999999999 x y",
    ] {
        let mutex = name();
        admin.ask(&["SET", &format!("simba:{{{mutex}}}:fence"), fence]);
        admin.ask(&["ZADD", &format!("simba:{{{mutex}}}:contender"), "-inf", "", "0", "@@", "inf", "\u{0}"]);
        let guard = soon("it is acquired", simba.locker(mutex).lock()).await.unwrap();
        assert!(
            guard.token().get() > 1_700_000_000_000_000,
            "broken: a token is the store's time at the least"
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_59_poisoned_events_harm_nobody() {
    let store = store();
    let mut admin = store.admin();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    let mutex = name();
    let key = format!("simba:{{{mutex}}}");
    let (leader, tenure) = lead(&one, &mutex).await;
    let waiter = wait(&two, &mutex, &mut admin).await;
    let id = waiter.id().unwrap();
    let megabyte = "x".repeat(1 << 20);
    let poison =
        ["", "@@", "@@@@", "released", "released@@", "released@@x@", "acquired@@a@@b", "\0", &megabyte];
    for at in 0..rounds() as usize * 1000 {
        let words = poison[if at % 100 == 0 { poison.len() - 1 } else { at % (poison.len() - 1) }];
        admin.int(&["PUBLISH", &format!("{key}:{id}"), words]);
        admin.int(&["PUBLISH", &key, words]);
    }
    for dead in ["a@@b", "x@", "", "\u{1}", "}{", &"y".repeat(10_000)] {
        admin.int(&["ZADD", &format!("{key}:contender"), "0", dead]);
    }
    assert_eq!(tenure.loss(), None, "broken: poison takes nothing");
    leader.stop().await.unwrap();
    within(Duration::from_secs(5), "poison stops no hand-over", waiter.acquired()).await.unwrap();
}

#[tokio::test]
async fn row_66_only_the_right_server_is_talked_to() {
    let store = Encrypted::shared();
    store.0.admin().admit();
    let (address, tls) = (store.address(), simba_servers::shared("SIMBA_TCK_TLS"));
    let connect = |url: String| async move {
        let config = RedisConfig::from_url(&url.parse().unwrap()).unwrap();
        soon("a refusal is told", RedisBackend::connect(config)).await
    };
    let (port, user) = (address.port(), format!("{}:{}", common::USER, common::PASSWORD));
    let right = format!("rediss://{user}@localhost:{port}?tls_ca={tls}/ca.pem");
    connect(right.clone()).await.expect("the right server is talked to");
    let identity = format!("{right}&tls_cert={tls}/client.pem&tls_key={tls}/client.key");
    connect(identity).await.expect("a client with a certificate is let in");
    let wrong = [
        ("a stranger's authority", format!("rediss://{user}@localhost:{port}?tls_ca={tls}/other-ca.pem")),
        ("no authority that is known", format!("rediss://{user}@localhost:{port}")),
        ("another host", format!("rediss://{user}@127.0.0.1:{port}?tls_ca={tls}/ca.pem")),
        ("a name that is not its", format!("{right}&tls_server_name=elsewhere")),
        ("a server without TLS", format!("rediss://{user}@{}?tls_ca={tls}/ca.pem", store.0.address)),
    ];
    for (what, url) in wrong {
        let error = connect(url).await.expect_err(what);
        assert!(
            matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unavailable),
            "broken: {what} is refused, not {error:?}"
        );
    }
    // Plain text to a port that wants TLS.
    let error = connect(format!("redis://{user}@{address}")).await.expect_err("a refusal");
    assert!(matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unavailable), "{error:?}");
}
