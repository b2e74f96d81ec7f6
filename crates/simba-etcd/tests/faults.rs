//! The rows of the fault matrix about etcd's leases, keys and watches.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::ffi::OsStr;
use std::os::unix::ffi::OsStringExt as _;
use std::time::Duration;

use common::{Etcd, EtcdStore, Peer, connect, keys, leads, lease, long, name, sees, shared_ctl, soon};
use simba_core::operate::{EvictIf, Eviction, Operate as _};
use simba_core::spi::{Answer, Backend as _, Claim, Holding, Prior, Session};
use simba_core::{Clock as _, ContenderId, FencingToken, Lease, Loss, MutexName, Simba, SystemClock};
use simba_servers::shared;
use simba_tck::{FaultProxy, Network as _, rounds};
use simba_test_support::queue::{HandOver, answered, handed_over_after};
use tokio::time::{sleep, timeout};

/// Returns the lease in the name of a key.
fn lease_of(key: &str) -> &str {
    key.rsplit_once('/').unwrap().1.split_once('-').unwrap().0
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_52_a_revoked_lease_is_a_loss_at_once_and_another_is_granted() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        // Renewals and polls come later than the limit, so only a watch can report the loss.
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let [key] = &keys(&mutex).await[..] else { panic!("one key") };
        let waiter = two.contend(&mutex, long());
        sees(&waiter, &tenure).await;
        sleep(Duration::from_millis(fastrand::u64(0..800))).await;
        shared_ctl(&["lease", "revoke", lease_of(key)]).await;
        let loss = soon("the loss of a lease is noticed", tenure.lost()).await;
        assert!(matches!(loss, Loss::TakenBy(_) | Loss::Vanished), "{loss:?}");
        let next = leads(&waiter).await;
        assert!(next.token() > tenure.token());
        waiter.stop().await.unwrap();
        assert!(leads(&leader).await.token() > next.token(), "a new lease has a new key");
        leader.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_52_a_waiter_whose_lease_is_revoked_joins_the_queue_again() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for _ in 0..rounds() {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let [first] = &keys(&mutex).await[..] else { panic!("one key") };
        let waiter = two.contend(&mutex, long());
        sees(&waiter, &tenure).await;
        let all = keys(&mutex).await;
        let waits = all.iter().find(|key| *key != first).unwrap();
        shared_ctl(&["lease", "revoke", lease_of(waits)]).await;
        leader.stop().await.unwrap();
        assert!(leads(&waiter).await.token() > tenure.token());
        waiter.stop().await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_a_waiter_acquires_after_a_compaction() {
    let (one, two) = (Peer::connect().await, Peer::connect().await);
    for round in 0..rounds().max(4) {
        let mutex = name();
        let leader = one.contend(&mutex, long());
        let tenure = leads(&leader).await;
        let waiter = two.contend(&mutex, long());
        sees(&waiter, &tenure).await;
        if round % 2 == 1 {
            // The release is compacted before the waiter can watch it.
            two.network.stall();
        }
        leader.stop().await.unwrap();
        compact(&mutex).await;
        two.network.heal();
        assert!(leads(&waiter).await.token() > tenure.token());
        waiter.stop().await.unwrap();
    }
}

/// A holder watches its key from the revision at which it was last seen. The one that created it may be compacted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hold_whose_creation_was_compacted_sends_no_extra_requests() {
    let peer = Peer::connect().await;
    let mutex = name();
    let leader = peer.contend(&mutex, long());
    let tenure = leads(&leader).await;
    compact(&mutex).await;
    peer.network.cut();
    let other = soon("another connection is made", peer.simba.locker(name()).lock()).await.unwrap();
    other.release().await.unwrap();
    // Lets the calls after a reconnect end.
    sleep(Duration::from_secs(1)).await;
    let (began, before) = (SystemClock.now(), peer.network.requests());
    sleep(Duration::from_secs(4)).await;
    // The sleep may have taken longer.
    let (requests, time) = (peer.network.requests() - before, SystemClock.now() - began);
    let max = 2.0 * time.as_secs_f64();
    assert!(requests as f64 <= max, "broken: no repeated requests, but {requests} in {time:?}");
    assert!(tenure.is_held());
    leader.stop().await.unwrap();
}

/// A watch from a compacted revision is cancelled by the server, and created again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_53_a_holder_notices_its_loss_after_a_compaction() {
    let peer = Peer::connect().await;
    let names = name();
    let mut held = Vec::new();
    for at in 0..30 {
        let leader = peer.contend(&MutexName::new(format!("{names}-{at}")).unwrap(), long());
        held.push((leads(&leader).await, leader));
    }
    // A hold is watched some time after it began. The requests for the last ones arrive when their first revision is
    // compacted.
    peer.network.stall();
    compact(&names).await;
    peer.network.heal();
    sleep(Duration::from_secs(1)).await;
    shared_ctl(&["del", "--prefix", &format!("simba/{names}-")]).await;
    for (tenure, leader) in held {
        let loss = soon("a leader without a key has lost", tenure.lost()).await;
        assert_eq!(loss, Loss::Vanished);
        leader.stop().await.unwrap();
    }
}

/// Compacts the history of the store up to now.
async fn compact(mutex: &MutexName) {
    // Two writes: a watch from the compacted revision itself misses nothing yet.
    shared_ctl(&["put", &format!("other-{mutex}"), "x"]).await;
    let output = shared_ctl(&["put", &format!("other-{mutex}"), "y", "-w", "json"]).await;
    let revision = output.split("\"revision\":").nth(1).unwrap();
    let revision: String = revision.chars().take_while(char::is_ascii_digit).collect();
    let mut command = common::etcdctl(&shared("SIMBA_TCK_ETCD"));
    command.args(["compact", &revision]);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let refusal = String::from_utf8_lossy(&output.stderr);
    // Another test may have compacted up to this revision or further, which has the same effect.
    let is_compacted = output.status.success() || refusal.contains("required revision has been compacted");
    assert!(is_compacted, "etcd did not compact: {refusal}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_waiter_s_lease_is_renewed_before_its_turn_comes() {
    // Longer than the lease: nothing of the first grant is left.
    let lease = Lease::new(Duration::from_secs(6), Duration::from_secs(3)).unwrap();
    let all = lease.total();
    let HandOver { granted, same_entry, .. } = handed_over_after::<EtcdStore>(lease, all * 5 / 4).await;
    assert!(same_entry, "broken: a waiter keeps its entry");
    assert!(granted >= all / 2, "broken: at least half is granted, but {granted:?} of {all:?}");
}

async fn ours(session: &mut dyn Session, prior: Prior) -> FencingToken {
    match answered(session, prior).await {
        Answer::Ours(ours) => ours.token.unwrap(),
        other => panic!("broken: the first of the queue holds the mutex, but the answer is {other:?}"),
    }
}

/// No entry holds twice: a tenure that is lost locally before its lease ends is followed by another entry.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_holder_joins_again_behind_the_waiters_with_a_greater_token() {
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    let (mut holder, mut waiter) =
        (backend.open(claim()).await.unwrap(), backend.open(claim()).await.unwrap());
    let lost = ours(&mut *holder, Prior::Nothing).await;
    assert!(matches!(answered(&mut *waiter, Prior::Nothing).await, Answer::Held(_)));
    // A session's first wakeup is immediate.
    waiter.changed().await.unwrap();
    let again = answered(&mut *holder, Prior::Lapsed(lost)).await;
    assert!(matches!(again, Answer::Held(_)), "broken: the lost holder goes behind the waiter: {again:?}");
    soon("the waiter is woken", waiter.changed()).await.unwrap();
    let next = ours(&mut *waiter, Prior::Nothing).await;
    assert_eq!(keys(&mutex).await.len(), 2, "one entry for each contender");
    holder.changed().await.unwrap();
    waiter.release(Holding::Under(next)).await.unwrap();
    soon("the lost holder is woken", holder.changed()).await.unwrap();
    let last = ours(&mut *holder, Prior::Nothing).await;
    assert!(lost < next && next < last, "broken: tokens grow: {lost}, {next}, {last}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_that_was_disconnected_acquires_again_with_a_greater_token() {
    let peer = Peer::connect().await;
    let leader = peer.contend(&name(), lease());
    let mut tenure = leads(&leader).await;
    for _ in 0..rounds() {
        peer.network.stall();
        assert_eq!(soon("a disconnected holder has lost", tenure.lost()).await, Loss::Deadline);
        // Its entry most likely still exists: servers end leases up to half a second late.
        peer.network.heal();
        let next = leads(&leader).await;
        assert!(next.token() > tenure.token(), "broken: {} held twice", tenure.token());
        tenure = next;
    }
    leader.stop().await.unwrap();
}

/// The reply to a dropped join arrives before a release, whose deletion fails. The key does not outlive its session.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_key_of_a_dropped_join_and_a_failed_release_is_deleted_with_its_session() {
    let (backend, network) = Etcd::single().proxied().await;
    let claim = |mutex| Claim::new(mutex, ContenderId::generate(), long());
    // Connects, and has the lease that the next session shares.
    let mut other = backend.open(claim(name())).await.unwrap();
    ours(&mut *other, Prior::Nothing).await;
    for _ in 0..rounds() {
        let mutex = name();
        let mut session = backend.open(claim(mutex.clone())).await.unwrap();
        network.stall_replies();
        assert!(timeout(Duration::ZERO, session.contend(Prior::Nothing)).await.is_err());
        soon("the key is created", async {
            while keys(&mutex).await.is_empty() {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        network.heal();
        // The reply to the join arrives before the reply to this call.
        ours(&mut *other, Prior::Unknown).await;
        network.refuse();
        let released = soon("a release ends", session.release(Holding::Unknown)).await;
        assert!(released.is_err(), "the deletion fails");
        drop(session);
        network.heal();
        // The lease is so long that its end does not explain the acquisition.
        let mut next = backend.open(claim(mutex)).await.unwrap();
        soon("the next contender acquires the mutex", async {
            while !matches!(answered(&mut *next, Prior::Unknown).await, Answer::Ours(_)) {
                sleep(Duration::from_millis(20)).await;
            }
        })
        .await;
        next.release(Holding::Unknown).await.unwrap();
    }
}

/// The limit for answers depends on the leases in use, not on those that were used before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_short_lease_that_ended_does_not_shorten_the_limit_for_answers() {
    let peer = Peer::connect().await;
    peer.simba.locker(name()).with_lease(lease()).lock().await.unwrap().release().await.unwrap();
    let leader = peer.contend(&name(), long());
    leads(&leader).await;
    peer.network.stall();
    let other = peer.contend(&name(), long());
    // The limit for a connection is twice that for an answer, and the error names it. The engine has a limit of its own
    // for a call, and its error may come first.
    let error = soon("a disconnected contender has an error", async {
        loop {
            let error = other.last_error().map(|error| error.to_string()).unwrap_or_default();
            if error.contains("did not answer within") && !error.contains("the store did not answer") {
                return error;
            }
            sleep(Duration::from_millis(20)).await;
        }
    });
    let error = error.await;
    assert!(error.contains("within 4s"), "broken: the short lease does not count: {error}");
    peer.network.heal();
}

/// Time in which this process could not read an answer does not count against the server.
#[tokio::test]
async fn a_paused_process_keeps_its_connection() {
    let url = shared("SIMBA_TCK_ETCD");
    let proxy = FaultProxy::start(url.trim_start_matches("etcd://")).await.unwrap().for_http2();
    let simba = Simba::new(connect(&format!("etcd://{}", proxy.address())).await.unwrap());
    proxy.delay(Duration::from_millis(300), Duration::ZERO);
    let before = proxy.requests();
    let locking = tokio::spawn(async move { simba.locker(name()).with_lease(long()).lock().await });
    soon("the lock sends a call", proxy.until(|counts| counts.requests > before)).await;
    // Blocks the only thread of the runtime: the first call of the lock is answered meanwhile, and nothing reads the
    // answer.
    std::thread::sleep(Duration::from_secs(4));
    proxy.pass();
    let _held = soon("the lock is taken", locking).await.unwrap().unwrap();
    assert_eq!(proxy.accepted(), 1, "broken: the connection is kept");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_queue_of_several_pages_is_listed_in_order() {
    // More than one page of a list.
    const ENTRIES: usize = 1_100;
    let backend = connect(&shared("SIMBA_TCK_ETCD")).await.unwrap();
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), long());
    let mut holder = backend.open(claim()).await.unwrap();
    let token = ours(&mut *holder, Prior::Nothing).await;
    let mut waiters = Vec::new();
    for _ in 1..ENTRIES {
        let mut waiter = backend.open(claim()).await.unwrap();
        assert!(matches!(answered(&mut *waiter, Prior::Nothing).await, Answer::Held(_)));
        waiters.push(waiter);
    }
    let record = backend.read(&mutex).await.unwrap();
    assert_eq!((record.token, record.waiters), (Some(token), Some(ENTRIES - 1)));
    let listed = backend.list().await.unwrap();
    let listed = listed.iter().find(|record| record.mutex == mutex).expect("it is listed");
    assert_eq!((listed.token, listed.waiters), (Some(token), Some(ENTRIES - 1)));
}

/// Other programs may use any bytes as a key, also bytes that are not text.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_holder_whose_key_is_not_text_is_waited_for_and_evicted() {
    let peer = Peer::connect().await;
    // With escapes, the second key is longer than an id.
    for (length, evicted) in [(1, false), (1, true), (128, false), (128, true)] {
        let mutex = name();
        let mut key = format!("simba/{mutex}/").into_bytes();
        key.resize(key.len() + length, 0xff);
        let key = std::ffi::OsString::from_vec(key);
        shared_ctl_os(&["put".as_ref(), &key, "".as_ref()]).await;
        let waiter = peer.contend(&mutex, long());
        soon("a waiter sees the holder", async {
            while waiter.owner().id.is_none() {
                sleep(Duration::from_millis(5)).await;
            }
        })
        .await;
        let holder = waiter.owner().id.unwrap();
        let shown = format!("simba/{mutex}/\\xff");
        assert!(holder.as_str().starts_with(&shown), "identified by its key: {holder}");
        let operate = peer.simba.operate().unwrap();
        let listed = operate.list().await.unwrap();
        let listed = listed.iter().find(|record| record.mutex == mutex).expect("it is listed");
        assert_eq!(listed.owner.as_ref(), Some(&holder));
        if evicted {
            let freed = operate.evict(&mutex, EvictIf::Any).await.unwrap();
            assert!(matches!(freed, Eviction::Freed { .. }), "{freed:?}");
        } else {
            shared_ctl_os(&["del".as_ref(), &key]).await;
        }
        // The poll interval is longer than the limit.
        leads(&waiter).await;
        waiter.stop().await.unwrap();
    }
}

async fn shared_ctl_os(args: &[&OsStr]) {
    let mut command = common::etcdctl(&shared("SIMBA_TCK_ETCD"));
    command.args(args);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
