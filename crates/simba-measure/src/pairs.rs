//! The rate of uncontended lock/unlock cycles. The report calls a cycle a pair.

use std::time::Duration;

use anyhow::Result;
use simba_core::{Clock, SystemClock};

use crate::Effort;
use crate::caller::{Caller, LockerCaller};
use crate::report::{Row, Unit};
use crate::stats::median;
use crate::target::Target;

/// The number of lock/unlock cycles between two reads of the clock.
const BATCH: u32 = 16;

/// Measures the lock/unlock cycles per second of one task and of many, each on its own mutex.
///
/// # Errors
///
/// The errors of the store.
pub async fn measure(target: &dyn Target, effort: Effort) -> Result<Vec<Row>> {
    let backend = target.connect().await?;
    let simba = target.handle(&backend);
    // Many short rounds: other load on the machine then affects ours and the floor alike.
    let (rounds, length) = effort.pick((20, Duration::from_millis(50)), (75, Duration::from_millis(100)));
    let mut rows = Vec::new();
    for (tasks, name) in [(1, "1 task".to_owned()), (target.tasks(), format!("{} tasks", target.tasks()))] {
        let (mut raw, mut ours) = (Vec::new(), Vec::new());
        for n in 0..tasks {
            raw.push(target.raw(&backend, target.mutex("raw", n)?).await?);
            let locker = simba.locker(target.mutex("ours", n)?);
            ours.push(Box::new(LockerCaller::new(locker)) as Box<dyn Caller>);
        }
        let (mut floor, mut rates) = (Vec::new(), Vec::new());
        // Alternate, so that other load affects both. The first round warms up.
        for round in 0..=rounds {
            let (raw_rate, our_rate);
            (raw, raw_rate) = rate(raw, length).await?;
            (ours, our_rate) = rate(ours, length).await?;
            if round > 0 {
                floor.push(raw_rate);
                rates.push(our_rate);
            }
        }
        let row = Row::new(target, format!("pairs, {name}"), Unit::PerSecond, median(&mut rates));
        rows.push(row.floor(median(&mut floor)).goal("ratio >= 0.9 on a server"));
    }
    rows.insert(1, rows[0].turned("one pair, 1 task", Unit::Micros, |rate| 1e6 / rate));
    simba.shutdown().await;
    Ok(rows)
}

/// Measures the lock/unlock cycles per second of all callers together. Returns the callers with the rate.
async fn rate(callers: Vec<Box<dyn Caller>>, length: Duration) -> Result<(Vec<Box<dyn Caller>>, f64)> {
    let start = SystemClock.now();
    let end = start + length;
    let tasks: Vec<_> = callers
        .into_iter()
        .map(|mut caller| {
            tokio::spawn(async move {
                let mut pairs = 0;
                while SystemClock.now() < end {
                    caller.pairs(BATCH).await?;
                    pairs += BATCH;
                }
                anyhow::Ok((caller, pairs))
            })
        })
        .collect();
    let (mut callers, mut pairs) = (Vec::new(), 0);
    for task in tasks {
        let (caller, count) = task.await??;
        callers.push(caller);
        pairs += count;
    }
    Ok((callers, f64::from(pairs) / (SystemClock.now() - start).as_secs_f64()))
}
