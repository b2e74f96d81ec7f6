use std::ops::{Add, Sub};
use std::time::Duration;

/// A point on a [`Clock`](crate::Clock), in nanoseconds since that clock's zero.
///
/// Arithmetic saturates: a lease of a year near the end of time ends then.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(u64);

impl Moment {
    /// The clock's zero.
    pub const ZERO: Self = Self(0);

    /// The time from the clock's zero to here.
    #[must_use]
    pub const fn since_zero(self) -> Duration {
        Duration::from_nanos(self.0)
    }

    /// The time from `earlier` to here, or zero if that lies after.
    #[must_use]
    pub const fn saturating_since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }

    /// This moment less `duration`, at the least the clock's zero.
    #[must_use]
    pub fn saturating_sub(self, duration: Duration) -> Self {
        Self(self.0.saturating_sub(nanos(duration)))
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

    /// The time from `earlier` to here, or zero if that lies after.
    fn sub(self, earlier: Self) -> Duration {
        self.saturating_since(earlier)
    }
}

fn nanos(duration: Duration) -> u64 {
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
}
