//! A holder is notified of a loss and its reason before another holds.

use std::future::pending;
use std::time::Duration;

use simba_core::operate::{EvictIf, Eviction};
use simba_core::{ErrorKind, Lease, Loss};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{MAX_PAUSE, Peer, assert_ok, lease_limit, lock, name, now, release, soon, within};

/// A mutex whose holder has crashed passes to the next, and not before the holder's deadline.
pub async fn a_dead_holder_is_succeeded(fixture: &dyn Fixture) {
    let Some((_dead, alive, guard)) = Peer::crashed_holder(fixture).await else { return };
    let (next, acquired) = (alive.succeed(fixture, guard.tenure().mutex()).await, now());
    assert!(acquired >= guard.deadline(), "broken: no other acquires before the holder's deadline");
    assert_eq!(guard.tenure().loss(), Some(Loss::Deadline), "broken: a holder with a successor has lost");
    assert!(next.token() > guard.token(), "broken: a successor has a greater token");
}

/// A holder that releases gets `Released`, and never a loss.
pub async fn a_release_is_no_loss(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let guard = peer.lock(&name()).await;
    let tenure = guard.tenure();
    release(guard).await;
    assert_eq!(
        soon("the end is notified", tenure.lost()).await,
        Loss::Released,
        "broken: a release is not reported as a loss"
    );
    assert!(!tenure.is_held() && tenure.remaining().is_zero(), "broken: a released mutex is not held");
}

/// A hold with a maximum time ends then, even if the store hangs, and another acquires the mutex.
pub async fn a_max_hold_ends(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    // It counts from before the request, so a machine that is paused while it waits for the answer loses nothing.
    let locker = one.long_locker(&mutex).with_max_hold(MAX_PAUSE * 2);
    let guard = lock(&locker).await;
    assert_eq!(soon("a maximum hold ends", guard.lost()).await, Loss::MaxHold);
    release(two.lock(&mutex).await).await;
}

/// A leader that steps down has a successor, and gets the reason of the end of its tenure.
pub async fn a_leader_that_steps_down_is_succeeded(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (old, new) = (one.simba.contend(mutex.clone()), two.simba.contend(mutex));
    old.start().unwrap();
    let tenure = soon("a free mutex is acquired", old.acquired()).await.unwrap();
    new.start().unwrap();
    old.step_down(Duration::from_secs(60));
    assert_eq!(soon("a step-down ends the tenure", tenure.lost()).await, Loss::SteppedDown);
    let next = within(lease_limit(fixture), "a leader that steps down has a successor", new.acquired())
        .await
        .unwrap();
    assert!(next.token() > tenure.token(), "broken: a successor has a greater token");
    assert!(!old.is_owner(), "broken: a leader that stepped down does not contend");
}

/// Work that does not stop by itself is dropped before another holds.
pub async fn work_is_dropped_before_another_holds(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("the mutex of a dead holder is not freed");
    }
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, short) = (name(), fixture.lease());
    // A quarter of the grace is left when work is dropped: longer than a machine may be paused, also on a store that
    // grants two thirds of the lease.
    let transition = short.transition() + MAX_PAUSE * 6;
    let lease = Lease::new(short.ttl(), transition).unwrap().with_grace(transition - MAX_PAUSE).unwrap();
    let guard = lock(&one.locker(&mutex).with_lease(lease)).await;
    let locker = two.locker(&mutex);
    let next = tokio::spawn(async move { (locker.lock().await, now()) });
    one.crash();
    let work =
        within(lease.total() + lease_limit(fixture), "work is dropped", guard.run(pending::<()>())).await;
    let dropped = now();
    assert_eq!(work.unwrap_err().kind(), ErrorKind::Lost, "broken: dropped work is reported as a loss");
    let (next, acquired) = within(lease_limit(fixture), "the next one holds", next).await.unwrap();
    release(assert_ok("the next one holds", next)).await;
    assert!(dropped < acquired, "broken: work ends before another holds");
}

/// A release after the loss is an error, because the end of the work may not have been protected.
pub async fn a_release_after_the_loss_is_an_error(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let guard = peer.lock(&name()).await;
    peer.crash();
    let loss = within(lease_limit(fixture), "a disconnected holder loses", guard.lost()).await;
    assert_eq!(loss, Loss::Deadline, "broken: the loss is the deadline, not the lost connection");
    peer.network.heal();
    let released = within(lease_limit(fixture), "a release ends", guard.release()).await;
    assert_eq!(released.unwrap_err().kind(), ErrorKind::Lost, "broken: a release after the loss is an error");
}

/// A holder that was evicted is notified at its next renewal.
pub async fn an_evicted_holder_is_notified(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let Some(operate) = two.backend.operate() else {
        return skip("the backend does not implement `Operate`");
    };
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let evicted = assert_ok("a holder can be evicted", operate.evict(&mutex, EvictIf::Any).await);
    assert!(matches!(evicted, Eviction::Freed { .. }), "broken: a holder can be evicted, not {evicted:?}");
    let loss = within(lease_limit(fixture), "an evicted holder is notified", guard.lost()).await;
    assert_eq!(loss, Loss::Vanished, "broken: the reason of the loss is that the hold vanished");
}
