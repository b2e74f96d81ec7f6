//! Server errors and configuration errors: typed errors with a fix, no panic, no busy loop.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use common::resp::{self, Reply};
use common::{Encrypted, SILENCE, Store, lead, lease, long, name, simba, soon, until, wait};
use simba_core::{Error, ErrorKind, Lease, MutexName, Simba};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_tck::rounds;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

fn store() -> Store {
    Store::private(Setup::redis())
}

/// Returns settings with a timeout so long that it is not the reported error.
fn config(url: &str) -> RedisConfig {
    RedisConfig::from_url(&url.parse().unwrap()).unwrap().with_timeout(SILENCE)
}

async fn refused(url: &str) -> Error {
    soon("a refusal is reported", RedisBackend::connect(config(url))).await.expect_err("a refusal")
}

async fn open(address: SocketAddr) -> Simba {
    let backend = RedisBackend::connect(config(&format!("redis://{address}"))).await;
    simba(backend.expect("a connection"), long())
}

async fn error_of(simba: &Simba, mutex: &MutexName) -> Error {
    soon("an error is reported", simba.locker(mutex.clone()).try_lock()).await.expect_err("an error")
}

#[tokio::test]
async fn a_wrong_password_is_denied() {
    let store = store();
    store.admin().create_user();
    let error = refused(&format!("redis://{}:wrong@{}", common::USER, store.address)).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert_eq!(store.admin().call(&["CONFIG", "SET", "requirepass", "secret"]), Reply::Status("OK".into()));
    let error = refused(&format!("redis://{}", store.address)).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("login"), "{error}");
}

#[tokio::test]
async fn a_missing_right_is_denied() {
    let store = store();
    let mut admin = store.admin();
    admin.create_user();
    admin.call(&["ACL", "SETUSER", common::USER, "-evalsha"]);
    let simba = simba(store.backend_as_is().await, long());
    let error = error_of(&simba, &name()).await;
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    assert!(error.to_string().contains("ACL"), "{error}");
}

#[tokio::test]
async fn a_wrong_database_is_a_config_error() {
    let store = store();
    let error = refused(&format!("redis://{}/99", store.address)).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("database"), "{error}");
}

#[tokio::test]
async fn a_server_that_is_not_redis_is_a_protocol_error() {
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
async fn a_silent_server_is_unavailable() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("redis://{}", listener.local_addr().unwrap()).parse().unwrap();
    let connect = RedisBackend::connect(RedisConfig::from_url(&url).unwrap());
    let error = soon("silence is reported", connect).await.expect_err("a refusal");
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
async fn a_cluster_node_and_a_standalone_server_are_distinguished() {
    let cluster = simba_servers::shared("SIMBA_TCK_REDIS_CLUSTER");
    let first = cluster.trim_start_matches("redis+cluster://").split(',').next().unwrap();
    let simba = simba(RedisBackend::connect(config(&format!("redis://{first}"))).await.unwrap(), long());
    // One of twenty names is on another node.
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
async fn an_unknown_master_name_is_a_config_error() {
    let sentinels = simba_servers::shared("SIMBA_TCK_REDIS_SENTINEL").replace("/mymaster", "/other");
    let error = refused(&sentinels).await;
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(error.to_string().contains("`other`"), "{error}");
}

#[tokio::test]
async fn a_unix_socket_works() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("redis.sock");
    let _store = Store::private(Setup::redis().with_arg("--unixsocket").with_arg(&socket));
    let url = format!("redis+unix:{}?db=3", socket.display());
    let simba = simba(RedisBackend::connect(config(&url)).await.unwrap(), long());
    simba.locker(name()).lock().await.unwrap().release().await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_34_full_busy_and_demoted_servers_are_unavailable() {
    let store = store();
    let mut admin = store.admin();
    let simba = open(store.address).await;
    let mutex = name();
    admin.call(&["CONFIG", "SET", "maxmemory", "1"]);
    let full = error_of(&simba, &mutex).await;
    admin.call(&["CONFIG", "SET", "maxmemory", "0"]);
    assert!(full.is_transient() && full.to_string().contains("maxmemory"), "{full}");

    admin.call(&["CONFIG", "SET", "busy-reply-threshold", "1"]);
    let mut busy = store.admin();
    busy.send(&["EVAL", "while true do end", "0"]);
    let is_busy = |reply: Reply| matches!(reply, Reply::Error(message) if message.starts_with("BUSY"));
    until("the server is busy", || is_busy(admin.call(&["PING"]))).await;
    let error = busy_error(&simba, &mutex).await;
    assert_eq!(admin.call(&["SCRIPT", "KILL"]), Reply::Status("OK".into()));
    assert!(error.to_string().contains("SCRIPT KILL"), "{error}");
    until("the script ends", || !is_busy(admin.call(&["PING"]))).await;

    assert_eq!(admin.call(&["REPLICAOF", "127.0.0.1", "1"]), Reply::Status("OK".into()));
    let replica = error_of(&simba, &mutex).await;
    admin.call(&["REPLICAOF", "NO", "ONE"]);
    assert!(replica.is_transient() && replica.to_string().contains("replica"), "{replica}");
    // All of these errors are temporary.
    let guard = soon("a recovered server serves calls", simba.locker(mutex).lock()).await;
    guard.unwrap().release().await.unwrap();
}

/// Returns the error of a busy server, which takes some time to report that it is busy.
async fn busy_error(simba: &Simba, mutex: &MutexName) -> Error {
    loop {
        let error = error_of(simba, mutex).await;
        assert!(error.is_transient(), "broken: the error of a busy server is transient: {error}");
        if error.to_string().contains("busy") {
            return error;
        }
    }
}

/// Starts a server that accepts every login and answers one command with a fixed reply. Counts the calls of that
/// command.
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
                        let reply = match command.array().and_then(|args| args[0].text()) {
                            Some(command) if command == name => {
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
async fn row_34_loading_server_and_replica_without_master_are_unavailable() {
    for message in ["LOADING Redis is loading the dataset in memory", "MASTERDOWN Link with MASTER is down"] {
        let (address, _) = fake("EVALSHA", format!("-{message}\r\n")).await;
        let error = error_of(&open(address).await, &name()).await;
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
}

/// An impossible reply to `TIME` must not end the task of the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_overflowing_server_time_does_not_end_the_connection() {
    let number = "$20\r\n18446744073709551615\r\n";
    let (address, times) = fake("TIME", format!("*2\r\n{number}{number}")).await;
    let config = RedisConfig::from_url(&format!("redis://{address}?ping=50ms").parse().unwrap()).unwrap();
    let _backend = RedisBackend::connect(config).await.unwrap();
    until("the clock is read again", || times.load(Ordering::SeqCst) >= 3).await;
}

/// Returns the number of attempts that are allowed since then: two per second, and one at the beginning. The elapsed
/// time is measured, since a pause may take longer than it should.
fn allowed(since: Instant) -> i64 {
    since.elapsed().as_millis() as i64 / 500 + 1
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_call_is_retried_at_most_twice_a_second() {
    let refusals = ["NOPERM no", "WRONGTYPE no", "ERR something new", "MOVED 1 127.0.0.1:1"];
    for message in refusals {
        let (address, calls) = fake("EVALSHA", format!("-{message}\r\n")).await;
        let contention = open(address).await.contend(name()).with_lease(lease());
        contention.start().unwrap();
        until("the error is reported", || contention.last_error().is_some()).await;
        let (began, before) = (Instant::now(), calls.load(Ordering::SeqCst));
        tokio::time::sleep(Duration::from_secs(2)).await;
        let tries = (calls.load(Ordering::SeqCst) - before) as i64;
        let most = allowed(began);
        assert!(tries <= most, "broken: at most {most} tries, two a second, not {tries}, after {message}");
    }
}

/// Returns the number of scripts that the server has run.
fn calls(admin: &mut common::Admin) -> i64 {
    let info = admin.text(&["INFO", "commandstats"]).unwrap_or_default();
    let count = |line: &str| line.split("calls=").nth(1)?.split(',').next()?.parse::<i64>().ok();
    info.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(count).sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_36_foreign_key_is_reported_and_not_changed() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, Lease::default());
    let mutex = name();
    let key = format!("simba:{{{mutex}}}");
    let foreign: [&[&str]; 3] =
        [&["RPUSH", &key, "x"], &["SADD", &key, "x"], &["SET", &key, "a\nb", "PX", "60000"]];
    for command in foreign {
        admin.call(command);
        let error = error_of(&simba, &mutex).await;
        assert_eq!(error.kind(), ErrorKind::Protocol, "{error}");
        assert!(error.to_string().contains(mutex.as_str()), "broken: the error names the mutex: {error}");
        assert_eq!(admin.int(&["EXISTS", &key]), 1, "broken: a foreign key is not changed");
        let contention = simba.contend(mutex.clone());
        contention.start().unwrap();
        until("the error is reported", || contention.last_error().is_some()).await;
        let (began, before) = (Instant::now(), calls(&mut admin));
        tokio::time::sleep(Duration::from_secs(2)).await;
        let tries = calls(&mut admin) - before;
        // The release of the attempt above may be counted here.
        let most = allowed(began) + 1;
        assert!(tries <= most, "broken: at most {most} tries, two a second, not {tries}");
        admin.int(&["DEL", &key]);
        soon("it is acquired once the key is deleted", contention.acquired()).await.unwrap();
        contention.stop().await.unwrap();
        admin.int(&["DEL", &key]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_36_key_without_an_expiry_is_polled() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, Lease::default());
    let mutex = name();
    admin.call(&["SET", &format!("simba:{{{mutex}}}"), "7:7@stranger"]);
    let contention = simba.contend(mutex);
    contention.start().unwrap();
    until("its owner is known", || contention.owner().has_owner(simba.now())).await;
    // Let the additional call after the subscription pass.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let before = calls(&mut admin);
    tokio::time::sleep(Duration::from_secs(2)).await;
    let polls = calls(&mut admin) - before;
    assert!(polls <= 4, "broken: at most two polls a second, not {polls} in two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn malformed_fences_and_queue_entries_do_not_prevent_an_acquisition() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, long());
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
        admin.call(&["SET", &format!("simba:{{{mutex}}}:fence"), fence]);
        admin.call(&["ZADD", &format!("simba:{{{mutex}}}:contender"), "-inf", "", "0", "@@", "inf", "\u{0}"]);
        let guard = soon("it is acquired", simba.locker(mutex).lock()).await.unwrap();
        assert!(guard.token().get() > 1_700_000_000_000_000, "broken: a token is at least the server's time");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_59_malformed_events_are_harmless() {
    let store = store();
    let mut admin = store.admin();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    let mutex = name();
    let key = format!("simba:{{{mutex}}}");
    let (leader, tenure) = lead(&one, &mutex).await;
    let waiter = wait(&two, &mutex, &mut admin).await;
    let id = waiter.id().unwrap();
    let megabyte = "x".repeat(1 << 20);
    let malformed =
        ["", "@@", "@@@@", "released", "released@@", "released@@x@", "acquired@@a@@b", "\0", &megabyte];
    for at in 0..rounds() as usize * 1000 {
        let event = malformed[if at % 100 == 0 { malformed.len() - 1 } else { at % (malformed.len() - 1) }];
        admin.int(&["PUBLISH", &format!("{key}:{id}"), event]);
        admin.int(&["PUBLISH", &key, event]);
    }
    for dead in ["a@@b", "x@", "", "\u{1}", "}{", &"y".repeat(10_000)] {
        admin.int(&["ZADD", &format!("{key}:contender"), "0", dead]);
    }
    assert_eq!(tenure.loss(), None, "broken: malformed events end no tenure");
    leader.stop().await.unwrap();
    soon("malformed events prevent no hand-over", waiter.acquired()).await.unwrap();
}

#[tokio::test]
async fn row_66_untrusted_servers_are_refused() {
    let store = Encrypted::shared();
    store.0.admin().create_user();
    let (address, tls) = (store.address(), simba_servers::shared("SIMBA_TCK_TLS"));
    let connect =
        |url: String| async move { soon("connect completes", RedisBackend::connect(config(&url))).await };
    let (port, user) = (address.port(), format!("{}:{}", common::USER, common::PASSWORD));
    let right = format!("rediss://{user}@localhost:{port}?tls_ca={tls}/ca.pem&connect_timeout=10s");
    connect(right.clone()).await.expect("the trusted server is accepted");
    let identity = format!("{right}&tls_cert={tls}/client.pem&tls_key={tls}/client.key");
    connect(identity).await.expect("a client with a certificate is accepted");
    let wrong = [
        ("another authority", format!("rediss://{user}@localhost:{port}?tls_ca={tls}/other-ca.pem")),
        ("no known authority", format!("rediss://{user}@localhost:{port}")),
        ("another host", format!("rediss://{user}@127.0.0.1:{port}?tls_ca={tls}/ca.pem")),
        ("another server name", format!("{right}&tls_server_name=elsewhere")),
        ("a server without TLS", format!("rediss://{user}@{}?tls_ca={tls}/ca.pem", store.0.address)),
    ];
    for (what, url) in wrong {
        let error = connect(url).await.expect_err(what);
        assert!(
            matches!(error.kind(), ErrorKind::Denied | ErrorKind::Unavailable),
            "broken: {what} is refused, not {error:?}"
        );
    }
    // Plain text to a port that requires TLS.
    let error = connect(format!("redis://{user}@{address}")).await.expect_err("a refusal");
    assert!(matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unavailable), "{error:?}");
}
