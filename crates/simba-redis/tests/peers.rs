//! Beside JVM peers on the same keys.

#![allow(clippy::unwrap_used, clippy::print_stdout, reason = "a test, by hand")]

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

/// Who held, from when to when.
#[derive(Clone, Debug)]
struct Held {
    rust: bool,
    who: String,
    from: Instant,
    to: Instant,
    /// Ended by giving it up, and not by a crash.
    gave_up: bool,
}

type Log = Arc<Mutex<Vec<Held>>>;

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// How a hold ends: now and then by a crash.
fn crashes() -> bool {
    fastrand::f64() < 0.03
}

/// A JVM peer that comes, works and goes, until it is over.
fn jvm(store: &Store, mutex: &MutexName, ttl: Duration, transition: Duration, over: Instant, log: &Log) {
    let mut count = 0;
    while Instant::now() < over {
        count += 1;
        let id = format!("{count}:{}@10.0.0.{}", fastrand::u16(..), ttl.as_millis() % 250);
        let mut peer = Peer::start(store.address, mutex, &id, ttl, transition);
        for _ in 0..20 {
            let Some(mut hold) = peer.acquire(over) else { return };
            let kept = peer.work(&mut hold, ms(fastrand::u64(2..20)));
            let crashes = crashes();
            let to = hold.until.min(Instant::now());
            if kept && to > hold.from {
                let held = Held { rust: false, who: id.clone(), from: hold.from, to, gave_up: !crashes };
                log.lock().unwrap().push(held);
            }
            if crashes {
                break;
            }
            peer.release();
            thread::sleep(ms(fastrand::u64(0..20)));
        }
    }
}

/// A contender of ours that does the same.
async fn ours(store: Store, mutex: MutexName, lease: Lease, over: Instant, log: Log) {
    while Instant::now() < over {
        let (backend, proxy) = store.proxied().await;
        let simba = simba(backend, lease);
        for _ in 0..20 {
            let contention = simba.contend(mutex.clone());
            contention.start().unwrap();
            let left = over.saturating_duration_since(Instant::now());
            let Ok(Ok(tenure)) = tokio::time::timeout(left, contention.acquired()).await else {
                return contention.stop().await.unwrap_or(());
            };
            let from = Instant::now();
            tokio::time::sleep(ms(fastrand::u64(2..20))).await;
            let crashes = crashes();
            // Valid until its deadline at the most.
            let to = Instant::now().min(from + (tenure.deadline() - SystemClock.now()));
            let held = tenure.is_held();
            if held {
                let who = tenure.contender().to_string();
                log.lock().unwrap().push(Held { rust: true, who, from, to, gave_up: !crashes });
            }
            if crashes {
                Network::refuse(&*proxy);
                break;
            }
            contention.stop().await.unwrap();
            tokio::time::sleep(ms(fastrand::u64(0..20))).await;
        }
    }
}

/// Three of theirs beside three of ours. Gives what happened, in order.
async fn contest(leases: [(u64, u64); EACH]) -> Vec<Held> {
    let store = Store::private(Setup::redis());
    let (mutex, log) = (name(), Log::default());
    let over = Instant::now() + Duration::from_secs(10) * rounds();
    let lease = Lease::new(ms(300), ms(200)).unwrap();
    let theirs: Vec<_> = leases
        .into_iter()
        .map(|(ttl, transition)| {
            let (store, mutex, log) = (store.clone(), mutex.clone(), Arc::clone(&log));
            thread::spawn(move || jvm(&store, &mutex, ms(ttl), ms(transition), over, &log))
        })
        .collect();
    let own: Vec<_> = (0..EACH)
        .map(|_| tokio::spawn(ours(store.clone(), mutex.clone(), lease, over, Arc::clone(&log))))
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
            "broken: {} and {} hold at once: {pair:#?}",
            pair[0].who,
            pair[1].who
        );
    }
}

fn report(held: &[Held]) -> (usize, usize, usize) {
    let ours = held.iter().filter(|held| held.rust).count();
    // From one side to the other sooner than any lease or timer explains.
    let woken = |rust: bool| {
        let woken = |pair: &&[Held]| {
            pair[0].rust != rust
                && pair[1].rust == rust
                && pair[0].gave_up
                && pair[1].from - pair[0].to < ms(25)
        };
        held.windows(2).filter(woken).count()
    };
    println!("{} holds, {ours} ours; woken: {} of ours, {} of theirs", held.len(), woken(true), woken(false));
    (ours, woken(true), woken(false))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_56_three_beside_three_jvm_peers_share_the_mutex() {
    let held = contest([(300, 200); EACH]).await;
    assert_no_overlap(&held);
    let (ours, woken, wake) = report(&held);
    assert!(held.len() > 50, "broken: the mutex goes from hand to hand, not {} times", held.len());
    assert!(ours * 5 >= held.len(), "broken: ours win a fifth, not {ours} of {}", held.len());
    assert!(
        (held.len() - ours) * 5 >= held.len(),
        "broken: theirs win a fifth of {}, ours {ours}",
        held.len()
    );
    assert!(woken >= 5 && wake >= 5, "broken: wake-ups go both ways, not {woken} and {wake}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_57_jvm_peers_may_have_other_leases() {
    let held = contest([(100, 50), (300, 200), (700, 500)]).await;
    assert_no_overlap(&held);
    report(&held);
    assert!(held.len() > 50, "broken: the mutex goes from hand to hand, not {} times", held.len());
}
