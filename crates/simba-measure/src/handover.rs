//! The time of a hand-over: from the call of release to the return of the next waiter's lock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use simba_core::spi::Backend;
use simba_core::{Clock, Moment, MutexName, Simba, SystemClock};
use tokio::task::JoinSet;

use crate::Effort;
use crate::caller::{Caller, LockerCaller};
use crate::report::{Row, Unit};
use crate::stats::percentile;
use crate::target::{Peer, Target};

/// The limit for all waiters together to join the queue.
const QUEUE_LIMIT: Duration = Duration::from_secs(30);

/// Measures hand-overs with one waiter and with many. The floor is a raw wake-up of one waiter.
///
/// # Errors
///
/// The errors of the store.
pub async fn measure(target: &dyn Target, effort: Effort) -> Result<Vec<Row>> {
    let (rounds, samples) = effort.pick((2, 200), (5, 1_000));
    let backend = target.connect().await?;
    let simba = target.handle(&backend);
    let runner =
        Runner { simba: simba.clone(), backend, hold: target.requeue(), samples: target.samples(samples) };
    let mut times = Times::default();
    // Alternate the measurements, so that other load on the machine affects all of them.
    for round in 0..rounds {
        times.round(target, &runner, round).await?;
    }
    simba.shutdown().await;
    Ok(times.rows(target))
}

/// The times of hand-overs.
#[derive(Default)]
struct Times {
    floor: Vec<Duration>,
    one: Vec<Duration>,
    many: Vec<Duration>,
    peer: Option<Peer>,
}

impl Times {
    async fn round(&mut self, target: &dyn Target, runner: &Runner, round: usize) -> Result<()> {
        if target.raw_waits() {
            let (raw, backend) = (target.mutex("raw", round)?, &runner.backend);
            let pair = vec![target.raw(backend, raw.clone()).await?, target.raw(backend, raw.clone()).await?];
            // Do not wait for queued waiters: the backend does not report raw ones.
            self.floor.extend(runner.run(&raw, pair, 0).await?);
        }
        if let Some(peer) = target.peer(runner.samples).await? {
            match &mut self.peer {
                Some(known) => known.handovers.extend(peer.handovers),
                None => self.peer = Some(peer),
            }
        }
        self.one.extend(runner.ours(&target.mutex("one", round)?, 1).await?);
        self.many.extend(runner.ours(&target.mutex("many", round)?, target.waiters()).await?);
        Ok(())
    }

    fn rows(mut self, target: &dyn Target) -> Vec<Row> {
        for all in [&mut self.floor, &mut self.one, &mut self.many] {
            all.sort_unstable();
        }
        let waiters = target.waiters();
        let mut rows = self.percentiles(target, "1 waiter", &self.one).to_vec();
        // The goal is about the first row, p50 with one waiter.
        let first = rows.remove(0).goal(target.handover_goal());
        rows.insert(0, first);
        rows.extend(self.percentiles(target, &format!("{waiters} waiters"), &self.many));
        let row = |name, all: &[Duration]| Row::new(target, name, Unit::Micros, micros(all, 50));
        if let Some(Peer { name, mut handovers }) = self.peer.take() {
            handovers.sort_unstable();
            let row = row(format!("hand-over p50 to {name}"), &self.one);
            rows.push(row.floor(micros(&handovers, 50)).goal("ratio <= 1"));
        }
        let row = row(format!("hand-over p50, {waiters} waiters to 1"), &self.many);
        rows.push(row.floor(micros(&self.one, 50)).goal("ratio <= 2"));
        rows
    }

    /// Returns the rows for p50 and p99, with the floor if there is one.
    fn percentiles(&self, target: &dyn Target, waiters: &str, all: &[Duration]) -> [Row; 2] {
        [50, 99].map(|percent| {
            let name = format!("hand-over p{percent}, {waiters}");
            let row = Row::new(target, name, Unit::Micros, micros(all, percent));
            if self.floor.is_empty() { row } else { row.floor(micros(&self.floor, percent)) }
        })
    }
}

fn micros(all: &[Duration], percent: usize) -> f64 {
    percentile(all, percent).as_secs_f64() * 1e6
}

/// Measures hand-overs of one mutex: one caller holds it, all others wait.
struct Runner {
    backend: Arc<dyn Backend>,
    simba: Simba,
    /// How long each caller holds the mutex.
    hold: Duration,
    samples: usize,
}

/// The state that the callers share.
#[derive(Default)]
struct Samples {
    released: Option<Moment>,
    times: Vec<Duration>,
}

impl Runner {
    /// Measures hand-overs among lockers of Simba.
    async fn ours(&self, mutex: &MutexName, waiters: usize) -> Result<Vec<Duration>> {
        let caller = || Box::new(LockerCaller::new(self.simba.locker(mutex.clone()))) as Box<dyn Caller>;
        let callers = std::iter::repeat_with(caller).take(waiters + 1).collect();
        self.run(mutex, callers, waiters + 1).await
    }

    /// Lets the callers acquire and release until there are enough samples. Starts once `waiters` are in the queue.
    async fn run(
        &self,
        mutex: &MutexName,
        callers: Vec<Box<dyn Caller>>,
        waiters: usize,
    ) -> Result<Vec<Duration>> {
        let Self { hold, samples: wanted, .. } = *self;
        let guard = self.simba.locker(mutex.clone()).lock().await?;
        let samples = Arc::new(Mutex::new(Samples::default()));
        let mut tasks = JoinSet::new();
        for mut caller in callers {
            let samples = Arc::clone(&samples);
            tasks.spawn(async move {
                loop {
                    let woken = caller.acquire().await?;
                    if update(&samples, |samples| samples.acquired(woken)) >= wanted {
                        return anyhow::Ok(());
                    }
                    SystemClock.sleep_until(SystemClock.now() + hold).await;
                    update(&samples, |samples| samples.released = Some(SystemClock.now()));
                    caller.release().await?;
                }
            });
        }
        until_queued(&*self.backend, mutex, waiters).await?;
        guard.release().await?;
        // The first task that ends does not release the mutex, so the others still wait.
        tasks.join_next().await.context("there are no callers")???;
        tasks.shutdown().await;
        Ok(update(&samples, |samples| std::mem::take(&mut samples.times)))
    }
}

fn update<R>(samples: &Mutex<Samples>, change: impl FnOnce(&mut Samples) -> R) -> R {
    change(&mut samples.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Samples {
    /// Records an acquisition. Returns the number of samples.
    fn acquired(&mut self, woken: Moment) -> usize {
        if let Some(released) = self.released.take() {
            self.times.push(woken - released);
        }
        self.times.len()
    }
}

/// Waits until all waiters are in the queue, if the store reports its waiters.
async fn until_queued(backend: &dyn Backend, mutex: &MutexName, waiters: usize) -> Result<()> {
    let clock = SystemClock;
    let end = clock.now() + QUEUE_LIMIT;
    let settle = Duration::from_millis(50);
    loop {
        let seen = match backend.operate() {
            Some(operate) => operate.read(mutex).await?.waiters,
            None => None,
        };
        match seen {
            Some(seen) if seen < waiters && clock.now() >= end => {
                bail!("{seen} of {waiters} waiters joined the queue within {QUEUE_LIMIT:?}")
            }
            Some(seen) if seen < waiters => clock.sleep_until(clock.now() + settle).await,
            _ => break,
        }
    }
    // A session queues before it subscribes.
    clock.sleep_until(clock.now() + settle).await;
    Ok(())
}
