//! Notices that the server's clock was set: leases are counted by it, so a step frees mutexes too early or too
//! late. Nothing can be done about it from here but to say so; the fencing token covers the rest.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// What two readings may differ by: milliseconds are cut off, and machines are busy.
const SLACK: Duration = Duration::from_millis(50);
/// How much faster or slower the server's clock may run, as a divisor.
const DRIFT: u32 = 100;

/// Compares the server's clock with ours, from one reply to the next.
#[derive(Debug, Default)]
pub(crate) struct ServerClock {
    last: Mutex<Option<Reading>>,
}

/// The server's time in a reply, which was read there between two moments here.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Reading {
    pub(crate) server_ms: u64,
    pub(crate) sent: Moment,
    pub(crate) received: Moment,
}

/// How far the server's clock was set, in milliseconds: forward or back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Step(pub(crate) i128);

impl ServerClock {
    /// Takes a reading and warns if the clock was set since the last one.
    pub(crate) fn read(&self, reading: Reading) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let step = match &*last {
            // Replies overtake each other on several connections.
            Some(last) if last.received > reading.received => return,
            Some(last) => step(last, &reading),
            None => None,
        };
        *last = Some(reading);
        drop(last);
        if let Some(Step(ms)) = step {
            tracing::warn!(
                step_ms = %ms,
                "the clock of the MySQL server was set: leases end that much too early or too late, \
                 until each is renewed; keep it in step by slewing"
            );
        }
    }
}

/// The step between two readings, if they cannot be explained without one.
fn step(before: &Reading, after: &Reading) -> Option<Step> {
    let moved = i128::from(after.server_ms) - i128::from(before.server_ms);
    let (least, most) = (after.sent - before.received, after.received - before.sent);
    let slack = SLACK + most / DRIFT;
    let (least, most) = (millis(least) - millis(slack), millis(most) + millis(slack));
    match moved {
        moved if moved > most => Some(Step(moved - most)),
        moved if moved < least => Some(Step(moved - least)),
        _ => None,
    }
}

fn millis(duration: Duration) -> i128 {
    i128::try_from(duration.as_millis()).unwrap_or(i128::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(server_ms: u64, sent: u64, received: u64) -> Reading {
        let at = |ms| Moment::ZERO + Duration::from_millis(ms);
        Reading { server_ms, sent: at(sent), received: at(received) }
    }

    #[test]
    fn a_clock_that_runs_as_ours_is_no_step() {
        assert_eq!(step(&reading(5_000, 0, 10), &reading(15_000, 10_000, 10_010)), None);
        assert_eq!(step(&reading(5_000, 0, 2_000), &reading(6_000, 2_000, 2_001)), None, "a slow reply");
    }

    #[test]
    fn an_hour_either_way_is_one() {
        let before = reading(10_000_000, 0, 10);
        assert!(step(&before, &reading(13_601_000, 1_000, 1_010)).unwrap().0 > 3_500_000);
        assert!(step(&before, &reading(6_401_000, 1_000, 1_010)).unwrap().0 < -3_500_000);
    }
}
