//! Many at once: what a handle costs the server, and that no wake-up is lost among them.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Private, Store, USER, name, soon, until};
use futures_util::future::join_all;
use simba_core::{Backend, Lease, Operate, Simba};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;
use simba_tck::rounds;
use tokio_postgres::{Client, SimpleQueryMessage};

/// The lock that the store's tables are made under, one after the other.
const SETTING_UP: u32 = 0x5369_6d62;

/// A lease and a poll so long that only a wake-up explains a hand-over.
fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(40), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(40)).unwrap()
}

async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).lease(long()).build()
}

async fn connections(admin: &Client) -> i64 {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1";
    admin.query_one(count, &[&USER]).await.unwrap().get(0)
}

/// An uncontended handle has one connection; one with any number of holders, waiters and observers has two.
#[tokio::test(flavor = "multi_thread")]
async fn a_handle_has_two_connections_whatever_it_does() {
    let private = Private::start(Setup::postgres()).await;
    let (simba, admin) = (simba(&private.store).await, private.store.admin().await);
    let mutexes: Vec<_> = (0..200).map(|n| name(&format!("held-{n}"))).collect();
    let mut guards = Vec::new();
    for mutex in &mutexes {
        guards.push(soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap());
    }
    assert_eq!(connections(&admin).await, 1, "nobody waits");
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
    assert_eq!(connections(&admin).await, 2, "one for commands, one for wake-ups");
    simba.shutdown().await;
    let gone = async {
        while connections(&admin).await > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("a shutdown leaves no connection", gone).await;
}

/// How many statements a server has carried out, by its own log: its statistics come seconds late.
fn statements(private: &Private) -> usize {
    let log = std::fs::read_to_string(private.server().dir().join("log")).unwrap();
    log.lines().filter(|line| line.contains("LOG:  execute ")).count()
}

/// The same once nobody has anything left to ask.
async fn settled(private: &Private) -> usize {
    let mut seen = statements(private);
    loop {
        tokio::time::sleep(Duration::from_secs(1)).await;
        if std::mem::replace(&mut seen, statements(private)) == seen {
            return seen;
        }
    }
}

/// Returns how many wait for anything. As a simple statement it does not count as a call.
async fn queued(admin: &Client) -> usize {
    let entries = admin.simple_query("SELECT FROM simba_waiter").await.unwrap();
    entries.iter().filter(|message| matches!(message, SimpleQueryMessage::Row(_))).count()
}

/// With two hundred waiters on a mutex, a hand-over costs five calls in sum, coming back into the queue included.
#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_costs_five_calls_whatever_the_number_of_waiters() {
    let private = Private::start(Setup::postgres().with_arg("-c").with_arg("log_statement=all")).await;
    let store = private.store.clone().with_keys("ping=10min");
    let (simba, mutex) = (simba(&store).await, name("crowd"));
    let blocked = soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap();
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
                    // The last one keeps it: nothing moves any more.
                    return std::mem::forget(guard);
                }
                // The one before is back: it would poll once more if it found the mutex free on the way.
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
    let before = soon("all rest", settled(&private)).await;
    blocked.release().await.unwrap();
    until("the mutex goes round", || turns.load(Ordering::SeqCst) > go).await;
    let calls = statements(&private) - before;
    waiters.iter().for_each(tokio::task::JoinHandle::abort);
    let most = go * 5 + 25;
    assert!((go..=most).contains(&calls), "broken: {go} hand-overs cost at most {most} calls, not {calls}");
}

/// How many rows of mutexes the server has fetched, once its statistics stand still.
async fn fetched(admin: &Client) -> i64 {
    let count = "SELECT coalesce(sum(idx_tup_fetch + seq_tup_read), 0)::bigint FROM pg_stat_user_tables \
                 WHERE relname = 'simba_mutex'";
    let (mut seen, mut still) = (-1, 0);
    while still < 15 {
        let now: i64 = admin.query_one(count, &[]).await.unwrap().get(0);
        still = if now == seen { still + 1 } else { 0 };
        seen = now;
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    seen
}

/// A server makes a plan once for a connection, and the table may be all but empty then.
#[tokio::test(flavor = "multi_thread")]
async fn a_plan_that_was_made_for_one_mutex_serves_hundreds() {
    const MANY: usize = 400;
    let private = Private::start(Setup::postgres()).await;
    let admin = private.store.admin().await;
    let only = simba(&private.store).await.locker(name("only"));
    soon("a release", soon("a lock", only.lock()).await.unwrap().release()).await.unwrap();
    admin.batch_execute("VACUUM ANALYZE simba_mutex").await.unwrap();
    let simba = simba(&private.store).await;
    let mutexes: Vec<_> = (0..MANY).map(|n| name(&format!("many-{n}"))).collect();
    let before = fetched(&admin).await;
    for _ in 0..3 {
        let locks = mutexes.iter().map(|mutex| simba.locker(mutex.clone()));
        let guards = join_all(locks.map(|locker| async move { locker.lock().await.unwrap() })).await;
        join_all(guards.into_iter().map(|guard| async { guard.release().await.unwrap() })).await;
    }
    let calls = i64::try_from(2 * 3 * MANY).unwrap();
    let fetched = fetched(&admin).await - before;
    assert!(
        (calls / 2..=5 * calls).contains(&fetched),
        "broken: {fetched} rows were looked at in {calls} calls"
    );
}

/// Contenders come, go, give up and are woken at random. A wake-up that is lost would cost the length of a poll.
#[tokio::test(flavor = "multi_thread")]
async fn no_wake_up_is_lost_in_a_crowd() {
    let store = Store::shared();
    let mutex = name("crowd");
    let mut handles = Vec::new();
    for _ in 0..3 {
        handles.push(simba(&store).await);
    }
    let mut tasks = Vec::new();
    for at in 0..24 {
        let locker = handles[at % handles.len()].locker(mutex.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds() * 10 {
                // Some give up just when they may be woken.
                let patience = Duration::from_micros(fastrand::u64(0..20_000));
                if fastrand::bool() {
                    let _ = tokio::time::timeout(patience, locker.lock()).await.map(drop);
                } else {
                    let guard = locker.lock().await.unwrap();
                    tokio::time::sleep(patience / 20).await;
                    guard.release().await.unwrap();
                }
            }
        }));
    }
    for task in tasks {
        let ended = tokio::time::timeout(Duration::from_secs(30), task).await;
        ended.expect("broken: nobody waits for a wake-up that was lost").unwrap();
    }
}

/// A configuration whose tables nobody has made yet, with the right to make them.
fn not_set_up(store: &Store, prefix: &str) -> PostgresConfig {
    let (admin, address) = (&store.admin, store.address());
    let login = format!("{}:{}", admin.user().unwrap(), admin.password().unwrap());
    let prefix = format!("{prefix}_{}", std::process::id());
    let url = format!("postgres://{login}@{address}{}?prefix={prefix}&sslmode=disable", admin.path());
    PostgresConfig::from_url(&url.parse().unwrap()).unwrap()
}

/// Tables that many make at the same time are made once, and nobody is told of a clash.
#[tokio::test(flavor = "multi_thread")]
async fn many_set_the_store_up_at_once() {
    let store = Store::shared();
    let mut crowd = Vec::new();
    for _ in 0..8 {
        crowd.push(PostgresBackend::connect(not_set_up(&store, "crowd")).await.unwrap());
    }
    let set_up = crowd.into_iter().map(|backend| tokio::spawn(async move { backend.apply_schema().await }));
    for done in set_up.collect::<Vec<_>>() {
        soon("the store is set up", done).await.unwrap().unwrap();
    }
}

/// On a slow server whoever comes second waits longer than it would for the row of a mutex.
#[tokio::test(flavor = "multi_thread")]
async fn a_set_up_that_takes_its_time_is_waited_for() {
    let store = Store::shared();
    let (first, watcher) = (store.admin().await, store.admin().await);
    first.batch_execute(&format!("BEGIN; SELECT pg_advisory_xact_lock({SETTING_UP})")).await.unwrap();
    let config = not_set_up(&store, "slow").with_lock_timeout(Duration::from_millis(20));
    let second = PostgresBackend::connect(config).await.unwrap();
    let set_up = tokio::spawn(async move { second.apply_schema().await });
    let waits =
        "SELECT EXISTS (SELECT FROM pg_locks WHERE locktype = 'advisory' AND objid = $1 AND NOT granted)";
    let waiting = async {
        while !watcher.query_one(waits, &[&SETTING_UP]).await.unwrap().get::<_, bool>(0) {
            assert!(!set_up.is_finished(), "broken: it does not wait for its turn");
        }
    };
    soon("the second waits for the first", waiting).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    first.batch_execute("COMMIT").await.unwrap();
    soon("the store is set up", set_up).await.unwrap().unwrap();
}
