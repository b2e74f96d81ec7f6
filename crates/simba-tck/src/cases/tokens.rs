//! Tokens grow with every acquisition, and with nothing else.

use simba_core::{FencingToken, View};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{Peer, lock, name, release, sees, try_lock, until};

/// Every acquisition has a greater token than all before it, by any contender.
pub async fn they_grow_with_every_acquisition(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, mut last) = (name(), FencingToken::new(0));
    for round in 0..20 {
        let guard = if round % 3 == 0 { one.lock(&mutex).await } else { two.lock(&mutex).await };
        assert!(guard.token() > last, "broken: {} comes after {last}", guard.token());
        last = guard.token();
        release(guard).await;
    }
}

/// A locker that locks again under its label gets a greater token too.
pub async fn they_grow_for_the_same_contender(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let locker = peer.simba.locker(name()).with_label("tck");
    let mut last = FencingToken::new(0);
    for _ in 0..5 {
        let guard = lock(&locker).await;
        assert!(guard.token() > last, "broken: the next tenure of the same contender has a greater token");
        last = guard.token();
        release(guard).await;
    }
}

/// A renewal keeps the token, as the holder and as others see it.
pub async fn they_stay_through_renewals(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let locker = two.locker(&mutex);
    for _ in 0..3 {
        let before = guard.deadline();
        until("a renewal moves the deadline", || guard.deadline() > before).await;
        assert!(guard.is_held(), "broken: the tenure stays the same through its renewals");
        assert!(try_lock(&locker).await.is_none(), "broken: a renewed hold keeps others out");
        if fixture.profile().token_visible_to_observers {
            assert_eq!(locker.last_holder().token, Some(guard.token()), "broken: a renewal keeps the token");
        }
    }
}

/// The successor of a crashed holder has a greater token, so that the old holder is fenced off.
pub async fn they_grow_past_a_dead_holder(fixture: &dyn Fixture) {
    let Some((_dead, alive, guard)) = Peer::crashed_holder(fixture).await else { return };
    for _ in 0..3 {
        let next = alive.succeed(fixture, guard.tenure().mutex()).await;
        assert!(next.token() > guard.token(), "broken: a successor has a greater token");
        release(next).await;
    }
}

/// Tokens grow after all contenders have shut down.
pub async fn they_survive_all_shutdowns(fixture: &dyn Fixture) {
    let (mutex, mut last) = (name(), FencingToken::new(0));
    for _ in 0..3 {
        let peer = Peer::connect(fixture).await;
        let guard = peer.lock(&mutex).await;
        assert!(guard.token() > last, "broken: tokens grow after all contenders have shut down");
        last = guard.token();
        release(guard).await;
        peer.shutdown().await;
    }
}

/// Others see the holder's token.
pub async fn others_see_them(fixture: &dyn Fixture) {
    if !fixture.profile().token_visible_to_observers {
        return skip("the store does not show tokens to others");
    }
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = one.lock(&mutex).await;
    let mut observer = two.simba.observe(mutex).unwrap();
    let token = Some(guard.token());
    let owned = |view: &View| matches!(view, View::Owned(owner) if owner.token == token);
    sees(&mut observer, "others see the holder's token", owned).await;
}
