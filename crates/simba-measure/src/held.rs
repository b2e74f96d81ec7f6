//! Many mutexes held at once: the memory for each, and whether all are renewed on time.

use std::time::Duration;

use anyhow::{Result, bail};
use simba_core::spi::{Answer, Backend, Claim, Prior, Session};
use simba_core::{Clock, ContenderId, Guard, Lease, Simba, SystemClock};
use tokio::task::JoinSet;

use crate::process::{processor_time, resident, thread_time};
use crate::report::{Row, Unit};
use crate::target::Target;

/// The guards of many mutexes, with the resident memory before they were acquired.
#[derive(Debug)]
pub struct Held {
    guards: Vec<Guard>,
    lease: Lease,
    before: usize,
}

/// The results for many held mutexes.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Findings {
    /// The resident memory for each mutex.
    pub bytes: f64,
    /// The processor time in cores, without the measuring thread; zero if no renewals were observed.
    pub cores: f64,
    /// The number of mutexes whose guard had at most the grace left at some time.
    pub late: f64,
    /// The shortest observed time to a deadline, in milliseconds.
    pub least_left: f64,
    /// The number of mutexes that are no longer held.
    pub lost: f64,
}

impl Held {
    /// Acquires `count` mutexes. Call it first in a process: memory that was freed before hides what the mutexes need.
    ///
    /// # Errors
    ///
    /// The errors of the store.
    pub async fn take(target: &dyn Target, simba: &Simba, count: usize) -> Result<Self> {
        // Allocate what a process allocates only once before the measurement starts.
        simba.locker(target.mutex("first", 0)?).lock().await?.release().await?;
        let mut guards = Vec::with_capacity(count);
        let before = resident()?;
        for n in 0..count {
            guards.push(simba.locker(target.mutex("held", n)?).lock().await?);
        }
        let settle = Duration::from_millis(500);
        SystemClock.sleep_until(SystemClock.now() + settle).await;
        Ok(Self { guards, lease: simba.lease(), before })
    }

    /// Checks all guards repeatedly during `rounds` renewals of each.
    ///
    /// # Errors
    ///
    /// `/proc` cannot be read.
    pub async fn watch(&self, rounds: u32) -> Result<Findings> {
        let (lease, clock) = (self.lease, SystemClock);
        let length = lease.renew_at() * rounds;
        // Short enough to observe every late renewal, long enough to cause little load.
        let pause = lease.grace() / 4;
        let (start, end) = (clock.now(), clock.now() + length);
        let (processor, own) = (processor_time()?, thread_time()?);
        let mut late = vec![false; self.guards.len()];
        let mut least_left = lease.total();
        while clock.now() < end {
            clock.sleep_until((clock.now() + pause).min(end)).await;
            for (guard, late) in self.guards.iter().zip(&mut late) {
                let left = guard.remaining();
                least_left = least_left.min(left);
                *late |= left <= lease.grace();
            }
        }
        let used = (processor_time()? - processor).saturating_sub(thread_time()? - own);
        let cores =
            if length.is_zero() { 0.0 } else { used.as_secs_f64() / (clock.now() - start).as_secs_f64() };
        let count = |number: usize| number as f64;
        Ok(Findings {
            bytes: each(self.before, self.guards.len())?,
            cores,
            late: count(late.iter().filter(|late| **late).count()),
            least_left: least_left.as_secs_f64() * 1e3,
            lost: count(self.guards.iter().filter(|guard| !guard.is_held()).count()),
        })
    }

    /// Releases all mutexes concurrently.
    pub async fn release(self) {
        let mut releases: JoinSet<_> = self.guards.into_iter().map(Guard::release).collect();
        while releases.join_next().await.is_some() {}
    }

    /// Forgets the guards without a release, for a process that is about to exit. The mutexes stay held
    /// until their leases end.
    pub fn abandon(self) {
        self.guards.into_iter().for_each(std::mem::forget);
    }
}

/// Returns the resident memory for each of `count` sessions without the engine: the backend's part.
///
/// # Errors
///
/// The errors of the store.
pub async fn sessions(target: &dyn Target, backend: &dyn Backend, count: usize) -> Result<f64> {
    let mut sessions: Vec<Box<dyn Session>> = Vec::with_capacity(count);
    let before = resident()?;
    for n in 0..count {
        let claim = Claim::new(target.mutex("held", n)?, ContenderId::generate(), Lease::default());
        let mut session = backend.open(claim).await?;
        if !matches!(session.contend(Prior::Nothing).await?, Answer::Ours(_)) {
            bail!("an uncontended mutex was refused");
        }
        sessions.push(session);
    }
    each(before, count)
}

fn each(before: usize, count: usize) -> Result<f64> {
    Ok(resident()?.saturating_sub(before) as f64 / count as f64)
}

/// Returns the rows about renewals: processor time, late renewals, the shortest time left, losses.
#[must_use]
pub fn punctuality(target: &dyn Target, count: usize, lease: &str, seen: &Findings) -> Vec<Row> {
    let row =
        |name: &str, unit, value| Row::new(target, format!("{count} held: {name}, {lease}"), unit, value);
    vec![
        row("processor", Unit::Cores, seen.cores).goal("<= 0.25 cores"),
        row("late renewals", Unit::Count, seen.late).goal("0"),
        row("least time left", Unit::Millis, seen.least_left),
        row("losses", Unit::Count, seen.lost).goal("0"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::target::tests::Memory;

    #[tokio::test]
    async fn held_mutexes_count_as_held_and_are_free_after_the_release() {
        let backend = Memory.connect().await.unwrap();
        let simba = Simba::builder(backend).build();
        let held = Held::take(&Memory, &simba, 10).await.unwrap();
        let found = held.watch(0).await.unwrap();
        assert_eq!((found.late, found.lost), (0.0, 0.0));
        assert!(simba.locker(Memory.mutex("held", 9).unwrap()).try_lock().await.unwrap().is_none());
        held.release().await;
        assert!(simba.locker(Memory.mutex("held", 9).unwrap()).try_lock().await.unwrap().is_some());
    }
}
