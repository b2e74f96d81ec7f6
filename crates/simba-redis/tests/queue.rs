//! Fault matrix: the order of waiters.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "test code")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Store, case, lead, lease, long, name, simba, soon, until, wait};
use simba_core::spi::{Answer, Backend as _, Claim, Holding, Prior};
use simba_core::{ContenderId, Lease, MutexName, SystemClock};
use simba_redis::RedisBackend;
use simba_servers::Setup;
use simba_tck::{Network, SkewedClock, rounds};
use tokio::sync::Mutex;

fn store() -> Store {
    Store::private(Setup::redis()).with_long_timeout()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_dead_head_of_the_queue_is_skipped_immediately() {
    let store = store();
    let mut admin = store.admin();
    for _ in 0..rounds() {
        let mutex = name();
        let (dead, proxy) = store.proxied().await;
        let (dead, alive) = (simba(dead, long()), simba(store.backend().await, long()));
        let (leader, _) = lead(&alive, &mutex).await;
        let _head = wait(&dead, &mutex, &mut admin).await;
        let next = wait(&alive, &mutex, &mut admin).await;
        // Its connections end, as those of a killed process do. Its queue entry stays.
        Network::refuse(&*proxy);
        until("the server notices", || subscribers(&mut admin, &mutex) == 1).await;
        leader.stop().await.unwrap();
        // The poll and the leader's lease are too long to be the cause.
        soon("the next live waiter is woken", next.acquired()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_waiter_subscribes_before_it_enters_the_queue() {
    let store = store();
    let mut admin = store.admin();
    admin.create_user();
    // A waiter enters the queue unsubscribed if its subscription takes longer than half a second: 50 s on this clock.
    let clock = Arc::new(SkewedClock::with_rate(SystemClock, 0.01));
    let backend = RedisBackend::connect_with_clock(store.config(store.address), clock).await.unwrap();
    let simba = simba(backend, long());
    // Opens the connection for subscriptions.
    let warm = name();
    let (_leader, _) = lead(&simba, &warm).await;
    let _waiter = wait(&simba, &warm, &mut admin).await;
    let mutex = name();
    let (_leader, _) = lead(&simba, &mutex).await;
    let mut monitor = store.admin();
    monitor.call(&["MONITOR"]);
    let _waiter = wait(&simba, &mutex, &mut admin).await;
    let mut subscribed = false;
    loop {
        let line = monitor.reply().text().unwrap_or_default().to_lowercase();
        if !line.contains(mutex.as_str()) {
            continue;
        }
        subscribed |= line.contains("\"subscribe\"");
        if line.contains("\"zadd\"") {
            // A waiter that dies before this command has no entry, so it delays no other.
            assert!(subscribed, "broken: messages reach every waiter in the queue");
            return;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_23_unsubscribed_head_of_the_queue_delays_the_next_only_briefly() {
    let store = store();
    let mut admin = store.admin();
    let backend = store.backend().await;
    let seconds = Duration::from_secs;
    // As by default, but no waiter polls within the test, and no lease ends.
    let lease = Lease::new(seconds(10), seconds(90)).and_then(|lease| lease.with_poll(seconds(60))).unwrap();
    for _ in 0..rounds() {
        let mutex = name();
        let alive = simba(store.backend().await, lease);
        let (leader, _) = lead(&alive, &mutex).await;
        admin.call(&["ACL", "SETUSER", common::USER, "-subscribe"]);
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), lease);
        let mut unsubscribed = backend.open(claim).await.unwrap();
        unsubscribed.contend(Prior::Nothing).await.unwrap();
        assert_eq!(
            admin.int(&["ZCARD", &format!("simba:{{{mutex}}}:contender")]),
            1,
            "it queues without a subscription"
        );
        // It never leaves the queue.
        std::mem::forget(unsubscribed);
        admin.call(&["ACL", "SETUSER", common::USER, "+subscribe"]);
        let next = wait(&alive, &mutex, &mut admin).await;
        leader.stop().await.unwrap();
        soon("the next waiter acquires", next.acquired()).await.unwrap();
    }
}

/// A server compares strings by its locale, in which `F` may come after `a`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dead_waiters_are_skipped_on_a_server_with_another_collation() {
    let locales = tempfile::tempdir().unwrap();
    let mut english = std::process::Command::new("localedef");
    english.args(["-i", "en_US", "-f", "UTF-8"]).arg(locales.path().join("en_US.UTF-8"));
    assert!(english.status().unwrap().success(), "the package `locales` is installed");
    let setup = Setup::redis().with_env("LOCPATH", locales.path()).with_env("LC_ALL", "en_US.UTF-8");
    let store = Store::private(setup);
    let (backend, mut admin) = (store.backend().await, store.admin());
    let sorts = ["EVAL", "return 'F' < 'a' and 1 or 0", "0"];
    assert_eq!(admin.int(&sorts), 0, "the server collates by the locale");
    let mutex = name();
    let key = |suffix: &str| format!("simba:{{{mutex}}}{suffix}");
    for dead in ["one", "two", "three"] {
        admin.call(&["ZADD", &key(":contender"), "1", dead]);
        admin.call(&["ZADD", &key(":alive"), "9000000000000.5", dead]);
    }
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let answer = backend.open(claim).await.unwrap().contend(Prior::Nothing).await.unwrap();
    assert!(matches!(answer, Answer::Ours(_)), "the waiters before it are dead: {answer:?}");
}

/// Returns the number of subscribed waiters of the mutex.
fn subscribers(admin: &mut common::Admin, mutex: &MutexName) -> usize {
    let channels = admin.call(&["PUBSUB", "CHANNELS", &format!("simba:{{{mutex}}}:*")]);
    channels.array().expect("channels").len()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_24_woken_waiter_that_stops_wakes_the_next() {
    let store = store();
    // Stopped between the wake-up and the next call.
    for _ in 0..rounds() * 5 {
        case(&store, "handover", "a_woken_waiter_that_gives_up_wakes_the_next").await;
        case(&store, "handover", "a_woken_waiter_that_is_dropped_wakes_the_next").await;
    }
    // Stopped at various times.
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
        soon("the next waiter is woken", next.acquired()).await.unwrap();
        next.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_stopped_head_of_the_queue_blocks_no_waiter() {
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
        soon("a stopped head blocks no waiter", next.acquired()).await.unwrap();
    }
}

/// The woken waiter stops or dies before it acquires. No waiter polls within the test.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_25_woken_waiter_that_does_not_acquire_delays_the_next_by_a_second() {
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
            let score = admin.text(&["ZSCORE", &format!("{key}:contender"), head.0.as_str()]).unwrap();
            admin.int(&["ZADD", &format!("{key}:contender"), &format!("{score}1"), &id]);
            admin.int(&["ZADD", &format!("{key}:alive"), "9000000000000.5", &id]);
        }
        let next = wait(&alive, &mutex, &mut admin).await;
        proxy.stall();
        leader.stop().await.unwrap();
        soon("the next waiter acquires after the reservation", next.acquired()).await.unwrap();
        next.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_26_one_release_skips_a_thousand_dead_waiters() {
    let store = store();
    let mut admin = store.admin();
    let (mutex, simba) = (name(), simba(store.backend().await, long()));
    let queue = format!("simba:{{{mutex}}}:contender");
    let (leader, _) = lead(&simba, &mutex).await;
    for dead in 0..1000 {
        admin.int(&["ZADD", &queue, &dead.to_string(), &format!("{dead}:7@dead")]);
    }
    let next = wait(&simba, &mutex, &mut admin).await;
    let before = calls(&mut admin);
    leader.stop().await.unwrap();
    soon("the live waiter is woken", next.acquired()).await.unwrap();
    // A release and an acquisition, and the waiter's calls after its subscription and its wake-up.
    let made = calls(&mut admin) - before;
    assert!(made <= 10, "broken: one release skips all dead waiters, not {made} calls");
    assert_eq!(admin.int(&["ZCARD", &queue]), 0, "broken: dead waiters are removed from the queue");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_27_crashed_waiters_leave_no_queue_entries() {
    let store = store();
    let mut admin = store.admin();
    let backend = store.backend().await;
    let (mutex, ms) = (name(), Duration::from_millis);
    let key = |suffix: &str| format!("simba:{{{mutex}}}:{suffix}");
    let short = Lease::new(ms(100), ms(50)).unwrap().with_poll(ms(50)).unwrap();
    // It is not renewed, and outlasts the entries of all waiters.
    let whole = Lease::new(Duration::from_secs(900), Duration::from_secs(600)).unwrap();
    let mut holder = backend.open(Claim::new(mutex.clone(), ContenderId::generate(), whole)).await.unwrap();
    holder.contend(Prior::Nothing).await.unwrap();
    // One call skips up to 5000.
    for _ in 0..(rounds() * 300).min(4500) {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), short);
        let mut crashed = backend.open(claim).await.unwrap();
        crashed.contend(Prior::Nothing).await.unwrap();
        // It never leaves the queue.
        std::mem::forget(crashed);
    }
    for suffix in ["contender", "alive"] {
        assert!(admin.int(&["PTTL", &key(suffix)]) > 0, "broken: `{suffix}` expires");
    }
    tokio::time::sleep(ms(200)).await;
    holder.release(Holding::Unknown).await.unwrap();
    for suffix in ["contender", "alive"] {
        assert_eq!(admin.int(&["ZCARD", &key(suffix)]), 0, "broken: no crashed waiter is in `{suffix}`");
    }
}

/// The waiters in the order of their turns, with the number of turns before each was queued.
type Order = Arc<Mutex<Vec<(usize, usize)>>>;

/// Waits for one turn, as the engine does. Turns of others count from when the waiter knows that it is queued: the
/// duration of its first call is not determined by the queue.
async fn take_turn(backend: &RedisBackend, mutex: &MutexName, waiter: usize, order: &Order) {
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
    turns.push((waiter, queued.unwrap_or(now)));
    drop(turns);
    session.release(Holding::Unknown).await.unwrap();
}

/// In one thread: with several, a waiter whose thread is not scheduled within its reservation loses its turn.
#[tokio::test]
async fn row_28_waiters_in_a_tight_loop_take_turns() {
    const WAITERS: usize = 5;
    let store = store();
    let (mutex, order, end) = (name(), Order::default(), Arc::new(AtomicBool::new(false)));
    let mut tasks = Vec::new();
    for waiter in 0..WAITERS {
        let backend = store.backend().await;
        let (mutex, order, end) = (mutex.clone(), Arc::clone(&order), Arc::clone(&end));
        tasks.push(tokio::spawn(async move {
            while !end.load(Ordering::SeqCst) {
                take_turn(&backend, &mutex, waiter, &order).await;
            }
        }));
    }
    tokio::time::sleep(Duration::from_secs(2) * rounds()).await;
    end.store(true, Ordering::SeqCst);
    for task in tasks {
        soon("every waiter ends", task).await.unwrap();
    }
    let order = order.lock().await;
    let mean = order.len() / WAITERS;
    for waiter in 0..WAITERS {
        let turns: Vec<usize> = (0..order.len()).filter(|at| order[*at].0 == waiter).collect();
        assert!(turns.len() * 2 >= mean, "broken: {waiter} has {} turns of {}", turns.len(), order.len());
        let overtaken = turns.iter().map(|at| at - order[*at].1).max().unwrap_or(0);
        assert!(overtaken <= 2 * WAITERS, "broken: {waiter} was overtaken {overtaken} times");
        println!("{waiter}: {} turns, overtaken at most {overtaken} times", turns.len());
    }
    println!("{} turns", order.len());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_29_handover_with_a_thousand_waiters_is_a_few_calls() {
    const WAITERS: i64 = 1000;
    const HANDOVERS: i64 = 50;
    let store = store();
    let mut admin = store.admin();
    let mutex = name();
    // No waiter polls within the test, however long it takes.
    let lease = long().with_poll(Duration::from_secs(600)).unwrap();
    let mut simbas = Vec::new();
    for _ in 0..4 {
        simbas.push(simba(store.backend().await, lease));
    }
    let (mut leader, _) = lead(&simbas[0], &mutex).await;
    let waiters: Vec<_> =
        (0..WAITERS).map(|at| simbas[usize::try_from(at).unwrap() % 4].contend(mutex.clone())).collect();
    waiters.iter().for_each(|waiter| waiter.start().unwrap());
    let (queue, pattern) = (format!("simba:{{{mutex}}}:contender"), format!("simba:{{{mutex}}}:*"));
    until("every waiter is queued", || admin.int(&["ZCARD", &queue]) == WAITERS).await;
    let subscribed = |admin: &mut common::Admin| {
        admin.call(&["PUBSUB", "CHANNELS", &pattern]).array().map_or(0, <[_]>::len)
    };
    until("every waiter is subscribed", || subscribed(&mut admin) >= 1000).await;
    // Every waiter calls once more after its subscription. Three seconds without a call are longer than a pause of the
    // machine.
    let (mut before, mut quiet) = (calls(&mut admin), 0);
    while quiet < 10 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = calls(&mut admin);
        quiet = if now == before { quiet + 1 } else { 0 };
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
        let at = soon("a waiter acquires", next).await;
        leader = waiters.remove(at);
    }
    let calls = calls(&mut admin) - before;
    assert!(calls <= 5 * HANDOVERS, "broken: at most 5 calls per hand-over, not {calls} for {HANDOVERS}");
    println!("{calls} calls for {HANDOVERS} hand-overs");
}

/// Returns the number of scripts that the server has run.
fn calls(admin: &mut common::Admin) -> i64 {
    let info = admin.text(&["INFO", "commandstats"]).unwrap_or_default();
    let count = |line: &str| line.split("calls=").nth(1)?.split(',').next()?.parse::<i64>().ok();
    info.lines().filter(|line| line.starts_with("cmdstat_eval")).filter_map(count).sum()
}
