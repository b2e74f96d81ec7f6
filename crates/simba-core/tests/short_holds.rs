//! A short hold runs without a spawned task, and a long hold gets one and is renewed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, mpsc};
use std::time::Duration;

use common::{CALL, NAME, TOTAL, World, ms};
use futures_util::FutureExt as _;
use simba_core::{ErrorKind, Guard, Lease, Loss, MemoryBackend, Simba, SystemClock};
use simba_tck::{Call, FaultyBackend, Leg, Passage, Switch};
use tokio::runtime::{Builder, Handle, Runtime};

/// Longer than a hold without a task.
const LONG: Duration = ms(30);

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

async fn lock(simba: &Simba, name: impl Into<String>) -> Guard {
    simba.locker(name.into()).lock().await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn short_hold_has_no_task_and_a_long_one_gets_one() {
    const MANY: usize = 50;
    let world = World::new();
    let simba = world.simba();
    let before = tasks();
    for n in 0..MANY {
        lock(&simba, format!("short{n}")).await.release().await.unwrap();
    }
    let mut guards = Vec::new();
    for n in 0..MANY {
        guards.push(lock(&simba, format!("long{n}")).await);
    }
    assert!(tasks() <= before + 1, "one sweeper for all of them, not {}", tasks() - before);
    world.sleep(LONG).await;
    assert_eq!(tasks(), before + MANY, "each has a task, and the sweeper has ended");
    world.sleep(3 * TOTAL).await;
    assert!(guards.iter().all(Guard::is_held), "they are renewed");
    for guard in guards {
        guard.release().await.unwrap();
    }
    world.sleep(LONG).await;
    assert_eq!(tasks(), before, "nothing is left");
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn guard_that_is_not_polled_is_renewed_from_the_first_lease_on() {
    let world = World::new();
    let (one, other) = (world.simba(), world.simba());
    let guard = lock(&one, NAME).await;
    // Short holds of another mutex keep the sweeper busy meanwhile.
    while world.age() < 3 * TOTAL {
        lock(&one, "other").await.release().await.unwrap();
        world.sleep(ms(3)).await;
        assert!(guard.is_held() && other.locker(NAME).try_lock().await.unwrap().is_none());
    }
    guard.release().await.unwrap();
    drop(other.locker(NAME).try_lock().await.unwrap().expect("it is free"));
}

#[tokio::test(start_paused = true)]
async fn release_that_is_dropped_continues_in_the_background() {
    for steps in 1..6 {
        let world = World::new();
        let (simba, weather) = world.handle();
        let guard = lock(&simba, NAME).await;
        weather.set(Passage::fail(ErrorKind::Unavailable));
        let mut release = Box::pin(guard.release());
        for _ in 0..steps {
            assert!(release.as_mut().now_or_never().is_none(), "it is retried");
            world.sleep(ms(1)).await;
        }
        drop(release);
        weather.set(Passage::CLEAR);
        world.sleep(CALL).await;
        let free = world.simba().locker(NAME).try_lock().await.unwrap();
        assert!(free.is_some(), "after {steps} steps");
    }
}

#[tokio::test(start_paused = true)]
async fn shutdown_reaches_a_parked_driver() {
    let world = World::new();
    let simba = world.simba();
    let guard = lock(&simba, NAME).await;
    tokio::join!(simba.shutdown(), async {
        guard.expiring().await;
        drop(guard);
    });
    assert!(world.age() < ms(1), "it waits for nothing: {:?}", world.age());
    world.assert_empty().await;
}

const SLOW: Passage = Passage { request: Leg::Delay(ms(4)), reply: Leg::Delay(ms(4)) };

#[tokio::test(start_paused = true)]
async fn shutdown_ends_releases_and_locks_in_other_tasks() {
    for steps in 0..9 {
        let world = World::new();
        let (simba, weather) = world.handle();
        let guard = lock(&simba, NAME).await;
        weather.set(SLOW);
        let release = tokio::spawn(guard.release());
        let other = simba.locker("other");
        let locked = tokio::spawn(async move { other.lock().await.map(drop) });
        world.sleep(ms(steps)).await;
        simba.shutdown().await;
        release.await.unwrap().unwrap();
        // It may have been acquired before.
        drop(locked.await.unwrap());
        assert!(world.age() < TOTAL, "after {steps} ms: {:?}", world.age());
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn release_that_is_kept_and_not_polled_continues_in_the_background() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = simba.locker(NAME);
    let guard = locker.lock().await.unwrap();
    weather.set(SLOW);
    let mut release = Box::pin(guard.release());
    assert!(release.as_mut().now_or_never().is_none());
    // The same locker waits for it, as every other contender would.
    let again = tokio::time::timeout(TOTAL / 2, locker.lock()).await.expect("it is freed").unwrap();
    release.await.unwrap();
    again.release().await.unwrap();
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

const REAL_TOTAL: Duration = ms(5_000);

/// Returns a lease on real time, which survives a stall of the machine of two seconds.
fn real_lease() -> Lease {
    Lease::new(ms(2_000), ms(3_000)).unwrap()
}

fn real() -> Simba {
    Simba::builder(Arc::new(MemoryBackend::new())).with_lease(real_lease()).build()
}

async fn assert_renewed(guard: &Guard) {
    let end = tokio::time::Instant::now() + 2 * REAL_TOTAL;
    while tokio::time::Instant::now() < end {
        assert!(guard.is_held(), "it is renewed: {:?}", guard.tenure().loss());
        tokio::time::sleep(ms(20)).await;
    }
}

#[test]
fn runtime_that_ends_drops_its_parked_drivers_only() {
    let simba = real();
    let (one, other) = (runtime(), runtime());
    let first = one.block_on(lock(&simba, "first"));
    let second = other.block_on(lock(&simba, "second"));
    drop(one);
    assert!(!first.is_held());
    assert_eq!(first.tenure().loss(), Some(Loss::Vanished));
    other.block_on(async {
        assert_renewed(&second).await;
        second.release().await.unwrap();
        // Without its runtime no driver can release it. The call fails and does not wait.
        first.release().await.unwrap_err();
    });
}

#[test]
fn release_and_stop_are_not_confirmed_if_their_runtime_ends_before_the_reply() {
    let (engine, caller, switch) = (runtime(), runtime(), Switch::new());
    let backend = FaultyBackend::new(MemoryBackend::new(), SystemClock, Arc::<Switch>::clone(&switch));
    let builder = Simba::builder(Arc::new(backend)).with_lease(real_lease());
    let simba = builder.with_runtime(engine.handle().clone()).build();
    let guard = caller.block_on(lock(&simba, NAME));
    let contention = simba.contend("leader");
    contention.start().unwrap();
    caller.block_on(contention.acquired()).unwrap();
    switch.set(Passage::HANG);
    let release = caller.spawn(guard.release());
    let stop = caller.spawn(async move { contention.stop().await });
    while switch.count(Call::Release) < 2 {
        std::thread::sleep(ms(1));
    }
    drop(engine);
    for ended in [release, stop] {
        assert_eq!(caller.block_on(ended).unwrap().unwrap_err().kind(), ErrorKind::Closed);
    }
}

#[test]
fn blocked_runtime_does_not_affect_another() {
    let simba = real();
    let (one, other) = (runtime(), runtime());
    let _first = one.block_on(lock(&simba, "first"));
    // Its only thread is blocked until the end, and with it the sweeper of that runtime.
    let (_end, ends) = mpsc::channel::<()>();
    one.spawn(async move { ends.recv() });
    let second = other.block_on(lock(&simba, "second"));
    other.block_on(assert_renewed(&second));
}

#[test]
fn blocked_thread_does_not_affect_the_others_of_its_runtime() {
    let simba = real();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (busy, holds) = mpsc::channel();
    let (_end, ends) = mpsc::channel::<()>();
    let first = simba.clone();
    runtime.spawn(async move {
        let _first = lock(&first, "first").await;
        busy.send(()).unwrap();
        ends.recv()
    });
    holds.recv().unwrap();
    let second = runtime.spawn(async move {
        let second = lock(&simba, "second").await;
        assert_renewed(&second).await;
    });
    runtime.block_on(second).unwrap();
}
