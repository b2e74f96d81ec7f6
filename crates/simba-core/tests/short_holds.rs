//! Who holds a mutex for a moment only needs no task for it; who holds it longer loses nothing by that.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{CALL, NAME, TOTAL, World, lease, ms};
use futures_util::FutureExt as _;
use simba_core::{ErrorKind, Guard, Loss, MemoryBackend, Simba};
use simba_tck::{Leg, Passage};
use tokio::runtime::{Builder, Handle, Runtime};

/// More than a hold may take that needs no task.
const LONG: Duration = ms(30);

fn tasks() -> usize {
    Handle::current().metrics().num_alive_tasks()
}

async fn lock(simba: &Simba, name: impl Into<String>) -> Guard {
    simba.locker(name.into()).lock().await.unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_short_hold_has_no_task_and_a_long_one_gets_one() {
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
    assert!(tasks() <= before + 1, "one looks after all of them, not {}", tasks() - before);
    world.pass(LONG).await;
    assert_eq!(tasks(), before + MANY, "each has a task, and nobody looks after anybody any more");
    world.pass(3 * TOTAL).await;
    assert!(guards.iter().all(Guard::is_held), "they are renewed");
    for guard in guards {
        guard.release().await.unwrap();
    }
    world.pass(LONG).await;
    assert_eq!(tasks(), before, "nothing is left");
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_guard_that_nobody_polls_is_renewed_from_the_first_lease_on() {
    let world = World::new();
    let (ours, theirs) = (world.simba(), world.simba());
    let guard = lock(&ours, NAME).await;
    // Others lock and release all the while: whoever looks after those who wait has plenty to do.
    while world.age() < 3 * TOTAL {
        lock(&ours, "other").await.release().await.unwrap();
        world.pass(ms(3)).await;
        assert!(guard.is_held() && theirs.locker(NAME).try_lock().await.unwrap().is_none());
    }
    guard.release().await.unwrap();
    drop(theirs.locker(NAME).try_lock().await.unwrap().expect("it is free"));
}

#[tokio::test(start_paused = true)]
async fn a_release_that_is_dropped_on_its_way_goes_on_by_itself() {
    for steps in 1..6 {
        let world = World::new();
        let (simba, weather) = world.handle();
        let guard = lock(&simba, NAME).await;
        weather.set(Passage::fail(ErrorKind::Unavailable));
        let mut release = Box::pin(guard.release());
        for _ in 0..steps {
            assert!(release.as_mut().now_or_never().is_none(), "it is tried again");
            world.pass(ms(1)).await;
        }
        drop(release);
        weather.set(Passage::CLEAR);
        world.pass(CALL).await;
        let free = world.simba().locker(NAME).try_lock().await.unwrap();
        assert!(free.is_some(), "after {steps} steps");
    }
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_reaches_who_holds_it_for_a_moment() {
    let world = World::new();
    let simba = world.simba();
    let guard = lock(&simba, NAME).await;
    tokio::join!(simba.shutdown(), async {
        guard.expiring().await;
        drop(guard);
    });
    assert!(world.age() < ms(1), "nobody waits for anything: {:?}", world.age());
    world.assert_empty().await;
}

const SLOW: Passage = Passage { request: Leg::Delay(ms(4)), reply: Leg::Delay(ms(4)) };

#[tokio::test(start_paused = true)]
async fn a_shutdown_lets_nobody_wait_for_ever_in_another_task() {
    for steps in 0..9 {
        let world = World::new();
        let (simba, weather) = world.handle();
        let guard = lock(&simba, NAME).await;
        weather.set(SLOW);
        let release = tokio::spawn(guard.release());
        let other = simba.locker("other");
        let locked = tokio::spawn(async move { other.lock().await.map(drop) });
        world.pass(ms(steps)).await;
        simba.shutdown().await;
        release.await.unwrap().unwrap();
        // It may have been won before.
        drop(locked.await.unwrap());
        assert!(world.age() < TOTAL, "after {steps} ms: {:?}", world.age());
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_release_that_is_kept_and_not_polled_goes_on_by_itself() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let locker = simba.locker(NAME);
    let guard = locker.lock().await.unwrap();
    weather.set(SLOW);
    let mut release = Box::pin(guard.release());
    assert!(release.as_mut().now_or_never().is_none());
    // The same locker waits for it, and so would everyone else.
    let again = tokio::time::timeout(TOTAL / 2, locker.lock()).await.expect("it is freed").unwrap();
    release.await.unwrap();
    again.release().await.unwrap();
}

fn runtime() -> Runtime {
    Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

async fn assert_renewed(guard: &Guard) {
    let end = tokio::time::Instant::now() + 2 * TOTAL;
    while tokio::time::Instant::now() < end {
        assert!(guard.is_held(), "it is renewed: {:?}", guard.tenure().loss());
        tokio::time::sleep(ms(20)).await;
    }
}

#[test]
fn a_runtime_that_ends_takes_what_waits_along_and_nothing_of_another_runtime() {
    let simba = Simba::builder(Arc::new(MemoryBackend::new())).lease(lease()).build();
    let (one, other) = (runtime(), runtime());
    let first = one.block_on(lock(&simba, "first"));
    let second = other.block_on(lock(&simba, "second"));
    drop(one);
    assert!(!first.is_held());
    assert_eq!(first.tenure().loss(), Some(Loss::Vanished));
    other.block_on(async {
        assert_renewed(&second).await;
        second.release().await.unwrap();
        // Without its runtime there is nobody left to free it; it is not waited for either.
        first.release().await.unwrap_err();
    });
}

#[test]
fn a_runtime_that_stands_still_costs_another_nothing() {
    let simba = Simba::builder(Arc::new(MemoryBackend::new())).lease(lease()).build();
    let (one, other) = (runtime(), runtime());
    let _first = one.block_on(lock(&simba, "first"));
    // Its only thread is gone for a while, and with it whatever looks after those who wait there.
    one.spawn(async { std::thread::sleep(3 * TOTAL) });
    let second = other.block_on(lock(&simba, "second"));
    other.block_on(assert_renewed(&second));
}

#[test]
fn a_thread_that_works_without_a_pause_costs_the_others_of_its_runtime_nothing() {
    let simba = Simba::builder(Arc::new(MemoryBackend::new())).lease(lease()).build();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (busy, holds) = std::sync::mpsc::channel();
    let first = simba.clone();
    runtime.spawn(async move {
        let _first = lock(&first, "first").await;
        busy.send(()).unwrap();
        std::thread::sleep(3 * TOTAL);
    });
    holds.recv().unwrap();
    let second = runtime.spawn(async move {
        let second = lock(&simba, "second").await;
        assert_renewed(&second).await;
    });
    runtime.block_on(second).unwrap();
}
