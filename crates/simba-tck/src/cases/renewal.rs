//! A holder keeps the mutex until it releases it.

use std::time::Duration;

use simba_core::{Contender, MutexState, Tenure};
use tokio::sync::mpsc;

use crate::Fixture;
use crate::world::{Peer, assert_ok, lease_limit, lock, name, now, release, soon, until, within};

/// A holder keeps the mutex far beyond one lease, under one token, and no other acquires it meanwhile.
pub async fn a_holder_outlives_its_lease(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, lease) = (name(), fixture.lease());
    let guard = one.lock(&mutex).await;
    let end = guard.tenure().acquired_at() + lease.total() * 3;
    while now() < end {
        assert!(guard.is_held(), "broken: renewals keep a hold: {:?}", guard.tenure().loss());
        assert!(two.try_lock(&mutex).await.is_none(), "broken: a renewed hold keeps others out");
        tokio::time::sleep(lease.total() / 8).await;
    }
    release(guard).await;
}

/// Every renewal moves the deadline.
pub async fn renewals_move_the_deadline(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let guard = peer.lock(&name()).await;
    for _ in 0..3 {
        let before = guard.deadline();
        until("a renewal moves the deadline", || guard.deadline() > before).await;
        assert!(guard.is_held(), "broken: a renewed hold is held");
    }
    release(guard).await;
}

/// A callback that takes longer than the lease does not delay a renewal.
pub async fn a_busy_callback_delays_no_renewal(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let (done, mut held) = mpsc::unbounded_channel();
    let busy = Busy { pause: fixture.lease().total() * 2, done };
    let contention = peer.simba.contend(name()).with_contender(busy);
    contention.start().unwrap();
    let held = within(lease_limit(fixture), "a callback runs to its end", held.recv()).await;
    assert_eq!(held, Some(true), "broken: renewals continue while a callback is busy");
    assert_ok("a contention stops", soon("a contention stops", contention.stop()).await);
}

/// Is busy for longer than its lease, and reports whether it still holds.
struct Busy {
    pause: Duration,
    done: mpsc::UnboundedSender<bool>,
}

impl Contender for Busy {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        tokio::time::sleep(self.pause).await;
        self.done.send(tenure.is_held()).ok();
    }

    async fn on_released(&mut self, _: &Tenure, _: &MutexState) {}
}

/// A mutex with a minimum hold stays held for that long, however soon it is released.
pub async fn a_min_hold_is_kept(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, least) = (name(), fixture.lease().total());
    let guard = lock(&one.locker(&mutex).with_min_hold(least)).await;
    let from = guard.tenure().acquired_at();
    drop(guard);
    let locker = two.locker(&mutex);
    let next = within(lease_limit(fixture), "a minimum hold ends", locker.lock()).await;
    assert!(now() - from >= least, "broken: a minimum hold is kept");
    release(assert_ok("a minimum hold ends", next)).await;
}
