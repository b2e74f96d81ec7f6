//! A future may be dropped at any await point.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use simba_core::spi::{Claim, Holding, Prior};
use simba_core::{ContenderId, MutexName};
use tokio::time::timeout;

use crate::Fixture;
use crate::world::{Peer, assert_ok, lock, long, name, ours, polled, release, soon};

/// More await points than any call has.
const MANY: usize = 1_000;
/// A future that is not polled for this long has no more await points before its mutex is released. Longer than a
/// machine may be paused: the store has answered by then.
const SETTLED: Duration = Duration::from_secs(3);

/// A lock that is dropped at any await point holds nothing and is not queued.
pub async fn a_lock_dropped_at_every_await_point_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    for polls in 0..MANY {
        let locker = one.long_locker(&mutex);
        let locked = soon("a free mutex is acquired", polled(locker.lock(), polls)).await;
        let completed = locked.map(|guard| drop(assert_ok("a free mutex is acquired", guard))).is_some();
        two.assert_free(&mutex).await;
        if completed {
            return;
        }
    }
    panic!("broken: a lock of a free mutex ends");
}

/// A wait that is dropped at any await point leaves the queue.
pub async fn a_wait_dropped_at_every_await_point_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    for polls in 0..MANY {
        let guard = lock(&two.long_locker(&mutex)).await;
        let locker = one.long_locker(&mutex);
        let waited = timeout(SETTLED, polled(locker.lock(), polls)).await;
        assert!(!matches!(waited, Ok(Some(_))), "broken: a waiter does not acquire what another holds");
        two.assert_no_waiters(&mutex).await;
        release(guard).await;
        two.assert_free(&mutex).await;
        if waited.is_err() {
            assert!(polls > 1, "broken: a wait has an await point before the store has answered");
            return;
        }
    }
    panic!("broken: a waiter is polled only when something happens");
}

/// A hundred waits, each dropped at a random time while the mutex changes hands, leave nothing.
pub async fn a_wait_dropped_at_any_time_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, over) = (name(), Arc::new(AtomicBool::new(false)));
    let busy = tokio::spawn(take_turns(two, mutex.clone(), Arc::clone(&over)));
    for round in 0..100 {
        let locker = one.long_locker(&mutex);
        let limit = Duration::from_micros(fastrand::u64(0..20_000));
        match timeout(limit, locker.lock()).await {
            Ok(guard) if round % 2 == 0 => drop(assert_ok("a mutex is acquired in turn", guard)),
            Ok(guard) => release(assert_ok("a mutex is acquired in turn", guard)).await,
            Err(_) => {}
        }
    }
    over.store(true, Ordering::SeqCst);
    let two = soon("the other one acquires", busy).await.unwrap();
    two.assert_free(&mutex).await;
}

/// Locks and releases until `over` is set.
async fn take_turns(peer: Peer, mutex: MutexName, over: Arc<AtomicBool>) -> Peer {
    while !over.load(Ordering::SeqCst) {
        let guard = peer.lock(&mutex).await;
        tokio::time::sleep(Duration::from_millis(2)).await;
        release(guard).await;
    }
    peer
}

/// An open that is dropped at any await point leaves nothing.
pub async fn an_open_dropped_at_every_await_point_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    for polls in 0..MANY {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
        let opened = soon("a session opens", polled(one.backend.open(claim), polls)).await;
        let completed = opened.map(|session| drop(assert_ok("a session opens", session))).is_some();
        two.assert_free(&mutex).await;
        if completed {
            return;
        }
    }
    panic!("broken: an open ends");
}

/// A call that is dropped at any await point can be repeated, and returns what the first may have acquired.
pub async fn a_contend_dropped_at_every_await_point_can_be_repeated(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    for polls in 0..MANY {
        let mut direct = one.waiter(&mutex).await;
        let contend = polled(direct.session.contend(Prior::Nothing), polls);
        let completed = soon("a call ends", contend).await.is_some();
        let again = direct.contend(Prior::Unknown).await;
        let token = ours("a repeated call returns what the first may have acquired", again);
        direct.release(Some(token)).await;
        two.assert_free(&mutex).await;
        if completed {
            return;
        }
    }
    panic!("broken: a call ends");
}

/// A release that is dropped at any await point can be repeated.
pub async fn a_release_dropped_at_every_await_point_can_be_repeated(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    for polls in 0..MANY {
        let mut direct = one.waiter(&mutex).await;
        let token = direct.take().await;
        let released = polled(direct.session.release(Holding::Under(token)), polls);
        let completed = soon("a release ends", released).await.is_some();
        direct.release(Some(token)).await;
        two.assert_free(&mutex).await;
        if completed {
            return;
        }
    }
    panic!("broken: a release ends");
}
