//! The rows of the fault matrix about who comes next.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test, by hand")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Store, case, lead, lease, long, name, simba, soon, until, wait, within};
use simba_core::{Answer, Backend as _, Claim, ContenderId, Holding, Lease, MutexName, Prior};
use simba_redis::RedisBackend;
use simba_servers::Setup;
use simba_tck::{Network, rounds};
use tokio::sync::Mutex;

fn store() -> Store {
    Store::private(Setup::redis())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_a_dead_head_of_the_queue_is_skipped_at_once() {
    let store = store();
    let mut admin = store.admin();
    for _ in 0..rounds() {
        let mutex = name();
        let (dead, proxy) = store.proxied().await;
        let (dead, alive) = (simba(dead, long()), simba(store.backend().await, long()));
        let (leader, _) = lead(&alive, &mutex).await;
        let _head = wait(&dead, &mutex, &mut admin).await;
        let next = wait(&alive, &mutex, &mut admin).await;
        // Its connections end, as those of a killed process do; its place stays.
        Network::refuse(&*proxy);
        until("the server notices", || listeners(&mut admin, &mutex) == 1).await;
        leader.stop().await.unwrap();
        // Its poll and the leader's lease are far too long to explain it.
        within(Duration::from_secs(3), "the next live waiter is woken", next.acquired()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_a_waiter_listens_before_it_enters_the_queue() {
    let store = store();
    let mut admin = store.admin();
    let simba = simba(store.backend().await, long());
    // The connection that hears is there.
    let warm = name();
    let (_leader, _) = lead(&simba, &warm).await;
    let _waiter = wait(&simba, &warm, &mut admin).await;
    let mutex = name();
    let (_leader, _) = lead(&simba, &mutex).await;
    let mut monitor = store.admin();
    monitor.ask(&["MONITOR"]);
    let _waiter = wait(&simba, &mutex, &mut admin).await;
    let mut listens = false;
    loop {
        let line = monitor.reply().text().unwrap_or_default().to_lowercase();
        if !line.contains(mutex.as_str()) {
            continue;
        }
        listens |= line.contains("\"subscribe\"");
        if line.contains("\"zadd\"") {
            // Who dies before that delays nobody, for nobody knows of it.
            assert!(listens, "broken: nobody is in the queue whom no message reaches");
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_a_head_that_never_heard_delays_the_next_for_a_moment() {
    let store = store();
    let mut admin = store.admin();
    let backend = store.backend().await;
    let seconds = Duration::from_secs;
    // As by default, but nobody polls.
    let lease = Lease::new(seconds(10), seconds(6)).and_then(|lease| lease.with_poll(seconds(30))).unwrap();
    for _ in 0..rounds() {
        let mutex = name();
        let alive = simba(store.backend().await, lease);
        let (leader, _) = lead(&alive, &mutex).await;
        admin.ask(&["ACL", "SETUSER", common::USER, "-subscribe"]);
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), lease);
        let mut deaf = backend.open(claim).await.unwrap();
        deaf.contend(Prior::Nothing).await.unwrap();
        assert_eq!(
            admin.int(&["ZCARD", &format!("simba:{{{mutex}}}:contender")]),
            1,
            "it queues all the same"
        );
        // It never says goodbye.
        std::mem::forget(deaf);
        admin.ask(&["ACL", "SETUSER", common::USER, "+subscribe"]);
        let next = wait(&alive, &mutex, &mut admin).await;
        leader.stop().await.unwrap();
        soon("the next waiter comes", next.acquired()).await.unwrap();
    }
}

/// A server compares texts by the language of its environment, where `F` comes after `a`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_sorts_like_people_skips_the_dead() {
    let languages = tempfile::tempdir().unwrap();
    let mut english = std::process::Command::new("localedef");
    english.args(["-i", "en_US", "-f", "UTF-8"]).arg(languages.path().join("en_US.UTF-8"));
    assert!(english.status().unwrap().success(), "the package `locales` is there");
    let setup = Setup::redis().with_env("LOCPATH", languages.path()).with_env("LC_ALL", "en_US.UTF-8");
    let store = Store::private(setup);
    let (backend, mut admin) = (store.backend().await, store.admin());
    let sorts = ["EVAL", "return 'F' < 'a' and 1 or 0", "0"];
    assert_eq!(admin.int(&sorts), 0, "it sorts like people");
    let mutex = name();
    let key = |suffix: &str| format!("simba:{{{mutex}}}{suffix}");
    for dead in ["one", "two", "three"] {
        admin.ask(&["ZADD", &key(":contender"), "1", dead]);
        admin.ask(&["ZADD", &key(":alive"), "9000000000000.5", dead]);
    }
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let answer = backend.open(claim).await.unwrap().contend(Prior::Nothing).await.unwrap();
    assert!(matches!(answer, Answer::Ours(_)), "those before it are dead: {answer:?}");
}

/// How many waiters of the mutex the server would tell.
fn listeners(admin: &mut common::Admin, mutex: &MutexName) -> usize {
    let channels = admin.ask(&["PUBSUB", "CHANNELS", &format!("simba:{{{mutex}}}:*")]);
    channels.array().expect("channels").len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_24_a_waiter_that_stops_when_it_is_woken_passes_it_on() {
    let store = store();
    // Between being woken and asking, for sure.
    for _ in 0..rounds() * 5 {
        case(&store, "handover", "a_woken_waiter_that_gives_up_wakes_the_next").await;
        case(&store, "handover", "a_woken_waiter_that_is_dropped_wakes_the_next").await;
    }
    // And at whatever moment it may be.
    let mut admin = store.admin();
    let (one, two) = (simba(store.backend().await, long()), simba(store.backend().await, long()));
    for round in 0..rounds() * 10 {
        let mutex = name();
        let (leader, _) = lead(&one, &mutex).await;
        let head = wait(&two, &mutex, &mut admin).await;
        let next = wait(&one, &mutex, &mut admin).await;
        let pause = Duration::from_micros(u64::from(round % 10) * 100);
        let stops = async {
            tokio::time::sleep(pause).await;
            head.stop().await
        };
        let (freed, stopped) = tokio::join!(leader.stop(), stops);
        freed.unwrap();
        stopped.unwrap();
        within(Duration::from_secs(5), "who stops wakes the next", next.acquired()).await.unwrap();
        next.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_a_stopped_head_of_the_queue_blocks_nobody() {
    let store = store();
    let mut admin = store.admin();
    for _ in 0..rounds() {
        let mutex = name();
        let (stopped, proxy) = store.proxied().await;
        let (stopped, alive) = (simba(stopped, lease()), simba(store.backend().await, lease()));
        let (leader, _) = lead(&alive, &mutex).await;
        let _head = wait(&stopped, &mutex, &mut admin).await;
        let next = wait(&alive, &mutex, &mut admin).await;
        proxy.stall();
        leader.stop().await.unwrap();
        let limit = lease().poll() + Duration::from_secs(2);
        within(limit, "a head that stands still blocks nobody", next.acquired()).await.unwrap();
    }
}

/// It was woken, and stands still or dies before it comes. Nobody polls within the test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_a_woken_waiter_that_does_not_come_keeps_the_next_out_for_a_second() {
    let store = store();
    let mut admin = store.admin();
    let alive = simba(store.backend().await, long());
    for peers in [0, 3] {
        let mutex = name();
        let (stopped, proxy) = store.proxied().await;
        let stopped = simba(stopped, long());
        let (leader, _) = lead(&alive, &mutex).await;
        let head = wait(&stopped, &mutex, &mut admin).await;
        let head = (head.id().unwrap(), head);
        // Dead waiters between the two.
        for n in 0..peers {
            let (id, key) = (format!("dead-{n}"), format!("simba:{{{mutex}}}"));
            let place = admin.text(&["ZSCORE", &format!("{key}:contender"), head.0.as_str()]).unwrap();
            admin.int(&["ZADD", &format!("{key}:contender"), &format!("{place}1"), &id]);
            admin.int(&["ZADD", &format!("{key}:alive"), "9000000000000.5", &id]);
        }
        let next = wait(&alive, &mutex, &mut admin).await;
        proxy.stall();
        leader.stop().await.unwrap();
        soon("the next waiter comes after the promise", next.acquired()).await.unwrap();
        next.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_26_a_thousand_dead_waiters_cost_one_release() {
    let store = store();
    let mut admin = store.admin();
    let (mutex, simba) = (name(), simba(store.backend().await, long()));
    let queue = format!("simba:{{{mutex}}}:contender");
    let (leader, _) = lead(&simba, &mutex).await;
    for dead in 0..1000 {
        admin.int(&["ZADD", &queue, &dead.to_string(), &format!("{dead}:7@dead")]);
    }
    let next = wait(&simba, &mutex, &mut admin).await;
    let began = Instant::now();
    leader.stop().await.unwrap();
    soon("the live waiter is woken", next.acquired()).await.unwrap();
    let took = began.elapsed();
    assert!(took < Duration::from_secs(2), "broken: dead waiters cost little, not {took:?}");
    assert_eq!(admin.int(&["ZCARD", &queue]), 0, "broken: the dead are gone from the queue");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_27_waiters_that_crash_leave_no_queue_behind() {
    let store = store();
    let mut admin = store.admin();
    let backend = store.backend().await;
    let (mutex, ms) = (name(), Duration::from_millis);
    let key = |suffix: &str| format!("simba:{{{mutex}}}:{suffix}");
    let short = Lease::new(ms(100), ms(50)).unwrap().with_poll(ms(50)).unwrap();
    let mut holder = backend.open(Claim::new(mutex.clone(), ContenderId::generate(), long())).await.unwrap();
    holder.contend(Prior::Nothing).await.unwrap();
    // One call skips so many, and five hundred more.
    for _ in 0..(rounds() * 300).min(4500) {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), short);
        let mut crashed = backend.open(claim).await.unwrap();
        crashed.contend(Prior::Nothing).await.unwrap();
        // It never says goodbye.
        std::mem::forget(crashed);
    }
    for suffix in ["contender", "alive"] {
        assert!(admin.int(&["PTTL", &key(suffix)]) > 0, "broken: `{suffix}` ends by itself");
    }
    tokio::time::sleep(ms(200)).await;
    holder.release(Holding::Unknown).await.unwrap();
    for suffix in ["contender", "alive"] {
        assert_eq!(admin.int(&["ZCARD", &key(suffix)]), 0, "broken: nobody who crashed is in `{suffix}`");
    }
}

/// Who held, and how many had held before it was queued.
type Order = Arc<Mutex<Vec<(usize, usize)>>>;

/// Waits for one turn, as the engine does. What passes a waiter counts from when it knows that it is queued: how
/// long its first call takes is not the queue's doing.
async fn take_turn(backend: &RedisBackend, mutex: &MutexName, who: usize, order: &Order) {
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let mut session = backend.open(claim).await.unwrap();
    let mut queued = None;
    while !matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)) {
        if queued.is_none() {
            queued = Some(order.lock().await.len());
        }
        tokio::time::timeout(Duration::from_secs(1), session.changed()).await.ok();
    }
    let mut turns = order.lock().await;
    let now = turns.len();
    turns.push((who, queued.unwrap_or(now)));
    drop(turns);
    session.release(Holding::Unknown).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_28_waiters_in_a_tight_loop_take_turns() {
    const WAITERS: usize = 5;
    let store = store();
    let (mutex, order, over) = (name(), Order::default(), Arc::new(AtomicBool::new(false)));
    let mut tasks = Vec::new();
    for who in 0..WAITERS {
        let backend = store.backend().await;
        let (mutex, order, over) = (mutex.clone(), Arc::clone(&order), Arc::clone(&over));
        tasks.push(tokio::spawn(async move {
            while !over.load(Ordering::SeqCst) {
                take_turn(&backend, &mutex, who, &order).await;
            }
        }));
    }
    tokio::time::sleep(Duration::from_secs(2) * rounds()).await;
    over.store(true, Ordering::SeqCst);
    for task in tasks {
        soon("everyone ends", task).await.unwrap();
    }
    let order = order.lock().await;
    let mean = order.len() / WAITERS;
    for who in 0..WAITERS {
        let turns: Vec<usize> = (0..order.len()).filter(|at| order[*at].0 == who).collect();
        assert!(turns.len() * 2 >= mean, "broken: {who} has {} turns of {}", turns.len(), order.len());
        let passed = turns.iter().map(|at| at - order[*at].1).max().unwrap_or(0);
        assert!(passed <= 2 * WAITERS, "broken: {who} was passed {passed} times");
        println!("{who}: {} turns, passed {passed} times at the most", turns.len());
    }
    println!("{} turns", order.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_29_a_release_to_a_thousand_waiters_is_a_few_calls() {
    const WAITERS: i64 = 1000;
    const HANDOVERS: i64 = 50;
    let store = store();
    let mut admin = store.admin();
    let mutex = name();
    let mut simbas = Vec::new();
    for _ in 0..4 {
        simbas.push(simba(store.backend().await, long()));
    }
    let (mut leader, _) = lead(&simbas[0], &mutex).await;
    let waiters: Vec<_> =
        (0..WAITERS).map(|at| simbas[usize::try_from(at).unwrap() % 4].contend(mutex.clone())).collect();
    waiters.iter().for_each(|waiter| waiter.start().unwrap());
    let (queue, pattern) = (format!("simba:{{{mutex}}}:contender"), format!("simba:{{{mutex}}}:*"));
    until("everyone is queued", || admin.int(&["ZCARD", &queue]) == WAITERS).await;
    let hears = |admin: &mut common::Admin| {
        admin.ask(&["PUBSUB", "CHANNELS", &pattern]).array().map_or(0, <[_]>::len)
    };
    until("everyone hears", || hears(&mut admin) >= 1000).await;
    // Everyone looks once more when it hears.
    let mut before = calls(&mut admin);
    loop {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = calls(&mut admin);
        if now == before {
            break;
        }
        before = now;
    }
    let mut waiters = waiters;
    for _ in 0..HANDOVERS {
        leader.stop().await.unwrap();
        let next = async {
            loop {
                if let Some(at) = waiters.iter().position(simba_core::Contention::is_owner) {
                    return at;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let at = soon("somebody comes next", next).await;
        leader = waiters.remove(at);
    }
    let calls = calls(&mut admin) - before;
    assert!(calls <= 5 * HANDOVERS, "broken: at most 5 calls a hand-over, not {calls} for {HANDOVERS}");
    println!("{calls} calls for {HANDOVERS} hand-overs");
}

/// How many scripts the server has run so far.
fn calls(admin: &mut common::Admin) -> i64 {
    let info = admin.text(&["INFO", "commandstats"]).unwrap_or_default();
    let count = |line: &str| line.split("calls=").nth(1)?.split(',').next()?.parse::<i64>().ok();
    info.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(count).sum()
}
