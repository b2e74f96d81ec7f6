//! The operations for operators.

use simba_core::operate::{EvictIf, Eviction};
use simba_core::{ContenderId, FencingToken};

use crate::Fixture;
use crate::skips::skip;
use crate::world::{Peer, assert_ok, lock, long, name, release, soon, until};

const NO_OPERATIONS: &str = "the backend does not implement `Operate`";

/// A list contains the held mutexes, sorted by name.
pub async fn a_list_names_what_is_held(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let Some(operate) = two.backend.operate() else { return skip(NO_OPERATIONS) };
    let names = [name(), name(), name()];
    let mut guards = Vec::new();
    for mutex in &names {
        guards.push(lock(&one.long_locker(mutex)).await);
    }
    let list = assert_ok("mutexes can be listed", soon("a list is answered", operate.list()).await);
    assert!(list.is_sorted_by(|one, other| one.mutex <= other.mutex), "broken: a list is sorted");
    for guard in &guards {
        let record = list.iter().find(|record| record.mutex == *guard.tenure().mutex());
        let owner = record.and_then(|record| record.owner.as_ref());
        assert_eq!(
            owner,
            Some(guard.tenure().contender()),
            "broken: a list contains held mutexes with their holders"
        );
    }
}

/// A record has the holder, its token, the remaining time, and the number of waiters, as far as the store knows.
pub async fn a_record_shows_the_holder_and_the_waiters(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let Some(operate) = two.backend.operate() else { return skip(NO_OPERATIONS) };
    let mutex = name();
    let guard = lock(&one.long_locker(&mutex)).await;
    let mut waiter = one.waiter(&mutex).await;
    waiter.queue().await;
    let record = assert_ok("a mutex can be read", operate.read(&mutex).await);
    assert_eq!(record.owner.as_ref(), Some(guard.tenure().contender()), "broken: a record names the holder");
    assert!(record.token.is_none_or(|token| token == guard.token()), "broken: a record has the right token");
    assert!(record.remaining.is_none_or(|left| !left.is_zero()), "broken: a holder has time left");
    assert_ne!(record.in_transition, Some(true), "broken: a fresh hold is within its ttl");
    assert!(record.waiters.is_none_or(|waiters| waiters == 1), "broken: one waits, not {:?}", record.waiters);
}

/// A mutex that was never used, or that was released, is free.
pub async fn an_unknown_mutex_is_free(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let Some(operate) = peer.backend.operate() else { return skip(NO_OPERATIONS) };
    let mutex = name();
    for _ in 0..2 {
        let record = assert_ok("a mutex can be read", operate.read(&mutex).await);
        assert_eq!((&record.mutex, record.owner), (&mutex, None), "broken: a free mutex has no owner");
        release(peer.lock(&mutex).await).await;
    }
}

/// An eviction frees only the holder of its condition.
pub async fn an_eviction_respects_its_condition(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let Some(operate) = two.backend.operate() else { return skip(NO_OPERATIONS) };
    let mutex = name();
    let evict =
        |condition| async { assert_ok("an eviction is answered", operate.evict(&mutex, condition).await) };
    assert_eq!(
        evict(EvictIf::Any).await,
        Eviction::Vacant,
        "broken: an eviction from a free mutex has no effect"
    );
    let guard = lock(&one.long_locker(&mutex)).await;
    let holder = guard.tenure().contender().clone();
    let wrong =
        [EvictIf::Owner(ContenderId::generate()), EvictIf::Token(FencingToken::new(guard.token().get() + 1))];
    for condition in wrong {
        let left = evict(condition.clone()).await;
        assert_eq!(
            left,
            Eviction::Other(holder.clone()),
            "broken: {condition:?} does not evict another holder"
        );
    }
    assert!(two.try_lock(&mutex).await.is_none(), "broken: a refused eviction frees nothing");
    let visible = fixture.profile().token_visible_to_observers;
    let right = if visible { EvictIf::Token(guard.token()) } else { EvictIf::Owner(holder.clone()) };
    let freed = evict(right).await;
    assert!(
        matches!(&freed, Eviction::Freed { owner, .. } if *owner == holder),
        "broken: {freed:?} names the holder"
    );
    assert!(two.try_lock(&mutex).await.is_some(), "broken: an eviction frees the mutex");
}

/// An eviction notifies the next waiter.
pub async fn an_eviction_wakes_the_next(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let Some(operate) = two.backend.operate() else { return skip(NO_OPERATIONS) };
    if !fixture.profile().push {
        return skip("the store sends no notifications");
    }
    let mutex = name();
    let guard = lock(&one.long_locker(&mutex)).await;
    let waiting = two.simba.contend(mutex.clone()).with_lease(long());
    waiting.start().unwrap();
    until("a waiter sees the holder", || waiting.owner().is_owner(guard.tenure().contender())).await;
    assert_ok("a holder can be evicted", operate.evict(&mutex, EvictIf::Any).await);
    assert_ok("the next one holds", soon("an eviction notifies the next", waiting.acquired()).await);
}

/// A probe succeeds and names the server.
pub async fn a_probe_answers(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let Some(operate) = peer.backend.operate() else { return skip(NO_OPERATIONS) };
    let probe = assert_ok("a store can be probed", soon("a probe is answered", operate.probe()).await);
    assert!(!probe.server.is_empty(), "broken: a probe names the server");
}

/// An existing schema can be applied again, under live holders.
pub async fn a_schema_is_applied_again(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let Some(operate) = peer.backend.operate() else { return skip(NO_OPERATIONS) };
    let guard = lock(&peer.long_locker(&name())).await;
    for _ in 0..2 {
        assert_ok("a schema is applied again", soon("a schema is applied", operate.apply_schema()).await);
    }
    assert!(
        peer.try_lock(guard.tenure().mutex()).await.is_none(),
        "broken: applying a schema keeps held mutexes"
    );
    release(guard).await;
}
