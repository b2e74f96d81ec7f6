//! The contract of [`Locker`]: lock, wait, cancel, release, on paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{CALL, DEADLINE, GRACE, NAME, TOTAL, TTL, World, lease, ms, settled, slow_poll_lease};
use futures_util::FutureExt;
use simba_core::blocking;
use simba_core::spi::{Answer, Backend, Claim, Holding, Ownership, Prior, Session, async_trait};
use simba_core::{
    Clock, ErrorKind, FencingToken, Guard, Locker, Loss, MemoryBackend, Moment, MutexOwner, Result, Simba,
    TokioClock,
};
use simba_tck::{Call, Leg, Passage, SkewedClock, Switch};
use tokio::task::JoinHandle;

// ===== acquired or refused =====

#[tokio::test(start_paused = true)]
async fn free_mutex_is_locked_at_once_and_free_after_its_release() {
    let world = World::new();
    let locker = world.simba().locker(NAME);
    let guard = locker.lock().await.unwrap();
    let record = world.record().await;
    assert_eq!(record.owner.as_ref(), Some(guard.tenure().contender()));
    assert_eq!(record.token, Some(guard.token()));
    assert!(guard.is_held());
    assert_eq!(guard.remaining(), DEADLINE);
    guard.release().await.unwrap();
    world.assert_empty().await;
    assert_eq!(world.age(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn try_lock_acquires_a_free_mutex_and_names_the_holder_of_another() {
    let world = World::new();
    let (one, other) = (world.simba().locker(NAME), world.simba().locker(NAME));
    assert_eq!(other.last_holder(), MutexOwner::none());
    let guard = one.try_lock().await.unwrap().unwrap();
    assert!(other.try_lock().await.unwrap().is_none());
    assert_eq!(other.last_holder().id.as_ref(), Some(guard.tenure().contender()));
    assert_eq!(world.record().await.waiters, Some(0), "a try does not queue");
    guard.release().await.unwrap();
    assert!(other.try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn try_lock_does_not_overtake_a_live_waiter() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let (simba, weather) = world.handle();
    let waiting = simba.locker(NAME);
    let mut waiting = Box::pin(waiting.lock());
    assert!(waiting.as_mut().now_or_never().is_none());
    world.queued(1).await;
    // The wake-up of the waiter is delayed.
    weather.once(Call::Hint, late(ms(50)));
    guard.release().await.unwrap();
    assert_eq!(world.record().await.owner, None);
    assert!(world.simba().locker(NAME).try_lock().await.unwrap().is_none());
    let guard = waiting.await.unwrap();
    assert_eq!(world.age(), ms(50));
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn waiter_acquires_at_the_moment_of_the_release() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let waiter = world.simba().with_lease(slow_poll_lease()).locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock().await });
    world.sleep(ms(12_345)).await;
    let before = guard.token();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert_eq!(world.age(), ms(12_345));
    assert!(guard.token() > before);
    assert_eq!(world.record().await.waiters, Some(0), "a holder is not in the queue");
}

#[tokio::test(start_paused = true)]
async fn timeout_is_on_time_names_the_holder_and_leaves_the_queue() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let error = world.simba().locker(NAME).lock_timeout(ms(2_500)).await.unwrap_err();
    assert_eq!(world.age(), ms(2_500));
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(error.holder(), Some(guard.tenure().contender()));
    assert_eq!(error.mutex().unwrap().as_str(), NAME);
    assert_eq!(error.backend(), Some("memory"));
    settled().await;
    assert_eq!(world.record().await.waiters, Some(0));
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn lock_with_a_timeout_acquires_a_mutex_that_is_freed_in_time() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let waiter = world.simba().with_lease(slow_poll_lease()).locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock_timeout(ms(2_500)).await });
    world.sleep(ms(2_499)).await;
    guard.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
    assert_eq!(world.age(), ms(2_499));
}

#[tokio::test(start_paused = true)]
async fn timeout_of_zero_acquires_a_free_mutex_and_does_not_wait() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock_timeout(Duration::ZERO).await.unwrap();
    let error = world.simba().locker(NAME).lock_timeout(Duration::ZERO).await.unwrap_err();
    assert_eq!((error.kind(), error.holder()), (ErrorKind::Timeout, Some(guard.tenure().contender())));
    assert_eq!((world.age(), world.record().await.waiters), (Duration::ZERO, Some(0)));
}

// ===== the store is unreachable =====

#[tokio::test(start_paused = true)]
async fn unreachable_store_is_unavailable_at_the_timeout_and_never_a_timeout() {
    // Shorter than one call, longer than one call, longer than the patience.
    for timeout in [ms(100), ms(700), ms(5_000)] {
        for passage in [Passage::HANG, Passage::REPLY_LOST, Passage::fail(ErrorKind::Unavailable)] {
            for call in [Call::Open, Call::Contend] {
                let world = World::new();
                let (simba, weather) = world.handle();
                (0..1000).for_each(|_| weather.once(call, passage));
                let error = simba.locker(NAME).lock_timeout(timeout).await.unwrap_err();
                assert_eq!(world.age(), timeout, "{passage:?} of {call:?}");
                assert_eq!(
                    error.kind(),
                    ErrorKind::Unavailable,
                    "{passage:?} of {call:?} in {timeout:?}: {error}"
                );
                assert_eq!(error.mutex().unwrap().as_str(), NAME);
                assert_eq!(error.backend(), Some("memory"));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_gets_unavailable_and_not_timeout_if_the_store_becomes_unreachable() {
    let world = World::new();
    let _guard = world.simba().locker(NAME).lock().await.unwrap();
    let (simba, weather) = world.handle();
    let waiter = simba.locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock_timeout(ms(5_000)).await });
    world.queued(1).await;
    weather.set(Passage::HANG);
    let error = waiting.await.unwrap().unwrap_err();
    assert_eq!((error.kind(), error.holder()), (ErrorKind::Unavailable, None));
    assert_eq!(world.age(), ms(5_000));
}

#[tokio::test(start_paused = true)]
async fn try_lock_on_an_unreachable_store_is_an_error_and_not_a_refusal() {
    for (passage, after) in [(Passage::HANG, CALL), (Passage::fail(ErrorKind::Unavailable), Duration::ZERO)] {
        let world = World::new();
        let (simba, weather) = world.handle();
        weather.set(passage);
        let error = simba.locker(NAME).try_lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unavailable);
        assert!(world.age() >= after);
    }
}

#[tokio::test(start_paused = true)]
async fn lock_fails_after_its_patience() {
    for patience in [TOTAL, ms(3_456)] {
        for call in [Call::Open, Call::Contend] {
            // An error arrives at once. An unanswered call may be in flight when the patience ends, and the
            // last call follows it.
            for (passage, room) in [(Passage::fail(ErrorKind::Unavailable), ms(0)), (Passage::HANG, 2 * CALL)]
            {
                let world = World::new();
                let (simba, weather) = world.handle();
                (0..1000).for_each(|_| weather.once(call, passage));
                let locker = simba.locker(NAME);
                // One lease is the default.
                let locker = if patience == TOTAL { locker } else { locker.with_patience(patience) };
                let error = locker.lock().await.unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unavailable);
                let took = world.age();
                assert!(
                    took >= patience && took <= patience + room,
                    "{passage:?} of {call:?}: {took:?} for {patience:?}"
                );
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lock_timeout_ends_with_a_patience_that_is_shorter() {
    for (patience, timeout) in [(TOTAL, 60 * TOTAL), (60 * TOTAL, TOTAL)] {
        let world = World::new();
        let (simba, switch) = world.handle();
        switch.set(Passage::fail(ErrorKind::Unavailable));
        let locker = simba.locker(NAME).with_patience(patience);
        assert_eq!(locker.lock_timeout(timeout).await.unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(world.age(), TOTAL, "{patience:?} and {timeout:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn lock_survives_a_fault_that_is_shorter_than_its_patience() {
    for passage in [Passage::fail(ErrorKind::Unavailable), Passage::HANG] {
        // The seeds put the end of the fault everywhere in a call and in a pause.
        for seed in 0..200 {
            let world = World::new();
            let weather = Switch::new();
            let simba = world.builder(Arc::<Switch>::clone(&weather)).with_seed(seed).build();
            weather.set(passage);
            let waiting = tokio::spawn(async move { simba.locker(NAME).lock().await });
            world.sleep(TOTAL - ms(1)).await;
            weather.clear();
            assert!(waiting.await.unwrap().unwrap().is_held(), "{passage:?}, seed {seed}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn permanent_error_is_returned_at_once() {
    for kind in [ErrorKind::Denied, ErrorKind::Config, ErrorKind::Protocol] {
        for call in [Call::Open, Call::Contend] {
            let world = World::new();
            let (simba, weather) = world.handle();
            let locker = simba.locker(NAME);
            weather.once(call, Passage::fail(kind));
            assert_eq!(locker.lock().await.unwrap_err().kind(), kind);
            weather.once(call, Passage::fail(kind));
            assert_eq!(locker.lock_timeout(TOTAL).await.unwrap_err().kind(), kind);
            weather.once(call, Passage::fail(kind));
            assert_eq!(locker.try_lock().await.unwrap_err().kind(), kind);
            assert_eq!(world.age(), Duration::ZERO);
            assert!(locker.try_lock().await.unwrap().is_some(), "it works after the fix");
        }
    }
}

// ===== wrong use =====

#[tokio::test(start_paused = true)]
async fn invalid_name_is_an_error_of_the_lock() {
    let locker = World::new().simba().locker("no/slash");
    assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(locker.try_lock().await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(locker.lock_timeout(TTL).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn contradictory_holds_are_an_error_of_the_lock() {
    let simba = World::new().simba();
    let shorter = simba.locker(NAME).with_max_hold(ms(100)).with_min_hold(ms(100));
    for locker in [simba.locker(NAME).with_max_hold(Duration::ZERO), shorter] {
        assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn lock_outside_a_runtime_is_an_error() {
    let error = blocking::wait(Simba::new(MemoryBackend::new()).locker(NAME).lock()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("runtime"), "{error}");
}

/// Returns a locker without a label and one with a label.
fn lockers(world: &World) -> [Locker; 2] {
    [world.simba().locker(NAME), world.simba().locker(NAME).with_label("me")]
}

#[tokio::test(start_paused = true)]
async fn invalid_label_is_an_error_of_the_lock() {
    let world = World::new();
    for label in ["", "Upper", "me@host", "a b", "twenty-characters-xy"] {
        let locker = world.simba().locker(NAME).with_label(label);
        for error in [
            locker.lock().await.unwrap_err(),
            locker.try_lock().await.unwrap_err(),
            locker.lock_timeout(TTL).await.unwrap_err(),
        ] {
            assert_eq!(error.kind(), ErrorKind::Invalid, "{label}");
            assert_eq!(error.mutex().unwrap().as_str(), NAME);
        }
        assert_eq!(locker.label(), None);
    }
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn every_lock_has_a_new_id_under_its_label() {
    let world = World::new();
    let locker = world.simba().locker(NAME).with_label("node-1");
    assert_eq!(locker.label(), Some("node-1"));
    let mut ids = Vec::new();
    for _ in 0..3 {
        let guard = locker.lock().await.unwrap();
        ids.push(guard.tenure().contender().clone());
        assert_eq!(world.record().await.owner.as_ref(), ids.last());
        guard.release().await.unwrap();
    }
    assert!(ids.iter().all(|id| id.as_str().starts_with("node-1.")), "{ids:?}");
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn second_lock_is_refused_while_the_guard_exists() {
    let world = World::new();
    for locker in lockers(&world) {
        let guard = locker.lock().await.unwrap();
        assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Reentered);
        assert_eq!(locker.try_lock().await.unwrap_err().kind(), ErrorKind::Reentered);
        assert_eq!(locker.lock_timeout(TTL).await.unwrap_err().kind(), ErrorKind::Reentered);
        assert!(guard.is_held(), "a refusal does not affect the guard");
        let before = guard.token();
        drop(guard);
        let guard = locker.lock().await.unwrap();
        assert!(guard.token() > before);
        guard.release().await.unwrap();
        assert!(locker.try_lock().await.unwrap().is_some());
        settled().await;
    }
    assert_eq!(world.age(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn second_lock_is_refused_while_the_first_is_awaited() {
    let world = World::new();
    for locker in lockers(&world) {
        let guard = world.simba().locker(NAME).lock().await.unwrap();
        let mut first = Box::pin(locker.lock());
        assert!(first.as_mut().now_or_never().is_none());
        assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Reentered);
        world.queued(1).await;
        assert_eq!(locker.try_lock().await.unwrap_err().kind(), ErrorKind::Reentered);
        drop(first);
        guard.release().await.unwrap();
        let guard = locker.lock().await.unwrap();
        guard.release().await.unwrap();
    }
    assert_eq!(world.age(), Duration::ZERO);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn next_lock_waits_for_the_previous_release() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = simba.locker(NAME);
    let first = locker.lock().await.unwrap();
    let token = first.token();
    weather.once(Call::Release, late(ms(150)));
    drop(first);
    let second = locker.lock().await.unwrap();
    assert_eq!(world.age(), ms(150), "after the release");
    assert!(second.token() > token);
    world.sleep(3 * TOTAL).await;
    assert!(second.is_held(), "the previous release has ended and frees nothing more");
}

#[tokio::test(start_paused = true)]
async fn failed_lock_keeps_a_release_in_progress() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = Arc::new(simba.locker(NAME));
    weather.once(Call::Release, late(ms(150)));
    drop(locker.lock().await.unwrap());
    // No lock starts outside a runtime.
    let outside = Arc::clone(&locker);
    let refused = std::thread::spawn(move || blocking::wait(outside.lock()).map(drop)).join().unwrap();
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Invalid);
    assert!(locker.try_lock().await.unwrap().is_some(), "it waited for the release");
    assert_eq!(world.age(), ms(150));
}

#[tokio::test(start_paused = true)]
async fn guard_in_its_minimum_hold_is_the_holder_for_its_own_locker() {
    let world = World::new();
    let locker = world.simba().locker(NAME).with_min_hold(ms(2_500));
    let guard = locker.lock().await.unwrap();
    let (id, token) = (guard.tenure().contender().clone(), guard.token());
    drop(guard);
    assert!(locker.try_lock().await.unwrap().is_none());
    assert_eq!(locker.last_holder().id.as_ref(), Some(&id));
    let error = locker.lock_timeout(Duration::ZERO).await.unwrap_err();
    assert_eq!((error.kind(), error.holder()), (ErrorKind::Timeout, Some(&id)));
    assert_eq!(world.age(), Duration::ZERO, "at once");
    let error = locker.lock_timeout(ms(300)).await.unwrap_err();
    assert_eq!((error.kind(), error.holder()), (ErrorKind::Timeout, Some(&id)));
    assert_eq!(world.age(), ms(300));
    let guard = locker.lock().await.unwrap();
    assert_eq!(world.age(), ms(2_500));
    assert!(guard.token() > token);
}

#[tokio::test(start_paused = true)]
async fn try_does_not_wait_for_a_hanging_release() {
    for timeout in [None, Some(Duration::ZERO), Some(ms(350))] {
        let world = World::new();
        let (simba, weather) = world.handle();
        let locker = simba.locker(NAME);
        let guard = locker.lock().await.unwrap();
        weather.set(Passage::HANG);
        drop(guard);
        let error = match timeout {
            None => locker.try_lock().await.map(drop),
            Some(timeout) => locker.lock_timeout(timeout).await.map(drop),
        };
        assert_eq!(error.unwrap_err().kind(), ErrorKind::Unavailable, "the store does not answer");
        // The time limit of a call for the release, and for its own call.
        let limit = timeout.filter(|timeout| !timeout.is_zero()).unwrap_or(2 * CALL);
        assert!(world.age() <= limit, "{timeout:?}: {:?}", world.age());
    }
}

// ===== the queue =====

#[tokio::test(start_paused = true)]
async fn five_waiters_acquire_in_fifo_order() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..5 {
        let locker = world.simba().with_lease(slow_poll_lease()).locker(NAME);
        let order = Arc::clone(&order);
        waiting.push(tokio::spawn(async move {
            let guard = locker.lock().await.unwrap();
            order.lock().unwrap().push(number);
            tokio::time::sleep(ms(10)).await;
            guard.release().await.unwrap();
        }));
        world.queued(number + 1).await;
    }
    guard.release().await.unwrap();
    for waiting in waiting {
        waiting.await.unwrap();
    }
    assert_eq!(*order.lock().unwrap(), [0, 1, 2, 3, 4]);
    assert_eq!(world.age(), ms(50), "each waiter was woken");
    world.assert_empty().await;
}

/// A holder, and two waiters that acquire only if they are woken.
struct Queue {
    guard: Guard,
    /// The faults of the first waiter.
    weather: Arc<Switch>,
    first: Pin<Box<dyn Future<Output = Result<Guard>> + Send>>,
    next: JoinHandle<Result<Guard>>,
}

impl Queue {
    async fn new(world: &World) -> Self {
        let guard = world.simba().locker(NAME).lock().await.unwrap();
        let (simba, weather) = world.handle();
        let locker = simba.with_lease(slow_poll_lease()).locker(NAME);
        let mut first: Pin<Box<dyn Future<Output = _> + Send>> = Box::pin(async move { locker.lock().await });
        assert!(first.as_mut().now_or_never().is_none());
        world.queued(1).await;
        let next = world.simba().with_lease(slow_poll_lease()).locker(NAME);
        let next = tokio::spawn(async move { next.lock().await });
        world.queued(2).await;
        Self { guard, weather, first, next }
    }
}

#[tokio::test(start_paused = true)]
async fn dropped_waiter_passes_its_wake_up_on() {
    let world = World::new();
    let Queue { guard, weather, first, next } = Queue::new(&world).await;
    // The first waiter is woken by the store, and dropped before it can act.
    weather.once(Call::Hint, late(Duration::from_secs(10)));
    guard.release().await.unwrap();
    settled().await;
    assert!(!next.is_finished() && world.record().await.owner.is_none(), "the first waiter is next");
    drop(first);
    assert!(next.await.unwrap().unwrap().is_held());
    assert_eq!(world.age(), Duration::ZERO);
    assert_eq!(world.record().await.waiters, Some(0));
}

#[tokio::test(start_paused = true)]
async fn waiter_that_acquires_after_it_was_dropped_releases_the_mutex() {
    let world = World::new();
    let Queue { guard, weather, first, next } = Queue::new(&world).await;
    weather.once(Call::Contend, Passage { request: Leg::Pass, reply: Leg::Delay(ms(40)) });
    guard.release().await.unwrap();
    settled().await;
    assert!(world.record().await.owner.is_some(), "acquired, and the reply is in flight");
    drop(first);
    assert!(next.await.unwrap().unwrap().is_held());
    assert_eq!(world.age(), ms(40));
    assert_eq!(world.record().await.waiters, Some(0));
}

// ===== dropped futures =====

type Attempt = fn(&Locker) -> Pin<Box<dyn Future<Output = Result<Option<Guard>>> + '_>>;

const ATTEMPTS: [Attempt; 3] = [
    |locker| Box::pin(async { locker.lock().await.map(Some) }),
    |locker| Box::pin(async { locker.lock_timeout(TOTAL).await.map(Some) }),
    |locker| Box::pin(async { locker.try_lock().await }),
];

#[tokio::test(start_paused = true)]
async fn lock_dropped_after_any_number_of_polls_leaves_nothing() {
    for attempt in ATTEMPTS {
        for polls in 0.. {
            let world = World::new();
            let locker = world.simba().locker(NAME);
            let mut future = attempt(&locker);
            let mut done = false;
            for _ in 0..polls {
                done = future.as_mut().now_or_never().is_some();
                if done {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(future);
            world.assert_empty().await;
            assert_eq!(world.age(), Duration::ZERO);
            assert!(polls < 100, "it is never acquired");
            if done {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lock_dropped_at_any_step_of_a_slow_store_leaves_nothing() {
    const SLOW: Passage = Passage { request: Leg::Delay(ms(2)), reply: Leg::Delay(ms(3)) };
    for attempt in ATTEMPTS {
        // The previous holder releases at once, during the first call, between calls, or never.
        for freed_at in [None, Some(0), Some(3), Some(20)] {
            let mut ended = false;
            for steps in 0..60 {
                let world = World::new();
                let guard = world.simba().locker(NAME).lock().await.unwrap();
                let mut guard = Some(guard);
                let (simba, weather) = world.handle();
                weather.set(SLOW);
                let locker = simba.with_lease(slow_poll_lease()).locker(NAME);
                let mut future = attempt(&locker);
                ended = false;
                for step in 0..steps {
                    if freed_at == Some(step) {
                        drop(guard.take());
                    }
                    ended = future.as_mut().now_or_never().is_some();
                    if ended {
                        break;
                    }
                    world.sleep(ms(1)).await;
                }
                drop(future);
                drop(guard);
                // A session may be opening; a call and a release follow.
                world.sleep(ms(5 + 5 + 2)).await;
                world.assert_empty().await;
                if ended {
                    break;
                }
            }
            assert!(ended || freed_at.is_none(), "every step up to its end was tried");
        }
    }
}

// ===== the maximum and the minimum hold =====

#[tokio::test(start_paused = true)]
async fn maximum_hold_ends_on_time_and_frees_the_mutex() {
    // Longer than a lease; and shorter, where three quarters are left for the work.
    for (max_hold, grace) in [(ms(2_345), GRACE), (ms(100), ms(25))] {
        let world = World::new();
        let guard = world.simba().locker(NAME).with_max_hold(max_hold).lock().await.unwrap();
        guard.expiring().await;
        assert_eq!(world.age(), max_hold - grace);
        assert!(guard.is_held());
        assert_eq!(guard.lost().await, Loss::MaxHold);
        assert_eq!(world.age(), max_hold);
        assert!(!guard.is_held());
        world.assert_empty().await;
        let error = guard.release().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Lost);
        assert_eq!(world.age(), max_hold);
    }
}

#[tokio::test(start_paused = true)]
async fn release_waits_for_the_minimum_hold() {
    // Shorter than a lease, and long enough to need a renewal.
    for min_hold in [ms(500), ms(12_345)] {
        let world = World::new();
        let guard = world.simba().locker(NAME).with_min_hold(min_hold).lock().await.unwrap();
        let tenure = guard.tenure();
        let releasing = tokio::spawn(guard.release());
        world.sleep(min_hold - ms(1)).await;
        assert!(!releasing.is_finished());
        assert!(world.simba().locker(NAME).try_lock().await.unwrap().is_none());
        assert!(tenure.is_expiring(), "no work starts any more");
        releasing.await.unwrap().unwrap();
        assert_eq!(world.age(), min_hold);
        assert_eq!(tenure.loss(), Some(Loss::Released));
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn release_after_the_minimum_hold_does_not_wait() {
    let world = World::new();
    let guard = world.simba().locker(NAME).with_min_hold(ms(500)).lock().await.unwrap();
    world.sleep(ms(500)).await;
    guard.release().await.unwrap();
    assert_eq!(world.age(), ms(500));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn dropped_guard_keeps_the_minimum_hold() {
    let world = World::new();
    let guard = world.simba().locker(NAME).with_min_hold(ms(1_500)).lock().await.unwrap();
    drop(guard);
    world.sleep(ms(1_499)).await;
    assert!(world.record().await.owner.is_some());
    world.sleep(ms(1)).await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn cancelled_lock_has_no_minimum_hold() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = simba.locker(NAME).with_min_hold(Duration::from_secs(3600));
    // Acquired after 150 ms, after the lock was dropped.
    weather.once(Call::Contend, Passage { request: Leg::Pass, reply: Leg::Delay(ms(150)) });
    assert_eq!(locker.lock_timeout(ms(100)).await.unwrap_err().kind(), ErrorKind::Unavailable);
    world.sleep(ms(50)).await;
    world.assert_empty().await;
    assert_eq!(weather.count(Call::Contend), 1, "nothing was renewed");
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_the_minimum_hold() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).with_min_hold(Duration::from_secs(3600)).lock().await.unwrap();
    let releasing = tokio::spawn(guard.release());
    world.sleep(ms(700)).await;
    simba.shutdown().await;
    releasing.await.unwrap().unwrap();
    assert_eq!(world.age(), ms(700));
    world.assert_empty().await;
}

// ===== calls of unknown outcome =====

#[tokio::test(start_paused = true)]
async fn lock_with_a_lost_reply_is_adopted() {
    let world = World::new();
    let (simba, weather) = world.handle();
    weather.once(Call::Contend, Passage::REPLY_LOST);
    let guard = simba.locker(NAME).lock().await.unwrap();
    // One unanswered call, and the first pause.
    assert!(world.age() >= CALL && world.age() <= CALL + TTL / 20, "{:?}", world.age());
    let record = world.record().await;
    assert_eq!(record.owner.as_ref(), Some(guard.tenure().contender()));
    assert_eq!((record.token, record.waiters), (Some(guard.token()), Some(0)));
    assert_eq!(guard.token(), FencingToken::new(1), "the token of the lost reply");
    world.sleep(10 * TOTAL).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn try_with_a_lost_reply_is_released() {
    let world = World::new();
    let (simba, weather) = world.handle();
    weather.once(Call::Contend, Passage::REPLY_LOST);
    assert_eq!(simba.locker(NAME).try_lock().await.unwrap_err().kind(), ErrorKind::Unavailable);
    world.assert_empty().await;
    assert_eq!(world.age(), CALL);
}

#[tokio::test(start_paused = true)]
async fn lock_that_is_acquired_after_its_timeout_is_released() {
    let world = World::new();
    let (simba, weather) = world.handle();
    // The request arrives after the timeout, and the driver still awaits the call.
    weather.once(Call::Contend, late(ms(150)));
    simba.locker(NAME).lock_timeout(ms(100)).await.unwrap_err();
    assert_eq!(world.age(), ms(100));
    let next = world.simba().locker(NAME);
    world.sleep(ms(50)).await;
    settled().await;
    assert_eq!(weather.count(Call::Release), 1);
    assert!(next.try_lock().await.unwrap().is_some(), "acquired at 150 ms and freed at once");
    assert_eq!(world.age(), ms(150));
}

#[tokio::test(start_paused = true)]
async fn request_that_arrives_after_the_release_holds_for_one_lease_and_is_never_renewed() {
    let world = World::new();
    let (simba, weather) = world.handle();
    weather.once(Call::Contend, late(ms(500)));
    simba.locker(NAME).lock_timeout(ms(100)).await.unwrap_err();
    world.sleep(ms(399)).await;
    world.assert_empty().await;
    world.sleep(ms(1)).await;
    settled().await;
    assert!(world.record().await.owner.is_some(), "held by a request that arrived late");
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    // The lease, plus the maximum jitter of a waiter.
    let took = world.age() - ms(500);
    assert!(took >= TOTAL && took <= TOTAL + TOTAL / 50, "{took:?}");
    assert_eq!(weather.count(Call::Contend), 1, "it was not renewed");
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn mutex_that_was_lost_before_the_first_poll_is_lost_and_not_closed() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let simba = world.builder(Switch::new()).with_clock(clock.clone()).build();
    let before = world.simba().locker(NAME).lock().await.unwrap();
    let locker = simba.locker(NAME);
    let mut lock = Box::pin(locker.lock());
    assert!(lock.as_mut().now_or_never().is_none());
    world.queued(1).await;
    before.release().await.unwrap();
    settled().await;
    assert!(world.record().await.owner.is_some(), "acquired while its task did not run");
    clock.jump(2 * TOTAL);
    let error = lock.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    world.assert_empty().await;
}

// ===== releasing =====

#[tokio::test(start_paused = true)]
async fn release_that_fails_or_is_not_answered_is_retried() {
    let pause = TTL / 20;
    for (passage, took) in [
        (Passage::fail(ErrorKind::Unavailable), pause),
        (Passage::REPLY_LOST, CALL + pause),
        (Passage::HANG, CALL + pause),
    ] {
        let world = World::new();
        let (simba, weather) = world.handle();
        let guard = simba.locker(NAME).lock().await.unwrap();
        weather.once(Call::Release, passage);
        guard.release().await.unwrap();
        assert!(world.age() <= took && world.age() >= took - pause / 2, "{passage:?}: {:?}", world.age());
        assert_eq!(weather.count(Call::Release), 2);
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn release_on_a_hanging_store_ends_in_time_and_the_lease_ends() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let token = guard.token();
    weather.set(Passage::HANG);
    let (waiter, clock) = (world.simba().locker(NAME), world.clock.clone());
    let next = tokio::spawn(async move { (waiter.lock().await.unwrap(), clock.now()) });
    world.queued(1).await;
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert_eq!(error.mutex().unwrap().as_str(), NAME);
    // Retried for one lease, as long as there can be a hold.
    assert!(world.age() <= TOTAL + CALL, "{:?}", world.age());
    assert!(weather.count(Call::Release) >= 3);
    let (guard, at) = next.await.unwrap();
    let took = at - Moment::ZERO;
    assert!(took >= TOTAL && took <= TOTAL + TOTAL / 50, "{took:?}");
    assert!(guard.token() > token);
    assert_eq!(weather.count(Call::Contend), 1, "a released mutex is not renewed");
}

#[tokio::test(start_paused = true)]
async fn dropped_guard_frees_the_mutex_in_the_background() {
    let world = World::new();
    let simba = world.simba();
    drop(simba.locker(NAME).lock().await.unwrap());
    world.assert_empty().await;
    let guard = simba.locker(NAME).lock().await.unwrap();
    let releasing = guard.release();
    drop(releasing);
    world.assert_empty().await;
    assert_eq!(world.age(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropped_release_continues_in_the_background() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.once(Call::Release, late(ms(50)));
    let mut releasing = Box::pin(guard.release());
    assert!(releasing.as_mut().now_or_never().is_none());
    drop(releasing);
    world.sleep(ms(50)).await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn tokens_increase_with_every_lock_of_every_handle() {
    let world = World::new();
    let lockers = [world.simba().locker(NAME), world.simba().locker(NAME)];
    let mut last = FencingToken::new(0);
    for locker in lockers.iter().cycle().take(200) {
        let guard = locker.lock().await.unwrap();
        assert!(guard.token() > last);
        last = guard.token();
        guard.release().await.unwrap();
    }
    assert_eq!(world.age(), Duration::ZERO);
}

// ===== shutting down =====

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_the_drop_of_the_guard() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let tenure = guard.tenure();
    let closing = tokio::spawn({
        let simba = simba.clone();
        async move { simba.shutdown().await }
    });
    tenure.expiring().await;
    assert_eq!(world.age(), Duration::ZERO, "the work is notified at once");
    world.sleep(ms(300)).await;
    assert!(guard.is_held() && !closing.is_finished());
    assert!(world.simba().locker(NAME).try_lock().await.unwrap().is_none());
    drop(guard);
    closing.await.unwrap();
    assert_eq!(world.age(), ms(300));
    assert_eq!(tenure.loss(), Some(Loss::Released));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn shutdown_waits_for_a_guard_until_its_deadline_at_most() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).lock().await.unwrap();
    simba.shutdown().await;
    assert_eq!(world.age(), DEADLINE);
    assert_eq!(guard.tenure().loss(), Some(Loss::Deadline));
    world.assert_empty().await;
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_every_wait() {
    let world = World::new();
    let _guard = world.simba().locker(NAME).lock().await.unwrap();
    let simba = world.simba();
    let waiter = simba.locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock().await });
    world.queued(1).await;
    simba.shutdown().await;
    assert_eq!(waiting.await.unwrap().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(world.record().await.waiters, Some(0));
    assert_eq!(world.age(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_a_lock_that_is_no_longer_polled() {
    const SLOW: Passage = Passage { request: Leg::Delay(ms(2)), reply: Leg::Delay(ms(3)) };
    for attempt in ATTEMPTS {
        for steps in 1..12 {
            let world = World::new();
            let (simba, weather) = world.handle();
            weather.set(SLOW);
            let locker = simba.locker(NAME);
            // Kept and not polled again, as in a `select!` whose other branch ends the program.
            let mut future = attempt(&locker);
            for _ in 0..steps {
                assert!(
                    future.as_mut().now_or_never().is_none_or(|locked| locked.is_ok()),
                    "pending or acquired"
                );
                world.sleep(ms(1)).await;
            }
            tokio::time::timeout(TOTAL, simba.shutdown()).await.unwrap();
            assert!(world.age() < ms(40), "{:?} after {steps} steps", world.age());
            world.assert_empty().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_while_the_store_hangs() {
    let world = World::new();
    let (simba, weather) = world.handle();
    drop(simba.locker(NAME).lock().await.unwrap());
    weather.set(Passage::HANG);
    simba.shutdown().await;
    assert!(world.age() <= TOTAL + CALL, "{:?}", world.age());
}

#[tokio::test(start_paused = true)]
async fn nothing_starts_after_a_shutdown() {
    let simba = World::new().simba();
    let locker = simba.locker(NAME);
    simba.clone().shutdown().await;
    assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(locker.try_lock().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(locker.lock_timeout(TTL).await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(simba.contend(NAME).start().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(simba.observe(NAME).unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(simba.with_lease(lease()).locker(NAME).lock().await.unwrap_err().kind(), ErrorKind::Closed);
    simba.shutdown().await;
}

/// A request that arrives this much later.
const fn late(by: Duration) -> Passage {
    Passage { request: Leg::Delay(by), reply: Leg::Pass }
}

// ===== shutting down =====

/// Grants three times the requested lease, and records when it is closed.
#[derive(Debug)]
struct LongGrant {
    store: MemoryBackend,
    closed: Arc<Mutex<Option<Moment>>>,
    clock: TokioClock,
}

struct LongGrantSession(Box<dyn Session>);

#[async_trait]
impl Backend for LongGrant {
    fn name(&self) -> &'static str {
        "long-grant"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(LongGrantSession(self.store.open(claim).await?)))
    }

    async fn close(&self) {
        *self.closed.lock().unwrap() = Some(self.clock.now());
    }
}

#[async_trait]
impl Session for LongGrantSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        Ok(match self.0.contend(prior).await? {
            Answer::Ours(mut ours) => {
                ours.remaining *= 3;
                Answer::Ours(ours)
            }
            answer => answer,
        })
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.0.inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.0.release(holding).await
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_closes_the_store_after_a_holder_that_was_granted_more_than_its_lease() {
    let world = World::new();
    let closed = Arc::new(Mutex::new(None));
    let (clock, store) = (world.clock.clone(), world.store.clone());
    let backend = LongGrant { store, closed: Arc::clone(&closed), clock: clock.clone() };
    let simba = Simba::builder(Arc::new(backend)).with_clock(clock).with_lease(lease()).build();
    let guard = simba.locker(NAME).lock().await.unwrap();
    assert!(guard.remaining() > 2 * TOTAL, "{:?}", guard.remaining());
    simba.shutdown().await;
    assert_eq!(guard.tenure().loss(), Some(Loss::Deadline));
    let closed = closed.lock().unwrap().unwrap();
    assert!(closed >= guard.deadline(), "closed at {closed:?}, held until {:?}", guard.deadline());
}

#[tokio::test(start_paused = true)]
async fn lock_whose_session_opens_after_a_shutdown_began_makes_no_call() {
    for waits in [false, true] {
        let world = World::new();
        let (simba, weather) = world.handle();
        weather.once(Call::Open, Passage { request: Leg::Delay(CALL / 2), reply: Leg::Pass });
        let contention = simba.contend(NAME);
        let locker = simba.locker(NAME);
        let mut lock = Box::pin(locker.lock());
        if waits {
            assert!(lock.as_mut().now_or_never().is_none());
        } else {
            contention.start().unwrap();
        }
        world.sleep(CALL / 4).await;
        assert_eq!(weather.count(Call::Open), 1);
        simba.shutdown().await;
        assert_eq!(lock.await.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(weather.count(Call::Contend), 0);
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn try_that_a_shutdown_ends_is_closed_and_not_unavailable() {
    for timed in [false, true] {
        let world = World::new();
        let (simba, weather) = world.handle();
        weather.once(Call::Open, Passage { request: Leg::Delay(CALL / 2), reply: Leg::Pass });
        let locker = simba.locker(NAME);
        let attempt = async {
            match timed {
                true => locker.lock_timeout(Duration::ZERO).await.map(drop),
                false => locker.try_lock().await.map(drop),
            }
        };
        let (attempt, ()) = tokio::join!(attempt, simba.shutdown());
        assert_eq!(attempt.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(weather.count(Call::Contend), 0);
    }
}
