//! Network faults and store restarts.

use std::time::Duration;

use simba_core::{Contention, ErrorKind, Guard, Lease, Loss, Tenure};
use tokio::time::timeout;

use crate::Fixture;
use crate::skips::skip;
use crate::world::{
    MAX_DELAY, MAX_PAUSE, Peer, assert_ok, lease_limit, lock, long, name, now, release, sleep_until, soon,
    try_lock, until, within,
};

/// A holder whose store hangs is asked to stop and notified of the loss, both on time, and no other holds before.
pub async fn a_stalled_holder_is_notified_on_time(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, lease) = (name(), long_grace(fixture));
    let guard = lock(&one.locker(&mutex).with_lease(lease)).await;
    let (locker, tenure) = (two.locker(&mutex), guard.tenure());
    let next = tokio::spawn(async move { (locker.lock().await, now()) });
    one.network.stall();
    let limit = lease.total() + lease_limit(fixture);
    within(limit, "a disconnected holder is asked to stop", guard.expiring()).await;
    let expiring_at = now();
    assert!(guard.is_held(), "broken: a holder is asked to stop before the loss");
    let loss = within(limit, "a disconnected holder loses", guard.lost()).await;
    let (lost, deadline) = (now(), tenure.deadline());
    assert_eq!(loss, Loss::Deadline, "broken: a disconnected holder loses at its deadline");
    // A store that grants a shorter lease leaves less grace, never more.
    let early_by = deadline.saturating_sub(lease.grace()) - expiring_at;
    assert!(
        early_by <= ROUNDING,
        "broken: a holder is asked to stop in its grace, not {early_by:?} before it"
    );
    let late = lost - deadline;
    assert!(lost >= deadline && late <= MAX_DELAY, "broken: a loss is notified on time, not {late:?} late");
    if fixture.profile().expires_without_client {
        let (next, acquired) = within(limit, "the next one holds", next).await.unwrap();
        assert!(assert_ok("the next one holds", next).token() > tenure.token(), "broken: tokens grow");
        assert!(acquired >= deadline, "broken: no other holds before the holder's deadline");
    }
}

/// Returns a lease whose grace is longer than a [`MAX_PAUSE`], also on a store that grants two thirds of it.
fn long_grace(fixture: &dyn Fixture) -> Lease {
    let lease = Lease::new(fixture.lease().ttl(), fixture.lease().transition().max(MAX_PAUSE * 4));
    assert_ok("a longer lease is valid", lease)
}

/// The rounding of a store that counts in milliseconds.
const ROUNDING: Duration = Duration::from_millis(5);

/// A stall that is shorter than the time for retries of a renewal has no effect.
pub async fn a_short_stall_is_survived(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, lease) = (name(), fixture.lease());
    let guard = one.lock(&mutex).await;
    for _ in 0..4 {
        let deadline = guard.deadline();
        // From just before the earliest renewal until just after the latest.
        let renewed = deadline.saturating_sub(lease.total() - lease.margin());
        sleep_until(renewed + lease.renew_at().mul_f64(0.85)).await;
        one.network.stall();
        sleep_until(renewed + lease.renew_at() + lease.ttl() / 20).await;
        one.network.heal();
        until("a holder survives a short stall", || guard.deadline() > deadline).await;
    }
    assert_unbroken(&guard, &two, "a short stall").await;
}

/// A connection that breaks at every renewal has no effect either.
pub async fn a_tenure_survives_short_cuts(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let guard = one.lock(&name()).await;
    for _ in 0..6 {
        let deadline = guard.deadline();
        one.network.cut();
        until("a holder survives a cut", || guard.deadline() > deadline).await;
    }
    assert_unbroken(&guard, &two, "a cut").await;
}

async fn assert_unbroken(guard: &Guard, other: &Peer, fault: &str) {
    let loss = guard.tenure().loss();
    assert_eq!(loss, None, "broken: {fault} within the window ends no tenure");
    let refused = try_lock(&other.locker(guard.tenure().mutex())).await.is_none();
    assert!(refused, "broken: {fault} lets no other acquire");
}

/// A waiter whose store is unreachable for some time keeps waiting, and acquires once it has reconnected.
pub async fn a_waiter_survives_an_outage(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let waiting = two.simba.contend(mutex);
    waiting.start().unwrap();
    until("a waiter sees the holder", || waiting.owner().is_owner(guard.tenure().contender())).await;
    two.network.stall();
    until("an outage is reported", || waiting.last_error().is_some()).await;
    release(guard).await;
    assert!(!waiting.is_owner(), "broken: a disconnected waiter does not acquire");
    two.network.heal();
    let next = within(lease_limit(fixture), "a waiter survives an outage", waiting.acquired()).await;
    assert_ok("a waiter survives an outage", next);
}

/// An acquisition whose reply is lost is adopted: the contender does not wait for its own hold.
pub async fn a_lost_reply_leaves_no_hold(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    // The connection exists before the reply is lost.
    release(one.lock(&name()).await).await;
    // A limit below the lease distinguishes adoption from the end of the lease: the next call comes after a third of
    // the ttl.
    let (mutex, lease) = (name(), threefold(fixture));
    let locker = one.locker(&mutex).with_lease(lease);
    one.network.lose_next_reply();
    let guard = within(lease.total(), "an acquisition without a reply is adopted", locker.lock()).await;
    let guard = assert_ok("an acquisition without a reply is adopted", guard);
    assert!(two.try_lock(&mutex).await.is_none(), "broken: an adopted mutex is held");
    release(guard).await;
    two.assert_free(&mutex).await;
}

/// Returns a lease of three times the length.
fn threefold(fixture: &dyn Fixture) -> Lease {
    let short = fixture.lease();
    assert_ok("a longer lease is valid", Lease::new(short.ttl() * 3, short.transition() * 3))
}

/// A release whose reply is lost frees the mutex, and is confirmed after a retry.
pub async fn a_lost_reply_of_a_release_frees(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    // With the long lease, no renewal comes before the release and loses its reply instead.
    let guard = lock(&one.locker(&mutex).with_lease(threefold(fixture))).await;
    one.network.lose_next_reply();
    let released = within(lease_limit(fixture), "a release ends", guard.release()).await;
    assert_ok("a release is confirmed in the end", released);
    two.assert_free(&mutex).await;
}

/// A request that arrives after its contender has given up holds the mutex for at most one lease.
pub async fn a_late_request_is_undone(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("the mutex of a dead holder is not freed");
    }
    let (one, two) = Peer::pair(fixture).await;
    release(one.lock(&name()).await).await;
    let mutex = name();
    let Some(mut held) = one.network.hold_next_request() else {
        return skip("the network cannot hold requests");
    };
    let locker = one.locker(&mutex);
    let given_up = tokio::spawn(async move { locker.lock().await.map(drop) });
    soon("a contender sends a request", held.caught()).await;
    given_up.abort();
    // The contender is gone once its handle has been shut down.
    within(lease_limit(fixture), "a shutdown ends", one.simba.shutdown()).await;
    // The store answers the request, unless the connection has ended with only a part of it.
    let _ = timeout(MAX_PAUSE * 2, held.deliver_and_wait()).await;
    let locker = two.locker(&mutex);
    let next = within(lease_limit(fixture), "a late request is undone", locker.lock()).await;
    release(assert_ok("a late request is undone", next)).await;
    two.assert_free(&mutex).await;
}

/// An unreachable store is an error, never "held by another", and the mutex works again afterwards.
pub async fn an_unreachable_store_is_an_error(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mutex = name();
    release(peer.lock(&mutex).await).await;
    peer.network.stall();
    let (locker, limit) = (peer.locker(&mutex), lease_limit(fixture));
    let errors = [
        within(limit, "a try without a connection fails", locker.try_lock()).await.map(drop),
        within(limit, "a lock without a connection fails", locker.lock()).await.map(drop),
        within(limit, "a wait without a connection fails", locker.lock_timeout(fixture.lease().ttl()))
            .await
            .map(drop),
    ];
    for error in errors {
        let error = error.expect_err("broken: an unreachable store is an error");
        assert_eq!(
            error.kind(),
            ErrorKind::Unavailable,
            "broken: unreachable does not mean held by another: {error}"
        );
    }
    peer.network.heal();
    let locked = within(limit, "a lock works after a reconnect", async {
        loop {
            match locker.lock().await {
                Err(error) if error.is_transient() => {}
                locked => return locked,
            }
        }
    });
    release(assert_ok("a lock works after a reconnect", locked.await)).await;
}

/// A restart of the store keeps a hold, or its holder is notified of the loss; tokens grow either way.
pub async fn a_restart_of_the_store_is_survived(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let survives = fixture.profile().survives_restart;
    let contention = one.simba.contend(name());
    // A hold that survives must not end during the restart.
    let contention = if survives { contention.with_lease(long()) } else { contention };
    contention.start().unwrap();
    let tenure = soon("a free mutex is acquired", contention.acquired()).await.unwrap();
    if !fixture.restart().await {
        return skip("the store cannot be restarted");
    }
    if survives {
        still_held(&two, &tenure).await
    } else {
        lost_and_regained(fixture, &contention, &tenure).await
    }
    within(lease_limit(fixture), "a contention stops", contention.stop()).await.unwrap();
    let next =
        within(lease_limit(fixture), "the store works after a restart", two.locker(tenure.mutex()).lock())
            .await;
    assert!(
        assert_ok("the store works after a restart", next).token() > tenure.token(),
        "broken: tokens survive a restart"
    );
}

async fn still_held(other: &Peer, tenure: &Tenure) {
    let locker = other.locker(tenure.mutex());
    assert!(try_lock(&locker).await.is_none(), "broken: a hold survives the restart of its store");
    assert!(locker.last_holder().is_owner(tenure.contender()), "broken: the holder survives the restart");
    assert!(tenure.is_held(), "broken: a hold survives the restart of its store");
}

async fn lost_and_regained(fixture: &dyn Fixture, contention: &Contention, tenure: &Tenure) {
    let loss =
        within(lease_limit(fixture), "a holder is notified that the store lost its hold", tenure.lost())
            .await;
    assert_ne!(loss, Loss::Released, "broken: a hold that the store lost is a loss");
    let again =
        within(lease_limit(fixture), "a contention continues after a restart", contention.acquired()).await;
    assert!(again.unwrap().token() > tenure.token(), "broken: tokens survive a restart");
}
