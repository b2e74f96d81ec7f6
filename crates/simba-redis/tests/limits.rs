//! What lasts too long, what ends too early, and what is left behind.

#![allow(clippy::unwrap_used, reason = "a test, by hand")]

mod common;

use std::fs;
use std::net::SocketAddr;
use std::time::Duration;

use common::resp::Reply;
use common::{Admin, Group, PASSWORD, Store, USER, admitting, lead, long, name, simba, soon, until, wait};
use simba_core::operate::{EvictIf, Eviction};
use simba_core::{Answer, Backend as _, Claim, ContenderId, ErrorKind, Intent, Lease, Operate as _, Prior};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::{Server, Setup, faketime_library};

/// A server whose clock a test can set.
struct Adjustable {
    store: Store,
    file: tempfile::NamedTempFile,
}

impl Adjustable {
    fn start() -> Self {
        let file = tempfile::NamedTempFile::new().unwrap();
        fs::write(file.path(), "+0").unwrap();
        let setup = Setup::valkey()
            .with_env("LD_PRELOAD", faketime_library(true))
            .with_env("FAKETIME_TIMESTAMP_FILE", file.path())
            .with_env("FAKETIME_NO_CACHE", "1")
            .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
        Self { store: Store::private(admitting(setup)), file }
    }

    /// Sets the clock, in seconds ahead of ours.
    fn set(&self, ahead: i32) {
        fs::write(self.file.path(), format!("{ahead:+}")).unwrap();
    }
}

async fn clock_findings(backend: &RedisBackend) -> Vec<String> {
    let findings = backend.probe().await.unwrap().findings;
    findings.into_iter().map(|finding| finding.problem).filter(|problem| problem.contains("clock")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_whose_clock_was_set_is_found_by_the_probe() {
    let server = Adjustable::start();
    let backend = server.store.clone().with_keys("ping=50ms").backend().await;
    let (mutex, mut admin) = (name(), server.store.admin());
    let mut holder = backend.open(Claim::new(mutex.clone(), ContenderId::generate(), long())).await.unwrap();
    assert!(matches!(holder.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(clock_findings(&backend).await, [""; 0], "a clock that was not set is no finding");

    server.set(3600);
    let found = async {
        while clock_findings(&backend).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("a clock that was set is a finding", found).await;
    let findings = clock_findings(&backend).await;
    let step: i64 = findings[0].split(' ').find_map(|word| word.parse().ok()).unwrap();
    // The reading may take as long as the machine stands still.
    assert!((3_590_000..=3_610_000).contains(&step), "{findings:?}");
    // Why it matters: the lease is over long before its end.
    assert_eq!(admin.int(&["EXISTS", &format!("simba:{{{mutex}}}")]), 0, "a step ends leases early");
}

/// As after a failover: the same address, another clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_takes_over_with_another_clock_is_found_by_the_probe() {
    let server = Adjustable::start();
    let backend = server.store.clone().with_keys("ping=50ms").backend().await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(clock_findings(&backend).await, [""; 0]);
    server.store.server().stop().unwrap();
    server.set(60);
    server.store.server().restart().unwrap();
    let found = async {
        loop {
            let findings = backend.probe().await.map(|probe| probe.findings).unwrap_or_default();
            if findings.iter().any(|finding| finding.problem.contains("clock")) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("another clock is a finding", found).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_kept_for_the_time_of_the_configuration() {
    let store = Store::private(admitting(Setup::redis()));
    let mut admin = store.admin();
    for (keys, least) in [("", 86_400), ("fence_retention=2h", 7_200)] {
        let simba = simba(store.clone().with_keys(keys).backend().await, long());
        let mutex = name();
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        let left = admin.int(&["TTL", &format!("simba:{{{mutex}}}:fence")]);
        // At most a thousand seconds more, and a moment less.
        assert!((least - 10..=least + 1000).contains(&left), "{left} s for `{keys}`");
        guard.release().await.unwrap();
    }
    let backend = store.clone().with_keys("fence_retention=1min").backend().await;
    let day = Lease::new(Duration::from_secs(80), Duration::from_secs(20)).unwrap();
    let refused = backend.open(Claim::new(name(), ContenderId::generate(), day)).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("fence_retention"), "{refused}");
}

/// Renewals wait while the server waits for replicas.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wait_for_replicas_of_more_than_a_sixth_of_the_ttl_is_refused() {
    let store = Store::private(admitting(Setup::redis())).with_keys("wait_replicas=1&wait_timeout=2s");
    let backend = store.backend().await;
    let claim = |ttl| {
        let lease = Lease::new(Duration::from_secs(ttl), Duration::from_secs(6)).unwrap();
        Claim::new(name(), ContenderId::generate(), lease)
    };
    let refused = backend.open(claim(10)).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let words = refused.to_string();
    assert!(["`wait_timeout` is 2s", "ttl (10s)", "12s"].iter().all(|part| words.contains(part)), "{words}");
    assert!(backend.open(claim(12)).await.is_ok());
    assert!(backend.open(claim(10).with_intent(Intent::Observe)).await.is_ok(), "it acquires nothing");
}

/// Behind sentinels nobody knows which of them are dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_of_jvm_peers_delay_a_free_mutex_by_a_moment_each() {
    let group = Group::shared("SIMBA_TCK_REDIS_SENTINEL");
    let (mutex, mut admin) = (name(), Admin::at(group.master()));
    for n in 0..20 {
        admin.int(&["ZADD", &format!("simba:{{{mutex}}}:contender"), "1", &format!("{n}:{n}@dead")]);
    }
    // Its poll is 30 s: only looks that follow each other at once explain it.
    let simba = simba(group.backend().await, long());
    let guard = soon("a free mutex is acquired", simba.locker(mutex).lock()).await.unwrap();
    guard.release().await.unwrap();
}

/// A waiter that was woken and does not come is forgotten.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_that_was_woken_leaves_nothing_behind() {
    let group = Group::shared("SIMBA_TCK_REDIS_SENTINEL");
    let (mutex, mut admin) = (name(), Admin::at(group.master()));
    let (alive, dead) = (simba(group.backend().await, long()), group.backend().await);
    let (leader, _) = lead(&alive, &mutex).await;
    let mut waiter = dead.open(Claim::new(mutex.clone(), ContenderId::generate(), long())).await.unwrap();
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let alive_key = format!("simba:{{{mutex}}}:alive");
    assert_eq!(admin.int(&["ZCARD", &alive_key]), 1);
    // Its process is gone.
    std::mem::forget(waiter);
    leader.stop().await.unwrap();
    assert_eq!(
        admin.int(&["ZCARD", &alive_key]),
        0,
        "broken: a waiter that left the queue is in no other list"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_evicted_jvm_owner_is_not_woken() {
    let store = Store::shared();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mutex = name();
    let key = format!("simba:{{{mutex}}}");
    // A JVM peer waits in the queue and stays in it when it wins.
    admin.int(&["ZADD", &format!("{key}:contender"), "1", "7:7@jvm"]);
    admin.ask(&["SET", &key, "7:7@jvm", "PX", "60000"]);
    let simba = simba(store.backend().await, long());
    let waiter = wait(&simba, &mutex, &mut admin).await;
    let mut owner = store.admin();
    owner.ask(&["SUBSCRIBE", &format!("{key}:7:7@jvm")]);
    let evicted = backend.evict(&mutex, EvictIf::Any).await.unwrap();
    assert!(matches!(evicted, Eviction::Freed { .. }), "{evicted:?}");
    soon("the next waiter is woken", waiter.acquired()).await.unwrap();
    owner.send(&["PING"]);
    let next = owner.reply();
    assert_eq!(
        next.array().and_then(|parts| parts[0].text()),
        Some("pong"),
        "broken: the owner is woken: {next:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_foreign_key_hides_no_mutex_from_the_list() {
    let store = Store::private(admitting(Setup::redis()));
    let (backend, mut admin) = (store.backend().await, store.admin());
    let (mutex, simba) = (name(), simba(store.backend().await, long()));
    let _leader = lead(&simba, &mutex).await;
    admin.ask(&["HSET", "simba:{foreign}", "a", "b"]);
    admin.ask(&["SET", "simba:{strange}", "not an id\n"]);
    let listed = backend.list().await.unwrap();
    assert_eq!(listed.iter().map(|record| &record.mutex).collect::<Vec<_>>(), [&mutex]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_was_restarted_is_given_the_scripts_before_any_call() {
    let store = Store::private(admitting(Setup::redis()));
    let simba = simba(store.backend().await, long());
    let mutex = name();
    simba.locker(mutex.clone()).lock().await.unwrap().release().await.unwrap();
    store.server().restart().unwrap();
    let again = async {
        loop {
            if let Ok(guard) = simba.locker(mutex.clone()).lock().await {
                return guard;
            }
        }
    };
    soon("the restarted server serves", again).await.release().await.unwrap();
    let errors = store.admin().text(&["INFO", "errorstats"]).unwrap();
    assert!(!errors.contains("NOSCRIPT"), "broken: no call finds its script missing: {errors}");
}

fn sentinels(group: &Group) -> Vec<SocketAddr> {
    group.url.hosts().iter().map(|host| host.to_string().parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_sentinel_is_asked_over_one_connection() {
    let group = Group::private(Setup::redis_sentinel());
    let _backend = group.backend().await;
    // One that asks every few seconds, and is older than that: it was asked again on the same connection.
    let is_kept = |client: &str| {
        let field = |name| client.split(' ').find_map(|field| field.strip_prefix(name)).unwrap();
        let number = |name| field(name).parse::<u32>().unwrap();
        client.contains("cmd=sentinel|get-master-addr-by-name") && number("age=") >= 2 + number("idle=")
    };
    until("a connection to each sentinel is kept", || {
        let clients = |at| Admin::at(at).text(&["CLIENT", "LIST"]).unwrap();
        sentinels(&group).iter().all(|sentinel| clients(*sentinel).lines().any(is_kept))
    })
    .await;
}

/// A sentinel and the old master are cut off from the rest: both go on as before, and others hold at the new master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sentinel_that_is_cut_off_keeps_no_handle_at_the_old_master() {
    let group = Group::private(Setup::redis_sentinel());
    let [one, _, alone] = sentinels(&group)[..] else { panic!("three sentinels") };
    let (old, ok) = (group.master(), Reply::Status("OK".into()));
    let new = group.servers().into_iter().find(|server| *server != old).unwrap();
    // It hears nothing from the others: neither through the servers, nor from them directly. It also cannot turn the
    // new master back into a replica, which a sentinel that sees two masters does after 8 s.
    for server in [old, new] {
        let user = "ACL SETUSER alone on >alone ~* +@all -subscribe -publish -replicaof -slaveof";
        assert_eq!(Admin::at(server).ask(&user.split(' ').collect::<Vec<_>>()), ok);
    }
    for words in [
        "ACL SETUSER default -publish",
        "SENTINEL SET mymaster auth-user alone",
        "SENTINEL SET mymaster auth-pass alone",
    ] {
        assert_eq!(Admin::at(alone).ask(&words.split(' ').collect::<Vec<_>>()), ok, "{words}");
    }
    // The old master does not learn that it is none.
    assert_eq!(Admin::at(old).ask(&["ACL", "SETUSER", "default", "-replicaof", "-slaveof"]), ok);

    let url = format!("redis+sentinel://{USER}:{PASSWORD}@{alone},{one}/mymaster").parse().unwrap();
    let mut backends = Vec::new();
    for _ in 0..8 {
        backends.push(RedisBackend::connect(RedisConfig::from_url(&url).unwrap()).await.unwrap());
    }
    let observe = Claim::new(name(), ContenderId::generate(), long()).with_intent(Intent::Observe);
    let mut observer = backends[0].open(observe).await.unwrap();
    soon("an observer listens", observer.changed()).await.unwrap();
    let clients = |server| {
        let list = Admin::at(server).text(&["CLIENT", "LIST"]).unwrap();
        list.lines().filter(|line| line.contains(&format!("user={USER}"))).count()
    };
    assert_eq!(clients(old), 9, "a connection of each handle, and one for subscriptions");

    assert_eq!(Admin::at(one).ask(&["SENTINEL", "FAILOVER", "mymaster"]), ok);
    let named = |sentinel: SocketAddr| {
        let reply = Admin::at(sentinel).ask(&["SENTINEL", "get-master-addr-by-name", "mymaster"]);
        reply.array().and_then(|parts| parts[1].text()?.parse::<u16>().ok()).unwrap()
    };
    until("there is another master", || named(one) == new.port()).await;
    until("every connection is at the new master", || clients(new) == 9 && clients(old) == 0).await;
    // Longer than it takes to ask each sentinel.
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert_eq!(named(alone), old.port(), "it still names the old one");
    assert!(Admin::at(old).text(&["INFO", "replication"]).unwrap().contains("role:master"), "so does that");
    assert_eq!((clients(new), clients(old)), (9, 0), "broken: no handle goes back");
}

/// A node that was reset answers with an empty map.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_without_a_map_is_passed_over() {
    let group = Group::shared("SIMBA_TCK_REDIS_CLUSTER");
    let empty: Server =
        admitting(Setup::redis().with_arg("--cluster-enabled").with_arg("yes")).start().unwrap();
    assert_eq!(Admin::at(empty.address()).ask(&["CLUSTER", "SLOTS"]), Reply::Array(vec![]));
    let seeds = format!("{},{}", empty.address(), group.servers()[0]);
    let url = format!("redis+cluster://{USER}:{PASSWORD}@{seeds}").parse().unwrap();
    for _ in 0..10 {
        let backend = RedisBackend::connect(RedisConfig::from_url(&url).unwrap()).await.unwrap();
        let simba = simba(backend, long());
        // The first call already knows where the mutex is.
        let guard = simba.locker(name()).try_lock().await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

/// The confirmation of a subscription arrives when it was cancelled already.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_subscription_that_was_cancelled_is_not_taken_for_one() {
    let store = Store::private(admitting(Setup::redis())).with_keys("timeout=30s");
    let ((backend, network), mut admin, mutex) = (store.proxied().await, store.admin(), name());
    let channel = format!("simba:{{{mutex}}}:owner");
    let listeners = |admin: &mut Admin| {
        admin.ask(&["PUBSUB", "NUMSUB", &channel]).array().and_then(|parts| parts[1].int()).unwrap()
    };
    let claim = |mutex| Claim::new(mutex, ContenderId::generate(), long()).with_intent(Intent::Observe);
    // The connection for subscriptions is there.
    let mut other = backend.open(claim(name())).await.unwrap();
    soon("an observer listens", other.changed()).await.unwrap();

    network.stall_replies();
    let mut observer = backend.open(claim(mutex.clone())).await.unwrap();
    tokio::select! {
        biased;
        changed = observer.changed() => panic!("no reply has come: {changed:?}"),
        () = until("the server has the subscription", || listeners(&mut admin) == 1) => {}
    }
    drop(observer);
    until("the server has no subscription any more", || listeners(&mut admin) == 0).await;
    network.pass();
    // Confirms on the same connection, so after both.
    let mut other = backend.open(claim(name())).await.unwrap();
    soon("an observer listens", other.changed()).await.unwrap();

    network.stall();
    let mut observer = backend.open(claim(mutex)).await.unwrap();
    let changed = tokio::time::timeout(Duration::from_millis(300), observer.changed()).await;
    assert!(changed.is_err(), "broken: what the server has not confirmed is no subscription");
}
