//! An observer sees the owner of a mutex, reports an unknown state, and never contends.

use simba_core::{ErrorKind, View};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{Peer, lock, long, name, release, sees, soon};

/// An observer sees the mutex free, then every owner that stays, then free again.
pub async fn sees_every_owner(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut observer = two.simba.observe(mutex.clone()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    for peer in [&one, &two] {
        let guard = peer.lock(&mutex).await;
        let tenure = guard.tenure();
        let owned = |view: &View| matches!(view, View::Owned(owner) if owner.is_owner(tenure.contender()));
        sees(&mut observer, "an owner is seen", owned).await;
        release(guard).await;
        sees(&mut observer, "a release is seen", is_vacant).await;
    }
}

/// An observer is notified of a change of owner. Its poll is too long to explain the change.
pub async fn is_woken_by_a_change(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store sends no notifications");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut observer = two.simba.with_lease(long()).observe(mutex.clone()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    let guard = lock(&one.long_locker(&mutex)).await;
    sees(&mut observer, "an acquisition notifies an observer", |view| matches!(view, View::Owned(_))).await;
    release(guard).await;
    sees(&mut observer, "a release notifies an observer", is_vacant).await;
}

/// An observer acquires nothing, is not queued and delays no contender.
pub async fn never_contends(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut observer = two.simba.observe(mutex.clone()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    let guard = one.try_lock(&mutex).await.expect("broken: an observer acquires nothing");
    sees(&mut observer, "an owner is seen", |view| matches!(view, View::Owned(_))).await;
    one.assert_no_waiters(&mutex).await;
    release(guard).await;
    assert!(one.try_lock(&mutex).await.is_some(), "broken: a released mutex is not reserved for an observer");
}

/// An observer without a connection to its store reports an unknown state, and recovers afterwards.
pub async fn reports_unknown_when_disconnected(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut observer = peer.simba.observe(name()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    peer.network.stall();
    let unknown = |view: &View| matches!(view, View::Unknown { .. });
    sees(&mut observer, "a disconnected observer reports an unknown state", unknown).await;
    let error = observer.last_error().expect("broken: an observer returns its last error");
    assert!(error.is_transient(), "broken: an unreachable store is transient: {error}");
    peer.network.heal();
    sees(&mut observer, "a reconnected observer recovers", is_vacant).await;
}

/// A shutdown ends the observers of its handle.
pub async fn ends_with_its_handle(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut observer = peer.simba.observe(name()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    peer.shutdown().await;
    let ended = async {
        loop {
            if let Err(error) = observer.changed().await {
                return error;
            }
        }
    };
    assert_eq!(soon("a shutdown ends observers", ended).await.kind(), ErrorKind::Closed);
}

fn is_vacant(view: &View) -> bool {
    *view == View::Vacant
}
