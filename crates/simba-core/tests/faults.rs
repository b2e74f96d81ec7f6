//! The rows of the fault matrix (`docs/testing.md`) that concern the core only.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::HashMap;
use std::env;
use std::fmt;
use std::future::pending;
use std::process::{self, Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use common::{DEADLINE, NAME, RENEWAL, TOTAL, World, ms, settled, slow_poll_lease};
use futures_util::FutureExt;
use simba_core::operate::MutexRecord;
use simba_core::spi::{Answer, Backend, Claim, Holding, Ownership, Prior, Session, async_trait};
use simba_core::{
    Clock, Contender, ContenderId, ErrorKind, Guard, Lease, Loss, MemoryBackend, MutexName, MutexState,
    Result, Schedule, Simba, Status, SystemClock, Tenure,
};
use simba_tck::{Call, FaultyBackend, Passage, SkewedClock, Switch};
use tokio::runtime::{Builder, Runtime};

/// The lease of the rows on real time. It survives a stall of the machine of two seconds.
fn real_lease() -> Lease {
    Lease::new(ms(2_000), ms(3_000)).unwrap()
}

const REAL_TOTAL: Duration = ms(5_000);
/// The tolerance of a bound on real time for a busy machine: less than another lease, and twice the two seconds, since
/// the timer's thread and the one that it wakes may each stall.
const ROOM: Duration = ms(4_000);

/// The time after which a call counts as hanging.
const HANGS: Duration = Duration::from_secs(60);

fn real(store: &MemoryBackend) -> Simba {
    Simba::new(store.clone()).with_lease(real_lease())
}

fn single_thread() -> Runtime {
    Builder::new_current_thread().enable_all().build().unwrap()
}

// ===== 12: requests arrive, replies do not =====

#[tokio::test(start_paused = true)]
async fn row_12_contender_without_replies_does_not_block_others() {
    let world = World::new();
    let ((one, switch), other) = (world.handle(), world.simba());
    let leader = one.contend(NAME);
    leader.start().unwrap();
    let tenure = leader.acquired().await.unwrap();
    let follower = other.contend(NAME);
    follower.start().unwrap();
    // Its calls still arrive: none of them may acquire the mutex again.
    switch.set(Passage::REPLY_LOST);
    let next = follower.acquired().await.unwrap();
    assert_eq!(tenure.loss(), Some(Loss::Deadline));
    assert!(world.age() <= 4 * TOTAL, "after {:?}", world.age());
    world.sleep(10 * TOTAL).await;
    assert!(next.is_held());
    // Replies arrive again, and it waits in the queue.
    switch.clear();
    follower.stop().await.unwrap();
    assert!(leader.acquired().await.unwrap().token() > next.token());
}

// ===== 4: user code blocks the runtime =====

#[tokio::test]
async fn row_04_blocked_runtime_does_not_hide_a_loss() {
    let simba = real(&MemoryBackend::new());
    let guard = simba.locker(NAME).lock().await.unwrap();
    let deadline = guard.deadline();
    assert!(guard.is_held());
    // The driver runs on this runtime as well, so nothing is renewed meanwhile.
    thread::sleep(2 * REAL_TOTAL);
    assert!(!guard.is_held());
    assert!(SystemClock.now() > deadline);
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert_eq!(guard.expiring().now_or_never(), Some(()));
    assert_eq!(guard.lost().now_or_never(), Some(Loss::Deadline));
    assert_eq!(guard.deadline(), deadline, "no renewal after the loss");
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test]
async fn row_04_work_is_not_polled_again_after_a_block() {
    let simba = real(&MemoryBackend::new());
    let guard = simba.locker(NAME).lock().await.unwrap();
    let polls = AtomicUsize::new(0);
    let mut run = Box::pin(guard.run(counted(&polls)));
    assert!(run.as_mut().now_or_never().is_none());
    thread::sleep(2 * REAL_TOTAL);
    assert_eq!(run.now_or_never().unwrap().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(polls.load(Ordering::Relaxed), 1);
}

/// Work that counts its polls.
async fn counted(polls: &AtomicUsize) {
    std::future::poll_fn(|_| {
        polls.fetch_add(1, Ordering::Relaxed);
        std::task::Poll::Pending
    })
    .await
}

#[tokio::test]
async fn row_04_watchdog_acts_while_the_runtime_is_blocked() {
    let simba = real(&MemoryBackend::new());
    let guard = simba.locker(NAME).lock().await.unwrap();
    let (acted, acts) = mpsc::channel();
    let act = move |loss| acted.send((loss, SystemClock.now())).unwrap();
    guard.tenure().watchdog(act).unwrap();
    let deadline = guard.deadline();
    thread::sleep(2 * REAL_TOTAL);
    let unblocked = SystemClock.now();
    let (loss, at) = acts.try_recv().unwrap();
    assert_eq!(loss, Loss::Deadline);
    let late = at - deadline;
    assert!(at < unblocked && at >= deadline && late <= ROOM, "{late:?} late");
}

// ===== 5: a panic =====

#[tokio::test(start_paused = true)]
async fn row_05_panic_in_guarded_work_frees_the_mutex() {
    let world = World::new();
    let guard = world.simba().locker(NAME).lock().await.unwrap();
    let waiter = world.simba().with_lease(slow_poll_lease()).locker(NAME);
    let next = tokio::spawn(async move { waiter.lock_timeout(TOTAL).await });
    world.queued(1).await;
    let work = tokio::spawn(async move { guard.run(async { panic!("the work panics") }).await });
    assert!(work.await.unwrap_err().is_panic());
    next.await.unwrap().unwrap().release().await.unwrap();
    assert_eq!(world.age(), Duration::ZERO);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn row_05_scheduler_continues_after_a_panic_of_its_job() {
    let world = World::new();
    let runs = Arc::new(AtomicUsize::new(0));
    let run = {
        let runs = Arc::clone(&runs);
        move |_: Tenure| {
            let run = runs.fetch_add(1, Ordering::Relaxed);
            // Once in the call, once in the poll.
            assert_ne!(run, 1, "the call panics");
            async move {
                assert_ne!(run, 3, "the job panics");
                Ok::<_, std::io::Error>(())
            }
        }
    };
    let job = world.simba().scheduler(NAME).start(Schedule::fixed_rate(ms(100)).unwrap(), run).unwrap();
    world.sleep(ms(950)).await;
    let progress = job.progress();
    assert_eq!((progress.started, progress.succeeded, progress.failed), (10, 8, 2));
    assert!(progress.last_failure.unwrap().contains("the job panics"));
    assert!(job.is_leading(), "a panic ends the run and not the tenure");
    assert_eq!(world.record().await.token.unwrap().get(), 1);
    job.stop().await.unwrap();
    world.assert_empty().await;
}

// ===== 7: the runtime is dropped without a shutdown =====

const CHILD: &str = "SIMBA_TEST_CHILD";

/// Runs the named test of this binary again, in a separate process.
fn child(test: &str) -> Output {
    let mut command = Command::new(env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture"]).env(CHILD, test).output().unwrap()
}

#[test]
fn row_07_runtime_that_ends_without_a_shutdown_leaves_only_the_lease() {
    if env::var_os(CHILD).is_some() {
        return drop_a_runtime_and_lock_again();
    }
    let began = Instant::now();
    let output = child("row_07_runtime_that_ends_without_a_shutdown_leaves_only_the_lease");
    assert!(output.status.success(), "{output:?}");
    assert!(String::from_utf8(output.stdout).unwrap().contains("1 passed"), "the child ran the test");
    assert!(began.elapsed() < HANGS, "{:?}", began.elapsed());
}

fn drop_a_runtime_and_lock_again() {
    // A panic of any thread counts, not only of the test's.
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        hook(panic);
        process::exit(101);
    }));
    thread::spawn(|| {
        thread::sleep(HANGS);
        process::exit(102);
    });
    let store = MemoryBackend::new();
    let runtime = Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let simba = real(&store);
    let locker = simba.locker(NAME);
    let guard = runtime.block_on(locker.lock()).unwrap();
    let leading = simba.contend("leader");
    runtime.block_on(async {
        leading.start().unwrap();
        leading.acquired().await.unwrap();
        // One guard and one waiting lock are dropped with the runtime, another guard after it.
        let inner = real(&store).locker("inner").lock().await.unwrap();
        tokio::spawn(async move {
            pending::<()>().await;
            drop(inner);
        });
        let waiter = real(&store).locker(NAME);
        tokio::spawn(async move { waiter.lock().await.map(drop) });
    });
    let tenure = guard.tenure();
    let began = Instant::now();
    drop(runtime);
    assert!(began.elapsed() < ROOM, "{:?}", began.elapsed());
    // The session was dropped with the runtime, and on some stores that frees the mutex.
    assert_eq!(tenure.loss(), Some(Loss::Vanished));

    let runtime = single_thread();
    runtime.block_on(async {
        for name in [NAME, "leader", "inner"] {
            let guard = real(&store).locker(name).lock().await.unwrap();
            // At most one lease, plus the jitter of a waiter.
            let (took, limit) = (began.elapsed(), REAL_TOTAL + REAL_TOTAL / 50 + ROOM);
            assert!(took < limit, "{name}: {took:?}");
            guard.release().await.unwrap();
        }
        // The old handles have no driver any more. Their calls fail at once.
        assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(leading.acquired().await.unwrap_err().kind(), ErrorKind::Closed);
        assert_eq!(leading.status(), Status::Idle);
        locker.lock().await.unwrap().release().await.unwrap();
        simba.shutdown().await;
    });
}

// ===== 9: a guard is dropped outside a runtime =====

/// Returns a guard whose driver is on this runtime.
fn locked(runtime: &Runtime, store: &MemoryBackend) -> Guard {
    runtime.block_on(real(store).locker(NAME).lock()).unwrap()
}

fn record(runtime: &Runtime, store: &MemoryBackend) -> MutexRecord {
    use simba_core::spi::Operate;
    runtime.block_on(store.read(&MutexName::new(NAME).unwrap())).unwrap()
}

#[test]
fn row_09_guard_dropped_on_a_plain_thread_frees_the_mutex() {
    let store = MemoryBackend::new();
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    // The lease does not end within the test.
    let simba = real(&store).with_lease(Lease::new(2 * HANGS, 2 * HANGS).unwrap());
    let guard = runtime.block_on(simba.locker(NAME).lock()).unwrap();
    let tenure = guard.tenure();
    thread::spawn(move || drop(guard)).join().unwrap();
    // The driver runs on the runtime's own thread.
    let next = runtime.block_on(real(&store).locker(NAME).lock_timeout(HANGS)).unwrap();
    assert!(next.is_held());
    assert_eq!(tenure.loss(), Some(Loss::Released));
}

#[test]
fn row_09_guard_dropped_after_its_runtime_holds_for_one_lease() {
    let store = MemoryBackend::new();
    let runtime = single_thread();
    let guard = locked(&runtime, &store);
    let deadline = guard.deadline();
    drop(runtime);
    drop(guard);
    let runtime = single_thread();
    assert!(record(&runtime, &store).owner.is_some(), "no driver could release it");
    let guard = runtime.block_on(real(&store).locker(NAME).lock_timeout(HANGS)).unwrap();
    let (late, limit) = (SystemClock.now() - deadline, REAL_TOTAL / 50 + ROOM);
    assert!(SystemClock.now() >= deadline && late <= limit, "{late:?} after the deadline");
    runtime.block_on(guard.release()).unwrap();
    assert!(record(&runtime, &store).owner.is_none());
}

#[test]
fn row_09_guard_released_after_its_runtime_fails_and_does_not_wait() {
    let store = MemoryBackend::new();
    let runtime = single_thread();
    let guard = locked(&runtime, &store);
    drop(runtime);
    let (released, outcome) = mpsc::channel();
    thread::spawn(move || released.send(simba_core::blocking::wait(guard.release())).unwrap());
    let error = outcome.recv_timeout(HANGS).unwrap().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
}

#[test]
fn row_09_waiting_lock_ends_with_its_runtime() {
    let store = MemoryBackend::new();
    let other = single_thread();
    let _guard = locked(&other, &store);
    let runtime = single_thread();
    let locker = real(&store).locker(NAME);
    let mut waiting = Box::pin(async move { locker.lock().await.map(drop) });
    runtime.block_on(async { assert!(waiting.as_mut().now_or_never().is_none()) });
    drop(runtime);
    let (ended, outcome) = mpsc::channel();
    thread::spawn(move || ended.send(simba_core::blocking::wait(waiting)).unwrap());
    assert_eq!(outcome.recv_timeout(HANGS).unwrap().unwrap_err().kind(), ErrorKind::Closed);
}

#[test]
fn row_09_runtime_that_ends_after_a_stop_is_not_a_loss() {
    let simba = Simba::new(MemoryBackend::new());
    let runtime = single_thread();
    let guard = runtime.block_on(simba.locker(NAME).lock()).unwrap();
    let dropped = guard.tenure();
    let contention = simba.contend("stopped");
    let lead = |contention: &simba_core::Contention| {
        runtime.block_on(async {
            contention.start().unwrap();
            contention.acquired().await.unwrap()
        })
    };
    let stopped = lead(&contention);
    let leader = simba.contend("leader");
    let leading = lead(&leader);
    drop(guard);
    drop(contention);
    drop(runtime);
    assert_eq!((dropped.loss(), stopped.loss()), (Some(Loss::Released), Some(Loss::Released)));
    assert_eq!(leading.loss(), Some(Loss::Vanished), "not stopped before");
}

#[test]
fn row_09_runtime_that_ends_under_a_guard_is_a_loss_even_during_a_shutdown() {
    let simba = real(&MemoryBackend::new());
    let runtime = single_thread();
    let guard = runtime.block_on(simba.locker(NAME).lock()).unwrap();
    let (acted, acts) = mpsc::channel();
    guard.tenure().watchdog(move |loss| acted.send(loss).unwrap()).unwrap();
    runtime.block_on(async {
        let mut shutdown = Box::pin(simba.shutdown());
        assert!(shutdown.as_mut().now_or_never().is_none());
        guard.expiring().await;
    });
    assert!(guard.is_held(), "the shutdown waits for the guard");
    drop(runtime);
    assert_eq!(guard.tenure().loss(), Some(Loss::Vanished));
    assert_eq!(acts.recv_timeout(HANGS), Ok(Loss::Vanished), "the watchdog acts");
}

#[test]
fn row_09_shutdown_ends_while_a_contenders_runtime_is_not_polled() {
    let (idle, driven) = (single_thread(), single_thread());
    let simba = real(&MemoryBackend::new());
    let contention = simba.contend(NAME);
    idle.block_on(async {
        contention.start().unwrap();
        contention.acquired().await.unwrap();
    });
    // One lease.
    let limit = REAL_TOTAL + ROOM;
    driven.block_on(async { tokio::time::timeout(limit, simba.shutdown()).await.unwrap() });
}

// ===== 45, 46: clocks =====

/// Creates a handle with a clock that can be skewed.
fn skewed(world: &World) -> (Simba, SkewedClock) {
    let clock = SkewedClock::new(world.clock.clone());
    (world.builder(Switch::new()).with_clock(clock.clone()).build(), clock)
}

#[tokio::test(start_paused = true)]
async fn row_45_jumps_of_the_wall_clock_have_no_effect() {
    const HOUR: Duration = Duration::from_secs(3600);
    let world = World::new();
    let (simba, clock) = skewed(&world);
    let guard = simba.locker(NAME).lock().await.unwrap();
    let changes = Arc::new(Changes::default());
    let contention = simba.contend("leader").with_contender(Counting(Arc::clone(&changes)));
    contention.start().unwrap();
    contention.acquired().await.unwrap();
    for jump in 0..100 {
        let now = SystemTime::now();
        clock.set_wall(if jump % 2 == 0 { now + HOUR } else { now - HOUR });
        assert!(guard.is_held() && contention.is_owner(), "jump {jump}");
        assert!(!guard.tenure().is_expiring(), "jump {jump}");
        world.sleep(ms(170)).await;
    }
    assert!(guard.is_held(), "{:?}", guard.tenure().loss());
    assert_eq!(world.record().await.token, Some(guard.token()));
    assert_eq!(changes.counts(), (1, 0));
    guard.release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn row_46_hold_ends_at_once_after_a_suspend() {
    let world = World::new();
    let (simba, clock) = skewed(&world);
    let guard = simba.locker(NAME).lock().await.unwrap();
    let lost = tokio::spawn({
        let tenure = guard.tenure();
        async move { tenure.lost().await }
    });
    settled().await;
    world.sleep(ms(100)).await;
    // Suspended until the last moment of the hold: nothing is lost yet.
    clock.jump(DEADLINE - ms(101));
    assert!(guard.is_held());
    clock.jump(ms(1));
    assert!(!guard.is_held());
    assert_eq!(guard.remaining(), Duration::ZERO);
    assert_eq!(guard.expiring().now_or_never(), Some(()));
    assert_eq!(guard.lost().now_or_never(), Some(Loss::Deadline));
    assert_eq!(lost.await.unwrap(), Loss::Deadline, "a sleeping task is woken");
    assert_eq!(world.age(), ms(100));
    assert_eq!(guard.release().await.unwrap_err().kind(), ErrorKind::Lost);
}

#[tokio::test(start_paused = true)]
async fn row_46_work_is_not_polled_again_after_a_suspend() {
    let world = World::new();
    let (simba, clock) = skewed(&world);
    let guard = simba.locker(NAME).lock().await.unwrap();
    let polls = AtomicUsize::new(0);
    let mut run = Box::pin(guard.run(counted(&polls)));
    assert!(run.as_mut().now_or_never().is_none());
    clock.jump(TOTAL);
    assert_eq!(run.now_or_never().unwrap().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(polls.load(Ordering::Relaxed), 1);
}

// ===== 58: one label, two contenders =====

const LABEL: &str = "node";

#[tokio::test(start_paused = true)]
async fn row_58_two_equal_labels_never_share_a_hold() {
    let world = World::new();
    let (simba, weather) = world.handle();
    let guard = simba.locker(NAME).with_label(LABEL).lock().await.unwrap();
    world.sleep(ms(200)).await;
    let other = world.simba();
    let second = other.locker(NAME).with_label(LABEL);
    assert!(second.try_lock().await.unwrap().is_none());
    assert_eq!(second.last_holder().id.as_ref(), Some(guard.tenure().contender()));
    let error = second.lock_timeout(ms(50)).await.unwrap_err();
    assert_eq!((error.kind(), error.holder()), (ErrorKind::Timeout, Some(guard.tenure().contender())));
    let contention = other.contend(NAME).with_label(LABEL);
    contention.start().unwrap();
    world.queued(1).await;

    // Their calls extend nothing: the lease counts from the holder's own request.
    assert_eq!(world.record().await.remaining, Some(TOTAL - ms(250)));
    let renewed = weather.count(Call::Contend);
    world.sleep(10 * TOTAL).await;
    assert!(guard.is_held() && !contention.is_owner());
    assert!(weather.count(Call::Contend) >= renewed + 25);
    let token = guard.token();
    guard.release().await.unwrap();
    let tenure = contention.acquired().await.unwrap();
    assert!(tenure.token() > token);
    contention.stop().await.unwrap();
    second.lock().await.unwrap().release().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn row_58_waiter_with_the_label_of_the_holder_frees_nothing() {
    let world = World::new();
    let first = world.simba().locker(NAME).with_label(LABEL).lock().await.unwrap();
    let second = world.simba().locker(NAME).with_label(LABEL);
    let mut waiting = Box::pin(second.lock());
    assert!(waiting.as_mut().now_or_never().is_none());
    world.queued(1).await;
    drop(waiting);
    settled().await;
    let record = world.record().await;
    assert_eq!((record.token, record.waiters), (Some(first.token()), Some(0)));
    world.sleep(3 * TOTAL).await;
    assert!(first.is_held(), "{:?}", first.tenure().loss());
}

/// A store that identifies contenders by id only, like a row with an owner's id: all sessions of one id are the same
/// session.
struct ById {
    store: MemoryBackend,
    sessions: Mutex<HashMap<ContenderId, SharedSession>>,
}

type SharedSession = Arc<tokio::sync::Mutex<Box<dyn Session>>>;

struct IdSession(ContenderId, SharedSession);

impl fmt::Debug for ById {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ById")
    }
}

#[async_trait]
impl Backend for ById {
    fn name(&self) -> &'static str {
        "by-id"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        let (id, new) = (claim.contender.clone(), self.store.open(claim).await?);
        let mut sessions = self.sessions.lock().unwrap();
        let session = sessions.entry(id.clone()).or_insert_with(|| Arc::new(tokio::sync::Mutex::new(new)));
        Ok(Box::new(IdSession(id, Arc::clone(session))))
    }
}

#[async_trait]
impl Session for IdSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let mut session = self.1.lock().await;
        match session.inspect().await? {
            Some(held) if prior == Prior::Nothing && held.owner == self.0 => Ok(Answer::Held(held)),
            _ => session.contend(prior).await,
        }
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.1.lock().await.inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.1.lock().await.release(holding).await
    }
}

#[tokio::test(start_paused = true)]
async fn row_58_lost_first_call_adopts_no_hold_of_an_equal_label() {
    let world = World::new();
    let store = Arc::new(ById { store: world.store.clone(), sessions: Mutex::default() });
    let handle = || {
        let switch = Switch::new();
        let weather = Arc::clone(&switch) as Arc<dyn simba_tck::Weather>;
        let backend =
            FaultyBackend::over(Arc::clone(&store) as Arc<dyn Backend>, world.clock.clone(), weather);
        let simba = Simba::builder(Arc::new(backend))
            .with_clock(world.clock.clone())
            .with_lease(common::lease())
            .build();
        (simba, switch)
    };
    let guard = handle().0.locker(NAME).with_label(LABEL).lock().await.unwrap();
    for lost in [Passage::HANG, Passage::REPLY_LOST] {
        let (other, weather) = handle();
        weather.once(Call::Contend, lost);
        let second = other.locker(NAME).with_label(LABEL);
        // Its lost call might have acquired, so the next call adopts a hold under its own id.
        tokio::time::timeout(3 * TOTAL, second.lock()).await.unwrap_err();
        assert!(guard.is_held(), "{:?}", guard.tenure().loss());
    }
}

// ===== 61: a callback blocks its thread =====

/// Counts the callbacks of a contender.
#[derive(Default)]
struct Changes {
    acquired: AtomicUsize,
    released: AtomicUsize,
}

impl Changes {
    fn counts(&self) -> (usize, usize) {
        (self.acquired.load(Ordering::SeqCst), self.released.load(Ordering::SeqCst))
    }
}

struct Counting(Arc<Changes>);

impl Contender for Counting {
    async fn on_acquired(&mut self, _: &Tenure, _: &MutexState) {
        self.0.acquired.fetch_add(1, Ordering::SeqCst);
    }

    async fn on_released(&mut self, _: &Tenure, _: &MutexState) {
        self.0.released.fetch_add(1, Ordering::SeqCst);
    }
}

/// Blocks the thread of its callback until it is unblocked.
struct Blocking {
    changes: Arc<Changes>,
    blocked: mpsc::Sender<()>,
    unblock: mpsc::Receiver<()>,
}

impl Contender for Blocking {
    async fn on_acquired(&mut self, _: &Tenure, _: &MutexState) {
        self.changes.acquired.fetch_add(1, Ordering::SeqCst);
        self.blocked.send(()).unwrap();
        self.unblock.recv().unwrap();
    }

    async fn on_released(&mut self, _: &Tenure, _: &MutexState) {
        self.changes.released.fetch_add(1, Ordering::SeqCst);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_61_callback_that_blocks_its_thread_delays_neither_renewals_nor_the_loss() {
    let weather = Switch::new();
    let backend = FaultyBackend::new(MemoryBackend::new(), SystemClock, Arc::<Switch>::clone(&weather));
    let simba = Simba::new(backend).with_lease(real_lease());
    let changes = Arc::new(Changes::default());
    let (blocked, blocks) = mpsc::channel();
    let (unblock, unblocked) = mpsc::channel();
    let contender = Blocking { changes: Arc::clone(&changes), blocked, unblock: unblocked };
    let contention = simba.contend(NAME).with_contender(contender);
    contention.start().unwrap();
    let tenure = contention.acquired().await.unwrap();
    let is_blocked = |blocks: mpsc::Receiver<()>| {
        tokio::task::spawn_blocking(move || blocks.recv_timeout(HANGS).map(|()| blocks).unwrap())
    };
    let blocks = is_blocked(blocks).await.unwrap();

    tokio::time::sleep(2 * REAL_TOTAL).await;
    assert!(tenure.is_held() && contention.is_owner(), "{:?}", tenure.loss());
    assert!(weather.count(Call::Contend) >= 4, "{} calls", weather.count(Call::Contend));
    assert_eq!(changes.counts(), (1, 0));

    weather.set(Passage::HANG);
    assert_eq!(tokio::time::timeout(HANGS, tenure.lost()).await, Ok(Loss::Deadline));
    let late = SystemClock.now() - tenure.deadline();
    assert!(SystemClock.now() >= tenure.deadline() && late <= ROOM, "{late:?} late");
    assert!(!tenure.is_held() && !contention.is_owner());
    assert_eq!(changes.counts(), (1, 0), "still blocked");

    weather.clear();
    unblock.send(()).unwrap();
    let again = contention.acquired().await.unwrap();
    assert!(again.token() > tenure.token());
    is_blocked(blocks).await.unwrap();
    unblock.send(()).unwrap();
    contention.stop().await.unwrap();
    assert_eq!(changes.counts(), (2, 2), "every acquired has its released");
}

#[tokio::test(start_paused = true)]
async fn row_61_callback_that_never_ends_delays_neither_renewals_nor_the_loss() {
    struct Endless;
    impl Contender for Endless {
        async fn on_acquired(&mut self, _: &Tenure, _: &MutexState) {
            pending().await
        }
        async fn on_released(&mut self, _: &Tenure, _: &MutexState) {}
    }
    let world = World::new();
    let (simba, weather) = world.handle();
    let contention = simba.contend(NAME).with_contender(Endless);
    contention.start().unwrap();
    let tenure = contention.acquired().await.unwrap();
    world.sleep(100 * TOTAL).await;
    assert!(tenure.is_held() && contention.is_owner());
    weather.set(Passage::HANG);
    let deadline = tenure.deadline();
    assert!(deadline - world.now() >= DEADLINE - RENEWAL);
    assert_eq!(tenure.lost().await, Loss::Deadline);
    assert_eq!(world.now(), deadline);
}
