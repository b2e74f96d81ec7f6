//! Contention with JVM peers on the same keys.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "test code")]

mod common;

use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use common::jvm::Peer;
use common::{Store, name, simba};
use simba_core::{Clock, Lease, MutexName, SystemClock};
use simba_servers::Setup;
use simba_tck::{Network, rounds};

const EACH: usize = 3;

/// A hold of one contender.
#[derive(Clone, Debug)]
struct Held {
    rust: bool,
    contender: String,
    from: Instant,
    to: Instant,
    /// Whether it ended with a release, and not with a crash.
    released: bool,
}

type Log = Arc<Mutex<Vec<Held>>>;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Returns the pause after a hold: long enough that a busy machine wakes a waiter before a JVM peer contends again.
fn pause() -> Duration {
    ms(fastrand::u64(0..50))
}

/// Returns whether a hold ends with a crash: 3 % of them do.
fn crashes() -> bool {
    fastrand::f64() < 0.03
}

/// Acquires and releases as JVM peers, until `end`.
fn jvm(store: &Store, mutex: &MutexName, ttl: Duration, transition: Duration, end: Instant, log: &Log) {
    let mut count = 0;
    while Instant::now() < end {
        count += 1;
        let id = format!("{count}:{}@10.0.0.{}", fastrand::u16(..), ttl.as_millis() % 250);
        let mut peer = Peer::start(store.address, mutex, &id, ttl, transition);
        for _ in 0..20 {
            let Some(mut hold) = peer.acquire(end) else { return };
            let kept = peer.work(&mut hold, ms(fastrand::u64(2..20)));
            let crashes = crashes();
            let to = hold.until.min(Instant::now());
            if kept && to > hold.from {
                let contender = id.clone();
                let held = Held { rust: false, contender, from: hold.from, to, released: !crashes };
                log.lock().unwrap().push(held);
            }
            if crashes {
                break;
            }
            peer.release();
            thread::sleep(pause());
        }
    }
}

/// Acquires and releases as contenders of this library, until `end`.
async fn ours(store: Store, mutex: MutexName, lease: Lease, end: Instant, log: Log) {
    while Instant::now() < end {
        let (backend, proxy) = store.proxied().await;
        let simba = simba(backend, lease);
        for _ in 0..20 {
            let contention = simba.contend(mutex.clone());
            contention.start().unwrap();
            let left = end.saturating_duration_since(Instant::now());
            let Ok(Ok(tenure)) = tokio::time::timeout(left, contention.acquired()).await else {
                return contention.stop().await.unwrap_or(());
            };
            let from = Instant::now();
            tokio::time::sleep(ms(fastrand::u64(2..20))).await;
            let crashes = crashes();
            // A hold is valid until its deadline at most.
            let to = Instant::now().min(from + (tenure.deadline() - SystemClock.now()));
            let held = tenure.is_held();
            if held {
                let contender = tenure.contender().to_string();
                log.lock().unwrap().push(Held { rust: true, contender, from, to, released: !crashes });
            }
            if crashes {
                Network::refuse(&*proxy);
                break;
            }
            contention.stop().await.unwrap();
            tokio::time::sleep(pause()).await;
        }
    }
}

/// Runs three JVM peers beside three contenders of ours. Returns all holds, ordered by their start.
async fn run(leases: [(u64, u64); EACH]) -> Vec<Held> {
    let store = Store::private(Setup::redis()).with_long_timeout();
    let (mutex, log) = (name(), Log::default());
    let end = Instant::now() + Duration::from_secs(10) * rounds();
    // A stop fails if it is not confirmed within three seconds.
    let lease = Lease::new(ms(900), ms(2100)).and_then(|lease| lease.with_poll(ms(3000))).unwrap();
    let theirs: Vec<_> = leases
        .into_iter()
        .map(|(ttl, transition)| {
            let (store, mutex, log) = (store.clone(), mutex.clone(), Arc::clone(&log));
            thread::spawn(move || jvm(&store, &mutex, ms(ttl), ms(transition), end, &log))
        })
        .collect();
    let own: Vec<_> = (0..EACH)
        .map(|_| tokio::spawn(ours(store.clone(), mutex.clone(), lease, end, Arc::clone(&log))))
        .collect();
    for task in own {
        task.await.unwrap();
    }
    for thread in theirs {
        tokio::task::spawn_blocking(move || thread.join().unwrap()).await.unwrap();
    }
    let mut held = log.lock().unwrap().clone();
    held.sort_by_key(|held| held.from);
    held
}

fn assert_no_overlap(held: &[Held]) {
    for pair in held.windows(2) {
        assert!(
            pair[0].to <= pair[1].from,
            "broken: {} and {} hold at the same time: {pair:#?}",
            pair[0].contender,
            pair[1].contender
        );
    }
}

fn report(held: &[Held]) -> (usize, usize, usize) {
    let ours = held.iter().filter(|held| held.rust).count();
    // Hand-overs between the two kinds that are faster than any lease or timer.
    let woken = |rust: bool| {
        let woken = |pair: &&[Held]| {
            pair[0].rust != rust
                && pair[1].rust == rust
                && pair[0].released
                && pair[1].from - pair[0].to < ms(100)
        };
        held.windows(2).filter(woken).count()
    };
    println!("{} holds, {ours} ours; woken: {} of ours, {} of theirs", held.len(), woken(true), woken(false));
    (ours, woken(true), woken(false))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_56_three_contenders_share_the_mutex_with_three_jvm_peers() {
    // As long as ours: a waiter that is not woken sleeps for seconds.
    let held = run([(2000, 1000); EACH]).await;
    assert_no_overlap(&held);
    let (ours, woken, wake) = report(&held);
    assert!(held.len() > 50, "broken: only {} holds", held.len());
    assert!(ours * 5 >= held.len(), "broken: ours acquire at least a fifth, not {ours} of {}", held.len());
    assert!(
        (held.len() - ours) * 5 >= held.len(),
        "broken: JVM peers acquire at least a fifth of {}, ours {ours}",
        held.len()
    );
    assert!(woken >= 5 && wake >= 5, "broken: wake-ups work in both directions, not {woken} and {wake}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_57_jvm_peers_can_have_other_leases() {
    let held = run([(100, 50), (300, 200), (700, 500)]).await;
    assert_no_overlap(&held);
    report(&held);
    assert!(held.len() > 50, "broken: only {} holds", held.len());
}
