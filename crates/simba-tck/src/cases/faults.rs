//! A bad network and a store that stops.

use std::time::Duration;

use simba_core::{Contention, ErrorKind, Guard, Lease, Loss, Tenure};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{
    Peer, STANDSTILL, kept, lock, long, name, now, patience, release, sleep_until, soon, try_lock, until,
    within,
};

/// A holder whose store hangs is told to stop and that it has lost, both on time, and nobody holds before.
pub async fn a_stalled_holder_is_told_on_time(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, lease) = (name(), lenient(fixture));
    let guard = lock(&one.locker(&mutex).with_lease(lease)).await;
    let (locker, tenure) = (two.locker(&mutex), guard.tenure());
    let next = tokio::spawn(async move { (locker.lock().await, now()) });
    one.network.stall();
    let patience = lease.total() + patience(fixture);
    within(patience, "a holder out of reach is told to stop", guard.expiring()).await;
    let told = now();
    assert!(guard.is_held(), "broken: a holder is told to stop before it has lost");
    let loss = within(patience, "a holder out of reach loses", guard.lost()).await;
    let (lost, deadline) = (now(), tenure.deadline());
    assert_eq!(loss, Loss::Deadline, "broken: a holder out of reach loses at its deadline");
    // A store that grants less than was asked for leaves less grace, never more.
    let early = deadline.saturating_sub(lease.grace()) - told;
    assert!(early <= ROUNDING, "broken: a holder is told to stop in its grace, not {early:?} before it");
    let late = lost - deadline;
    assert!(lost >= deadline && late <= STANDSTILL, "broken: a loss is told on time, not {late:?} late");
    if fixture.profile().expires_without_client {
        let (next, acquired) = within(patience, "the next one holds", next).await.unwrap();
        assert!(kept("the next one holds", next).token() > tenure.token(), "broken: tokens grow");
        assert!(acquired >= deadline, "broken: nobody holds before the holder's deadline");
    }
}

/// Returns a lease whose grace is longer than a [`STANDSTILL`], also where a store grants two thirds of it.
fn lenient(fixture: &dyn Fixture) -> Lease {
    let lease = Lease::new(fixture.lease().ttl(), fixture.lease().transition().max(STANDSTILL * 4));
    kept("a longer lease is in order", lease)
}

/// A store counts in milliseconds, or rounds.
const ROUNDING: Duration = Duration::from_millis(5);

/// A stall that is shorter than the window after a failed renewal costs nothing.
pub async fn a_short_stall_is_ridden_out(fixture: &dyn Fixture) {
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
        until("a holder rides out a short stall", || guard.deadline() > deadline).await;
    }
    assert_unbroken(&guard, &two, "a short stall").await;
}

/// A connection that breaks at every renewal costs nothing either.
pub async fn cuts_are_ridden_out(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let guard = one.lock(&name()).await;
    for _ in 0..6 {
        let deadline = guard.deadline();
        one.network.cut();
        until("a holder rides out a cut", || guard.deadline() > deadline).await;
    }
    assert_unbroken(&guard, &two, "a cut").await;
}

async fn assert_unbroken(guard: &Guard, other: &Peer, fault: &str) {
    let loss = guard.tenure().loss();
    assert_eq!(loss, None, "broken: {fault} within the window ends no tenure");
    let refused = try_lock(&other.locker(guard.tenure().mutex())).await.is_none();
    assert!(refused, "broken: {fault} lets nobody else in");
}

/// A waiter whose store is out of reach for a while waits on, and comes next when it is back.
pub async fn a_waiter_outwaits_an_outage(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let waiting = two.simba.contend(mutex);
    waiting.start().unwrap();
    until("a waiter sees who holds", || waiting.owner().is_owner(guard.tenure().contender())).await;
    two.network.stall();
    until("an outage is told", || waiting.last_error().is_some()).await;
    release(guard).await;
    assert!(!waiting.is_owner(), "broken: nobody gains a mutex out of reach");
    two.network.heal();
    let next = within(patience(fixture), "a waiter outwaits an outage", waiting.acquired()).await;
    kept("a waiter outwaits an outage", next);
}

/// An acquisition whose reply is lost is adopted: the contender does not wait for its own ghost.
pub async fn a_lost_reply_is_no_ghost(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    // The connection stands before the reply is lost.
    release(one.lock(&name()).await).await;
    let (mutex, short) = (name(), fixture.lease());
    // Adoption is told from the end of the lease by a bound with room: the next call comes after a third of the ttl.
    let lease = kept("a longer lease is in order", Lease::new(short.ttl() * 3, short.transition() * 3));
    let locker = one.locker(&mutex).with_lease(lease);
    one.network.lose_next_reply();
    let guard = within(lease.total(), "what was won without a reply is adopted", locker.lock()).await;
    let guard = kept("what was won without a reply is adopted", guard);
    assert!(two.try_lock(&mutex).await.is_none(), "broken: what was adopted is held");
    release(guard).await;
    two.finds_nothing_of(&mutex).await;
}

/// A release whose reply is lost frees the mutex, and says so once it is sure.
pub async fn a_lost_reply_of_a_release_frees(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    one.network.lose_next_reply();
    let released = within(patience(fixture), "a release ends", guard.release()).await;
    kept("a release is confirmed in the end", released);
    two.finds_nothing_of(&mutex).await;
}

/// A request that arrives after its contender has given up holds the mutex for one lease at the most.
pub async fn a_late_request_is_undone(fixture: &dyn Fixture) {
    if !fixture.profile().expires_without_client {
        return skip("a dead holder's mutex is not freed by itself");
    }
    let (one, two) = Peer::pair(fixture).await;
    release(one.lock(&name()).await).await;
    let mutex = name();
    let Some(mut held) = one.network.hold_next_request() else { return skip("the network holds no request") };
    let locker = one.locker(&mutex);
    let given_up = tokio::spawn(async move { locker.lock().await.map(drop) });
    soon("a contender asks the store", held.caught()).await;
    given_up.abort();
    // The contender is gone for good once its handle has let go of everything.
    within(patience(fixture), "a shutdown ends", one.simba.shutdown()).await;
    held.deliver();
    tokio::time::sleep(fixture.lease().ttl() / 4).await;
    let locker = two.locker(&mutex);
    let next = within(patience(fixture), "a late request is undone", locker.lock()).await;
    release(kept("a late request is undone", next)).await;
    two.finds_nothing_of(&mutex).await;
}

/// A store out of reach is an error, never "held by another", and works again when it is back.
pub async fn out_of_reach_is_an_error(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mutex = name();
    release(peer.lock(&mutex).await).await;
    peer.network.stall();
    let (locker, limit) = (peer.locker(&mutex), patience(fixture));
    let errors = [
        within(limit, "a try out of reach fails", locker.try_lock()).await.map(drop),
        within(limit, "a lock out of reach fails", locker.lock()).await.map(drop),
        within(limit, "a wait out of reach fails", locker.lock_timeout(fixture.lease().ttl()))
            .await
            .map(drop),
    ];
    for error in errors {
        let error = error.expect_err("broken: a store out of reach is an error");
        assert_eq!(
            error.kind(),
            ErrorKind::Unavailable,
            "broken: out of reach is not held by another: {error}"
        );
    }
    peer.network.heal();
    let locked = within(limit, "a store that is back works again", async {
        loop {
            match locker.lock().await {
                Err(error) if error.is_transient() => {}
                locked => return locked,
            }
        }
    });
    release(kept("a store that is back works again", locked.await)).await;
}

/// A restart of the store keeps a hold, or its holder learns of the loss; tokens grow either way.
pub async fn a_restart_of_the_store_is_survived(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let survives = fixture.profile().survives_restart;
    let contention = one.simba.contend(name());
    // A hold that survives is not to be lost to the time that the restart takes.
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
    within(patience(fixture), "a contention stops", contention.stop()).await.unwrap();
    let next = within(patience(fixture), "the store works on", two.locker(tenure.mutex()).lock()).await;
    assert!(kept("the store works on", next).token() > tenure.token(), "broken: tokens survive a restart");
}

async fn still_held(other: &Peer, tenure: &Tenure) {
    let locker = other.locker(tenure.mutex());
    assert!(try_lock(&locker).await.is_none(), "broken: a hold survives the restart of its store");
    assert!(locker.last_holder().is_owner(tenure.contender()), "broken: the holder survives the restart");
    assert!(tenure.is_held(), "broken: a hold survives the restart of its store");
}

async fn lost_and_regained(fixture: &dyn Fixture, contention: &Contention, tenure: &Tenure) {
    let loss = within(patience(fixture), "a holder learns that its store forgot it", tenure.lost()).await;
    assert_ne!(loss, Loss::Released, "broken: a forgotten holder has lost");
    let again =
        within(patience(fixture), "a contention goes on after a restart", contention.acquired()).await;
    assert!(again.unwrap().token() > tenure.token(), "broken: tokens survive a restart");
}
