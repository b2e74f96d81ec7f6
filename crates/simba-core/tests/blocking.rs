//! The blocking interface on plain threads, in real time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{NAME, ms};
use simba_core::blocking::{self, Contender, Simba};
use simba_core::operate::MutexRecord;
use simba_core::spi::{Backend, Operate};
use simba_core::{
    Clock, Error, ErrorKind, Lease, Loss, MemoryBackend, MutexName, MutexState, Schedule, Status,
    SystemClock, Tenure, View,
};
use simba_tck::{FaultyBackend, Passage, Switch, Weather};

/// A lease that survives a stall of the machine of two seconds.
fn lease() -> Lease {
    Lease::new(ms(2_000), ms(3_000)).unwrap()
}

const TOTAL: Duration = ms(5_000);
/// Longer than any call of these tests.
const LONG: Duration = Duration::from_secs(60);

fn simba(store: &MemoryBackend) -> Simba {
    Simba::new(store.clone()).unwrap().with_lease(lease())
}

fn record(store: &MemoryBackend) -> MutexRecord {
    blocking::wait(store.read(&MutexName::new(NAME).unwrap())).unwrap()
}

fn assert_empty(store: &MemoryBackend) {
    let record = record(store);
    assert_eq!((record.owner, record.waiters.unwrap_or(0)), (None, 0));
}

/// Returns the result of `call`, or panics if it hangs.
fn in_time<R: Send + 'static>(call: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(call()));
    result.recv_timeout(LONG).unwrap()
}

// ===== locking =====

#[test]
fn lock_is_held_refused_to_others_and_released() {
    let store = MemoryBackend::new();
    let (one, other) = (simba(&store), simba(&store));
    let guard = one.locker(NAME).lock().unwrap();
    assert!(guard.is_held() && !guard.remaining().is_zero());
    assert_eq!(record(&store).token, Some(guard.token()));

    let locker = other.locker(NAME);
    assert!(locker.try_lock().unwrap().is_none());
    assert_eq!(locker.last_holder().id.as_ref(), Some(guard.tenure().contender()));
    // Long enough for an answer of the store, which names the holder.
    let (began, limit) = (Instant::now(), ms(3_000));
    let error = locker.lock_timeout(limit).unwrap_err();
    assert!(began.elapsed() >= limit);
    assert_eq!(error.kind(), ErrorKind::Timeout);
    assert_eq!(error.holder(), Some(guard.tenure().contender()));

    let tenure = guard.tenure();
    guard.release().unwrap();
    assert_eq!(blocking::wait(tenure.lost()), Loss::Released);
    let token = tenure.token();
    let guard = locker.try_lock().unwrap().unwrap();
    assert!(guard.token() > token);
    guard.release().unwrap();
    locker.lock_timeout(LONG).unwrap().release().unwrap();
    assert_empty(&store);
}

#[test]
fn waiting_thread_acquires_when_another_releases() {
    let store = MemoryBackend::new();
    let guard = simba(&store).locker(NAME).lock().unwrap();
    let waiting = thread::spawn({
        // A long poll interval: it acquires in time only if it is woken.
        let waiter = simba(&store).with_lease(lease().with_poll(LONG).unwrap());
        move || waiter.locker(NAME).lock().unwrap().token()
    });
    while record(&store).waiters != Some(1) {
        thread::sleep(ms(1));
    }
    let token = guard.token();
    guard.release().unwrap();
    assert!(in_time(move || waiting.join().unwrap()) > token);
}

#[test]
fn renewals_continue_while_the_caller_sleeps_for_three_leases() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let guard = simba.locker(NAME).lock().unwrap();
    thread::sleep(3 * TOTAL);
    assert!(guard.is_held(), "{:?}", guard.tenure().loss());
    assert_eq!(record(&store).token, Some(guard.token()));
    guard.release().unwrap();
    assert_empty(&store);
}

#[test]
fn thread_can_wait_for_the_loss() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    // A quarter of the hold is between the two notifications: longer than a stall of the machine.
    let max_hold = ms(12_000);
    let lease = Lease::new(ms(2_000), ms(8_000)).unwrap();
    let locker = simba.locker(NAME).with_lease(lease).with_max_hold(max_hold);
    let began = Instant::now();
    let guard = locker.lock().unwrap();
    guard.expiring();
    assert!(guard.is_held());
    assert_eq!(guard.lost(), Loss::MaxHold);
    assert!(began.elapsed() >= max_hold);
    assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
}

#[test]
fn dropped_guard_frees_the_mutex() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let guard = simba.locker(NAME).lock().unwrap();
    let tenure = guard.tenure();
    drop(guard);
    assert_eq!(blocking::wait(tenure.lost()), Loss::Released);
    simba.locker(NAME).lock_timeout(LONG).unwrap().release().unwrap();
}

#[test]
fn guard_stays_valid_after_its_handle_is_dropped() {
    let store = MemoryBackend::new();
    let guard = simba(&store).locker(NAME).lock().unwrap();
    thread::sleep(2 * TOTAL);
    assert!(guard.is_held(), "its engine still runs: {:?}", guard.tenure().loss());
    guard.release().unwrap();
    assert_empty(&store);
}

#[test]
fn failed_connect_is_an_error() {
    let refused = Simba::connect(async { Err(Error::new(ErrorKind::Denied, "no")) });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Denied);
}

// ===== contending, scheduling, observing =====

/// Sends every callback to a channel, and blocks in the first.
struct Blocking(mpsc::Sender<(&'static str, u64)>);

impl Contender for Blocking {
    fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) {
        assert!(state.is_acquired(tenure.contender()));
        // Longer than a lease.
        thread::sleep(TOTAL + ms(1_000));
        assert!(tenure.is_held(), "a callback that blocks delays no renewal: {:?}", tenure.loss());
        self.0.send(("acquired", tenure.token().get())).unwrap();
    }

    fn on_released(&mut self, tenure: &Tenure, state: &MutexState) {
        assert!(state.is_released(tenure.contender()));
        assert!(tenure.is_held(), "the mutex is freed after this callback");
        self.0.send(("released", tenure.token().get())).unwrap();
    }
}

/// Sends the name of every callback to a channel.
struct Phases(mpsc::Sender<&'static str>);

impl Contender for Phases {
    fn on_acquired(&mut self, _: &Tenure, _: &MutexState) {
        self.0.send("acquired").unwrap();
    }

    fn on_expiring(&mut self, tenure: &Tenure) {
        assert!(tenure.is_expiring());
        self.0.send("expiring").unwrap();
    }

    fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        assert!(!tenure.is_held());
        self.0.send("released").unwrap();
    }
}

#[test]
fn contender_is_notified_to_stop_while_the_store_hangs() {
    let switch = Switch::new();
    let weather = Arc::clone(&switch) as Arc<dyn Weather>;
    let backend = FaultyBackend::new(MemoryBackend::new(), SystemClock, weather);
    let simba = Simba::new(backend).unwrap().with_lease(lease());
    let (callback, callbacks) = mpsc::channel();
    let contention = simba.contend(NAME).with_label("node-1").with_contender(Phases(callback));
    contention.start().unwrap();
    assert_eq!(callbacks.recv_timeout(LONG), Ok("acquired"));
    assert!(contention.id().unwrap().as_str().starts_with("node-1."));
    assert_eq!(contention.label(), Some("node-1"));
    switch.set(Passage::HANG);
    assert_eq!(callbacks.recv_timeout(LONG), Ok("expiring"));
    // A renewal that was in flight when the store hung may have succeeded, so that `expiring` is called twice.
    let mut later = std::iter::from_fn(|| callbacks.recv_timeout(LONG).ok());
    assert_eq!(later.find(|callback| *callback != "expiring"), Some("released"));
}

#[test]
fn contender_callbacks_may_block() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let (callback, callbacks) = mpsc::channel();
    let contention = simba.contend(NAME).with_contender(Blocking(callback));
    assert_eq!(contention.acquired().unwrap_err().kind(), ErrorKind::Closed, "not started yet");
    contention.start().unwrap();
    let tenure = contention.acquired().unwrap();
    assert!(contention.is_owner());
    let token = tenure.token().get();
    assert_eq!(callbacks.recv_timeout(LONG), Ok(("acquired", token)));
    contention.stop().unwrap();
    assert_eq!(callbacks.try_recv(), Ok(("released", token)), "a stop waits for the callback");
    assert_eq!(tenure.loss(), Some(Loss::Released));
    assert_eq!(
        (contention.status(), contention.last_error().map(|error| error.kind())),
        (Status::Idle, None)
    );
    assert_empty(&store);
    contention.start().unwrap();
    let (acquired, again) = callbacks.recv_timeout(LONG).unwrap();
    assert!(acquired == "acquired" && again > token);
    drop(contention);
    assert_eq!(callbacks.recv_timeout(LONG), Ok(("released", again)));
}

#[test]
fn another_contender_leads_after_a_step_down() {
    let store = MemoryBackend::new();
    let (one, other) = (simba(&store), simba(&store));
    let (first, second) = (one.contend(NAME), other.contend(NAME));
    first.start().unwrap();
    let tenure = first.acquired().unwrap();
    second.start().unwrap();
    first.step_down(LONG);
    let second = Arc::new(second);
    let next = in_time({
        let second = Arc::clone(&second);
        move || second.acquired().unwrap()
    });
    assert!(next.token() > tenure.token());
    assert_eq!(blocking::wait(tenure.lost()), Loss::SteppedDown);
    assert!(!first.is_owner() && second.is_owner());
    assert!(!first.is_in_ttl() && second.is_in_ttl());
    assert!(second.owner().is_owner(next.contender()));
    assert!(second.state().is_acquired(next.contender()));
}

#[test]
fn scheduled_job_may_block() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let (ran, runs) = mpsc::channel();
    let mut number = 0;
    let job = simba.scheduler(NAME).start(Schedule::fixed_rate(ms(20)).unwrap(), move |tenure| {
        number += 1;
        assert_ne!(number, 2, "a panic ends only its run");
        if number == 1 {
            thread::sleep(2 * TOTAL);
        }
        ran.send((number, tenure.token().get(), tenure.is_held())).unwrap();
        if number == 3 { Err(std::io::Error::other("the third fails")) } else { Ok(()) }
    });
    let job = job.unwrap();
    let seen: Vec<_> = (0..3).map(|_| runs.recv_timeout(LONG).unwrap()).collect();
    let token = seen[0].1;
    assert_eq!(seen, [(1, token, true), (3, token, true), (4, token, true)], "one tenure");
    assert!(job.is_leading());
    job.stop().unwrap();
    let progress = job.progress();
    assert_eq!(progress.failed, 2);
    assert_eq!(progress.started, progress.succeeded + progress.failed);
    assert_eq!(progress.last_failure.as_deref(), Some("the third fails"));
    assert_empty(&store);
}

#[test]
fn job_reports_its_leader_and_steps_down() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let scheduler = simba.scheduler(NAME).with_label("job");
    let job = scheduler.start(Schedule::fixed_rate(LONG).unwrap(), |_| Ok::<_, Error>(())).unwrap();
    let tenure = job.acquired().unwrap();
    assert_eq!((job.label(), job.status(), job.last_error().is_none()), (Some("job"), Status::Running, true));
    assert_eq!(job.tenure().unwrap().token(), tenure.token());
    assert!(job.id().as_ref() == Some(tenure.contender()) && job.owner().is_owner(tenure.contender()));
    job.step_down(LONG);
    assert_eq!(tenure_loss(&tenure), Loss::SteppedDown);
    job.stop().unwrap();
    assert_eq!(job.status(), Status::Idle);
    assert_empty(&store);
}

fn tenure_loss(tenure: &Tenure) -> Loss {
    blocking::wait(tenure.lost())
}

#[test]
fn settings_apply_to_a_blocking_handle() {
    let backend: Arc<dyn Backend> = Arc::new(MemoryBackend::new());
    let simba =
        Simba::connect_with(async { Ok(backend) }, |builder| builder.with_lease(lease()).with_seed(7))
            .unwrap();
    assert_eq!(simba.as_async().lease(), lease());
    lock_and_release(&simba);
}

#[test]
fn observer_returns_every_change_of_owner() {
    let store = MemoryBackend::new();
    let (one, other) = (simba(&store), simba(&store).with_lease(lease().with_poll(LONG).unwrap()));
    let mut observer = other.observe(NAME).unwrap();
    assert_eq!(observer.mutex().as_str(), NAME);
    assert_eq!(observer.changed().unwrap(), View::Vacant);
    let guard = one.locker(NAME).lock().unwrap();
    let View::Owned(owner) = observer.changed().unwrap() else { panic!("{:?}", observer.view()) };
    assert_eq!(owner.token, Some(guard.token()));
    guard.release().unwrap();
    assert_eq!(observer.changed().unwrap(), View::Vacant);
    assert!(observer.last_error().is_none());
    other.shutdown();
    assert_eq!(observer.changed().unwrap_err().kind(), ErrorKind::Closed);
}

// ===== on threads of a runtime =====

fn lock_and_release(simba: &Simba) {
    let guard = simba.locker(NAME).lock_timeout(LONG).unwrap();
    assert!(guard.is_held());
    guard.release().unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn calls_work_on_the_only_thread_of_a_runtime() {
    let simba = simba(&MemoryBackend::new());
    lock_and_release(&simba);
    tokio::spawn({
        let simba = simba.clone();
        async move { lock_and_release(&simba) }
    })
    .await
    .unwrap();
    let guard = simba.locker(NAME).lock().unwrap();
    thread::sleep(2 * TOTAL);
    assert!(guard.is_held(), "the engine does not depend on this runtime: {:?}", guard.tenure().loss());
    guard.release().unwrap();
    assert_eq!(simba.run(async { 42 }).unwrap(), 42);
    simba.shutdown();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn calls_work_on_a_worker_and_on_a_blocking_thread() {
    let simba = simba(&MemoryBackend::new());
    let (on_worker, on_blocking) = (simba.clone(), simba.clone());
    tokio::spawn(async move { lock_and_release(&on_worker) }).await.unwrap();
    tokio::task::spawn_blocking(move || lock_and_release(&on_blocking)).await.unwrap();
    simba.shutdown();
}

/// A tokio task has a budget of 128 operations before it has to yield, which a blocking call cannot.
#[test]
fn task_without_budget_is_not_blocked_forever() {
    in_time(|| {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let simba = simba(&MemoryBackend::new());
            for number in 0..300 {
                assert_eq!(simba.run(async move { number }).unwrap(), number);
            }
            lock_and_release(&simba);
            simba.shutdown();
        });
    });
}

// ===== ending =====

#[test]
fn shutdown_leaves_nothing() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let contention = simba.contend("leader");
    contention.start().unwrap();
    let tenure = contention.acquired().unwrap();
    let locker = simba.locker(NAME);
    drop(locker.lock().unwrap());
    simba.shutdown();
    assert_eq!(tenure.loss(), Some(Loss::Released));
    let records = blocking::wait(store.list()).unwrap();
    assert_eq!(records.len(), 2);
    for record in records {
        assert_eq!((record.owner, record.waiters), (None, Some(0)), "{}", record.mutex);
    }
    assert_eq!(locker.lock().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Closed);
    simba.shutdown();
}

#[test]
fn shutdown_waits_for_a_guard_on_another_thread() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let guard = simba.locker(NAME).lock().unwrap();
    let ended = Arc::new(AtomicUsize::new(0));
    let working = thread::spawn({
        let ended = Arc::clone(&ended);
        move || {
            guard.expiring();
            assert!(guard.is_held());
            ended.store(1, Ordering::SeqCst);
            guard.release().unwrap();
        }
    });
    simba.shutdown();
    assert_eq!(ended.load(Ordering::SeqCst), 1, "the work ended before the shutdown");
    working.join().unwrap();
    assert_empty(&store);
}

#[test]
fn shutdown_with_a_timeout_ends_by_it() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let guard = simba.locker(NAME).lock().unwrap();
    assert_eq!(simba.shutdown_timeout(ms(10)).unwrap_err().kind(), ErrorKind::Timeout);
    assert!(guard.is_held(), "the shutdown waits for the guard");
    drop(guard);
    simba.shutdown_timeout(LONG).unwrap();
    assert_empty(&store);
}

/// Returns the number of threads of this process with this name.
#[cfg(target_os = "linux")]
fn threads(name: &str) -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|comm| comm.trim() == name)
        .count()
}

/// Runs in a separate process, where no other test has an engine.
#[cfg(target_os = "linux")]
#[test]
fn engine_thread_ends_with_its_last_handle() {
    const CHILD: &str = "SIMBA_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "engine_thread_ends_with_its_last_handle"]).env(CHILD, "1");
        let output = child.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    // A new thread briefly has the name of its creator: start the timer thread before threads are counted.
    blocking::wait(SystemClock.sleep_until(SystemClock.now() + ms(1)));
    let store = MemoryBackend::new();
    let handle = simba(&store);
    let locker = handle.locker(NAME);
    let guard = locker.lock().unwrap();
    let tenure = guard.tenure();
    drop((handle, locker));
    assert_eq!(threads("simba-engine"), 1, "the guard needs it");
    drop(guard);
    assert_eq!(blocking::wait(tenure.lost()), Loss::Released);
    let began = Instant::now();
    while threads("simba-engine") > 0 {
        assert!(began.elapsed() < LONG, "the thread still runs");
        thread::yield_now();
    }
    assert_empty(&store);
}
