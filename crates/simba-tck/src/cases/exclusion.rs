//! At most one contender holds a mutex.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use simba_core::{ErrorKind, MutexName};

use crate::Fixture;
use crate::suite::CASE_LIMIT;
use crate::world::{Peer, assert_ok, lease_limit, lock, name, now, release, soon, try_lock, within};

/// A held mutex is refused to others at once, and the refusal names the holder.
pub async fn a_held_mutex_is_refused_and_its_holder_named(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let locker = two.locker(&mutex);
    assert!(try_lock(&locker).await.is_none(), "broken: a held mutex is refused");
    let holder = guard.tenure().contender().clone();
    assert_eq!(locker.last_holder().id, Some(holder), "broken: a refusal names the holder");
    release(guard).await;
    assert!(two.try_lock(&mutex).await.is_some(), "broken: a free mutex is acquired at once");
}

/// A wait ends when the mutex is released, and not before.
pub async fn a_wait_ends_with_the_release(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let locker = two.locker(&mutex);
    let wait = tokio::spawn(async move { (locker.lock().await, now()) });
    tokio::time::sleep(fixture.lease().total()).await;
    assert!(!wait.is_finished(), "broken: a waiter does not acquire what another holds");
    let released = now();
    release(guard).await;
    let (guard, acquired) = soon("a wait ends with the release", wait).await.unwrap();
    let _guard = assert_ok("a wait ends with the release", guard);
    assert!(acquired >= released, "broken: no waiter acquires before the release");
}

/// A wait that times out is an error that names the holder.
pub async fn a_wait_that_runs_out_names_the_holder(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    // With the long lease: otherwise a call that times out before the wait would be the error.
    let locker = two.long_locker(&mutex);
    let wait = locker.lock_timeout(fixture.lease().total());
    let error = within(lease_limit(fixture), "a wait times out", wait).await.unwrap_err();
    assert_eq!(
        error.kind(),
        ErrorKind::Timeout,
        "broken: a timeout while another holds is not an error of the store: {error}"
    );
    assert_eq!(error.holder(), Some(guard.tenure().contender()), "broken: a timeout names the holder");
    assert_eq!(error.mutex(), Some(&mutex), "broken: an error names the mutex");
}

/// Two lockers of one handle contend as two processes would.
pub async fn two_lockers_of_one_handle_exclude_each_other(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mutex = name();
    let guard = peer.lock(&mutex).await;
    assert!(peer.try_lock(&mutex).await.is_none(), "broken: lockers of one handle exclude each other");
    release(guard).await;
    assert!(peer.try_lock(&mutex).await.is_some(), "broken: a free mutex is acquired at once");
}

/// A counter that is read and written under the mutex loses no increment.
pub async fn a_counter_loses_no_step(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, counter) = (name(), Arc::new(AtomicU64::new(0)));
    let tasks: Vec<_> = [one, two]
        .into_iter()
        .flat_map(|peer| {
            let peer = Arc::new(peer);
            [0, 1].map(|_| tokio::spawn(count(Arc::clone(&peer), mutex.clone(), Arc::clone(&counter))))
        })
        .collect();
    for task in tasks {
        within(CASE_LIMIT, "every contender gets all its turns", task).await.unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 20, "broken: two held at once and lost an increment");
}

async fn count(peer: Arc<Peer>, mutex: MutexName, counter: Arc<AtomicU64>) {
    let locker = peer.locker(&mutex);
    for _ in 0..5 {
        let guard = assert_ok("every contender gets its turn", locker.lock().await);
        let seen = counter.load(Ordering::SeqCst);
        tokio::time::sleep(Duration::from_millis(1)).await;
        counter.store(seen + 1, Ordering::SeqCst);
        release(guard).await;
    }
}

/// A locker that holds its mutex refuses a second lock instead of waiting for itself.
pub async fn a_locker_does_not_reenter(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let locker = peer.simba.locker(name());
    let guard = lock(&locker).await;
    let error = soon("a second lock is refused", locker.lock()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Reentered, "broken: a locker does not wait for itself");
    assert!(guard.is_held(), "broken: a refused lock does not affect the guard");
    release(guard).await;
    release(lock(&locker).await).await;
}
