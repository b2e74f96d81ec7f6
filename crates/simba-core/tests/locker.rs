//! Locking, waiting, giving up, releasing: what a [`Locker`] promises, on paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use common::{CALL, DEADLINE, GRACE, NAME, TOTAL, TTL, World, lease, ms, pushed_lease, settled};
use futures_util::FutureExt;
use simba_core::blocking;
use simba_core::{
    Answer, Backend, Claim, Clock, ErrorKind, FencingToken, Guard, Holding, Locker, Loss, MemoryBackend,
    Moment, MutexOwner, Ownership, Prior, Result, Session, Simba, TokioClock, async_trait,
};
use simba_tck::{Call, Leg, Passage, SkewedClock, Switch};

// ===== to be had, or not =====

#[tokio::test(start_paused = true)]
async fn a_free_mutex_is_locked_at_once_and_free_after_its_release() {
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
async fn try_lock_takes_what_is_free_and_names_who_holds_the_rest() {
    let world = World::new();
    let (one, other) = (world.simba().locker(NAME), world.simba().locker(NAME));
    assert_eq!(other.last_holder(), MutexOwner::none());
    let guard = one.try_lock().await.unwrap().unwrap();
    assert!(other.try_lock().await.unwrap().is_none());
    assert_eq!(other.last_holder().id.as_ref(), Some(guard.tenure().contender()));
    assert_eq!(world.record().await.waiters, Some(0), "a try queues nowhere");
    guard.release().await.unwrap();
    assert!(other.try_lock().await.unwrap().is_some());
}

#[tokio::test(start_paused = true)]
async fn try_lock_does_not_pass_a_live_waiter() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let (simba, weather) = world.handle();
    let waiting = simba.locker(NAME);
    let mut waiting = Box::pin(waiting.lock());
    assert!(waiting.as_mut().now_or_never().is_none());
    world.queued(1).await;
    // The waiter is to be told, but not yet.
    weather.once(Call::Hint, late(ms(50)));
    guard.release().await.unwrap();
    assert_eq!(world.record().await.owner, None);
    assert!(world.simba().locker(NAME).try_lock().await.unwrap().is_none());
    let guard = waiting.await.unwrap();
    assert_eq!(world.age(), ms(50));
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_waiter_gets_the_mutex_the_moment_it_is_released() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let waiter = world.simba().with_lease(pushed_lease()).locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock().await });
    world.pass(ms(12_345)).await;
    let before = guard.token();
    guard.release().await.unwrap();
    let guard = waiting.await.unwrap().unwrap();
    assert_eq!(world.age(), ms(12_345));
    assert!(guard.token() > before);
    assert_eq!(world.record().await.waiters, Some(0), "a holder waits no more");
}

#[tokio::test(start_paused = true)]
async fn a_timeout_comes_on_time_names_the_holder_and_leaves_the_queue() {
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
async fn a_lock_with_a_timeout_gets_what_is_freed_in_time() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let waiter = world.simba().with_lease(pushed_lease()).locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock_timeout(ms(2_500)).await });
    world.pass(ms(2_499)).await;
    guard.release().await.unwrap();
    assert!(waiting.await.unwrap().unwrap().is_held());
    assert_eq!(world.age(), ms(2_499));
}

#[tokio::test(start_paused = true)]
async fn a_timeout_of_zero_takes_what_is_free_and_waits_for_nothing() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock_timeout(Duration::ZERO).await.unwrap();
    let error = world.simba().locker(NAME).lock_timeout(Duration::ZERO).await.unwrap_err();
    assert_eq!((error.kind(), error.holder()), (ErrorKind::Timeout, Some(guard.tenure().contender())));
    assert_eq!((world.age(), world.record().await.waiters), (Duration::ZERO, Some(0)));
}

// ===== the store is out of reach =====

#[tokio::test(start_paused = true)]
async fn a_store_out_of_reach_is_unavailable_at_the_timeout_and_never_a_timeout() {
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
async fn a_waiter_whose_store_goes_away_is_told_that_and_not_who_held() {
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
async fn try_lock_on_a_store_out_of_reach_is_an_error_and_not_a_refusal() {
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
async fn lock_gives_up_when_its_patience_is_over() {
    for patience in [TOTAL, ms(3_456)] {
        for call in [Call::Open, Call::Contend] {
            // An error tells at once. A call without an answer may be under way when the patience ends, and the
            // last one comes after it.
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
async fn lock_waits_out_a_fault_that_is_shorter_than_its_patience() {
    for passage in [Passage::fail(ErrorKind::Unavailable), Passage::HANG] {
        // The seeds put the end of the fault everywhere in a call and in a pause.
        for seed in 0..200 {
            let world = World::new();
            let weather = Switch::new();
            let simba = world.builder(Arc::<Switch>::clone(&weather)).seed(seed).build();
            weather.set(passage);
            let waiting = tokio::spawn(async move { simba.locker(NAME).lock().await });
            world.pass(TOTAL - ms(1)).await;
            weather.clear();
            assert!(waiting.await.unwrap().unwrap().is_held(), "{passage:?}, seed {seed}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_person_must_mend_is_told_at_once() {
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
            assert!(locker.try_lock().await.unwrap().is_some(), "a mended store serves again");
        }
    }
}

// ===== wrong use =====

#[tokio::test(start_paused = true)]
async fn a_wrong_name_is_an_error_of_the_lock() {
    let locker = World::new().simba().locker("no/slash");
    assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(locker.try_lock().await.unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(locker.lock_timeout(TTL).await.unwrap_err().kind(), ErrorKind::Invalid);
}

#[tokio::test(start_paused = true)]
async fn holds_that_contradict_each_other_are_an_error_of_the_lock() {
    let simba = World::new().simba();
    let shorter = simba.locker(NAME).with_max_hold(ms(100)).with_min_hold(ms(100));
    for locker in [simba.locker(NAME).with_max_hold(Duration::ZERO), shorter] {
        assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Invalid);
    }
}

#[test]
fn a_lock_outside_a_runtime_is_an_error_that_says_so() {
    let error = blocking::wait(Simba::new(MemoryBackend::new()).locker(NAME).lock()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Invalid);
    assert!(error.to_string().contains("runtime"), "{error}");
}

/// A locker without a label, and one with.
fn lockers(world: &World) -> [Locker; 2] {
    [world.simba().locker(NAME), world.simba().locker(NAME).with_label("me")]
}

#[tokio::test(start_paused = true)]
async fn a_wrong_label_is_an_error_of_the_lock() {
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
async fn a_second_lock_is_refused_while_the_guard_lives_and_fine_right_after() {
    let world = World::new();
    for locker in lockers(&world) {
        let guard = locker.lock().await.unwrap();
        assert_eq!(locker.lock().await.unwrap_err().kind(), ErrorKind::Reentered);
        assert_eq!(locker.try_lock().await.unwrap_err().kind(), ErrorKind::Reentered);
        assert_eq!(locker.lock_timeout(TTL).await.unwrap_err().kind(), ErrorKind::Reentered);
        assert!(guard.is_held(), "a refusal costs the guard nothing");
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
async fn a_second_lock_is_refused_while_the_first_is_awaited_and_fine_right_after() {
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
async fn the_next_lock_waits_for_the_release_before_it() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = simba.locker(NAME);
    let first = locker.lock().await.unwrap();
    let token = first.token();
    weather.once(Call::Release, late(ms(150)));
    drop(first);
    let second = locker.lock().await.unwrap();
    assert_eq!(world.age(), ms(150), "or it would have found the mutex held");
    assert!(second.token() > token);
    world.pass(3 * TOTAL).await;
    assert!(second.is_held(), "the release before is over and frees nothing any more");
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_cannot_start_forgets_no_release_under_way() {
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
async fn a_guard_that_keeps_its_shortest_hold_is_the_holder_for_its_own_locker() {
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
async fn a_try_does_not_wait_for_a_release_that_hangs() {
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
        // For the release as long as for a call, and the call of its own.
        let limit = timeout.filter(|timeout| !timeout.is_zero()).unwrap_or(2 * CALL);
        assert!(world.age() <= limit, "{timeout:?}: {:?}", world.age());
    }
}

// ===== the queue =====

#[tokio::test(start_paused = true)]
async fn five_waiters_are_served_in_the_order_in_which_they_came() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let order = Arc::new(Mutex::new(Vec::new()));
    let mut waiting = Vec::new();
    for number in 0..5 {
        let locker = world.simba().with_lease(pushed_lease()).locker(NAME);
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
    assert_eq!(world.age(), ms(50), "each hand-over was a wake-up");
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_is_woken_and_gone_passes_the_baton() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let (gone, weather) = world.handle();
    let gone = gone.with_lease(pushed_lease()).locker(NAME);
    let mut first = Box::pin(gone.lock());
    assert!(first.as_mut().now_or_never().is_none());
    world.queued(1).await;
    let next = world.simba().with_lease(pushed_lease()).locker(NAME);
    let next = tokio::spawn(async move { next.lock().await });
    world.queued(2).await;
    // The first is woken by the store, and dropped before it can act on that.
    weather.once(Call::Hint, late(Duration::from_secs(10)));
    guard.release().await.unwrap();
    settled().await;
    assert!(!next.is_finished() && world.record().await.owner.is_none(), "it is the first one's turn");
    drop(first);
    assert!(next.await.unwrap().unwrap().is_held());
    assert_eq!(world.age(), Duration::ZERO);
    assert_eq!(world.record().await.waiters, Some(0));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_that_wins_after_it_was_dropped_passes_the_mutex_on() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let (gone, weather) = world.handle();
    let gone = gone.with_lease(pushed_lease()).locker(NAME);
    let mut first = Box::pin(gone.lock());
    assert!(first.as_mut().now_or_never().is_none());
    world.queued(1).await;
    let next = world.simba().with_lease(pushed_lease()).locker(NAME);
    let next = tokio::spawn(async move { next.lock().await });
    world.queued(2).await;
    weather.once(Call::Contend, Passage { request: Leg::Pass, reply: Leg::Delay(ms(40)) });
    guard.release().await.unwrap();
    settled().await;
    assert!(world.record().await.owner.is_some(), "won, and the answer is on its way");
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
async fn a_lock_dropped_after_any_number_of_polls_leaves_nothing() {
    for attempt in ATTEMPTS {
        for polls in 0.. {
            let world = World::new();
            let locker = world.simba().locker(NAME);
            let mut future = attempt(&locker);
            let mut won = false;
            for _ in 0..polls {
                won = future.as_mut().now_or_never().is_some();
                if won {
                    break;
                }
                tokio::task::yield_now().await;
            }
            drop(future);
            world.assert_empty().await;
            assert_eq!(world.age(), Duration::ZERO);
            assert!(polls < 100, "it is won some time");
            if won {
                break;
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_lock_dropped_at_any_step_of_a_slow_store_leaves_nothing() {
    const SLOW: Passage = Passage { request: Leg::Delay(ms(2)), reply: Leg::Delay(ms(3)) };
    for attempt in ATTEMPTS {
        // The holder before it releases at once, in the middle of the first call, between calls, or never.
        for freed_at in [None, Some(0), Some(3), Some(20)] {
            let mut ended = false;
            for steps in 0..60 {
                let world = World::new();
                let guard = world.simba().locker(NAME).lock().await.unwrap();
                let mut guard = Some(guard);
                let (simba, weather) = world.handle();
                weather.set(SLOW);
                let locker = simba.with_lease(pushed_lease()).locker(NAME);
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
                    world.pass(ms(1)).await;
                }
                drop(future);
                drop(guard);
                // An opening may be under way; a call and a release follow it.
                world.pass(ms(5 + 5 + 2)).await;
                world.assert_empty().await;
                if ended {
                    break;
                }
            }
            assert!(ended || freed_at.is_none(), "every step up to its end was tried");
        }
    }
}

// ===== the longest and the shortest hold =====

#[tokio::test(start_paused = true)]
async fn the_longest_hold_ends_on_time_and_frees_the_mutex() {
    // Longer than a lease; shorter, which keeps three quarters for the work.
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
async fn the_shortest_hold_is_waited_for_by_a_release() {
    // Shorter than a lease, and so long that it must be renewed.
    for min_hold in [ms(500), ms(12_345)] {
        let world = World::new();
        let guard = world.simba().locker(NAME).with_min_hold(min_hold).lock().await.unwrap();
        let tenure = guard.tenure();
        let releasing = tokio::spawn(guard.release());
        world.pass(min_hold - ms(1)).await;
        assert!(!releasing.is_finished());
        assert!(world.simba().locker(NAME).try_lock().await.unwrap().is_none());
        assert!(tenure.is_expiring(), "no work starts in the rest of it");
        releasing.await.unwrap().unwrap();
        assert_eq!(world.age(), min_hold);
        assert_eq!(tenure.loss(), Some(Loss::Released));
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_after_the_shortest_hold_waits_for_nothing() {
    let world = World::new();
    let guard = world.simba().locker(NAME).with_min_hold(ms(500)).lock().await.unwrap();
    world.pass(ms(500)).await;
    guard.release().await.unwrap();
    assert_eq!(world.age(), ms(500));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn the_shortest_hold_is_kept_by_a_dropped_guard() {
    let world = World::new();
    let guard = world.simba().locker(NAME).with_min_hold(ms(1_500)).lock().await.unwrap();
    drop(guard);
    world.pass(ms(1_499)).await;
    assert!(world.record().await.owner.is_some());
    world.pass(ms(1)).await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_was_cancelled_keeps_nothing_for_the_shortest_hold() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = simba.locker(NAME).with_min_hold(Duration::from_secs(3600));
    // Won after 150 ms, when nobody wants it any more.
    weather.once(Call::Contend, Passage { request: Leg::Pass, reply: Leg::Delay(ms(150)) });
    assert_eq!(locker.lock_timeout(ms(100)).await.unwrap_err().kind(), ErrorKind::Unavailable);
    world.pass(ms(50)).await;
    world.assert_empty().await;
    assert_eq!(weather.count(Call::Contend), 1, "nothing was renewed");
}

#[tokio::test(start_paused = true)]
async fn the_shortest_hold_is_cut_short_by_a_shutdown() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).with_min_hold(Duration::from_secs(3600)).lock().await.unwrap();
    let releasing = tokio::spawn(guard.release());
    world.pass(ms(700)).await;
    simba.shutdown().await;
    releasing.await.unwrap().unwrap();
    assert_eq!(world.age(), ms(700));
    world.assert_empty().await;
}

// ===== calls of unknown outcome =====

#[tokio::test(start_paused = true)]
async fn a_lock_whose_answer_was_lost_is_adopted() {
    let world = World::new();
    let (simba, weather) = world.handle();
    weather.once(Call::Contend, Passage::REPLY_LOST);
    let guard = simba.locker(NAME).lock().await.unwrap();
    // One call that was not answered, and the first pause.
    assert!(world.age() >= CALL && world.age() <= CALL + TTL / 20, "{:?}", world.age());
    let record = world.record().await;
    assert_eq!(record.owner.as_ref(), Some(guard.tenure().contender()));
    assert_eq!((record.token, record.waiters), (Some(guard.token()), Some(0)));
    assert_eq!(guard.token(), FencingToken::new(1), "the token of the answer that was lost");
    world.pass(10 * TOTAL).await;
    assert!(guard.is_held());
    guard.release().await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_try_whose_answer_was_lost_is_undone() {
    let world = World::new();
    let (simba, weather) = world.handle();
    weather.once(Call::Contend, Passage::REPLY_LOST);
    assert_eq!(simba.locker(NAME).try_lock().await.unwrap_err().kind(), ErrorKind::Unavailable);
    world.assert_empty().await;
    assert_eq!(world.age(), CALL);
}

#[tokio::test(start_paused = true)]
async fn a_lock_that_is_won_after_its_waiter_gave_up_is_undone() {
    let world = World::new();
    let (simba, weather) = world.handle();
    // The request arrives after the timeout, and the call is still awaited.
    weather.once(Call::Contend, late(ms(150)));
    simba.locker(NAME).lock_timeout(ms(100)).await.unwrap_err();
    assert_eq!(world.age(), ms(100));
    let next = world.simba().locker(NAME);
    world.pass(ms(50)).await;
    settled().await;
    assert_eq!(weather.count(Call::Release), 1);
    assert!(next.try_lock().await.unwrap().is_some(), "won at 150 ms and freed at once");
    assert_eq!(world.age(), ms(150));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_arrives_after_everyone_left_ends_with_its_lease_and_is_never_renewed() {
    let world = World::new();
    let (simba, weather) = world.handle();
    weather.once(Call::Contend, late(ms(500)));
    simba.locker(NAME).lock_timeout(ms(100)).await.unwrap_err();
    world.pass(ms(399)).await;
    world.assert_empty().await;
    world.pass(ms(1)).await;
    settled().await;
    assert!(world.record().await.owner.is_some(), "a ghost, as the network would have it");
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    // The lease, and what a waiter adds to it at the most.
    let took = world.age() - ms(500);
    assert!(took >= TOTAL && took <= TOTAL + TOTAL / 50, "{took:?}");
    assert_eq!(weather.count(Call::Contend), 1, "nobody renewed it");
    assert!(guard.is_held());
}

#[tokio::test(start_paused = true)]
async fn a_mutex_that_was_lost_before_anybody_looked_is_lost_and_not_closed() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let simba = world.builder(Switch::new()).clock(clock.clone()).build();
    let before = world.simba().locker(NAME).lock().await.unwrap();
    let locker = simba.locker(NAME);
    let mut lock = Box::pin(locker.lock());
    assert!(lock.as_mut().now_or_never().is_none());
    world.queued(1).await;
    before.release().await.unwrap();
    settled().await;
    assert!(world.record().await.owner.is_some(), "won while its task did not run");
    clock.jump(2 * TOTAL);
    let error = lock.await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost, "{error}");
    world.assert_empty().await;
}

// ===== releasing =====

#[tokio::test(start_paused = true)]
async fn a_release_that_fails_or_is_not_answered_is_tried_again() {
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
async fn a_release_on_a_store_that_hangs_ends_in_time_and_the_lease_ends_too() {
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
    // Tried for as long as there can be something to free.
    assert!(world.age() <= TOTAL + CALL, "{:?}", world.age());
    assert!(weather.count(Call::Release) >= 3);
    let (guard, at) = next.await.unwrap();
    let took = at - Moment::ZERO;
    assert!(took >= TOTAL && took <= TOTAL + TOTAL / 50, "{took:?}");
    assert!(guard.token() > token);
    assert_eq!(weather.count(Call::Contend), 1, "what was released is not renewed");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_guard_frees_the_mutex_without_being_waited_for() {
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
async fn a_dropped_release_goes_on_in_the_background() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.once(Call::Release, late(ms(50)));
    let mut releasing = Box::pin(guard.release());
    assert!(releasing.as_mut().now_or_never().is_none());
    drop(releasing);
    world.pass(ms(50)).await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn tokens_grow_with_every_lock_of_every_handle() {
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
async fn a_shutdown_waits_for_the_guard_to_go() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let tenure = guard.tenure();
    let closing = tokio::spawn({
        let simba = simba.clone();
        async move { simba.shutdown().await }
    });
    tenure.expiring().await;
    assert_eq!(world.age(), Duration::ZERO, "the work is told at once");
    world.pass(ms(300)).await;
    assert!(guard.is_held() && !closing.is_finished());
    assert!(world.simba().locker(NAME).try_lock().await.unwrap().is_none());
    drop(guard);
    closing.await.unwrap();
    assert_eq!(world.age(), ms(300));
    assert_eq!(tenure.loss(), Some(Loss::Released));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_waits_for_a_guard_until_its_deadline_at_most() {
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
async fn a_shutdown_ends_every_wait() {
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
async fn a_shutdown_ends_a_lock_that_nobody_asks_any_more() {
    const SLOW: Passage = Passage { request: Leg::Delay(ms(2)), reply: Leg::Delay(ms(3)) };
    for attempt in ATTEMPTS {
        for steps in 1..12 {
            let world = World::new();
            let (simba, weather) = world.handle();
            weather.set(SLOW);
            let locker = simba.locker(NAME);
            // Kept, and not asked again: as in a `select!` whose other branch ends the program.
            let mut future = attempt(&locker);
            for _ in 0..steps {
                assert!(future.as_mut().now_or_never().is_none_or(|won| won.is_ok()), "won at the most");
                world.pass(ms(1)).await;
            }
            tokio::time::timeout(TOTAL, simba.shutdown()).await.unwrap();
            assert!(world.age() < ms(40), "{:?} after {steps} steps", world.age());
            world.assert_empty().await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_while_the_store_hangs() {
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

/// A message that arrives this much later.
const fn late(by: Duration) -> Passage {
    Passage { request: Leg::Delay(by), reply: Leg::Pass }
}

// ===== shutting down =====

/// Grants three times the lease that was asked for, and notes when it is closed.
#[derive(Debug)]
struct Generous {
    store: MemoryBackend,
    closed: Arc<Mutex<Option<Moment>>>,
    clock: TokioClock,
}

struct GenerousSession(Box<dyn Session>);

#[async_trait]
impl Backend for Generous {
    fn name(&self) -> &'static str {
        "generous"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(GenerousSession(self.store.open(claim).await?)))
    }

    async fn close(&self) {
        *self.closed.lock().unwrap() = Some(self.clock.now());
    }
}

#[async_trait]
impl Session for GenerousSession {
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
async fn a_shutdown_does_not_close_the_store_under_a_holder_that_was_granted_more_than_its_lease() {
    let world = World::new();
    let closed = Arc::new(Mutex::new(None));
    let (clock, store) = (world.clock.clone(), world.store.clone());
    let backend = Generous { store, closed: Arc::clone(&closed), clock: clock.clone() };
    let simba = Simba::builder(Arc::new(backend)).clock(clock).lease(lease()).build();
    let guard = simba.locker(NAME).lock().await.unwrap();
    assert!(guard.remaining() > 2 * TOTAL, "{:?}", guard.remaining());
    simba.shutdown().await;
    assert_eq!(guard.tenure().loss(), Some(Loss::Deadline));
    let closed = closed.lock().unwrap().unwrap();
    assert!(closed >= guard.deadline(), "closed at {closed:?}, held until {:?}", guard.deadline());
}

#[tokio::test(start_paused = true)]
async fn a_lock_whose_session_opens_after_a_shutdown_began_sends_no_call() {
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
        world.pass(CALL / 4).await;
        assert_eq!(weather.count(Call::Open), 1);
        simba.shutdown().await;
        assert_eq!(lock.await.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(weather.count(Call::Contend), 0);
        world.assert_empty().await;
    }
}
