//! Detects that a server's wall clock was set.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// The difference of two readings that does not count as a step: both machines round, and schedulers are late.
const SLACK: Duration = Duration::from_millis(50);
/// The rate by which the server's clock may run faster or slower than the local clock, as a divisor.
const DRIFT: u32 = 100;

/// A comparison of a server's wall clock with the local monotonic clock, from one reading to the next.
///
/// A store that ends leases by its wall clock ends them too soon when that clock is set forward. A client cannot
/// prevent that, but it can report it.
///
/// - Each reading is compared with the previous one. A difference counts as a step if it is greater than the round trips,
///   a drift of one percent, and 50 ms explain. So a slow reading hides a step that is shorter than its round trip.
/// - A reading whose reply arrived before that of the previous one is ignored.
/// - A reading of another server counts as a step if the clocks of the two servers differ: use one `ServerClock` for each
///   server.
#[derive(Debug, Default)]
pub struct ServerClock {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    last: Option<ClockReading>,
    step: Option<ClockStep>,
}

/// A reading of a server's wall clock between two moments of the local clock.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct ClockReading {
    /// The server's time since 1970.
    pub server: Duration,
    /// The local time before the request was sent.
    pub sent: Moment,
    /// The local time after the reply was received.
    pub received: Moment,
}

/// The least number of milliseconds by which a server's clock was set; negative if it was set back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::exhaustive_structs)]
pub struct ClockStep(pub i128);

impl ServerClock {
    /// Records a reading. Returns the step since the last reading, if there was one.
    pub fn read(&self, reading: ClockReading) -> Option<ClockStep> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let step = match &state.last {
            // Replies on different connections can arrive out of order.
            Some(last) if last.received > reading.received => return None,
            Some(last) => step(last, &reading),
            None => None,
        };
        state.last = Some(reading);
        state.step = step.or(state.step);
        step
    }

    /// Returns the last step that was detected.
    #[must_use]
    pub fn last_step(&self) -> Option<ClockStep> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).step
    }
}

/// Returns the step between two readings, or `None` if round trip, slack and drift explain the difference.
fn step(before: &ClockReading, after: &ClockReading) -> Option<ClockStep> {
    let moved = millis(after.server) - millis(before.server);
    let (least, most) = (after.sent - before.received, after.received - before.sent);
    let slack = SLACK + most / DRIFT;
    let (least, most) = (millis(least) - millis(slack), millis(most) + millis(slack));
    match moved {
        moved if moved > most => Some(ClockStep(moved - most)),
        moved if moved < least => Some(ClockStep(moved - least)),
        _ => None,
    }
}

fn millis(duration: Duration) -> i128 {
    i128::try_from(duration.as_millis()).unwrap_or(i128::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reading(server_ms: u64, sent: u64, received: u64) -> ClockReading {
        let at = |ms| Moment::ZERO + Duration::from_millis(ms);
        ClockReading { server: Duration::from_millis(server_ms), sent: at(sent), received: at(received) }
    }

    #[test]
    fn equal_rates_and_slow_replies_are_no_step() {
        let clock = ServerClock::default();
        assert_eq!(clock.read(reading(5_000, 0, 10)), None);
        assert_eq!(clock.read(reading(15_000, 10_000, 10_010)), None);
        assert_eq!(clock.read(reading(17_000, 10_020, 14_000)), None, "a slow reply");
        assert_eq!(clock.last_step(), None);
    }

    #[test]
    fn a_reply_that_is_overtaken_by_a_later_one_is_ignored() {
        let clock = ServerClock::default();
        assert_eq!(clock.read(reading(5_000, 0, 100)), None);
        assert_eq!(clock.read(reading(60_000, 10, 90)), None);
        assert_eq!(clock.read(reading(6_000, 1_050, 1_100)), None, "compared with the first one");
        assert_eq!(clock.last_step(), None);
    }

    #[test]
    fn a_drift_of_one_percent_is_no_step_and_a_millisecond_more_is_one() {
        let before = reading(500_000, 0, 0);
        let after = |server: u64| step(&before, &reading(500_000 + server, 100_000, 100_000));
        assert_eq!((after(101_050), after(98_950)), (None, None));
        assert_eq!((after(101_051), after(98_949)), (Some(ClockStep(1)), Some(ClockStep(-1))));
    }

    #[test]
    fn a_clock_set_by_an_hour_is_a_step_in_its_direction() {
        let before = reading(10_000_000, 0, 10);
        assert!(step(&before, &reading(13_601_000, 1_000, 1_010)).unwrap().0 > 3_500_000);
        assert!(step(&before, &reading(6_401_000, 1_000, 1_010)).unwrap().0 < -3_500_000);
    }
}
