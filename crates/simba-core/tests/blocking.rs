//! The same nouns on plain threads, in real time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use common::{NAME, ms};
use simba_core::blocking::{self, Contender, Simba};
use simba_core::operate::MutexRecord;
use simba_core::{
    Clock, Error, ErrorKind, Lease, Loss, MemoryBackend, MutexName, MutexState, Operate, Schedule, Status,
    SystemClock, Tenure, View,
};
use simba_tck::{FaultyBackend, Passage, Switch, Weather};

/// The renewal comes at 400 ms of a second, which leaves room for a machine that stands still for half of one.
fn lease() -> Lease {
    Lease::new(ms(600), ms(400)).unwrap()
}

const TOTAL: Duration = ms(1_000);
/// Longer than anything here takes.
const LONG: Duration = Duration::from_secs(30);

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

/// What `call` gives, unless it hangs.
fn soon<R: Send + 'static>(call: impl FnOnce() -> R + Send + 'static) -> R {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(call()));
    result.recv_timeout(LONG).unwrap()
}

// ===== locking =====

#[test]
fn a_lock_is_held_refused_to_others_and_released() {
    let store = MemoryBackend::new();
    let (one, other) = (simba(&store), simba(&store));
    let guard = one.locker(NAME).lock().unwrap();
    assert!(guard.is_held() && !guard.remaining().is_zero());
    assert_eq!(record(&store).token, Some(guard.token()));

    let locker = other.locker(NAME);
    assert!(locker.try_lock().unwrap().is_none());
    assert_eq!(locker.last_holder().id.as_ref(), Some(guard.tenure().contender()));
    let began = Instant::now();
    let error = locker.lock_timeout(ms(100)).unwrap_err();
    assert!(began.elapsed() >= ms(100));
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
fn a_waiting_thread_gets_the_mutex_when_another_releases_it() {
    let store = MemoryBackend::new();
    let guard = simba(&store).locker(NAME).lock().unwrap();
    let waiting = thread::spawn({
        // Hardly ever looks by itself, so that it is woken or late.
        let waiter = simba(&store).with_lease(lease().with_poll(LONG).unwrap());
        move || waiter.locker(NAME).lock().unwrap().token()
    });
    while record(&store).waiters != Some(1) {
        thread::yield_now();
    }
    let token = guard.token();
    guard.release().unwrap();
    assert!(soon(move || waiting.join().unwrap()) > token);
}

#[test]
fn renewals_go_on_while_the_caller_sleeps_for_three_leases() {
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
fn a_thread_can_wait_for_the_loss() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let locker = simba.locker(NAME).with_max_hold(TOTAL);
    let began = Instant::now();
    let guard = locker.lock().unwrap();
    guard.expiring();
    assert!(guard.is_held());
    assert_eq!(guard.lost(), Loss::MaxHold);
    assert!(began.elapsed() >= TOTAL);
    assert_eq!(guard.release().unwrap_err().kind(), ErrorKind::Lost);
}

#[test]
fn a_dropped_guard_frees_the_mutex() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let guard = simba.locker(NAME).lock().unwrap();
    let tenure = guard.tenure();
    drop(guard);
    assert_eq!(blocking::wait(tenure.lost()), Loss::Released);
    simba.locker(NAME).lock_timeout(LONG).unwrap().release().unwrap();
}

#[test]
fn a_guard_outlives_the_handle_it_came_from() {
    let store = MemoryBackend::new();
    let guard = simba(&store).locker(NAME).lock().unwrap();
    thread::sleep(2 * TOTAL);
    assert!(guard.is_held(), "its engine goes on: {:?}", guard.tenure().loss());
    guard.release().unwrap();
    assert_empty(&store);
}

#[test]
fn a_backend_that_cannot_be_made_is_an_error() {
    let refused = Simba::connect(async { Err(Error::new(ErrorKind::Denied, "no")) });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Denied);
}

// ===== contending, scheduling, observing =====

/// Tells a channel of every callback, and blocks in each.
struct Telling(mpsc::Sender<(&'static str, u64)>);

impl Contender for Telling {
    fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) {
        assert!(state.is_acquired(tenure.contender()));
        thread::sleep(2 * TOTAL);
        assert!(tenure.is_held(), "a callback that blocks delays no renewal: {:?}", tenure.loss());
        self.0.send(("acquired", tenure.token().get())).unwrap();
    }

    fn on_released(&mut self, tenure: &Tenure, state: &MutexState) {
        assert!(state.is_released(tenure.contender()));
        assert!(tenure.is_held(), "the mutex is freed after this callback");
        self.0.send(("released", tenure.token().get())).unwrap();
    }
}

/// Tells a channel which callbacks come, and in which order.
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
fn a_contender_is_notified_to_stop_while_the_store_hangs() {
    let switch = Switch::new();
    let weather = Arc::clone(&switch) as Arc<dyn Weather>;
    let backend = FaultyBackend::new(MemoryBackend::new(), SystemClock, weather);
    // Survives two seconds in which the machine stops.
    let lease = Lease::new(ms(2_000), ms(3_000)).unwrap();
    let simba = Simba::new(backend).unwrap().with_lease(lease);
    let (told, tells) = mpsc::channel();
    let contention = simba.contend(NAME).with_label("node-1").with_contender(Phases(told));
    contention.start().unwrap();
    assert_eq!(tells.recv_timeout(LONG), Ok("acquired"));
    assert!(contention.id().unwrap().as_str().starts_with("node-1."));
    assert_eq!(contention.label(), Some("node-1"));
    switch.set(Passage::HANG);
    assert_eq!(tells.recv_timeout(LONG), Ok("expiring"));
    // A renewal that was on its way when the store hung may have come late, and the end was near once more.
    let mut callbacks = std::iter::from_fn(|| tells.recv_timeout(LONG).ok());
    assert_eq!(callbacks.find(|callback| *callback != "expiring"), Some("released"));
}

#[test]
fn a_contender_is_called_back_where_it_may_block() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let (told, tells) = mpsc::channel();
    let contention = simba.contend(NAME).with_contender(Telling(told));
    assert_eq!(contention.acquired().unwrap_err().kind(), ErrorKind::Closed, "not started yet");
    contention.start().unwrap();
    let tenure = contention.acquired().unwrap();
    assert!(contention.is_owner());
    let token = tenure.token().get();
    assert_eq!(tells.recv_timeout(LONG), Ok(("acquired", token)));
    contention.stop().unwrap();
    assert_eq!(tells.try_recv(), Ok(("released", token)), "a stop waits for it");
    assert_eq!(tenure.loss(), Some(Loss::Released));
    assert_eq!(
        (contention.status(), contention.last_error().map(|error| error.kind())),
        (Status::Idle, None)
    );
    assert_empty(&store);
    contention.start().unwrap();
    let (acquired, again) = tells.recv_timeout(LONG).unwrap();
    assert!(acquired == "acquired" && again > token);
    drop(contention);
    assert_eq!(tells.recv_timeout(LONG), Ok(("released", again)));
}

#[test]
fn leading_moves_on_when_the_leader_steps_down() {
    let store = MemoryBackend::new();
    let (one, other) = (simba(&store), simba(&store));
    let (first, second) = (one.contend(NAME), other.contend(NAME));
    first.start().unwrap();
    let tenure = first.acquired().unwrap();
    second.start().unwrap();
    first.step_down(LONG);
    let second = Arc::new(second);
    let next = soon({
        let second = Arc::clone(&second);
        move || second.acquired().unwrap()
    });
    assert!(next.token() > tenure.token());
    assert_eq!(blocking::wait(tenure.lost()), Loss::SteppedDown);
    assert!(!first.is_owner() && second.is_owner());
    assert!(second.owner().is_owner(next.contender()));
}

#[test]
fn a_job_runs_on_schedule_where_it_may_block() {
    let store = MemoryBackend::new();
    let simba = simba(&store);
    let (ran, runs) = mpsc::channel();
    let mut number = 0;
    let job = simba.scheduler(NAME).start(Schedule::fixed_rate(ms(20)).unwrap(), move |tenure| {
        number += 1;
        assert_ne!(number, 2, "a run that panics costs the run alone");
        if number == 1 {
            thread::sleep(2 * TOTAL);
        }
        ran.send((number, tenure.token().get(), tenure.is_held())).unwrap();
        if number == 3 { Err(std::io::Error::other("the third fails")) } else { Ok(()) }
    });
    let job = job.unwrap();
    let seen: Vec<_> = (0..3).map(|_| runs.recv_timeout(LONG).unwrap()).collect();
    let token = seen[0].1;
    assert_eq!(seen, [(1, token, true), (3, token, true), (4, token, true)], "one leader all along");
    assert!(job.is_leading());
    job.stop().unwrap();
    let progress = job.progress();
    assert_eq!(progress.failed, 2);
    assert_eq!(progress.started, progress.succeeded + progress.failed);
    assert_eq!(progress.last_failure.as_deref(), Some("the third fails"));
    assert_empty(&store);
}

#[test]
fn an_observer_sees_the_owner_come_and_go() {
    let store = MemoryBackend::new();
    let (one, other) = (simba(&store), simba(&store).with_lease(lease().with_poll(LONG).unwrap()));
    let mut observer = other.observe(NAME).unwrap();
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

// ===== beside a runtime =====

fn lock_and_release(simba: &Simba) {
    let guard = simba.locker(NAME).lock_timeout(LONG).unwrap();
    assert!(guard.is_held());
    guard.release().unwrap();
}

#[tokio::test(flavor = "current_thread")]
async fn the_calls_work_on_a_runtime_s_only_thread() {
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
async fn the_calls_work_on_a_worker_and_on_a_blocking_thread() {
    let simba = simba(&MemoryBackend::new());
    let (on_worker, on_blocking) = (simba.clone(), simba.clone());
    tokio::spawn(async move { lock_and_release(&on_worker) }).await.unwrap();
    tokio::task::spawn_blocking(move || lock_and_release(&on_blocking)).await.unwrap();
    simba.shutdown();
}

/// A task of tokio may make some 128 steps before it has to yield, which a blocking call cannot.
#[test]
fn a_task_without_budget_left_is_not_blocked_for_ever() {
    soon(|| {
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
fn a_shutdown_leaves_nothing() {
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
fn a_shutdown_waits_for_a_guard_on_another_thread() {
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
    assert_eq!(ended.load(Ordering::SeqCst), 1, "the work was over before the shutdown was");
    working.join().unwrap();
    assert_empty(&store);
}

/// How many threads of this process have this name.
#[cfg(target_os = "linux")]
fn threads(name: &str) -> usize {
    std::fs::read_dir("/proc/self/task")
        .unwrap()
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|comm| comm.trim() == name)
        .count()
}

/// Runs in a process of its own, where no other test has an engine.
#[cfg(target_os = "linux")]
#[test]
fn the_engine_thread_ends_with_its_last_handle() {
    const CHILD: &str = "SIMBA_TEST_CHILD";
    if std::env::var_os(CHILD).is_none() {
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", "the_engine_thread_ends_with_its_last_handle"]).env(CHILD, "1");
        let output = child.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        return;
    }
    // A thread that starts has its starter's name for a moment: let the timer's start here and now.
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
        assert!(began.elapsed() < LONG, "the thread goes on");
        thread::yield_now();
    }
    assert_empty(&store);
}
