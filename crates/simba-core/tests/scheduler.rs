//! Scheduled jobs: start, leader, failure and stop, on virtual time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::convert::Infallible;
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use simba_core::{
    Clock, ErrorKind, FencingToken, Job, Lease, Loss, MemoryBackend, Moment, Schedule, Simba, Status, Tenure,
};
use simba_tck::{Call, Passage, SkewedClock};
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::time::{sleep, timeout};
use world::{
    DEADLINE, EXPIRING, LEASE, MUTEX, Peer, RELEASE_LIMIT, WORK_DROPPED, World, WorldClock, handle, lease,
    ms, secs,
};

// ===== a job that records its runs =====

/// The start of a run.
#[derive(Clone, Debug)]
struct Run {
    at: Moment,
    wall: Duration,
    token: FencingToken,
    may_start: bool,
}

/// Records the start of each run.
#[derive(Clone)]
struct Recorder<C> {
    runs: UnboundedSender<Run>,
    clock: C,
}

struct Runs(UnboundedReceiver<Run>);

fn recorder<C: Clock + Clone>(clock: &C) -> (Recorder<C>, Runs) {
    let (runs, read) = mpsc::unbounded_channel();
    (Recorder { runs, clock: clock.clone() }, Runs(read))
}

impl<C: Clock> Recorder<C> {
    fn note(&self, tenure: &Tenure) {
        let wall = self.clock.wall().duration_since(UNIX_EPOCH).unwrap();
        let may_start = tenure.is_held() && !tenure.is_expiring();
        let _ = self.runs.send(Run { at: self.clock.now(), wall, token: tenure.token(), may_start });
    }
}

impl Runs {
    /// Waits for the next runs, and asserts that each was allowed to start.
    async fn take(&mut self, number: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        for _ in 0..number {
            let run = self.0.recv().await.unwrap();
            assert!(run.may_start, "started while invalid or expiring: {run:?}");
            runs.push(run);
        }
        runs
    }

    async fn next(&mut self) -> Run {
        self.take(1).await.remove(0)
    }

    /// Returns the runs since the last call.
    fn drain(&mut self) -> Vec<Run> {
        let mut runs = Vec::new();
        while let Ok(run) = self.0.try_recv() {
            assert!(run.may_start, "started while invalid or expiring: {run:?}");
            runs.push(run);
        }
        runs
    }
}

/// Schedules a job that takes `busy` and records its runs.
fn schedule<C: Clock + Clone>(simba: &Simba, clock: &C, schedule: Schedule, busy: Duration) -> (Job, Runs) {
    let (recorder, runs) = recorder(clock);
    let job = simba.scheduler(MUTEX).start(schedule, move |tenure| {
        let recorder = recorder.clone();
        async move {
            recorder.note(&tenure);
            if !busy.is_zero() {
                recorder.clock.sleep_until(recorder.clock.now() + busy).await;
            }
            Ok::<(), Infallible>(())
        }
    });
    (job.unwrap(), runs)
}

impl Peer {
    fn every(&self, world: &World, period: Duration, busy: Duration) -> (Job, Runs) {
        schedule(&self.simba, &world.clock, Schedule::fixed_rate(period).unwrap(), busy)
    }
}

fn starts(runs: &[Run]) -> Vec<Duration> {
    runs.iter().map(|run| run.at.since_zero()).collect()
}

fn ticks_of(first: Duration, period: Duration, number: u32) -> Vec<Duration> {
    (0..number).map(|tick| first + period * tick).collect()
}

// ===== schedules =====

#[tokio::test(start_paused = true)]
async fn fixed_rate_keeps_its_ticks_however_long_a_run_takes() {
    let world = World::new();
    let (job, mut runs) = world.peer(1).every(&world, ms(100), ms(30));
    assert_eq!(starts(&runs.take(50).await), ticks_of(Duration::ZERO, ms(100), 50));
    job.stop().await.unwrap();
    let progress = job.progress();
    assert_eq!((progress.started, progress.succeeded, progress.failed), (50, 50, 0));
}

#[tokio::test(start_paused = true)]
async fn fixed_delay_counts_from_the_end_of_a_run() {
    let world = World::new();
    let peer = world.peer(1);
    let every = Schedule::fixed_delay(ms(100)).unwrap();
    let (_job, mut runs) = schedule(&peer.simba, &world.clock, every, ms(30));
    assert_eq!(starts(&runs.take(50).await), ticks_of(Duration::ZERO, ms(130), 50));
}

#[tokio::test(start_paused = true)]
async fn initial_delay_precedes_the_first_run_of_every_tenure() {
    let world = World::new();
    let peer = world.peer(1);
    for make in [Schedule::fixed_rate, Schedule::fixed_delay] {
        let every = make(ms(100)).unwrap().with_initial_delay(secs(3)).unwrap();
        let (job, mut runs) = schedule(&peer.simba, &world.clock, every, Duration::ZERO);
        let led = job.acquired().await.unwrap().acquired_at().since_zero();
        assert_eq!(starts(&runs.take(3).await), ticks_of(led + secs(3), ms(100), 3));
        job.step_down(secs(1));
        let tenure = loop {
            let tenure = job.acquired().await.unwrap();
            if tenure.acquired_at().since_zero() > led {
                break tenure;
            }
            tenure.lost().await;
        };
        let led = tenure.acquired_at().since_zero();
        assert_eq!(starts(&runs.take(3).await), ticks_of(led + secs(3), ms(100), 3));
        job.stop().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn cron_job_runs_at_its_wall_clock_times() {
    let world = World::new();
    let peer = world.peer(1);
    let every = Schedule::cron("*/20 * * * * *").unwrap();
    let (_job, mut runs) = schedule(&peer.simba, &world.clock, every, ms(30));
    let runs = runs.take(9).await;
    let walls: Vec<_> = runs.iter().map(|run| run.wall).collect();
    assert_eq!(walls, ticks_of(WorldClock::WALL + secs(20), secs(20), 9), "from the next occurrence on");
    assert!(runs.windows(2).all(|two| two[0].token == two[1].token), "nine leases, one tenure");
}

#[tokio::test(start_paused = true)]
async fn cron_job_runs_once_for_all_occurrences_that_a_jump_skipped() {
    let world = World::new();
    let peer = world.peer(1);
    let clock = SkewedClock::new(world.clock.clone());
    let noon = world.clock.wall();
    clock.set_wall(noon);
    let simba = world.handle(1, peer.switch, clock.clone());
    let (_job, mut runs) = schedule(&simba, &clock, Schedule::cron("* * * * *").unwrap(), Duration::ZERO);
    timeout(secs(600), runs.next()).await.unwrap_err();
    clock.set_wall(noon + secs(3600));
    let jumped = world.now();
    assert!(runs.next().await.at <= jumped + secs(30), "a step of the wall clock is noticed within 30 s");
    timeout(secs(600), runs.next()).await.unwrap_err();
    clock.set_wall(noon + secs(3660));
    runs.next().await;
    clock.set_wall(noon);
    timeout(secs(600), runs.next()).await.unwrap_err();
}

// ===== on the leader only =====

#[tokio::test(start_paused = true)]
async fn job_runs_on_the_leader_only_and_moves_when_the_leader_stops() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (leader, mut leading) = one.every(&world, ms(100), Duration::ZERO);
    leading.next().await;
    let (follower, mut following) = two.every(&world, ms(100), Duration::ZERO);
    sleep(ms(10_050)).await;
    assert!(leader.is_leading() && !follower.is_leading());
    assert_eq!((following.drain().len(), follower.progress().started), (0, 0));
    let of_leader = leading.drain();
    assert_eq!(of_leader.len(), 100);

    let stopped = world.now();
    leader.stop().await.unwrap();
    let first = following.next().await;
    assert_eq!(first.at, stopped, "acquired at once");
    assert!(first.token > of_leader[0].token);
    sleep(ms(10_050)).await;
    assert_eq!((leading.drain().len(), following.drain().len()), (0, 100));
}

#[tokio::test(start_paused = true)]
async fn job_moves_within_a_lease_if_the_store_hangs_and_never_runs_twice_at_once() {
    for seed in 0..50 {
        let world = World::new();
        let (one, two) = (world.peer(seed), world.peer(seed + 1000));
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let start = |peer: &Peer| {
            let (recorder, runs) = recorder(&world.clock);
            let (running, most) = (Arc::clone(&running), Arc::clone(&most));
            let job = move |tenure: Tenure| {
                let (recorder, running, most) = (recorder.clone(), Arc::clone(&running), Arc::clone(&most));
                async move {
                    recorder.note(&tenure);
                    let _running = Running::enter(running, &most);
                    // Does not await `expiring`: the engine has to drop it.
                    sleep(secs(3600)).await;
                    Ok::<(), Infallible>(())
                }
            };
            let every = Schedule::fixed_rate(ms(10)).unwrap();
            (peer.simba.scheduler(MUTEX).start(every, job).unwrap(), runs)
        };
        let (leader, mut leading) = start(&one);
        leading.next().await;
        let (follower, mut following) = start(&two);
        sleep(ms(1 + seed * 17)).await;
        one.switch.set(Passage::HANG);
        let tenure = leader.tenure().unwrap();
        let freed = world.now() + world.record().await.remaining.unwrap();
        let first = following.next().await;
        assert!(first.at >= freed && first.at <= freed + LEASE / 50, "seed {seed}");
        assert!(first.token > tenure.token() && tenure.loss() == Some(Loss::Deadline));
        assert_eq!(most.load(Ordering::SeqCst), 1, "two runs at once with seed {seed}");
        assert_eq!((leader.progress().started, leader.progress().failed), (1, 1));
        assert!(leader.progress().last_failure.unwrap().contains("lost"));
        drop(follower);
    }
}

/// Counts the runs at the same time.
struct Running(Arc<AtomicUsize>);

impl Running {
    fn enter(running: Arc<AtomicUsize>, most: &AtomicUsize) -> Self {
        let now = running.fetch_add(1, Ordering::SeqCst) + 1;
        most.fetch_max(now, Ordering::SeqCst);
        Self(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

#[tokio::test(start_paused = true)]
async fn no_run_starts_while_the_tenure_is_invalid_or_expiring() {
    for seed in 0..20 {
        let world = World::new();
        let peer = world.peer(seed);
        let (job, mut runs) = peer.every(&world, ms(1), Duration::ZERO);
        runs.next().await;
        sleep(ms(100 + seed * 31)).await;
        peer.switch.set(Passage::HANG);
        let tenure = job.tenure().unwrap();
        let sent = tenure.deadline().saturating_sub(DEADLINE);
        sleep(secs(10)).await;
        let last = runs.drain().pop().unwrap();
        assert_eq!(last.at, sent + (EXPIRING - ms(1)), "the last tick before expiring");
        assert_eq!(job.progress().failed, 0);
        peer.switch.clear();
        let next = runs.next().await;
        assert!(next.token > last.token, "in a new tenure");
        job.stop().await.unwrap();
    }
}

#[tokio::test(start_paused = true)]
async fn runs_continue_after_a_renewal_before_the_deadline() {
    let world = World::new();
    let peer = world.peer(1);
    let (job, mut runs) = peer.every(&world, ms(10), Duration::ZERO);
    runs.next().await;
    let tenure = job.tenure().unwrap();
    peer.switch.set(Passage::fail(ErrorKind::Unavailable));
    sleep(EXPIRING + ms(100)).await;
    assert_eq!(runs.drain().pop().unwrap().at.since_zero(), EXPIRING - ms(10));
    peer.switch.clear();
    let next = runs.next().await;
    assert!(next.at.since_zero() < DEADLINE && next.token == tenure.token());
    let later = runs.take(10).await;
    assert!(
        starts(&later).iter().all(|at| at.as_millis().is_multiple_of(10)),
        "on the same ticks: {later:?}"
    );
    assert!(tenure.is_held());
}

// ===== failed runs =====

#[tokio::test(start_paused = true)]
async fn failed_and_panicked_runs_are_counted_and_the_schedule_continues() {
    let world = World::new();
    let peer = world.peer(1);
    let (recorder, mut runs) = recorder(&world.clock);
    let mut number = 0;
    let job = move |tenure: Tenure| {
        recorder.note(&tenure);
        number += 1;
        // Before its future is created, or in the future.
        assert!(number != 4, "the fourth panics");
        async move {
            match number {
                2 => Err("the second fails"),
                3 => panic!("the third panics"),
                5 => panic!("the {}th panics", 5),
                _ => Ok(()),
            }
        }
    };
    let job = peer.simba.scheduler(MUTEX).start(Schedule::fixed_rate(ms(100)).unwrap(), job).unwrap();
    let progress = |number: u32| {
        let (job, world) = (&job, &world);
        async move {
            world.clock.sleep_until(Moment::ZERO + ms(100) * (number - 1) + ms(1)).await;
            let progress = job.progress();
            (progress.started, progress.succeeded, progress.failed, progress.last_failure.unwrap_or_default())
        }
    };
    assert_eq!(progress(1).await, (1, 1, 0, String::new()));
    assert_eq!(progress(2).await, (2, 1, 1, "the second fails".into()));
    assert_eq!(progress(3).await, (3, 1, 2, "the job panicked: the third panics".into()));
    assert_eq!(progress(4).await, (4, 1, 3, "the job panicked: the fourth panics".into()));
    assert_eq!(progress(5).await, (5, 1, 4, "the job panicked: the 5th panics".into()));
    let last = progress(50).await;
    assert_eq!((last.0, last.1, last.2), (50, 46, 4));
    assert_eq!(starts(&runs.drain()), ticks_of(Duration::ZERO, ms(100), 50), "on every tick, in one tenure");
}

/// An error of a job that panics in its conversion or its `Display`.
#[derive(Debug)]
enum PanickingError {
    Converted,
    Shown,
}

#[derive(Debug)]
struct PanickingDisplay;

impl std::fmt::Display for PanickingDisplay {
    fn fmt(&self, _: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        panic!("shown")
    }
}

impl std::error::Error for PanickingDisplay {}

impl From<PanickingError> for Box<dyn std::error::Error + Send + Sync> {
    fn from(error: PanickingError) -> Self {
        match error {
            PanickingError::Converted => panic!("converted"),
            PanickingError::Shown => Box::new(PanickingDisplay),
        }
    }
}

/// Panics if it is dropped before its end.
struct PanickingDrop {
    done: bool,
}

impl Drop for PanickingDrop {
    fn drop(&mut self) {
        assert!(self.done, "dropped");
    }
}

#[tokio::test(start_paused = true)]
async fn error_that_panics_is_a_failed_run_and_the_schedule_continues() {
    let world = World::new();
    let peer = world.peer(1);
    let mut number = 0;
    let job = move |_| {
        number += 1;
        let outcome = match number {
            1 => Err(PanickingError::Converted),
            2 => Err(PanickingError::Shown),
            _ => Ok(()),
        };
        async move { outcome }
    };
    let job = peer.simba.scheduler(MUTEX).start(Schedule::fixed_rate(ms(100)).unwrap(), job).unwrap();
    for (run, panic) in [(1, "converted"), (2, "shown")] {
        world.clock.sleep_until(Moment::ZERO + ms(100) * (run - 1) + ms(1)).await;
        let failure = job.progress().last_failure.unwrap();
        assert_eq!(failure, format!("the job panicked: {panic}"));
    }
    world.clock.sleep_until(Moment::ZERO + ms(901)).await;
    let progress = job.progress();
    assert_eq!((progress.started, progress.succeeded, progress.failed), (10, 8, 2));
}

#[tokio::test(start_paused = true)]
async fn run_that_panics_in_its_drop_is_a_failed_run_and_the_schedule_continues() {
    let world = World::new();
    let peer = world.peer(1);
    let mut number = 0;
    let job = move |_| {
        number += 1;
        let panicking = PanickingDrop { done: number > 1 };
        async move {
            // Moves the whole value into the future, not only its field.
            let panicking = panicking;
            if !panicking.done {
                pending::<()>().await;
            }
            Ok::<(), Infallible>(())
        }
    };
    let job = peer.simba.scheduler(MUTEX).start(Schedule::fixed_rate(ms(100)).unwrap(), job).unwrap();
    job.acquired().await.unwrap();
    peer.switch.set(Passage::HANG);
    sleep(LEASE).await;
    assert_eq!(job.progress().last_failure.as_deref(), Some("the job panicked: dropped"));
    peer.switch.clear();
    sleep(3 * LEASE).await;
    let progress = job.progress();
    assert!(job.is_leading() && progress.succeeded > 10, "{progress:?}");
}

#[tokio::test(start_paused = true)]
async fn runs_never_overlap_and_ticks_during_a_long_run_are_skipped() {
    // The next tick after the end, or the delay after it.
    let schedules = [(Schedule::fixed_rate(ms(10)), ms(40)), (Schedule::fixed_delay(ms(10)), ms(45))];
    for (every, period) in schedules {
        let world = World::new();
        let peer = world.peer(1);
        let (running, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
        let (recorder, mut runs) = recorder(&world.clock);
        let (inside, peak) = (Arc::clone(&running), Arc::clone(&most));
        let job = move |tenure: Tenure| {
            let (recorder, running, most) = (recorder.clone(), Arc::clone(&inside), Arc::clone(&peak));
            async move {
                recorder.note(&tenure);
                let _running = Running::enter(running, &most);
                sleep(ms(35)).await;
                Ok::<(), Infallible>(())
            }
        };
        let _job = peer.simba.scheduler(MUTEX).start(every.unwrap(), job).unwrap();
        assert_eq!(starts(&runs.take(100).await), ticks_of(Duration::ZERO, period, 100));
        assert_eq!(most.load(Ordering::SeqCst), 1);
    }
}

// ===== pauses of the process =====

/// Creates a handle of a process that can be paused, and its clock. Time continues for the store.
fn pausable(lease: Lease) -> (SkewedClock, Simba) {
    let clock = SkewedClock::new(World::new().clock);
    let store = MemoryBackend::with_clock(clock.clone());
    let simba = handle(store, 1, clock.clone()).with_lease(lease);
    (clock, simba)
}

#[tokio::test(start_paused = true)]
async fn row_63_pause_of_five_seconds_within_a_lease_causes_one_tick_and_no_burst() {
    let long = Lease::new(secs(60), secs(40)).unwrap();
    for jump in [secs(5), ms(5050), ms(5099)] {
        let (clock, simba) = pausable(long);
        let every = Schedule::fixed_rate(ms(100)).unwrap();
        let (job, mut runs) = schedule(&simba, &clock, every, ms(10));
        runs.take(11).await;
        sleep(ms(50)).await;
        let before = clock.now();
        clock.jump(jump);
        sleep(ms(49)).await;
        let ticks = runs.drain();
        assert_eq!(ticks.len(), 1, "after a pause of {jump:?}");
        // Then on the same ticks: at whole tenths of a second since the first run.
        let next = starts(&runs.take(5).await);
        let first = next[0];
        assert!(first > (before + jump).since_zero() && first <= (before + jump).since_zero() + ms(150));
        assert_eq!(next, ticks_of(first, ms(100), 5));
        assert!(first.as_millis() % 100 <= 1, "{first:?}; this clock wakes a sleeper up to 1 ms late");
        assert!(job.is_leading());
    }
}

#[tokio::test(start_paused = true)]
async fn row_63_pause_of_five_seconds_beyond_the_lease_causes_one_tick_in_a_new_tenure() {
    let (clock, simba) = pausable(lease());
    let every = Schedule::fixed_rate(ms(100)).unwrap();
    let (job, mut runs) = schedule(&simba, &clock, every, ms(10));
    let old = runs.take(11).await.pop().unwrap();
    sleep(ms(50)).await;
    let tenure = job.tenure().unwrap();
    clock.jump(secs(5));
    assert!(!tenure.is_held() && !job.is_leading(), "invalid at once");
    sleep(ms(49)).await;
    let ticks = runs.drain();
    assert_eq!(ticks.len(), 1, "after the pause");
    assert!(ticks[0].token > old.token, "not in the old tenure");
    let next = starts(&runs.take(5).await);
    assert_eq!(next, ticks_of(next[0], ms(100), 5));
}

#[tokio::test(start_paused = true)]
async fn row_63_blocked_runtime_causes_one_tick_and_no_burst() {
    let world = World::new();
    let long = Lease::new(secs(60), secs(40)).unwrap();
    let simba = world.peer(1).simba.with_lease(long);
    let every = Schedule::fixed_rate(ms(100)).unwrap();
    let (_job, mut runs) = schedule(&simba, &world.clock, every, ms(10));
    runs.take(11).await;
    sleep(ms(50)).await;
    runs.drain();
    // No task runs while these five seconds pass.
    tokio::time::advance(secs(5)).await;
    sleep(ms(49)).await;
    assert_eq!(runs.drain().len(), 1);
    assert_eq!(starts(&runs.take(5).await), ticks_of(ms(6100), ms(100), 5));
}

// ===== stopping =====

#[tokio::test(start_paused = true)]
async fn running_job_is_notified_to_stop_and_awaited() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (recorder, mut runs) = recorder(&world.clock);
    let record = recorder.clone();
    let job = one.simba.scheduler(MUTEX).start(Schedule::fixed_rate(ms(10)).unwrap(), move |tenure| {
        let record = record.clone();
        async move {
            record.note(&tenure);
            tenure.expiring().await;
            sleep(ms(200)).await;
            assert!(tenure.is_held(), "the mutex is held until its end");
            Ok::<(), Infallible>(())
        }
    });
    let job = job.unwrap();
    runs.next().await;
    let (next, mut following) = two.every(&world, ms(10), Duration::ZERO);
    sleep(ms(50)).await;
    job.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + ms(250));
    let progress = job.progress();
    assert_eq!((progress.started, progress.succeeded, progress.failed), (1, 1, 0));
    assert_eq!(following.next().await.at, Moment::ZERO + ms(250), "then the next leader runs it");
    drop(next);
}

/// Sends the moment of its drop.
struct OnDrop(UnboundedSender<Moment>, WorldClock);

impl Drop for OnDrop {
    fn drop(&mut self) {
        let _ = self.0.send(self.1.now());
    }
}

#[tokio::test(start_paused = true)]
async fn job_that_does_not_stop_is_dropped_before_the_deadline() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (dropped, mut drops) = mpsc::unbounded_channel();
    let (recorder, mut runs) = recorder(&world.clock);
    let clock = world.clock.clone();
    let job = one.simba.scheduler(MUTEX).start(Schedule::fixed_rate(ms(10)).unwrap(), move |tenure| {
        let (recorder, on_drop) = (recorder.clone(), OnDrop(dropped.clone(), clock.clone()));
        async move {
            recorder.note(&tenure);
            let _on_drop = on_drop;
            pending::<Result<(), Infallible>>().await
        }
    });
    let job = job.unwrap();
    runs.next().await;
    let tenure = job.tenure().unwrap();
    let (_next, mut following) = two.every(&world, ms(10), Duration::ZERO);
    sleep(ms(50)).await;
    job.stop().await.unwrap();
    let end = tenure.acquired_at() + WORK_DROPPED;
    assert_eq!((world.now(), drops.recv().await.unwrap()), (end, end));
    let progress = job.progress();
    assert_eq!((progress.started, progress.succeeded, progress.failed), (1, 0, 1));
    assert_eq!(following.next().await.at, end);
}

#[tokio::test(start_paused = true)]
async fn no_run_starts_after_a_stop() {
    let world = World::new();
    let peer = world.peer(1);
    let (job, mut runs) = peer.every(&world, ms(1), Duration::ZERO);
    runs.take(100).await;
    job.stop().await.unwrap();
    runs.drain();
    assert_eq!((job.status(), job.is_leading()), (Status::Idle, false));
    world.assert_empty().await;
    sleep(secs(60)).await;
    assert_eq!(runs.drain().len(), 0);
    job.stop().await.unwrap();
    let calls = [Call::Contend, Call::Release].map(|call| peer.switch.count(call));
    sleep(secs(60)).await;
    assert_eq!(calls, [Call::Contend, Call::Release].map(|call| peer.switch.count(call)));
}

#[tokio::test(start_paused = true)]
async fn stop_while_the_store_hangs_is_bounded_and_no_run_follows() {
    let world = World::new();
    let peer = world.peer(1);
    let (job, mut runs) = peer.every(&world, ms(1), Duration::ZERO);
    runs.take(100).await;
    peer.switch.set(Passage::HANG);
    let requested = world.now();
    assert_eq!(job.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(world.now() - requested <= RELEASE_LIMIT);
    assert!(runs.drain().iter().all(|run| run.at <= requested));
    peer.switch.clear();
    sleep(secs(60)).await;
    assert_eq!(runs.drain().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn dropped_job_stops_gracefully() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (job, mut runs) = one.every(&world, ms(100), ms(30));
    runs.next().await;
    let (_next, mut following) = two.every(&world, ms(100), Duration::ZERO);
    sleep(ms(10)).await;
    drop(job);
    assert_eq!(following.next().await.at, Moment::ZERO + ms(30), "after the current run");
    sleep(secs(60)).await;
    assert_eq!(runs.drain().len(), 0);
}

#[tokio::test(start_paused = true)]
async fn job_runs_again_after_a_step_down() {
    let world = World::new();
    let (job, mut runs) = world.peer(1).every(&world, ms(100), Duration::ZERO);
    let first = runs.take(5).await.pop().unwrap();
    job.step_down(secs(5));
    let next = runs.next().await;
    assert_eq!(next.at, first.at + secs(5));
    assert!(next.token > first.token);
}

#[tokio::test(start_paused = true)]
async fn shutdown_ends_the_runs_and_a_later_start_fails() {
    let world = World::new();
    let peer = world.peer(1);
    let (job, mut runs) = peer.every(&world, ms(100), ms(30));
    runs.next().await;
    peer.simba.shutdown().await;
    assert_eq!((world.now(), job.progress().succeeded), (Moment::ZERO + ms(30), 1));
    world.assert_empty().await;
    sleep(secs(60)).await;
    assert_eq!(runs.drain().len(), 0);
    let refused = peer
        .simba
        .scheduler(MUTEX)
        .start(Schedule::fixed_rate(ms(1)).unwrap(), |_| async { Ok::<(), Infallible>(()) });
    assert_eq!(refused.unwrap_err().kind(), ErrorKind::Closed);
}
