use std::ops::{Add, Sub};
use std::time::{Duration, Instant};

use super::Clock;

/// A point on a [`Clock`](crate::Clock), in nanoseconds since that clock's zero.
///
/// Arithmetic saturates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// The clock's zero.
    pub const ZERO: Self = Self(0);

    /// The last moment.
    pub(crate) const MAX: Self = Self(u64::MAX);

    /// Returns the time since the clock's zero.
    #[must_use]
    pub const fn since_zero(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// Returns this moment minus `duration`, at least the clock's zero.
    #[must_use]
    pub fn saturating_sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(duration)))
    }

    /// Returns this moment of `clock` as an [`Instant`], for timers such as `tokio::time::timeout_at`.
    ///
    /// An `Instant` stops while the machine is suspended and the clock of a lease does not: the result is exact until the
    /// next suspend, and too late after it. A moment in the past gives the current instant.
    ///
    /// # Examples
    ///
    /// ```
    /// use std::time::{Duration, Instant};
    /// use simba_core::{Clock as _, Moment, SystemClock};
    ///
    /// let deadline = SystemClock.now() + Duration::from_secs(10);
    /// assert!(deadline.to_instant(&SystemClock) <= Instant::now() + Duration::from_secs(10));
    /// ```
    #[must_use]
    pub fn to_instant(self, clock: &dyn Clock) -> Instant {
        let now = Instant::now();
        now.checked_add(self - clock.now()).unwrap_or(now)
    }

    /// Returns the moment of `clock` at which `instant` is reached, if the machine is not suspended before. An instant in
    /// the past gives the current moment.
    #[must_use]
    pub fn from_instant(instant: Instant, clock: &dyn Clock) -> Self {
        clock.now() + instant.saturating_duration_since(Instant::now())
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    fn add(self, duration: Duration) -> Self {
        Self(self.0.saturating_add(nanos(duration)))
    }
}

impl Sub for Moment {
    type Output = Duration;

    /// Returns the time since `earlier`, or zero if `earlier` is later.
    fn sub(self, earlier: Self) -> Duration {
        self.saturating_since(earlier)
    }
}

/// Returns the nanoseconds of a duration, at most the maximum.
pub(crate) fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        let second = Moment::ZERO + Duration::from_secs(1);
        assert_eq!(second - Moment::ZERO, Duration::from_secs(1));
        assert_eq!(Moment::ZERO - second, Duration::ZERO);
        assert_eq!(second.saturating_sub(Duration::from_secs(2)), Moment::ZERO);
        assert_eq!(second + Duration::MAX, Moment(u64::MAX));
    }

    #[test]
    fn a_moment_survives_the_way_to_an_instant_and_back() {
        let clock = crate::SystemClock;
        let (hour, before) = (Duration::from_secs(3_600), clock.now());
        let deadline = before + hour;
        let back = Moment::from_instant(deadline.to_instant(&clock), &clock);
        // Each way reads two clocks, one after the other.
        let read = clock.now() - before;
        assert!(back - deadline <= read && deadline - back <= read, "{deadline:?} became {back:?}");
        let past = Moment::ZERO.to_instant(&clock);
        assert!(Moment::from_instant(past, &clock) >= before, "the past is now");
    }
}
