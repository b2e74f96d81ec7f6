//! From one holder to the next: by a wake-up, in order, and to nobody else.

use simba_core::{Answer, Claim, ContenderId, Contention, Intent, Prior};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{Asking, Peer, kept, lock, long, name, patience, release, soon, until, within};

/// A release wakes the next waiter: its poll and the holder's lease are far too long to explain the
/// hand-over.
pub async fn a_release_wakes_the_next(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store wakes nobody");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = lock(&one.long_locker(&mutex)).await;
    let waiting = wait(two.simba.contend(mutex).with_lease(long()), guard.tenure().contender()).await;
    release(guard).await;
    kept("the next one holds", soon("a release wakes the next", waiting.acquired()).await);
    kept("a contention stops", soon("a contention stops", waiting.stop()).await);
}

/// A leader that stops wakes the next one.
pub async fn a_leader_that_stops_wakes_the_next(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store wakes nobody");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let leader = one.simba.contend(mutex.clone()).with_lease(long());
    leader.start().unwrap();
    let tenure = soon("a free mutex is acquired", leader.acquired()).await.unwrap();
    let waiting = wait(two.simba.contend(mutex).with_lease(long()), tenure.contender()).await;
    kept("a contention stops", soon("a contention stops", leader.stop()).await);
    kept("the next one holds", soon("a stop wakes the next", waiting.acquired()).await);
    kept("a contention stops", soon("a contention stops", waiting.stop()).await);
}

/// Starts a contention and waits until the store has told it who holds: from there on it is queued.
async fn wait(contention: Contention, holder: &ContenderId) -> Contention {
    contention.start().unwrap();
    until("a waiter sees who holds", || contention.owner().is_owner(holder)).await;
    contention
}

/// Waiters get the mutex in the order in which they came.
pub async fn waiters_are_served_in_order(fixture: &dyn Fixture) {
    if !fixture.profile().fifo {
        return skip("the store serves waiters in no order");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let mut token = holder.take().await;
    let mut waiters = Vec::new();
    for index in 0..5 {
        let mut waiter = if index % 2 == 0 { one.waiter(&mutex).await } else { two.waiter(&mutex).await };
        waiter.queue().await;
        waiters.push(waiter);
    }
    while !waiters.is_empty() {
        holder.release(Some(token)).await;
        for later in &mut waiters[1..] {
            assert_not_ours(later, "nobody passes who came before").await;
        }
        holder = waiters.remove(0);
        token = take_turn(&mut holder).await;
    }
}

async fn assert_not_ours(asking: &mut Asking, promise: &str) {
    let answer = asking.contend(Prior::Nothing).await;
    assert!(!matches!(answer, Answer::Ours(_)), "broken: {promise}");
}

/// Takes the mutex, whose turn it is; a store may need a moment to pass it on.
async fn take_turn(asking: &mut Asking) -> simba_core::FencingToken {
    let turn = async {
        loop {
            if let Answer::Ours(ours) = asking.contend(Prior::Nothing).await {
                return ours.token;
            }
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    soon("who came first is served first", turn).await.expect("broken: what is ours has a token")
}

/// A waiter that was woken and is dropped wakes the next one.
pub async fn a_woken_waiter_that_is_dropped_wakes_the_next(fixture: &dyn Fixture) {
    let Some((_peers, woken, next)) = woken_and_next(fixture).await else { return };
    drop(woken);
    served(next).await;
}

/// A waiter that was woken and does not want the mutex any more wakes the next one.
pub async fn a_woken_waiter_that_gives_up_wakes_the_next(fixture: &dyn Fixture) {
    let Some((_peers, mut woken, next)) = woken_and_next(fixture).await else { return };
    woken.release(None).await;
    served(next).await;
}

/// Two waiters of a mutex that was just released: the first one has been woken and has not answered.
async fn woken_and_next(fixture: &dyn Fixture) -> Option<([Peer; 2], Asking, Asking)> {
    let profile = fixture.profile();
    if !profile.push || !profile.fifo {
        skip("the store wakes nobody in particular");
        return None;
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let token = holder.take().await;
    let (mut first, mut next) = (two.waiter(&mutex).await, one.waiter(&mutex).await);
    for waiter in [&mut first, &mut next] {
        waiter.queue().await;
        waiter.hint("a subscription is told once").await;
    }
    holder.release(Some(token)).await;
    first.hint("a release wakes the next").await;
    Some(([one, two], first, next))
}

async fn served(mut waiter: Asking) {
    waiter.hint("who gives up wakes the next").await;
    waiter.take_by_hints("who gives up wakes the next").await;
}

/// A try on a mutex that is free but promised to a waiter is refused, and the waiter gets it.
pub async fn a_try_never_passes_a_waiter(fixture: &dyn Fixture) {
    if !fixture.profile().fifo {
        return skip("the store serves waiters in no order");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    waiter.queue().await;
    holder.release(Some(token)).await;
    let mut hasty = one.session_for(&mutex, Intent::Try).await;
    assert_not_ours(&mut hasty, "a try never passes a waiter").await;
    take_turn(&mut waiter).await;
}

/// A try that was refused is not queued: the mutex is promised to nobody after its release.
pub async fn a_try_leaves_no_trace(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let token = holder.take().await;
    let mut hasty = two.session_for(&mutex, Intent::Try).await;
    hasty.queue().await;
    one.finds_no_waiter_of(&mutex).await;
    holder.release(Some(token)).await;
    one.waiter(&mutex).await.take().await;
}

/// A waiter that is gone without a word keeps the others out for a short time only.
pub async fn a_dead_waiter_blocks_nobody_for_long(fixture: &dyn Fixture) {
    let (dead, alive) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = alive.lock(&mutex).await;
    let mut waiter = dead.session(Claim::new(mutex.clone(), ContenderId::generate(), fixture.lease())).await;
    waiter.queue().await;
    dead.die();
    release(guard).await;
    let locker = alive.locker(&mutex);
    let next = within(patience(fixture), "a dead waiter blocks nobody for long", locker.lock()).await;
    release(kept("a dead waiter blocks nobody for long", next)).await;
}
