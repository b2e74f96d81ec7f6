//! An observer sees who owns a mutex, knows when it does not know, and never contends.

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

/// An observer is woken by a change of owner: its poll is far too long to explain it.
pub async fn is_woken_by_a_change(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store wakes nobody");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut observer = two.simba.with_lease(long()).observe(mutex.clone()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    let guard = lock(&one.long_locker(&mutex)).await;
    sees(&mut observer, "an acquisition wakes an observer", |view| matches!(view, View::Owned(_))).await;
    release(guard).await;
    sees(&mut observer, "a release wakes an observer", is_vacant).await;
}

/// An observer takes nothing, queues nowhere and delays nobody.
pub async fn never_contends(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut observer = two.simba.observe(mutex.clone()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    let guard = one.try_lock(&mutex).await.expect("broken: an observer takes nothing");
    sees(&mut observer, "an owner is seen", |view| matches!(view, View::Owned(_))).await;
    one.finds_no_waiter_of(&mutex).await;
    release(guard).await;
    assert!(one.try_lock(&mutex).await.is_some(), "broken: nothing is promised to an observer");
}

/// An observer out of reach of its store says that it does not know, and knows again afterwards.
pub async fn knows_that_it_does_not_know(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut observer = peer.simba.observe(name()).unwrap();
    sees(&mut observer, "a free mutex is seen as vacant", is_vacant).await;
    peer.network.stall();
    let unknown = |view: &View| matches!(view, View::Unknown { .. });
    sees(&mut observer, "an observer out of reach does not know", unknown).await;
    let error = observer.last_error().expect("broken: an observer says what went wrong");
    assert!(error.is_transient(), "broken: out of reach is transient: {error}");
    peer.network.heal();
    sees(&mut observer, "an observer within reach knows again", is_vacant).await;
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
