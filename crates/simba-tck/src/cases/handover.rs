//! Hand-over from one holder to the next: by a notification, in order, and to no other contender.

use std::time::Duration;

use simba_core::spi::{Answer, Claim, Intent, Prior};
use simba_core::{ContenderId, Contention, FencingToken, Moment, MutexName};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{
    DirectSession, Peer, assert_ok, lease_limit, lock, long, name, now, release, soon, until, within,
};

/// A release notifies the next waiter. The poll and the lease are too long to explain the hand-over.
pub async fn a_release_wakes_the_next(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store sends no notifications");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = lock(&one.long_locker(&mutex)).await;
    let waiting = wait(two.simba.contend(mutex).with_lease(long()), guard.tenure().contender()).await;
    release(guard).await;
    assert_ok("the next one holds", soon("a release notifies the next", waiting.acquired()).await);
    assert_ok("a contention stops", soon("a contention stops", waiting.stop()).await);
}

/// A leader that stops notifies the next waiter.
pub async fn a_leader_that_stops_wakes_the_next(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store sends no notifications");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let leader = one.simba.contend(mutex.clone()).with_lease(long());
    leader.start().unwrap();
    let tenure = soon("a free mutex is acquired", leader.acquired()).await.unwrap();
    let waiting = wait(two.simba.contend(mutex).with_lease(long()), tenure.contender()).await;
    assert_ok("a contention stops", soon("a contention stops", leader.stop()).await);
    assert_ok("the next one holds", soon("a stop notifies the next", waiting.acquired()).await);
    assert_ok("a contention stops", soon("a contention stops", waiting.stop()).await);
}

/// Starts a contention and waits until it sees the holder: from then on it is queued.
async fn wait(contention: Contention, holder: &ContenderId) -> Contention {
    contention.start().unwrap();
    until("a waiter sees the holder", || contention.owner().is_owner(holder)).await;
    contention
}

/// Waiters acquire in FIFO order.
pub async fn waiters_are_served_in_order(fixture: &dyn Fixture) {
    if !fixture.profile().fifo {
        return skip("the store does not order its waiters");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let mut token = holder.take().await;
    let mut waiters = Vec::new();
    for index in 0..5 {
        let peer = if index % 2 == 0 { &one } else { &two };
        waiters.push(queued_waiter(fixture, peer, &mutex).await);
    }
    while !waiters.is_empty() {
        // A waiter that was skipped because it did not answer gets its old entry again when it contends.
        for waiter in &mut waiters {
            waiter.queue().await;
        }
        let released = now();
        holder.release(Some(token)).await;
        let mut passed = None;
        for (index, later) in waiters.iter_mut().enumerate().skip(1) {
            passed =
                acquired_out_of_order(fixture, later, released, "no call passes an earlier waiter").await;
            if let Some(won) = passed {
                (holder, token) = (waiters.remove(index), won);
                break;
            }
        }
        if passed.is_none() {
            holder = waiters.remove(0);
            token = acquire_next(&mut holder).await;
        }
    }
}

/// Opens a session that waits in the queue. On a store with notifications, returns after it has subscribed.
async fn queued_waiter(fixture: &dyn Fixture, peer: &Peer, mutex: &MutexName) -> DirectSession {
    let mut waiter = peer.waiter(mutex).await;
    waiter.queue().await;
    if fixture.profile().push {
        waiter.hint("a subscription starts with a hint").await;
        waiter.queue().await;
    }
    waiter
}

/// Contends out of order for a mutex whose release began at `released`: it is reserved for another. Returns the token
/// if it was acquired nevertheless, which a store may allow once the earlier waiter has not answered for as long as a
/// dead one is waited for.
async fn acquired_out_of_order(
    fixture: &dyn Fixture,
    session: &mut DirectSession,
    released: Moment,
    guarantee: &str,
) -> Option<FencingToken> {
    let Answer::Ours(ours) = session.contend(Prior::Nothing).await else { return None };
    let (took, limit) = (now() - released, fixture.profile().dead_waiter.unwrap_or(Duration::MAX));
    // A store counts in milliseconds, or rounds.
    let is_allowed = took + Duration::from_millis(5) >= limit;
    assert!(is_allowed, "broken: {guarantee}, but it was acquired {took:?} after the release");
    Some(session.token_of(&ours))
}

/// Acquires the mutex as the next waiter; a store may need some time for the hand-over.
async fn acquire_next(session: &mut DirectSession) -> FencingToken {
    let acquired = async {
        loop {
            if let Answer::Ours(ours) = session.contend(Prior::Nothing).await {
                return ours.token;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("the first waiter acquires first", acquired).await.expect("broken: a hold has a token")
}

/// A notified waiter that is dropped notifies the next one.
pub async fn a_woken_waiter_that_is_dropped_wakes_the_next(fixture: &dyn Fixture) {
    let Some((_peers, notified, next)) = notified_and_next(fixture).await else { return };
    drop(notified);
    assert_acquires(next).await;
}

/// A notified waiter that gives up notifies the next one.
pub async fn a_woken_waiter_that_gives_up_wakes_the_next(fixture: &dyn Fixture) {
    let Some((_peers, mut notified, next)) = notified_and_next(fixture).await else { return };
    notified.release(None).await;
    assert_acquires(next).await;
}

/// Returns two waiters of a mutex that was just released: the first one was notified and has not answered.
async fn notified_and_next(fixture: &dyn Fixture) -> Option<([Peer; 2], DirectSession, DirectSession)> {
    let profile = fixture.profile();
    if !profile.push || !profile.fifo {
        skip("the store does not notify a particular waiter");
        return None;
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let token = holder.take().await;
    let (mut first, mut next) = (two.waiter(&mutex).await, one.waiter(&mutex).await);
    for waiter in [&mut first, &mut next] {
        waiter.queue().await;
        waiter.hint("a subscription starts with a hint").await;
    }
    holder.release(Some(token)).await;
    first.hint("a release notifies the next").await;
    Some(([one, two], first, next))
}

async fn assert_acquires(mut waiter: DirectSession) {
    waiter.hint("a waiter that gives up notifies the next").await;
    waiter.take_by_hints("a waiter that gives up notifies the next").await;
}

/// A try on a mutex that is free but reserved for a waiter is refused, and the waiter acquires it.
pub async fn a_try_never_passes_a_waiter(fixture: &dyn Fixture) {
    if !fixture.profile().fifo {
        return skip("the store does not order its waiters");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let token = holder.take().await;
    let mut waiter = queued_waiter(fixture, &two, &mutex).await;
    let mut trying = one.session_for(&mutex, Intent::Try).await;
    let released = now();
    holder.release(Some(token)).await;
    let passed = acquired_out_of_order(fixture, &mut trying, released, "a try never passes a waiter").await;
    if passed.is_some() {
        trying.release(passed).await;
    }
    acquire_next(&mut waiter).await;
}

/// A try that was refused is not queued: the mutex is not reserved after its release.
pub async fn a_try_leaves_no_trace(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let token = holder.take().await;
    let mut trying = two.session_for(&mutex, Intent::Try).await;
    trying.queue().await;
    one.assert_no_waiters(&mutex).await;
    holder.release(Some(token)).await;
    one.waiter(&mutex).await.take().await;
}

/// A waiter that has crashed blocks the others for a short time only.
pub async fn a_dead_waiter_is_skipped(fixture: &dyn Fixture) {
    let (dead, alive) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = alive.lock(&mutex).await;
    let mut waiter = dead.session(Claim::new(mutex.clone(), ContenderId::generate(), fixture.lease())).await;
    waiter.queue().await;
    dead.crash();
    release(guard).await;
    let locker = alive.locker(&mutex);
    let next = within(lease_limit(fixture), "a dead waiter is skipped", locker.lock()).await;
    release(assert_ok("a dead waiter is skipped", next)).await;
}
