//! The contract of a session, by direct calls.

use std::time::Duration;

use simba_core::spi::{Answer, Claim, Holding, Intent, Prior};
use simba_core::{ContenderId, MutexName};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{DirectSession, Peer, assert_ok, lease_limit, long, name, ours, polled, release, within};

/// Opening a session acquires nothing and is not queued.
pub async fn opening_takes_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let _open = one.waiter(&mutex).await;
    assert_eq!(two.waiter(&mutex).await.inspect().await, None, "broken: opening acquires nothing");
    two.waiter(&mutex).await.take().await;
    two.assert_no_waiters(&mutex).await;
}

/// The first call acquires a free mutex; the next one returns the holder.
pub async fn the_first_call_acquires_a_free_mutex(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    let seen = waiter.queue().await;
    assert_eq!(seen.owner, holder.id, "broken: `held` names the holder");
    assert!(!seen.remaining.is_zero(), "broken: `held` has the remaining time");
    if fixture.profile().token_visible_to_observers {
        assert_eq!(seen.token, Some(token), "broken: `held` has the holder's token");
    }
}

/// A session under the id of a live holder is refused, and changes nothing.
pub async fn a_duplicate_id_is_refused(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let (mut holder, mut duplicate) = (one.session(claim.clone()).await, two.session(claim).await);
    let token = holder.take().await;
    for _ in 0..3 {
        assert_eq!(
            duplicate.queue().await.owner,
            holder.id,
            "broken: a duplicate is refused with its own id"
        );
    }
    let renewed = ours("a holder keeps its hold", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a duplicate changes nothing");
    holder.release(Some(token)).await;
    drop(duplicate);
    one.assert_free(&mutex).await;
}

/// A release with `Holding::Nothing` frees nothing, even under the id of a live holder.
pub async fn a_release_of_nothing_frees_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long());
    let (mut holder, mut duplicate) = (one.session(claim.clone()).await, two.session(claim).await);
    let token = holder.take().await;
    duplicate.queue().await;
    assert_ok("a release of nothing is confirmed", duplicate.session.release(Holding::Nothing).await);
    let renewed = ours("a holder keeps its hold", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a release of nothing frees nothing");
    holder.release(Some(token)).await;
    two.assert_free(&mutex).await;
}

/// A session under the id of a crashed holder does not extend the lease by its calls.
pub async fn a_duplicate_id_extends_nothing(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("the mutex of a dead holder is not freed");
    }
    let (dead, alive) = Peer::pair(fixture).await;
    let claim = Claim::new(name(), ContenderId::generate(), fixture.lease());
    let (mut holder, mut duplicate) = (dead.session(claim.clone()).await, alive.session(claim).await);
    let token = holder.take().await;
    dead.crash();
    let contended = async {
        loop {
            match duplicate.contend(Prior::Nothing).await {
                Answer::Held(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                answer => return answer,
            }
        }
    };
    let answer = within(lease_limit(fixture), "calls of a duplicate extend no lease", contended).await;
    if let Answer::Ours(taken) = answer {
        assert!(taken.token > Some(token), "broken: a later acquisition of a duplicate is another tenure");
    }
}

/// A session that does not know the result of its call adopts what it acquired, under the same token.
pub async fn an_unknown_outcome_is_adopted(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut direct = peer.waiter(&name()).await;
    let token = direct.take().await;
    for _ in 0..3 {
        let adopted = ours("an acquisition is adopted", direct.contend(Prior::Unknown).await);
        assert_eq!(adopted, token, "broken: an adopted hold keeps its token");
    }
}

/// A renewal keeps the token and restores the whole lease.
pub async fn a_renewal_keeps_the_token(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let lease = fixture.lease();
    let mut direct = peer.session(Claim::new(name(), ContenderId::generate(), lease)).await;
    let token = direct.take().await;
    tokio::time::sleep(lease.ttl() / 2).await;
    let left = direct.inspect().await.map(|seen| seen.remaining);
    match direct.contend(Prior::Held).await {
        Answer::Ours(renewed) => {
            assert_eq!(direct.token_of(&renewed), token, "broken: a renewal keeps the token");
            assert!(Some(renewed.remaining) >= left, "broken: a renewal does not shorten the lease");
            assert!(renewed.remaining > lease.ttl() / 2, "broken: a renewal restores the whole lease");
        }
        other => panic!("broken: a hold can be renewed; the answer is {other:?}"),
    }
}

/// A lapsed hold is acquired again under a greater token.
pub async fn a_lapsed_hold_is_acquired_again(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut direct = peer.waiter(&name()).await;
    let token = direct.take().await;
    let again = ours("a lapsed hold is acquired again", direct.contend(Prior::Lapsed(token)).await);
    assert!(again > token, "broken: a lapsed hold under {token} is fenced off by the next, under {again}");
}

/// A call with a lapsed token that arrives after the hold was acquired again changes no token.
pub async fn a_late_lapsed_call_renews_the_new_hold(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mut direct = peer.waiter(&name()).await;
    let token = direct.take().await;
    let again = ours("a lapsed hold is acquired again", direct.contend(Prior::Lapsed(token)).await);
    let late = ours("a hold can be renewed", direct.contend(Prior::Lapsed(token)).await);
    assert_eq!(late, again, "broken: only the token that lapsed is replaced");
}

/// A renewal that arrives after the end of the lease never restores the old token.
pub async fn a_late_renewal_does_not_restore_the_token(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("the mutex of a dead holder is not freed");
    }
    let (dead, alive) = Peer::pair(fixture).await;
    let mutex = name();
    let mut late = dead.session(Claim::new(mutex.clone(), ContenderId::generate(), fixture.lease())).await;
    let token = late.take().await;
    dead.crash();
    let next = alive.succeed(fixture, &mutex).await;
    dead.network.heal();
    match renew(fixture, &mut late).await {
        Answer::Held(seen) => {
            assert_eq!(&seen.owner, next.tenure().contender(), "broken: `held` names the holder")
        }
        other => panic!("broken: a late renewal does not affect the next holder; the answer is {other:?}"),
    }
    assert!(next.is_held(), "broken: a late renewal does not affect the next holder");
    release(next).await;
    if let Answer::Ours(again) = renew(fixture, &mut late).await {
        assert!(again.token > Some(token), "broken: a late renewal does not restore the token");
    }
}

/// Renews through a network that may need some time to recover.
async fn renew(fixture: &dyn Fixture, direct: &mut DirectSession) -> Answer {
    let renewed = async {
        loop {
            match direct.session.contend(Prior::Held).await {
                Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(20)).await,
                answer => return assert_ok("a call is answered", answer),
            }
        }
    };
    within(lease_limit(fixture), "a call is answered", renewed).await
}

/// A release under the token of an earlier hold does not affect the current one.
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

async fn assert_owner(peer: &Peer, mutex: &MutexName, holder: &ContenderId, guarantee: &str) {
    let owner = peer.session_for(mutex, Intent::Observe).await.inspect().await.map(|seen| seen.owner);
    assert_eq!(owner.as_ref(), Some(holder), "broken: {guarantee}");
}

/// A release can be repeated, with its token or without, also without a hold.
pub async fn a_release_is_idempotent(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut direct = one.waiter(&mutex).await;
    direct.release(None).await;
    let token = direct.take().await;
    for token in [Some(token), Some(token), None] {
        direct.release(token).await;
    }
    two.assert_free(&mutex).await;
}

/// A release never frees the hold of another.
pub async fn a_release_never_frees_another_holder(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut before, mut holder) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let old = before.take().await;
    before.release(Some(old)).await;
    let token = holder.take().await;
    for token in [None, Some(old), Some(token)] {
        before.release(token).await;
    }
    assert_owner(&one, &mutex, &holder.id, "a release never frees another holder").await;
    let renewed = ours("a release never frees another holder", holder.contend(Prior::Held).await);
    assert_eq!(renewed, token, "broken: a release does not affect another holder");
}

/// An inspection acquires nothing, is not queued and extends nothing.
pub async fn an_inspection_changes_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut observer = one.session_for(&mutex, Intent::Observe).await;
    assert_eq!(observer.inspect().await, None, "broken: a new mutex has no owner");
    let mut holder = two.waiter(&mutex).await;
    let token = holder.take().await;
    let mut last = long().total();
    for _ in 0..5 {
        let seen = observer.inspect().await.expect("broken: an inspection sees the owner");
        assert_eq!(seen.owner, holder.id, "broken: an inspection sees the owner");
        // A store may count in milliseconds, or round.
        assert!(seen.remaining <= last + Duration::from_millis(5), "broken: an inspection extends nothing");
        last = last.min(seen.remaining);
    }
    two.assert_no_waiters(&mutex).await;
    holder.release(Some(token)).await;
    assert_eq!(observer.inspect().await, None, "broken: an inspection sees the release");
}

/// A subscription starts with one hint, and a hint without a waiting call is kept.
pub async fn hints_begin_with_the_subscription_and_are_kept(fixture: &dyn Fixture) {
    if !fixture.profile().push {
        return skip("the store sends no notifications");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    waiter.queue().await;
    waiter.hint("a subscription starts with a hint").await;
    for _ in 0..20 {
        // The engine often drops this call.
        drop(polled(waiter.session.changed(), 1).await);
    }
    holder.release(Some(token)).await;
    waiter.hint("a hint without a waiting call is kept").await;
    waiter.take_by_hints("the mutex is free after the hint").await;
}

/// A session that is dropped while it waits leaves the queue.
pub async fn a_dropped_session_leaves_the_queue(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (mut holder, mut waiter) = (one.waiter(&mutex).await, two.waiter(&mutex).await);
    let token = holder.take().await;
    waiter.queue().await;
    drop(waiter);
    one.assert_no_waiters(&mutex).await;
    holder.release(Some(token)).await;
    one.assert_free(&mutex).await;
}
