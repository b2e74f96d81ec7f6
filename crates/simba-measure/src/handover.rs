//! Hand-over: from the call of release to the return of the next waiter's lock.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use simba_core::{Backend, Clock, Moment, MutexName, Simba, SystemClock};
use tokio::task::JoinSet;

use crate::Effort;
use crate::caller::{Caller, LockerCaller};
use crate::report::{Row, Unit};
use crate::stats::percentile;
use crate::target::{Peer, Target};

/// How long all waiters together may take to queue up.
const QUEUE_UP: Duration = Duration::from_secs(30);

/// Hand-over with one waiter and with many; the floor is a raw wake-up of one waiter.
///
/// # Errors
///
/// What the store says.
pub async fn measure(target: &dyn Target, effort: Effort) -> Result<Vec<Row>> {
    let (rounds, samples) = effort.pick((2, 200), (5, 1_000));
    let backend = target.connect().await?;
    let simba = target.handle(&backend);
    let course =
        Course { simba: simba.clone(), backend, hold: target.requeue(), samples: target.samples(samples) };
    let mut taken = Taken::default();
    // In turns, so that a busy moment of the machine hits all.
    for round in 0..rounds {
        taken.round(target, &course, round).await?;
    }
    simba.shutdown().await;
    Ok(taken.rows(target))
}

/// How long hand-overs took.
#[derive(Default)]
struct Taken {
    floor: Vec<Duration>,
    one: Vec<Duration>,
    many: Vec<Duration>,
    peer: Option<Peer>,
}

impl Taken {
    async fn round(&mut self, target: &dyn Target, course: &Course, round: usize) -> Result<()> {
        if target.raw_waits() {
            let (raw, backend) = (target.mutex("raw", round)?, &course.backend);
            let pair = vec![target.raw(backend, raw.clone()).await?, target.raw(backend, raw.clone()).await?];
            // They wait by their own means, which the backend does not see.
            self.floor.extend(course.run(&raw, pair, 0).await?);
        }
        if let Some(peer) = target.peer(course.samples).await? {
            match &mut self.peer {
                Some(known) => known.handovers.extend(peer.handovers),
                None => self.peer = Some(peer),
            }
        }
        self.one.extend(course.ours(&target.mutex("one", round)?, 1).await?);
        self.many.extend(course.ours(&target.mutex("many", round)?, target.waiters()).await?);
        Ok(())
    }

    fn rows(mut self, target: &dyn Target) -> Vec<Row> {
        for all in [&mut self.floor, &mut self.one, &mut self.many] {
            all.sort_unstable();
        }
        let crowd = target.waiters();
        let mut rows = self.of(target, "1 waiter", &self.one).to_vec();
        // The first of them is the one that the design speaks of.
        let first = rows.remove(0).goal(target.handover_goal());
        rows.insert(0, first);
        rows.extend(self.of(target, &format!("{crowd} waiters"), &self.many));
        let row = |name, all: &[Duration]| Row::new(target, name, Unit::Micros, micros(all, 50));
        if let Some(Peer { name, mut handovers }) = self.peer.take() {
            handovers.sort_unstable();
            let row = row(format!("hand-over p50 to {name}"), &self.one);
            rows.push(row.floor(micros(&handovers, 50)).goal("ratio <= 1"));
        }
        let row = row(format!("hand-over p50, {crowd} waiters to 1"), &self.many);
        rows.push(row.floor(micros(&self.one, 50)).goal("ratio <= 2"));
        rows
    }

    /// The middle and the worst of some, beside the floor.
    fn of(&self, target: &dyn Target, waiters: &str, all: &[Duration]) -> [Row; 2] {
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

/// A mutex goes round: one caller holds it, all others wait.
struct Course {
    backend: Arc<dyn Backend>,
    simba: Simba,
    /// How long each holds it.
    hold: Duration,
    samples: usize,
}

/// What the callers share.
#[derive(Default)]
struct Lap {
    released: Option<Moment>,
    taken: Vec<Duration>,
}

impl Course {
    /// Among our own callers.
    async fn ours(&self, mutex: &MutexName, waiters: usize) -> Result<Vec<Duration>> {
        let caller = || Box::new(LockerCaller::new(self.simba.locker(mutex.clone()))) as Box<dyn Caller>;
        let callers = std::iter::repeat_with(caller).take(waiters + 1).collect();
        self.run(mutex, callers, waiters + 1).await
    }

    /// Passes the mutex on among the callers until there are enough samples. Begins once so many wait.
    async fn run(
        &self,
        mutex: &MutexName,
        callers: Vec<Box<dyn Caller>>,
        waiters: usize,
    ) -> Result<Vec<Duration>> {
        let Self { hold, samples, .. } = *self;
        let blocked = self.simba.locker(mutex.clone()).lock().await?;
        let lap = Arc::new(Mutex::new(Lap::default()));
        let mut runners = JoinSet::new();
        for mut caller in callers {
            let lap = Arc::clone(&lap);
            runners.spawn(async move {
                loop {
                    let woken = caller.acquire().await?;
                    if note(&lap, |lap| lap.took(woken)) >= samples {
                        return anyhow::Ok(());
                    }
                    SystemClock.sleep_until(SystemClock.now() + hold).await;
                    note(&lap, |lap| lap.released = Some(SystemClock.now()));
                    caller.release().await?;
                }
            });
        }
        queued(&*self.backend, mutex, waiters).await?;
        blocked.release().await?;
        // The first to come back has seen enough; the others wait for what it never frees.
        runners.join_next().await.context("nobody took part")???;
        runners.shutdown().await;
        Ok(note(&lap, |lap| std::mem::take(&mut lap.taken)))
    }
}

fn note<R>(lap: &Mutex<Lap>, change: impl FnOnce(&mut Lap) -> R) -> R {
    change(&mut lap.lock().unwrap_or_else(PoisonError::into_inner))
}

impl Lap {
    /// Somebody has it; how many have had it so far.
    fn took(&mut self, woken: Moment) -> usize {
        if let Some(released) = self.released.take() {
            self.taken.push(woken - released);
        }
        self.taken.len()
    }
}

/// Waits until everybody is in the queue, as far as the store tells.
async fn queued(backend: &dyn Backend, mutex: &MutexName, waiters: usize) -> Result<()> {
    let clock = SystemClock;
    let end = clock.now() + QUEUE_UP;
    let settle = Duration::from_millis(50);
    loop {
        let seen = match backend.operate() {
            Some(operate) => operate.read(mutex).await?.waiters,
            None => None,
        };
        match seen {
            Some(seen) if seen < waiters && clock.now() >= end => {
                bail!("{seen} of {waiters} waiters queued up within {QUEUE_UP:?}")
            }
            Some(seen) if seen < waiters => clock.sleep_until(clock.now() + settle).await,
            _ => break,
        }
    }
    // Queued is not subscribed yet.
    clock.sleep_until(clock.now() + settle).await;
    Ok(())
}
