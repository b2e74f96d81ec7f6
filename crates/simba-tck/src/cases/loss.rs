//! A holder learns that it has lost, and why, before another holds.

use std::future::pending;
use std::time::Duration;

use simba_core::operate::{EvictIf, Eviction};
use simba_core::{ErrorKind, Lease, Loss};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{Peer, STANDSTILL, kept, lock, name, now, patience, release, soon, within};

/// A mutex whose holder is gone without a word passes to the next, and not before the holder's deadline.
pub async fn a_dead_holder_is_succeeded(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("a dead holder's mutex is not freed by itself");
    }
    let (dead, alive) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = dead.lock(&mutex).await;
    dead.die();
    let locker = alive.locker(&mutex);
    let next = within(patience(fixture), "a dead holder is succeeded", locker.lock()).await;
    let (next, acquired) = (kept("a dead holder is succeeded", next), now());
    assert!(acquired >= guard.deadline(), "broken: nobody succeeds a holder before its deadline");
    assert_eq!(guard.tenure().loss(), Some(Loss::Deadline), "broken: a succeeded holder has lost");
    assert!(next.token() > guard.token(), "broken: a successor has a greater token");
}

/// A holder that releases is told `Released`, and never that it lost.
pub async fn a_release_is_told_as_such(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let guard = peer.lock(&name()).await;
    let tenure = guard.tenure();
    release(guard).await;
    assert_eq!(soon("the end is told", tenure.lost()).await, Loss::Released, "broken: a release is no loss");
    assert!(!tenure.is_held() && tenure.remaining().is_zero(), "broken: what is released is not held");
}

/// A hold with a longest time ends then, whatever hangs, and another gets the mutex.
pub async fn a_longest_hold_ends(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let locker = one.long_locker(&mutex).with_max_hold(Duration::from_secs(2));
    let guard = lock(&locker).await;
    assert_eq!(soon("a longest hold ends", guard.lost()).await, Loss::MaxHold);
    release(two.lock(&mutex).await).await;
}

/// A leader that steps down is succeeded, and told why its tenure ended.
pub async fn a_leader_that_steps_down_is_succeeded(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (old, new) = (one.simba.contend(mutex.clone()), two.simba.contend(mutex));
    old.start().unwrap();
    let tenure = soon("a free mutex is acquired", old.acquired()).await.unwrap();
    new.start().unwrap();
    old.step_down(Duration::from_secs(60));
    assert_eq!(soon("a step-down ends the tenure", tenure.lost()).await, Loss::SteppedDown);
    let next = within(patience(fixture), "who steps down is succeeded", new.acquired()).await.unwrap();
    assert!(next.token() > tenure.token(), "broken: a successor has a greater token");
    assert!(!old.is_owner(), "broken: who stepped down stays away");
}

/// Work that does not stop by itself is dropped before another holds.
pub async fn work_is_dropped_before_another_holds(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("a dead holder's mutex is not freed by itself");
    }
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, short) = (name(), fixture.lease());
    // A quarter of the grace is left when work is dropped: longer than a machine may stand still.
    let lease = Lease::new(short.ttl(), short.transition() + STANDSTILL * 8).unwrap();
    let guard = lock(&one.locker(&mutex).with_lease(lease)).await;
    let locker = two.locker(&mutex);
    let next = tokio::spawn(async move { (locker.lock().await, now()) });
    one.die();
    let work = within(lease.total() + patience(fixture), "work is dropped", guard.run(pending::<()>())).await;
    let dropped = now();
    assert_eq!(work.unwrap_err().kind(), ErrorKind::Lost, "broken: dropped work is told as a loss");
    let (next, acquired) = within(patience(fixture), "the next one holds", next).await.unwrap();
    release(kept("the next one holds", next)).await;
    assert!(dropped < acquired, "broken: work ends before another holds");
}

/// A release after the loss says that the end of the work may not have been covered.
pub async fn a_release_after_the_loss_says_so(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let guard = peer.lock(&name()).await;
    peer.die();
    let loss = within(patience(fixture), "a holder out of reach loses", guard.lost()).await;
    assert_eq!(loss, Loss::Deadline, "broken: a lost connection is no loss, the deadline is");
    peer.network.heal();
    let released = within(patience(fixture), "a release ends", guard.release()).await;
    assert_eq!(released.unwrap_err().kind(), ErrorKind::Lost, "broken: a release after the loss says so");
}

/// A holder that was evicted learns of it at its next renewal.
pub async fn an_evicted_holder_learns_of_it(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let Some(operate) = two.backend.operate() else { return skip("the backend offers nothing to operators") };
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let evicted = kept("a holder can be evicted", operate.evict(&mutex, EvictIf::Any).await);
    assert!(matches!(evicted, Eviction::Freed { .. }), "broken: a holder can be evicted, not {evicted:?}");
    let loss = within(patience(fixture), "an evicted holder learns of it", guard.lost()).await;
    assert_eq!(loss, Loss::Vanished, "broken: the reason of the loss is that the store forgot the holder");
}
