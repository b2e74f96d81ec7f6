//! The observer: what it returns and when, and that it never contends.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use simba_core::{Clock, ErrorKind, Locker, Moment, MutexOwner, Observer, View};
use simba_tck::{Call, Leg, Passage, Switch, Weather};
use tokio::time::{sleep, timeout};
use world::{CALL_LIMIT, LEASE, MUTEX, Peer, TTL, World, lease, ms, name, secs};

impl Peer {
    fn observe(&self) -> Observer {
        self.simba.observe(MUTEX).unwrap()
    }

    fn locker(&self) -> Locker {
        self.simba.locker(MUTEX)
    }
}

async fn owned(observer: &mut Observer) -> MutexOwner {
    match observer.changed().await.unwrap() {
        View::Owned(owner) => owner,
        view => panic!("not owned: {view:?}"),
    }
}

/// Asserts that nothing changes for ten seconds.
async fn assert_quiet(observer: &mut Observer) {
    timeout(secs(10), observer.changed()).await.unwrap_err();
}

#[tokio::test(start_paused = true)]
async fn vacant_mutex_is_returned_once() {
    let world = World::new();
    let mut observer = world.peer(1).observe();
    assert_eq!(observer.mutex(), &name(MUTEX));
    assert_eq!(observer.changed().await.unwrap(), View::Vacant);
    assert_eq!(world.now(), Moment::ZERO, "at the first poll");
    assert_quiet(&mut observer).await;
    assert_eq!(observer.view(), View::Vacant);
    assert!(observer.last_error().is_none());
}

#[tokio::test(start_paused = true)]
async fn first_changed_waits_for_the_first_poll() {
    let world = World::new();
    let peer = world.peer(1);
    sleep(ms(10)).await;
    let late = Passage { request: Leg::Delay(ms(150)), reply: Leg::Pass };
    peer.switch.once(Call::Inspect, late);
    let mut observer = peer.observe();
    assert_eq!(observer.view(), View::Unknown { since: world.now() }, "nothing is known before");
    assert_eq!(observer.changed().await.unwrap(), View::Vacant);
    assert_eq!(world.now(), Moment::ZERO + ms(160));
}

#[tokio::test(start_paused = true)]
async fn every_change_of_owner_is_returned_at_once_with_id_and_token() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let mut observer = world.peer(3).observe();
    observer.changed().await.unwrap();
    for round in 0..5 {
        let peer = if round % 2 == 0 { &one } else { &two };
        sleep(ms(70)).await;
        let (since, guard) = (world.now(), peer.locker().lock().await.unwrap());
        let owner = owned(&mut observer).await;
        assert_eq!(owner.id.as_ref(), Some(guard.tenure().contender()));
        assert_eq!((owner.token, owner.acquired_at), (Some(guard.token()), since));
        assert_eq!((owner.ttl_at, owner.transition_at), (since + TTL, since + LEASE));
        // Renewals are not changes. They only update the view.
        assert_quiet(&mut observer).await;
        let View::Owned(later) = observer.view() else { panic!("{:?}", observer.view()) };
        assert!(later.has_owner(world.now()) && later.transition_at > owner.transition_at);
        assert_eq!((later.id, later.acquired_at), (owner.id, since), "since it was first observed");
        let freed = world.now();
        guard.release().await.unwrap();
        assert_eq!(observer.changed().await.unwrap(), View::Vacant);
        assert_eq!(world.now(), freed);
    }
}

#[tokio::test(start_paused = true)]
async fn acquisition_by_a_waiter_is_returned_at_once() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let first = one.locker().lock().await.unwrap();
    let mut observer = world.peer(3).observe();
    assert_eq!(owned(&mut observer).await.token, Some(first.token()));
    let waiter = two.locker();
    let mut waiting = std::pin::pin!(waiter.lock());
    assert!(futures_util::poll!(&mut waiting).is_pending());
    world.queue_of(1).await;
    let (_, second) = tokio::join!(first.release(), waiting);
    let second = second.unwrap();
    let mut seen = owned_or_vacant(&mut observer).await;
    if seen.is_none() {
        seen = owned_or_vacant(&mut observer).await;
    }
    assert_eq!(seen.unwrap().token, Some(second.token()));
    assert_eq!(world.now(), Moment::ZERO);
}

async fn owned_or_vacant(observer: &mut Observer) -> Option<MutexOwner> {
    match observer.changed().await.unwrap() {
        View::Owned(owner) => Some(owner),
        View::Vacant => None,
        view => panic!("{view:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn change_with_a_lost_hint_is_returned_within_one_poll_interval() {
    for seed in 0..100 {
        let world = World::new();
        let (holder, observing) = (world.peer(seed), world.peer(seed + 1000));
        let guard = holder.locker().lock().await.unwrap();
        let mut observer = observing.observe();
        assert_eq!(owned(&mut observer).await.token, Some(guard.token()));
        // Only the hints of the next hour are lost.
        for _ in 0..100 {
            observing.switch.once(Call::Hint, Passage::HANG);
        }
        sleep(ms(1 + seed * 7)).await;
        let freed = world.now();
        guard.release().await.unwrap();
        assert_eq!(observer.changed().await.unwrap(), View::Vacant);
        let waited = world.now() - freed;
        assert!(waited > Duration::ZERO && waited <= lease().poll(), "{waited:?} with seed {seed}");
    }
}

#[tokio::test(start_paused = true)]
async fn end_of_a_dead_holders_lease_is_returned_within_two_percent() {
    for seed in 0..100 {
        let world = World::new();
        let (holder, observing) = (world.peer(seed), world.peer(seed + 1000));
        let locker = holder.locker();
        let guard = locker.lock().await.unwrap();
        let mut observer = observing.observe();
        owned(&mut observer).await;
        sleep(ms(1 + seed * 7)).await;
        holder.switch.set(Passage::HANG);
        let ends = world.now() + world.record().await.remaining.unwrap();
        assert_eq!(observer.changed().await.unwrap(), View::Vacant);
        assert!(world.now() >= ends && world.now() <= ends + LEASE / 50, "seed {seed}");
        drop(guard);
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_store_is_unknown_since_the_first_failure_until_it_answers() {
    for outage in [Passage::HANG, Passage::REPLY_LOST, Passage::fail(ErrorKind::Unavailable)] {
        let world = World::new();
        let (holder, observing) = (world.peer(1), world.peer(2));
        let guard = holder.locker().lock().await.unwrap();
        let mut observer = observing.observe();
        owned(&mut observer).await;
        observing.switch.set(outage);
        let cut = world.now();
        let failed = observer.changed().await.unwrap();
        let since = world.now();
        assert_eq!(failed, View::Unknown { since }, "{outage:?}");
        assert!(since <= cut + lease().poll() + CALL_LIMIT, "noticed at the next poll");
        let error = observer.last_error().unwrap();
        assert_eq!((error.kind(), error.backend()), (ErrorKind::Unavailable, Some("memory")));
        assert_eq!(error.mutex(), Some(&name(MUTEX)));
        assert_quiet(&mut observer).await;
        assert_eq!(observer.view(), View::Unknown { since }, "the first failure counts");
        assert!(observer.last_error().is_some());

        observing.switch.clear();
        let cleared = world.now();
        let owner = owned(&mut observer).await;
        assert!(world.now() <= cleared + CALL_LIMIT + TTL, "{outage:?}");
        assert_eq!(owner.token, Some(guard.token()));
        assert!(observer.last_error().is_none());

        // A second outage counts from its own first failure.
        observing.switch.set(outage);
        let View::Unknown { since: again } = observer.changed().await.unwrap() else { panic!() };
        assert!(again > since);
        assert_eq!(again, world.now().min(owner.transition_at), "or from the end of the last known lease");
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_is_unreachable_from_the_start_is_unknown_since_the_first_failure() {
    let world = World::new();
    let peer = world.peer(1);
    peer.switch.set(Passage::HANG);
    sleep(secs(1)).await;
    let mut observer = peer.observe();
    let view = observer.changed().await.unwrap();
    assert_eq!(view, View::Unknown { since: Moment::ZERO + secs(1) + CALL_LIMIT });
    assert_quiet(&mut observer).await;
    assert_eq!(observer.view(), view);
    peer.switch.clear();
    assert_eq!(observer.changed().await.unwrap(), View::Vacant);
}

#[tokio::test(start_paused = true)]
async fn owner_whose_lease_has_ended_is_unknown_until_the_next_poll() {
    let world = World::new();
    let (holder, observing) = (world.peer(1), world.peer(2));
    let guard = holder.locker().lock().await.unwrap();
    let seldom = observing.simba.with_lease(lease().with_poll(secs(30)).unwrap());
    let mut observer = seldom.observe(MUTEX).unwrap();
    let owner = owned(&mut observer).await;
    assert_eq!(owner.token, Some(guard.token()));
    holder.switch.set(Passage::HANG);
    observing.switch.set(Passage::HANG);
    let end = Moment::ZERO + LEASE;
    world.clock.sleep_until(end.saturating_sub(ms(1))).await;
    assert_eq!(observer.view(), View::Owned(owner));
    world.clock.sleep_until(end).await;
    assert_eq!(observer.view(), View::Unknown { since: end });
    assert_eq!(observer.changed().await.unwrap(), View::Unknown { since: end }, "when the next poll fails");
    assert!(world.now() > end);
    observing.switch.clear();
    assert_eq!(observer.changed().await.unwrap(), View::Vacant);
}

#[tokio::test(start_paused = true)]
async fn change_to_an_owner_whose_lease_has_ended_is_unknown_until_the_next_answer() {
    let world = World::new();
    let (holder, observing) = (world.peer(1), world.peer(2));
    let guard = holder.locker().lock().await.unwrap();
    let seldom = observing.simba.with_lease(lease().with_poll(secs(30)).unwrap());
    let mut observer = seldom.observe(MUTEX).unwrap();
    sleep(ms(10)).await;
    assert!(matches!(observer.view(), View::Owned(_)));
    // The next poll takes until after the end of the lease that the first one returned.
    observing.switch.set(Passage { request: Leg::Pass, reply: Leg::Delay(CALL_LIMIT / 2) });
    let end = Moment::ZERO + LEASE;
    world.clock.sleep_until(end + ms(50)).await;
    assert_eq!(observer.changed().await.unwrap(), View::Unknown { since: end });
    // The holder has renewed meanwhile.
    let owner = owned(&mut observer).await;
    assert_eq!(owner.token, Some(guard.token()));
    assert!(owner.has_owner(world.now()));
    assert_quiet(&mut observer).await;
    guard.release().await.unwrap();
    assert_eq!(observer.changed().await.unwrap(), View::Vacant);
}

#[tokio::test(start_paused = true)]
async fn permanent_error_is_retried_at_most_twice_a_second() {
    for seed in 0..20 {
        let world = World::new();
        let peer = world.peer(seed);
        peer.switch.once(Call::Open, Passage::CLEAR);
        peer.switch.set(Passage::fail(ErrorKind::Denied));
        let mut observer = peer.observe();
        let View::Unknown { .. } = observer.changed().await.unwrap() else { panic!() };
        assert_eq!(observer.last_error().unwrap().kind(), ErrorKind::Denied);
        let mut before = peer.switch.count(Call::Inspect);
        for _ in 0..10 {
            sleep(secs(1)).await;
            let polls = peer.switch.count(Call::Inspect) - before;
            before += polls;
            assert!((1..=2).contains(&polls), "{polls} polls in a second");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn observer_never_contends_and_never_queues() {
    let world = World::new();
    let (holder, observing) = (world.peer(1), world.peer(2));
    let mut observer = observing.observe();
    for _ in 0..5 {
        assert_eq!(observer.changed().await.unwrap(), View::Vacant);
        let guard = holder.locker().lock().await.unwrap();
        owned(&mut observer).await;
        sleep(5 * LEASE).await;
        assert_eq!(world.record().await.waiters, Some(0));
        guard.release().await.unwrap();
        // No waiter is before a try.
        let tried = holder.locker().try_lock().await.unwrap().unwrap();
        // The moment in between may be returned or not.
        while owned_or_vacant(&mut observer).await.is_none() {}
        tried.release().await.unwrap();
    }
    let calls = [Call::Contend, Call::Release].map(|call| observing.switch.count(call));
    assert_eq!(calls, [0, 0]);
    assert!(observing.switch.count(Call::Inspect) > 25 && observing.switch.count(Call::Open) == 1);
}

/// Forges hints, and counts the calls.
#[derive(Debug)]
struct Flood(Arc<Switch>, Duration);

impl Weather for Flood {
    fn passage(&self, call: Call) -> Passage {
        self.0.passage(call)
    }

    fn forged_hint(&self) -> Option<Duration> {
        Some(self.1)
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_forged_hints_causes_no_busy_loop() {
    for every in [Duration::ZERO, ms(1)] {
        let world = World::new();
        let switch = Switch::new();
        let flood = Arc::new(Flood(Arc::clone(&switch), every));
        let mut observer = world.handle(1, flood, world.clock.clone()).observe(MUTEX).unwrap();
        assert_eq!(observer.changed().await.unwrap(), View::Vacant);
        sleep(secs(1)).await;
        for _ in 0..10 {
            let before = switch.count(Call::Inspect);
            sleep(10 * TTL).await;
            let polls = switch.count(Call::Inspect) - before;
            assert!(polls <= 100, "{polls} polls in ten ttls, hinted every {every:?}");
        }
        // A genuine hint still has an effect.
        let taken = world.now();
        let guard = world.peer(2).locker().lock().await.unwrap();
        assert_eq!(owned(&mut observer).await.token, Some(guard.token()));
        assert!(world.now() - taken <= TTL / 10);
    }
}

#[tokio::test(start_paused = true)]
async fn changed_returns_a_pending_change_after_a_shutdown_and_then_closed() {
    let world = World::new();
    let peer = world.peer(1);
    let mut observer = peer.observe();
    let mut other = peer.observe();
    assert_eq!(observer.changed().await.unwrap(), View::Vacant);
    let (waited, ()) = tokio::join!(observer.changed(), peer.simba.shutdown());
    assert_eq!(waited.unwrap_err().kind(), ErrorKind::Closed, "a wait ends");
    assert_eq!(observer.changed().await.unwrap_err().mutex(), Some(&name(MUTEX)));
    assert_eq!(other.changed().await.unwrap(), View::Vacant, "observed before the shutdown");
    assert_eq!(other.changed().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(peer.simba.observe(MUTEX).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(world.now(), Moment::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropped_observer_stops_polling() {
    let world = World::new();
    let peer = world.peer(1);
    let mut observer = peer.observe();
    observer.changed().await.unwrap();
    sleep(secs(5)).await;
    drop(observer);
    let polls = peer.switch.count(Call::Inspect);
    assert!(polls >= 5);
    sleep(secs(60)).await;
    assert_eq!(peer.switch.count(Call::Inspect), polls);
    peer.simba.shutdown().await;
}

#[tokio::test(start_paused = true)]
async fn invalid_name_is_an_error() {
    let world = World::new();
    assert_eq!(world.peer(1).simba.observe("no/slash").unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn stream_returns_every_change_and_ends_with_a_shutdown() {
    let world = World::new();
    let (peer, holder) = (world.peer(1), world.peer(2));
    let mut views = pin!(peer.observe().into_stream());
    assert_eq!(views.next().await, Some(View::Vacant));
    let guard = holder.locker().lock().await.unwrap();
    assert!(matches!(views.next().await, Some(View::Owned(owner)) if owner.is_owner(guard.contender())));
    guard.release().await.unwrap();
    assert_eq!(views.next().await, Some(View::Vacant));
    peer.simba.shutdown().await;
    assert_eq!(views.next().await, None);
}
