//! The contract of a session, by direct calls.

use std::time::Duration;

use simba_core::{Answer, Claim, ContenderId, Holding, Intent, MutexName, Prior};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{Asking, Peer, kept, long, name, ours, patience, polled, release, within};

/// Opening a session takes nothing and queues nowhere.
pub async fn opening_takes_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let _open = one.waiter(&mutex).await;
    assert_eq!(two.waiter(&mutex).await.inspect().await, None, "broken: opening takes nothing");
    two.waiter(&mutex).await.take().await;
    two.finds_no_waiter_of(&mutex).await;
}

/// The first to ask for a free mutex gets it; the next is told who has it.
pub async fn nothing_before_takes_what_is_free(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    let seen = waiter.queue().await;
    assert_eq!(seen.owner, holder.id, "broken: `held` names the holder");
    assert!(!seen.remaining.is_zero(), "broken: `held` says for how long");
    if fixture.profile().token_visible_to_observers {
        assert_eq!(seen.token, Some(token), "broken: `held` tells the holder's token");
    }
}

/// A session under the id of a live holder is told that it is held, and changes nothing.
pub async fn a_twin_is_held_off(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let (mut holder, mut twin) = (one.session(claim.clone()).await, two.session(claim).await);
    let token = holder.take().await;
    for _ in 0..3 {
        assert_eq!(twin.queue().await.owner, holder.id, "broken: a twin is told its own id");
    }
    let renewed = ours("a holder keeps what a twin asked for", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a twin changes nothing");
    holder.release(Some(token)).await;
    drop(twin);
    one.finds_nothing_of(&mutex).await;
}

/// A session that surely has nothing frees nothing, even under the id of a live holder.
pub async fn a_release_of_nothing_frees_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let (mut holder, mut twin) = (one.session(claim.clone()).await, two.session(claim).await);
    let token = holder.take().await;
    twin.queue().await;
    kept("a release of nothing is confirmed", twin.session.release(Holding::Nothing).await);
    let renewed = ours("a holder keeps what a twin did not have", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a release of nothing frees nothing");
    holder.release(Some(token)).await;
    two.finds_nothing_of(&mutex).await;
}

/// A session under the id of a holder that is gone keeps nothing alive by asking.
pub async fn a_twin_extends_nothing(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("a dead holder's mutex is not freed by itself");
    }
    let (dead, alive) = Peer::pair(fixture).await;
    let claim = Claim::new(name(), ContenderId::generate(), fixture.lease());
    let (mut holder, mut twin) = (dead.session(claim.clone()).await, alive.session(claim).await);
    let token = holder.take().await;
    dead.die();
    let asked = async {
        loop {
            match twin.contend(Prior::Nothing).await {
                Answer::Held(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                answer => return answer,
            }
        }
    };
    let answer = within(patience(fixture), "a twin's calls extend no lease", asked).await;
    if let Answer::Ours(taken) = answer {
        assert!(taken.token > Some(token), "broken: what a twin takes later is another tenure");
    }
}

/// A session that does not know what became of its call adopts what it won, under the same token.
pub async fn an_unknown_outcome_is_adopted(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut asking = peer.waiter(&name()).await;
    let token = asking.take().await;
    for _ in 0..3 {
        let adopted = ours("what was won is adopted", asking.contend(Prior::Unknown).await);
        assert_eq!(adopted, token, "broken: what is adopted keeps its token");
    }
}

/// A renewal keeps the token and gives a whole lease again.
pub async fn a_renewal_keeps_the_token(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let lease = fixture.lease();
    let mut asking = peer.session(Claim::new(name(), ContenderId::generate(), lease)).await;
    let token = asking.take().await;
    tokio::time::sleep(lease.ttl() / 2).await;
    let left = asking.inspect().await.map(|seen| seen.remaining);
    match asking.contend(Prior::Held).await {
        Answer::Ours(renewed) => {
            assert_eq!(asking.token_of(&renewed), token, "broken: a renewal keeps the token");
            assert!(Some(renewed.remaining) >= left, "broken: a renewal makes no lease shorter");
            assert!(renewed.remaining > lease.ttl() / 2, "broken: a renewal gives a whole lease");
        }
        other => panic!("broken: what is held can be renewed; the answer is {other:?}"),
    }
}

/// A hold that was given up for lost is taken anew under a greater token, where the store can.
pub async fn a_lapsed_hold_is_taken_anew(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut asking = peer.waiter(&name()).await;
    let token = asking.take().await;
    let anew = ours("a lapsed hold is taken anew", asking.contend(Prior::Lapsed(token)).await);
    let right = if fixture.profile().keeps_token_on_resume { anew == token } else { anew > token };
    assert!(right, "broken: a lapsed hold under {token} is fenced off by the next one, under {anew}");
}

/// A call that speaks of a lapsed hold and arrives after that was taken anew changes no token.
pub async fn a_late_lapse_renews_what_came_after(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut asking = peer.waiter(&name()).await;
    let token = asking.take().await;
    let anew = ours("a lapsed hold is taken anew", asking.contend(Prior::Lapsed(token)).await);
    let late = ours("what is ours is ours", asking.contend(Prior::Lapsed(token)).await);
    assert_eq!(late, anew, "broken: only the token that lapsed is replaced");
}

/// A renewal that comes after the lease has ended never brings the old token back.
pub async fn a_late_renewal_brings_no_token_back(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("a dead holder's mutex is not freed by itself");
    }
    let (dead, alive) = Peer::pair(fixture).await;
    let mutex = name();
    let mut late = dead.session(Claim::new(mutex.clone(), ContenderId::generate(), fixture.lease())).await;
    let token = late.take().await;
    dead.die();
    let locker = alive.locker(&mutex);
    let next = within(patience(fixture), "a dead holder is succeeded", locker.lock()).await;
    let next = kept("a dead holder is succeeded", next);
    dead.network.heal();
    match renew(fixture, &mut late).await {
        Answer::Held(seen) => {
            assert_eq!(&seen.owner, next.tenure().contender(), "broken: `held` names the holder")
        }
        other => panic!("broken: a late renewal takes nothing from the next holder; the answer is {other:?}"),
    }
    assert!(next.is_held(), "broken: a late renewal leaves the next holder alone");
    release(next).await;
    if let Answer::Ours(again) = renew(fixture, &mut late).await {
        assert!(again.token > Some(token), "broken: a late renewal brings no token back");
    }
}

/// Renews through a network that may need a moment to come back.
async fn renew(fixture: &dyn Fixture, asking: &mut Asking) -> Answer {
    let renewed = async {
        loop {
            match asking.session.contend(Prior::Held).await {
                Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(20)).await,
                answer => return kept("a call is answered", answer),
            }
        }
    };
    within(patience(fixture), "a call is answered", renewed).await
}

/// A release under the token of an earlier hold leaves the present one alone.
pub async fn a_stale_token_frees_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut holder = one.waiter(&mutex).await;
    let stale = holder.take().await;
    holder.release(Some(stale)).await;
    let token = holder.take().await;
    assert!(token > stale, "broken: the next tenure has a greater token");
    holder.release(Some(stale)).await;
    assert_owner(&two, &mutex, &holder.id, "a stale token frees nothing").await;
    let renewed = ours("a stale token frees nothing", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a stale token changes nothing");
}

async fn assert_owner(peer: &Peer, mutex: &MutexName, holder: &ContenderId, promise: &str) {
    let owner = peer.session_for(mutex, Intent::Observe).await.inspect().await.map(|seen| seen.owner);
    assert_eq!(owner.as_ref(), Some(holder), "broken: {promise}");
}

/// A release can be repeated, with its token or without, and of what is not held.
pub async fn a_release_is_idempotent(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut asking = one.waiter(&mutex).await;
    asking.release(None).await;
    let token = asking.take().await;
    for token in [Some(token), Some(token), None] {
        asking.release(token).await;
    }
    two.finds_nothing_of(&mutex).await;
}

/// A release never frees what another holds.
pub async fn a_release_never_frees_another_s(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut before, mut holder) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let old = before.take().await;
    before.release(Some(old)).await;
    let token = holder.take().await;
    for token in [None, Some(old), Some(token)] {
        before.release(token).await;
    }
    assert_owner(&one, &mutex, &holder.id, "a release never frees another's").await;
    let renewed = ours("a release never frees another's", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a release changes nothing of another's");
}

/// A look takes nothing, queues nowhere and extends nothing.
pub async fn a_look_changes_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut looking = one.session_for(&mutex, Intent::Observe).await;
    assert_eq!(looking.inspect().await, None, "broken: nobody owns a new mutex");
    let mut holder = two.waiter(&mutex).await;
    let token = holder.take().await;
    let mut last = long().total();
    for _ in 0..5 {
        let seen = looking.inspect().await.expect("broken: a look sees the owner");
        assert_eq!(seen.owner, holder.id, "broken: a look sees the owner");
        // A store may count in milliseconds, or round.
        assert!(seen.remaining <= last + Duration::from_millis(5), "broken: a look extends nothing");
        last = last.min(seen.remaining);
    }
    two.finds_no_waiter_of(&mutex).await;
    holder.release(Some(token)).await;
    assert_eq!(looking.inspect().await, None, "broken: a look sees the release");
}

/// Hints come once after the subscription, and one that nobody waits for is kept.
pub async fn hints_begin_with_the_subscription_and_are_kept(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store wakes nobody");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    waiter.queue().await;
    waiter.hint("a subscription is told once").await;
    for _ in 0..20 {
        // The engine drops it often.
        drop(polled(waiter.session.changed(), 1).await);
    }
    holder.release(Some(token)).await;
    waiter.hint("a hint that came while nobody waited is kept").await;
    waiter.take_by_hints("the hint was right").await;
}

/// A session that is dropped while it waits leaves the queue.
pub async fn a_dropped_session_leaves_the_queue(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    waiter.queue().await;
    drop(waiter);
    one.finds_no_waiter_of(&mutex).await;
    holder.release(Some(token)).await;
    one.finds_nothing_of(&mutex).await;
}
