//! Tenures: renewals, the two notifications before an end, and work under a tenure, on paused time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use common::{
    CALL, DEADLINE, DropTime, GRACE, NAME, RENEWAL, TOTAL, TRANSITION, World, ms, settled, slow_poll_lease,
};
use futures_util::FutureExt;
use simba_core::operate::{EvictIf, Eviction};
use simba_core::spi::Operate;
use simba_core::{Clock, ErrorKind, Lease, Loss, MemoryBackend, Moment, MutexName, Simba, SystemClock};
use simba_tck::{Call, Leg, Passage, SkewedClock, Switch, Weather};

const FAIL: Passage = Passage::fail(ErrorKind::Unavailable);

// ===== renewing =====

#[tokio::test(start_paused = true)]
async fn renewals_keep_the_mutex_for_a_hundred_leases() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let token = guard.token();
    tokio::select! {
        loss = guard.lost() => panic!("{loss} after {:?}", world.age()),
        () = guard.expiring() => panic!("expiring after {:?}", world.age()),
        () = world.sleep(100 * TOTAL) => {}
    }
    assert!(guard.is_held());
    assert_eq!((guard.token(), world.record().await.token), (token, Some(token)));
    let calls = weather.count(Call::Contend);
    assert!((250..=278).contains(&calls), "one in 360 to 400 ms, not {calls} in all");
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn deadline_counts_from_before_the_request_was_sent() {
    // A slow request, so that the lease at the store starts late, or a slow reply.
    for passage in [
        Passage { request: Leg::Delay(ms(150)), reply: Leg::Pass },
        Passage { request: Leg::Pass, reply: Leg::Delay(ms(150)) },
    ] {
        let world = World::new();
        let (simba, weather) = world.handle();
        weather.once(Call::Contend, passage);
        let guard = simba.locker(NAME).lock().await.unwrap();
        assert_eq!(world.age(), ms(150));
        assert_eq!(guard.tenure().acquired_at(), Moment::ZERO);
        assert_eq!(guard.deadline(), Moment::ZERO + DEADLINE);
        assert_eq!(guard.remaining(), DEADLINE - ms(150));
    }
}

// ===== losing =====

#[tokio::test(start_paused = true)]
async fn holder_is_notified_twice_and_on_time_if_the_store_hangs() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let tenure = guard.tenure();
    world.sleep(ms(100)).await;
    weather.set(Passage::HANG);

    let expiring = tokio::spawn({
        let (tenure, clock) = (guard.tenure(), world.clock.clone());
        async move {
            tenure.expiring().await;
            (clock.now(), tenure.is_expiring(), tenure.is_held(), tenure.remaining())
        }
    });
    let lost = tokio::spawn({
        let (tenure, clock) = (guard.tenure(), world.clock.clone());
        async move { (tenure.lost().await, clock.now(), tenure.is_held(), tenure.remaining()) }
    });
    world.sleep(DEADLINE - GRACE - ms(101)).await;
    assert!(!tenure.is_expiring());
    let deadline = tenure.deadline();
    assert_eq!(deadline, Moment::ZERO + DEADLINE);
    let expiring = expiring.await.unwrap();
    assert_eq!(expiring, (deadline.saturating_sub(GRACE), true, true, GRACE));
    assert_eq!(tenure.ends_at(), (expiring.0, deadline));
    world.sleep(GRACE - ms(1)).await;
    assert!(tenure.is_held());
    assert_eq!(lost.await.unwrap(), (Loss::Deadline, deadline, false, Duration::ZERO));
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn another_contender_holds_only_after_the_holder_has_lost() {
    // Requests are lost; or replies are lost, so that the store keeps renewing.
    for passage in [Passage::HANG, Passage::REPLY_LOST] {
        for hangs_after in (0..1000).step_by(50) {
            let world = World::new();
            let (simba, weather) = world.handle();
            let guard = simba.locker(NAME).lock().await.unwrap();
            let tenure = guard.tenure();
            let waiter = world.simba().with_lease(slow_poll_lease()).locker(NAME);
            let (before, clock) = (tenure.clone(), world.clock.clone());
            let next = tokio::spawn(async move {
                let guard = waiter.lock().await.unwrap();
                (clock.now(), before.is_held(), guard)
            });
            world.queued(1).await;
            world.sleep(ms(hangs_after)).await;
            weather.set(passage);
            let deadline = tenure.deadline();
            assert_eq!(tenure.lost().await, Loss::Deadline);
            assert_eq!(world.now(), deadline);
            let (at, held, _guard) = next.await.unwrap();
            assert!(!held && at >= deadline, "{passage:?} after {hangs_after} ms: at {at:?}, {deadline:?}");
            if passage == Passage::HANG {
                // The end of the lease at the store, plus the maximum jitter of a waiter.
                let freed = deadline + (TOTAL - DEADLINE);
                assert!(at >= freed && at <= freed + TOTAL / 50, "after {hangs_after} ms: {at:?}, {freed:?}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn lost_tenure_stays_lost_if_the_answer_arrives_late() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.set(Passage { request: Leg::Pass, reply: Leg::Delay(TOTAL) });
    assert_eq!(guard.lost().await, Loss::Deadline);
    weather.clear();
    world.sleep(5 * TOTAL).await;
    assert_eq!((guard.is_held(), guard.tenure().loss()), (false, Some(Loss::Deadline)));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn fault_of_half_a_transition_ends_no_tenure_whenever_it_begins() {
    for passage in [FAIL, Passage::HANG, Passage::REPLY_LOST] {
        for begins in (0..1000).step_by(20) {
            let world = World::new();
            let (simba, weather) = world.handle();
            let guard = simba.locker(NAME).lock().await.unwrap();
            let token = guard.token();
            world.sleep(ms(begins)).await;
            weather.set(passage);
            world.sleep(TRANSITION / 2).await;
            weather.clear();
            world.sleep(3 * TOTAL).await;
            assert!(guard.is_held(), "{passage:?} at {begins} ms: {:?}", guard.tenure().loss());
            assert_eq!(world.record().await.token, Some(token));
        }
    }
}

/// Fails every other attempt: one error for every renewal.
#[derive(Debug)]
struct EveryOther {
    passage: Passage,
    calls: AtomicUsize,
}

impl Weather for EveryOther {
    fn passage(&self, call: Call) -> Passage {
        match call {
            Call::Contend if self.calls.fetch_add(1, Ordering::Relaxed) % 2 == 1 => self.passage,
            _ => Passage::CLEAR,
        }
    }
}

#[tokio::test(start_paused = true)]
async fn one_error_per_renewal_ends_no_tenure_in_a_hundred_leases() {
    for passage in [FAIL, Passage::HANG, Passage::REPLY_LOST, Passage::fail(ErrorKind::Denied)] {
        let world = World::new();
        let weather = Arc::new(EveryOther { passage, calls: AtomicUsize::new(0) });
        let guard =
            world.builder(Arc::<EveryOther>::clone(&weather)).build().locker(NAME).lock().await.unwrap();
        tokio::select! {
            loss = guard.lost() => panic!("{passage:?}: {loss} after {:?}", world.age()),
            () = guard.expiring() => panic!("{passage:?}: expiring after {:?}", world.age()),
            () = world.sleep(100 * TOTAL) => {}
        }
        assert!(weather.calls.load(Ordering::Relaxed) > 300, "it was retried every time");
    }
}

#[tokio::test(start_paused = true)]
async fn failed_renewal_does_not_move_the_deadline() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.set(FAIL);
    world.sleep(DEADLINE - ms(1)).await;
    assert!(weather.count(Call::Contend) > 5, "it was retried");
    assert_eq!((guard.deadline(), guard.remaining()), (Moment::ZERO + DEADLINE, ms(1)));
    assert_eq!(guard.lost().await, Loss::Deadline);
    assert_eq!(world.age(), DEADLINE);
}

#[tokio::test(start_paused = true)]
async fn evicted_holder_loses_at_its_next_renewal() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let name = MutexName::new(NAME).unwrap();
    let evicted = simba.operate().unwrap().evict(&name, EvictIf::Token(guard.token())).await.unwrap();
    let owner = guard.tenure().contender().clone();
    assert_eq!(evicted, Eviction::Freed { owner, window: TOTAL });
    assert_eq!(guard.lost().await, Loss::Vanished);
    assert!(world.age() >= RENEWAL * 9 / 10 && world.age() <= RENEWAL, "{:?}", world.age());
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn loss_of_an_evicted_holder_names_the_next_one() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let waiter = world.simba().locker(NAME);
    let waiting = tokio::spawn(async move { waiter.lock().await.unwrap() });
    world.queued(1).await;
    let name = MutexName::new(NAME).unwrap();
    world.store.evict(&name, EvictIf::Any).await.unwrap();
    let next = waiting.await.unwrap();
    assert_eq!(world.age(), Duration::ZERO, "an eviction wakes the next waiter");
    assert_eq!(guard.lost().await, Loss::TakenBy(next.tenure().contender().clone()));
    assert!(world.age() <= RENEWAL, "{:?}", world.age());
    guard.release().await.unwrap_err();
    world.sleep(3 * TOTAL).await;
    assert!(next.is_held(), "the old holder did not release the new hold");
}

#[tokio::test(start_paused = true)]
async fn tenure_returns_the_reason_after_its_guard_is_gone() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let tenure = guard.tenure();
    let notified = tokio::spawn({
        let tenure = tenure.clone();
        async move {
            tenure.expiring().await;
            tenure.lost().await
        }
    });
    guard.release().await.unwrap();
    assert_eq!(notified.await.unwrap(), Loss::Released);
    assert_eq!((tenure.is_held(), tenure.is_expiring(), tenure.remaining()), (false, true, Duration::ZERO));
    assert_eq!(world.age(), Duration::ZERO);
}

#[tokio::test(start_paused = true)]
async fn step_down_keeps_its_cooldown() {
    for labelled in [false, true] {
        let world = World::new();
        let contention = world.simba().contend(NAME);
        let contention = if labelled { contention.with_label("me") } else { contention };
        contention.start().unwrap();
        let tenure = contention.acquired().await.unwrap();
        contention.step_down(ms(12_345));
        assert_eq!(tenure.lost().await, Loss::SteppedDown);
        world.assert_empty().await;
        // Another contender locks and releases meanwhile.
        world.sleep(ms(5_000)).await;
        world.simba().locker(NAME).lock().await.unwrap().release().await.unwrap();
        world.sleep(ms(7_344)).await;
        world.assert_empty().await;
        let again = contention.acquired().await.unwrap();
        assert_eq!(world.age(), ms(12_345));
        assert!(again.token() > tenure.token());
        assert_ne!(again.contender(), tenure.contender());
        contention.stop().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn expiring_that_is_polled_first_completes_before_lost_after_the_deadline() {
    async fn first_of(tenure: simba_core::Tenure) -> &'static str {
        tokio::select! {
            biased;
            () = tenure.expiring() => "expiring",
            _ = tenure.lost() => "lost",
        }
    }
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let simba = world.builder(Switch::new()).with_clock(clock.clone()).build();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let sleeping = tokio::spawn(first_of(guard.tenure()));
    settled().await;
    clock.jump(TOTAL);
    let late = tokio::spawn(first_of(guard.tenure()));
    assert_eq!((sleeping.await.unwrap(), late.await.unwrap()), ("expiring", "expiring"));
    assert_eq!(world.age(), Duration::ZERO, "at once");
}

#[tokio::test(start_paused = true)]
async fn lost_completes_in_a_loop_beside_a_branch_that_is_always_ready() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let simba = world.builder(Switch::new()).with_clock(clock.clone()).build();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let mut iterations = 0;
    let loss = loop {
        tokio::select! {
            biased;
            loss = guard.lost() => break loss,
            () = std::future::ready(()) => iterations += 1,
        }
        assert!(iterations <= 10, "the loss is missed");
        if iterations == 10 {
            clock.jump(TOTAL);
        }
    };
    assert_eq!((loss, iterations), (Loss::Deadline, 10));
    assert_eq!(guard.tenure().lost().now_or_never(), Some(Loss::Deadline));
}

// ===== work =====

#[tokio::test(start_paused = true)]
async fn work_under_a_held_mutex_returns_its_output() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let work = async {
        world.sleep(10 * TOTAL).await;
        42
    };
    assert_eq!(guard.run(work).await.unwrap(), 42);
    assert_eq!(world.age(), 10 * TOTAL);
}

#[tokio::test(start_paused = true)]
async fn work_that_awaits_expiring_ends_before_the_deadline() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.set(Passage::HANG);
    let tenure = guard.tenure();
    let work = async {
        tenure.expiring().await;
        world.sleep(GRACE / 2).await;
        "cleaned up"
    };
    assert_eq!(guard.run(work).await.unwrap(), "cleaned up");
    assert_eq!(world.age(), DEADLINE - GRACE / 2);
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_await_expiring_is_dropped_before_the_deadline() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.set(Passage::HANG);
    let dropped = DropTime::new(world.clock.clone());
    let flag = dropped.flag();
    let work = async move {
        let _flag = flag;
        pending::<()>().await;
    };
    let error = guard.run(work).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert_eq!(error.mutex().unwrap().as_str(), NAME);
    assert_eq!(dropped.get(), Some(Moment::ZERO + (DEADLINE - GRACE / 4)));
    assert!(guard.is_held(), "the work ended before the hold");
}

#[tokio::test(start_paused = true)]
async fn work_is_not_started_after_the_loss() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.set(Passage::HANG);
    assert_eq!(guard.lost().await, Loss::Deadline);
    let started = AtomicBool::new(false);
    let error = guard.run(async { started.store(true, Ordering::Relaxed) }).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(!started.load(Ordering::Relaxed));
}

#[tokio::test(start_paused = true)]
async fn work_is_not_started_after_the_end_is_announced() {
    let world = World::new();
    let simba = world.simba();
    let guard = simba.locker(NAME).lock().await.unwrap();
    let mut closing = Box::pin(simba.shutdown());
    assert!(closing.as_mut().now_or_never().is_none());
    guard.expiring().await;
    assert!(guard.is_held());
    let started = AtomicBool::new(false);
    let error = guard.run(async { started.store(true, Ordering::Relaxed) }).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(!started.load(Ordering::Relaxed));
}

#[tokio::test(start_paused = true)]
async fn work_continues_after_a_late_renewal() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).lock().await.unwrap();
    weather.set(FAIL);
    let tenure = guard.tenure();
    let work = tokio::spawn({
        let (tenure, clock) = (tenure.clone(), world.clock.clone());
        async move {
            let until = clock.now() + 3 * TOTAL;
            tenure.run(clock.sleep_until(until)).await
        }
    });
    tenure.expiring().await;
    assert_eq!(world.age(), DEADLINE - GRACE);
    world.sleep(ms(60)).await;
    assert!(tenure.is_expiring());
    weather.clear();
    // The next attempt follows after at most a quarter of the remaining time.
    world.sleep((GRACE - ms(60)) / 4).await;
    assert!(!tenure.is_expiring() && tenure.is_held());
    work.await.unwrap().unwrap();
    assert_eq!(world.age(), 3 * TOTAL);
}

#[tokio::test(start_paused = true)]
async fn work_of_an_evicted_holder_is_dropped_at_the_loss() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    world.store.evict(&MutexName::new(NAME).unwrap(), EvictIf::Any).await.unwrap();
    let error = guard.run(pending::<()>()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Lost);
    assert!(world.age() <= RENEWAL, "{:?}", world.age());
}

#[tokio::test(start_paused = true)]
async fn release_does_not_wait_for_dropped_work() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let tenure = guard.tenure();
    let mut work = Box::pin(tenure.run(pending::<()>()));
    assert!(work.as_mut().now_or_never().is_none());
    let mut releasing = Box::pin(guard.release());
    assert!(releasing.as_mut().now_or_never().is_none());
    world.sleep(CALL).await;
    assert!(world.record().await.owner.is_some(), "work is running");
    drop(work);
    releasing.await.unwrap();
    assert_eq!(world.age(), CALL);
    settled().await;
    world.assert_empty().await;
}

// ===== the watchdog, on real threads =====

/// A lease that survives a stall of the machine of two seconds.
fn real_lease() -> Lease {
    Lease::new(ms(2_000), ms(3_000)).unwrap()
}

#[tokio::test]
async fn watchdog_acts_while_the_runtime_is_blocked() {
    let simba = Simba::new(MemoryBackend::new()).with_lease(real_lease());
    let guard = simba.locker(NAME).lock().await.unwrap();
    let (acted, acts) = mpsc::channel();
    let act = move |loss| acted.send((loss, SystemClock.now(), thread::current().id())).unwrap();
    guard.tenure().watchdog(act).unwrap();
    let deadline = guard.deadline();
    // Blocks the only thread of this runtime, and with it the renewals.
    let (loss, at, thread) = acts.recv_timeout(Duration::from_secs(30)).unwrap();
    assert_eq!(loss, Loss::Deadline);
    // The watchdog's thread and the timer's may each stall for two seconds.
    let limit = deadline + ms(4_000);
    assert!(at >= deadline && at < limit, "{:?} after the deadline", at - deadline);
    assert_ne!(thread, thread::current().id());
    assert!(!guard.is_held());
}

#[tokio::test]
async fn watchdog_does_not_act_after_a_release() {
    let simba = Simba::new(MemoryBackend::new()).with_lease(real_lease());
    let guard = simba.locker(NAME).lock().await.unwrap();
    let (acted, acts) = mpsc::channel::<Loss>();
    guard.tenure().watchdog(move |loss| acted.send(loss).unwrap()).unwrap();
    guard.release().await.unwrap();
    // Its thread ends and closes the channel without a message.
    assert_eq!(acts.recv_timeout(Duration::from_secs(30)), Err(mpsc::RecvTimeoutError::Disconnected));
}
