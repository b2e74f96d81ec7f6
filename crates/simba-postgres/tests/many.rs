//! Many contenders: the load of a handle on the server, and no lost wakeups.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Private, Store, USER, name, soon, until};
use futures_util::future::join_all;
use simba_core::spi::{Backend, Operate};
use simba_core::{Lease, Simba};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;
use simba_tck::rounds;
use tokio_postgres::{Client, SimpleQueryMessage};

/// The key of the advisory lock that serialises the creation of the tables.
const SETUP_LOCK: u32 = 0x5369_6d62;

/// Returns a lease with a poll interval so long that only a wakeup explains a hand-over.
fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(40), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(600)).unwrap()
}

async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).with_lease(long()).build()
}

async fn connections(admin: &Client) -> i64 {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1";
    admin.query_one(count, &[&USER]).await.unwrap().get(0)
}

/// An uncontended handle has one connection; one with any number of holders, waiters and observers has two.
#[tokio::test(flavor = "multi_thread")]
async fn a_handle_has_at_most_two_connections() {
    let private = Private::start(Setup::postgres()).await;
    let (simba, admin) = (simba(&private.store).await, private.store.admin().await);
    let mutexes: Vec<_> = (0..200).map(|n| name(&format!("held-{n}"))).collect();
    let mut guards = Vec::new();
    for mutex in &mutexes {
        guards.push(soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap());
    }
    assert_eq!(connections(&admin).await, 1, "no waiter");
    let waiting: Vec<_> = mutexes.iter().map(|mutex| simba.contend(mutex.clone())).collect();
    let mut observers = Vec::new();
    for (contention, guard) in waiting.iter().zip(&guards) {
        contention.start().unwrap();
        until("a waiter waits", || contention.owner().is_owner(guard.tenure().contender())).await;
        observers.push(simba.observe(guard.tenure().mutex().clone()).unwrap());
    }
    guards.clear();
    for contention in &waiting {
        soon("each waiter is woken", contention.acquired()).await.unwrap();
    }
    assert_eq!(connections(&admin).await, 2, "one for commands, one for wakeups");
    simba.shutdown().await;
    let gone = async {
        while connections(&admin).await > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("a shutdown leaves no connection", gone).await;
}

/// Returns how many statements a server has executed, by its log: its statistics are seconds late.
fn statements(private: &Private) -> usize {
    let log = std::fs::read_to_string(private.server().dir().join("log")).unwrap();
    log.lines().filter(|line| line.contains("LOG:  execute ")).count()
}

/// Returns the same number once it stops changing, also if the machine pauses for two seconds.
async fn settled(private: &Private) -> usize {
    let (mut seen, mut still) = (statements(private), 0);
    while still < 3 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let now = statements(private);
        still = if now == seen { still + 1 } else { 0 };
        seen = now;
    }
    seen
}

/// Returns the number of queue entries. A simple statement does not count as a call.
async fn queued(admin: &Client) -> usize {
    let entries = admin.simple_query("SELECT FROM simba_waiter").await.unwrap();
    entries.iter().filter(|message| matches!(message, SimpleQueryMessage::Row(_))).count()
}

/// With 200 waiters on a mutex, a hand-over costs five calls in total, including joining the queue again.
#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_costs_five_calls_for_any_number_of_waiters() {
    let private = Private::start(Setup::postgres().with_arg("-c").with_arg("log_statement=all")).await;
    let store = private.store.clone().with_keys("ping=10min");
    let (simba, mutex) = (simba(&store).await, name("many"));
    let first = soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap();
    let admin = Arc::new(private.store.admin().await);
    let (turns, go) = (Arc::new(AtomicUsize::new(0)), 40);
    let mut waiters = Vec::new();
    for _ in 0..200 {
        let (locker, turns, admin) = (simba.locker(mutex.clone()), Arc::clone(&turns), Arc::clone(&admin));
        waiters.push(tokio::spawn(async move {
            loop {
                let guard = locker.lock().await.unwrap();
                let turn = turns.fetch_add(1, Ordering::SeqCst);
                if turn >= go {
                    // The last holder keeps the mutex, so that no further calls are made.
                    return std::mem::forget(guard);
                }
                // The previous holder is queued again. It would poll once more if it found the mutex free.
                while queued(&admin).await < 199 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                guard.release().await.unwrap();
                while turns.load(Ordering::SeqCst) < turn + 2 {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }));
    }
    let operate = simba.operate().unwrap();
    let queued = async {
        while operate.read(&mutex).await.unwrap().waiters != Some(200) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("all are queued", queued).await;
    let before = soon("no more calls", settled(&private)).await;
    first.release().await.unwrap();
    let round = async {
        while turns.load(Ordering::SeqCst) <= go {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(120), round).await.expect("each hand-over succeeds");
    let calls = statements(&private) - before;
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    let most = go * 5 + 25;
    assert!((go..=most).contains(&calls), "broken: {go} hand-overs cost at most {most} calls, not {calls}");
}

/// Returns how many rows of mutexes the server has fetched, by its statistics, which are late.
async fn fetched(admin: &Client) -> i64 {
    let count = "SELECT coalesce(sum(idx_tup_fetch + seq_tup_read), 0)::bigint FROM pg_stat_user_tables \
                 WHERE relname = 'simba_mutex'";
    admin.query_one(count, &[]).await.unwrap().get(0)
}

/// Returns the same number once it is at least `least` and stops changing.
async fn fetched_at_least(admin: &Client, least: i64) -> i64 {
    let (mut seen, mut still) = (-1, 0);
    while still < 15 || seen < least {
        let now = fetched(admin).await;
        still = if now == seen { still + 1 } else { 0 };
        seen = now;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    seen
}

/// A server plans once per connection, when the table may be almost empty.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_made_with_one_mutex_is_efficient_for_hundreds() {
    const MANY: usize = 400;
    let private = Private::start(Setup::postgres()).await;
    let admin = private.store.admin().await;
    // A server process reports its statistics after a statement, at most once a second.
    let store = private.store.clone().with_keys("ping=500ms");
    let only = simba(&store).await.locker(name("only"));
    soon("a release", soon("a lock", only.lock()).await.unwrap().release()).await.unwrap();
    admin.batch_execute("VACUUM ANALYZE simba_mutex").await.unwrap();
    let simba = simba(&store).await;
    let mutexes: Vec<_> = (0..MANY).map(|n| name(&format!("many-{n}"))).collect();
    let before = fetched_at_least(&admin, 0).await;
    for _ in 0..3 {
        let locks = mutexes.iter().map(|mutex| simba.locker(mutex.clone()));
        let guards = join_all(locks.map(|locker| async move { locker.lock().await.unwrap() })).await;
        join_all(guards.into_iter().map(|guard| async { guard.release().await.unwrap() })).await;
    }
    let calls = i64::try_from(2 * 3 * MANY).unwrap();
    let fetched = soon("the statistics", fetched_at_least(&admin, before + calls / 2)).await - before;
    assert!(fetched <= 5 * calls, "broken: {fetched} rows were read in {calls} calls");
}

/// Contenders join, leave, time out and are woken at random. A lost wakeup would cost a poll interval.
#[tokio::test(flavor = "multi_thread")]
async fn no_wakeup_is_lost_among_many_contenders() {
    let store = Store::shared();
    let mutex = name("many");
    let mut handles = Vec::new();
    for _ in 0..3 {
        handles.push(simba(&store).await);
    }
    let mut tasks = Vec::new();
    for at in 0..24 {
        let locker = handles[at % handles.len()].locker(mutex.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds() * 10 {
                // Some time out at the moment of their wakeup.
                let limit = Duration::from_micros(fastrand::u64(0..20_000));
                if fastrand::bool() {
                    let _ = tokio::time::timeout(limit, locker.lock()).await.map(drop);
                } else {
                    let guard = locker.lock().await.unwrap();
                    tokio::time::sleep(limit / 20).await;
                    guard.release().await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        // Half of a poll interval.
        let ended = tokio::time::timeout(Duration::from_secs(300), task).await;
        ended.expect("broken: no waiter waits for a lost wakeup").unwrap();
    }
}

/// Returns a configuration of the superuser whose tables do not exist yet. A handle that creates tables waits for all
/// others that do the same.
fn not_set_up(store: &Store, prefix: &str) -> PostgresConfig {
    let (admin, address) = (&store.admin, store.address());
    let login = format!("{}:{}", admin.user().unwrap(), store.admin_password());
    let keys = format!("prefix={prefix}_{}&application_name={prefix}", std::process::id());
    let url = format!("postgres://{login}@{address}{}?{keys}&sslmode=disable", admin.path());
    let (config, limit) = (PostgresConfig::from_url(&url.parse().unwrap()).unwrap(), Duration::from_secs(20));
    config.with_connect_timeout(limit).with_statement_timeout(limit)
}

/// Concurrent creation of the tables reports no conflict.
#[tokio::test(flavor = "multi_thread")]
async fn concurrent_set_ups_succeed() {
    let store = Store::shared();
    let mut handles = Vec::new();
    for _ in 0..8 {
        handles.push(PostgresBackend::connect(not_set_up(&store, "concurrent")).await.unwrap());
    }
    let set_up = handles.into_iter().map(|backend| tokio::spawn(async move { backend.apply_schema().await }));
    for done in set_up.collect::<Vec<_>>() {
        soon("the store is set up", done).await.unwrap().unwrap();
    }
}

/// On a slow server the second set-up waits longer than `lock_timeout`.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_up_waits_for_a_slow_one() {
    let store = Store::shared();
    let (first, watcher) = (store.admin().await, store.admin().await);
    first.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock({SETUP_LOCK})")).await.unwrap();
    let config = not_set_up(&store, "slow").with_lock_timeout(Duration::from_millis(20));
    let second = PostgresBackend::connect(config).await.unwrap();
    let set_up = tokio::spawn(async move { second.apply_schema().await });
    // Another test creates tables too.
    let waits = "SELECT EXISTS (SELECT FROM pg_locks JOIN pg_stat_activity USING (pid) WHERE locktype = 'advisory' \
                 AND objid = $1 AND NOT granted AND application_name = 'slow')";
    let waiting = async {
        while !watcher.query_one(waits, &[&SETUP_LOCK]).await.unwrap().get::<_, bool>(0) {
            assert!(!set_up.is_finished(), "broken: the second set-up waits");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the second waits for the first", waiting).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    first.batch_execute("COMMIT").await.unwrap();
    soon("the store is set up", set_up).await.unwrap().unwrap();
}
