//! Clock steps, retention, dead waiters, reconnects and leftovers.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::fs;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, ThreadId};
use std::time::Duration;

use common::resp::Reply;
use common::{
    Admin, ELECTION, Group, PASSWORD, SILENCE, Store, USER, lead, long, name, simba, soon, until,
    until_within, wait, with_user,
};
use simba_core::operate::{EvictIf, Eviction};
use simba_core::spi::{Answer, Backend as _, Claim, Intent, Operate as _, Prior};
use simba_core::{ContenderId, ErrorKind, Lease};
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
        Self { store: Store::private(with_user(setup)), file }
    }

    /// Sets the clock to this many seconds ahead of ours.
    fn set(&self, ahead: i32) {
        fs::write(self.file.path(), format!("{ahead:+}")).unwrap();
    }
}

async fn clock_findings(backend: &RedisBackend) -> Vec<String> {
    let findings = backend.probe().await.unwrap().findings;
    findings.into_iter().map(|finding| finding.problem).filter(|problem| problem.contains("clock")).collect()
}

/// Waits until the backend has compared two readings of the clock: it reads again only after the reply to the last one.
async fn wait_for_clock_readings(admin: &mut Admin) {
    let mut readings = || {
        let stats = admin.text(&["INFO", "commandstats"]).unwrap();
        let calls =
            stats.lines().find_map(|line| line.strip_prefix("cmdstat_time:calls=")?.split(',').next());
        calls.map_or(0, |calls| calls.parse::<u64>().unwrap())
    };
    let before = readings();
    until("the clock is read", || readings() >= before + 3).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_reports_a_clock_step() {
    let server = Adjustable::start();
    let backend = server.store.clone().with_keys("ping=50ms").backend().await;
    let (mutex, mut admin) = (name(), server.store.admin());
    let mut holder = backend.open(Claim::new(mutex.clone(), ContenderId::generate(), long())).await.unwrap();
    assert!(matches!(holder.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    wait_for_clock_readings(&mut admin).await;
    assert_eq!(clock_findings(&backend).await, [""; 0], "a clock without a step is no finding");

    server.set(3600);
    let found = async {
        while clock_findings(&backend).await.is_empty() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("a clock step is a finding", found).await;
    let findings = clock_findings(&backend).await;
    let step: i64 = findings[0].split(' ').find_map(|word| word.parse().ok()).unwrap();
    // The reading may take as long as a pause of the machine.
    assert!((3_590_000..=3_610_000).contains(&step), "{findings:?}");
    // The effect of a step: the lease has ended long before its time.
    assert_eq!(admin.int(&["EXISTS", &format!("simba:{{{mutex}}}")]), 0, "a step ends leases early");
}

/// As after a failover: the same address, another clock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_reports_a_new_server_with_another_clock() {
    let server = Adjustable::start();
    let backend = server.store.clone().with_keys("ping=50ms").backend().await;
    wait_for_clock_readings(&mut server.store.admin()).await;
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
async fn token_is_kept_for_the_configured_retention() {
    let store = Store::private(with_user(Setup::redis()));
    let mut admin = store.admin();
    for (keys, least) in [("", 86_400), ("fence_retention=2h", 7_200)] {
        let simba = simba(store.clone().with_keys(keys).backend().await, long());
        let mutex = name();
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        let left = admin.int(&["TTL", &format!("simba:{{{mutex}}}:fence")]);
        // Up to 1000 s more, and a few seconds less.
        assert!((least - 10..=least + 1000).contains(&left), "{left} s for `{keys}`");
        guard.release().await.unwrap();
    }
    let backend = store.clone().with_keys("fence_retention=1min").backend().await;
    let too_long = Lease::new(Duration::from_secs(80), Duration::from_secs(20)).unwrap();
    let refused = backend.open(Claim::new(name(), ContenderId::generate(), too_long)).await.err().unwrap();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    assert!(refused.to_string().contains("fence_retention"), "{refused}");
}

/// An acquisition may wait for two `WAIT`, and the engine drops a call after a third of the ttl, at most 5 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wait_timeout_of_which_two_do_not_fit_into_a_call_is_refused() {
    let store = Store::private(with_user(Setup::redis()));
    let claim = |ttl| {
        let lease = Lease::new(Duration::from_secs(ttl), Duration::from_secs(6)).unwrap();
        Claim::new(name(), ContenderId::generate(), lease)
    };
    let open = async |timeout: &str, claim: Claim| {
        let backend = store.clone().with_keys(&format!("wait_replicas=1{timeout}")).backend().await;
        backend.open(claim).await.map(drop)
    };
    for (timeout, ttl) in [("", 10), ("&wait_timeout=1s", 7), ("&wait_timeout=2250ms", 16)] {
        assert!(open(timeout, claim(ttl)).await.is_ok(), "{timeout} with {ttl} s");
    }
    let refused: [(_, _, &[_], _); 2] = [
        ("2s", 13, &["`wait_timeout` is 2s", "ttl of 13s", "at least 14s"], ""),
        // No ttl is long enough.
        ("2251ms", 20, &["`wait_timeout` is 2.251s", "at most 2.25s"], "at least"),
    ];
    for (timeout, ttl, parts, absent) in refused {
        let error = open(&format!("&wait_timeout={timeout}"), claim(ttl)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid);
        let message = error.to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{message}");
        assert!(absent.is_empty() || !message.contains(absent), "{message}");
    }
    let observer = claim(3).with_intent(Intent::Observe);
    assert!(open("&wait_timeout=2s", observer).await.is_ok(), "an observer never acquires");
}

/// Behind sentinels the server does not know which waiters are dead.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_dead_jvm_waiter_delays_a_free_mutex_only_briefly() {
    let group = Group::shared("SIMBA_TCK_REDIS_SENTINEL");
    let (mutex, mut admin) = (name(), Admin::at(group.master()));
    for n in 0..20 {
        admin.int(&["ZADD", &format!("simba:{{{mutex}}}:contender"), "1", &format!("{n}:{n}@dead")]);
    }
    // The poll interval is a minute, so the call must be repeated without waiting for it.
    let simba = simba(group.backend().await, long());
    let guard = soon("a free mutex is acquired", simba.locker(mutex).lock()).await.unwrap();
    guard.release().await.unwrap();
}

/// The woken waiter never acquires.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn woken_waiter_leaves_no_entries() {
    let group = Group::shared("SIMBA_TCK_REDIS_SENTINEL");
    let (mutex, mut admin) = (name(), Admin::at(group.master()));
    let (alive, dead) = (simba(group.backend().await, long()), group.backend().await);
    let (leader, _) = lead(&alive, &mutex).await;
    let mut waiter = dead.open(Claim::new(mutex.clone(), ContenderId::generate(), long())).await.unwrap();
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let alive_key = format!("simba:{{{mutex}}}:alive");
    assert_eq!(admin.int(&["ZCARD", &alive_key]), 1);
    // Its process dies.
    std::mem::forget(waiter);
    leader.stop().await.unwrap();
    assert_eq!(admin.int(&["ZCARD", &alive_key]), 0, "broken: a woken waiter is in no list");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn evicted_jvm_owner_is_not_woken() {
    let store = Store::shared();
    let (backend, mut admin) = (store.backend().await, store.admin());
    let mutex = name();
    let key = format!("simba:{{{mutex}}}");
    // A JVM peer keeps its queue entry when it acquires.
    admin.int(&["ZADD", &format!("{key}:contender"), "1", "7:7@jvm"]);
    admin.call(&["SET", &key, "7:7@jvm", "PX", "60000"]);
    let simba = simba(store.backend().await, long());
    let waiter = wait(&simba, &mutex, &mut admin).await;
    let mut owner = store.admin();
    owner.call(&["SUBSCRIBE", &format!("{key}:7:7@jvm")]);
    let evicted = backend.evict(&mutex, EvictIf::Any).await.unwrap();
    assert!(matches!(evicted, Eviction::Freed { .. }), "{evicted:?}");
    soon("the next waiter is woken", waiter.acquired()).await.unwrap();
    owner.send(&["PING"]);
    let next = owner.reply();
    assert_eq!(
        next.array().and_then(|parts| parts[0].text()),
        Some("pong"),
        "broken: the evicted owner is not woken: {next:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_keys_are_omitted_from_the_list() {
    let store = Store::private(with_user(Setup::redis()));
    let (backend, mut admin) = (store.backend().await, store.admin());
    let (mutex, simba) = (name(), simba(store.backend().await, long()));
    let _leader = lead(&simba, &mutex).await;
    admin.call(&["HSET", "simba:{foreign}", "a", "b"]);
    admin.call(&["SET", "simba:{strange}", "not an id\n"]);
    let listed = backend.list().await.unwrap();
    assert_eq!(listed.iter().map(|record| &record.mutex).collect::<Vec<_>>(), [&mutex]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn scripts_are_loaded_into_a_restarted_server_before_any_call() {
    let store = Store::private(with_user(Setup::redis()));
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
    assert!(!errors.contains("NOSCRIPT"), "broken: no call fails with NOSCRIPT: {errors}");
}

fn sentinels(group: &Group) -> Vec<SocketAddr> {
    group.url.hosts().iter().map(|host| host.to_string().parse().unwrap()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_to_each_sentinel_is_kept() {
    let group = Group::private(Setup::redis_sentinel());
    let _backend = group.backend().await;
    until("a connection to each sentinel is kept", || {
        sentinels(&group).iter().all(|sentinel| kept_connections(*sentinel) > 0)
    })
    .await;
}

/// Counts the connections that were used for at least two queries: they are older than the interval between queries.
fn kept_connections(sentinel: SocketAddr) -> usize {
    let is_kept = |client: &&str| {
        let field = |name| client.split(' ').find_map(|field| field.strip_prefix(name)).unwrap();
        let number = |name| field(name).parse::<u32>().unwrap();
        client.contains("cmd=sentinel|get-master-addr-by-name") && number("age=") >= 2 + number("idle=")
    };
    Admin::at(sentinel).text(&["CLIENT", "LIST"]).unwrap().lines().filter(is_kept).count()
}

/// A sentinel and the old master are partitioned from the rest and continue as before. Other contenders hold at the new
/// master.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn partitioned_sentinel_keeps_no_handle_at_the_old_master() {
    // A requested failover is not retried, so its timeout is longer than a pause of the machine.
    let group = Group::private(Setup::redis_sentinel().with_env("FAILOVER_TIMEOUT", "30000"));
    let [one, _, alone] = sentinels(&group)[..] else { panic!("three sentinels") };
    let (old, ok) = (group.master(), Reply::Status("OK".into()));
    let new = group.servers().into_iter().find(|server| *server != old).unwrap();
    // It receives nothing from the others, neither through the servers nor directly. It also cannot turn the new master
    // back into a replica, which a sentinel that sees two masters does after 8 s.
    for server in [old, new] {
        let user = "ACL SETUSER alone on >alone ~* +@all -subscribe -publish -replicaof -slaveof";
        assert_eq!(Admin::at(server).call(&user.split(' ').collect::<Vec<_>>()), ok);
    }
    for command in [
        "ACL SETUSER default -publish",
        "SENTINEL SET mymaster auth-user alone",
        "SENTINEL SET mymaster auth-pass alone",
    ] {
        assert_eq!(Admin::at(alone).call(&command.split(' ').collect::<Vec<_>>()), ok, "{command}");
    }
    // The old master is not demoted.
    assert_eq!(Admin::at(old).call(&["ACL", "SETUSER", "default", "-replicaof", "-slaveof"]), ok);

    let url = format!("redis+sentinel://{USER}:{PASSWORD}@{alone},{one}/mymaster").parse().unwrap();
    let mut backends = Vec::new();
    for _ in 0..8 {
        let config = RedisConfig::from_url(&url).unwrap().with_timeout(SILENCE);
        backends.push(RedisBackend::connect(config).await.unwrap());
    }
    let observe = Claim::new(name(), ContenderId::generate(), long()).with_intent(Intent::Observe);
    let mut observer = backends[0].open(observe).await.unwrap();
    soon("an observer is subscribed", observer.changed()).await.unwrap();
    let clients = |server| {
        let list = Admin::at(server).text(&["CLIENT", "LIST"]).unwrap();
        list.lines().filter(|line| line.contains(&format!("user={USER}"))).count()
    };
    until("each handle has a connection, and there is one for subscriptions", || clients(old) == 9).await;

    assert_eq!(Admin::at(one).call(&["SENTINEL", "FAILOVER", "mymaster"]), ok);
    let named = |sentinel: SocketAddr| {
        let reply = Admin::at(sentinel).call(&["SENTINEL", "get-master-addr-by-name", "mymaster"]);
        reply.array().and_then(|parts| parts[1].text()?.parse::<u16>().ok()).unwrap()
    };
    until_within(ELECTION, "there is another master", || named(one) == new.port()).await;
    let moved = || clients(new) == 9 && clients(old) == 0;
    until_within(ELECTION, "every connection is at the new master", moved).await;
    // On connections that were opened after the failover.
    until("each handle has queried it twice again", || kept_connections(alone) >= 8).await;
    assert_eq!(named(alone), old.port(), "it still names the old master");
    assert!(
        Admin::at(old).text(&["INFO", "replication"]).unwrap().contains("role:master"),
        "the old master still is a master"
    );
    assert_eq!((clients(new), clients(old)), (9, 0), "broken: no handle returns to the old master");
}

/// A node that was reset has an empty map.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn node_without_a_map_is_skipped() {
    let group = Group::shared("SIMBA_TCK_REDIS_CLUSTER");
    let empty: Server =
        with_user(Setup::redis().with_arg("--cluster-enabled").with_arg("yes")).start().unwrap();
    assert_eq!(Admin::at(empty.address()).call(&["CLUSTER", "SLOTS"]), Reply::Array(vec![]));
    let seeds = format!("{},{}", empty.address(), group.servers()[0]);
    let url = format!("redis+cluster://{USER}:{PASSWORD}@{seeds}").parse().unwrap();
    for _ in 0..10 {
        let config = RedisConfig::from_url(&url).unwrap().with_timeout(SILENCE);
        let simba = simba(RedisBackend::connect(config).await.unwrap(), long());
        // The map is known before the first call.
        let guard = simba.locker(name()).try_lock().await.unwrap().unwrap();
        guard.release().await.unwrap();
    }
}

/// The confirmation of a subscription arrives after its cancellation.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_confirmation_of_a_cancelled_subscription_is_ignored() {
    let store = Store::private(with_user(Setup::redis())).with_keys("timeout=30s");
    let ((backend, network), mut admin, mutex) = (store.proxied().await, store.admin(), name());
    let channel = format!("simba:{{{mutex}}}:owner");
    let subscribers = |admin: &mut Admin| {
        admin.call(&["PUBSUB", "NUMSUB", &channel]).array().and_then(|parts| parts[1].int()).unwrap()
    };
    let claim = |mutex| Claim::new(mutex, ContenderId::generate(), long()).with_intent(Intent::Observe);
    // Opens the connection for subscriptions.
    let mut other = backend.open(claim(name())).await.unwrap();
    soon("an observer is subscribed", other.changed()).await.unwrap();

    network.stall_replies();
    let mut observer = backend.open(claim(mutex.clone())).await.unwrap();
    tokio::select! {
        biased;
        changed = observer.changed() => panic!("no reply was sent: {changed:?}"),
        () = until("the server has the subscription", || subscribers(&mut admin) == 1) => {}
    }
    drop(observer);
    until("the server has no subscription", || subscribers(&mut admin) == 0).await;
    network.pass();
    // Confirmed on the same connection, so after both replies.
    let mut other = backend.open(claim(name())).await.unwrap();
    soon("an observer is subscribed", other.changed()).await.unwrap();

    network.stall();
    let mut observer = backend.open(claim(mutex)).await.unwrap();
    let changed = tokio::time::timeout(Duration::from_millis(300), observer.changed()).await;
    assert!(changed.is_err(), "broken: only the server's confirmation completes a subscription");
}

/// Counts how often a task is woken by the thread that polls it, which is always for nothing.
struct SelfWakes {
    task: Waker,
    polled_by: Mutex<Option<ThreadId>>,
    count: AtomicU32,
}

impl Wake for SelfWakes {
    fn wake(self: Arc<Self>) {
        if *self.polled_by.lock().unwrap() == Some(thread::current().id()) {
            self.count.fetch_add(1, Ordering::Relaxed);
        }
        self.task.wake_by_ref();
    }
}

/// A task that is woken while it runs is scheduled once more, which costs more than the rest of the lock.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn uncontended_lock_and_release_do_not_wake_their_own_task() {
    let simba = simba(Store::shared().backend().await, long());
    let task = std::future::poll_fn(|context| Poll::Ready(context.waker().clone())).await;
    let wakes = Arc::new(SelfWakes { task, polled_by: Mutex::default(), count: AtomicU32::new(0) });
    for _ in 0..100 {
        let locker = simba.locker(name());
        let mut pair = Box::pin(async { locker.lock().await.unwrap().release().await.unwrap() });
        std::future::poll_fn(|_| {
            *wakes.polled_by.lock().unwrap() = Some(thread::current().id());
            let polled = pair.as_mut().poll(&mut Context::from_waker(&Arc::clone(&wakes).into()));
            *wakes.polled_by.lock().unwrap() = None;
            polled
        })
        .await;
    }
    assert_eq!(wakes.count.load(Ordering::Relaxed), 0, "broken: only replies wake the task");
}
