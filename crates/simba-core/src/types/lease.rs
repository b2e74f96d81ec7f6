use std::fmt;
use std::time::Duration;

use crate::clock::nanos;
use crate::error::{Error, Result};

/// The duration of a hold without a renewal, and the moments at which its holder acts.
///
/// ```text
/// sent        renew_at     ttl        expiring   deadline  store frees
///  |-------------|----------|------------|----------|--------|
///  |<------- ttl ---------->|<---------- transition -------->|
///                                        |<- grace >|<margin>|
/// ```
///
/// The holder renews at `renew_at`. If that fails, it retries. At *expiring* its work is notified
/// to stop, at the *deadline* the mutex is lost. All moments count from before the request was sent, so the
/// deadline passes before the store can give the mutex to another contender.
///
/// # Default
///
/// `ttl` 10 s and `transition` 6 s, as in JVM Simba; the other values are computed from them.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use simba_core::Lease;
///
/// let lease = Lease::new(Duration::from_secs(5), Duration::from_secs(3))?
///     .with_grace(Duration::from_secs(1))?;
/// assert_eq!(lease.total(), Duration::from_secs(8));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use]
pub struct Lease {
    ttl: Span,
    transition: Span,
    renew_at: Span,
    grace: Span,
    margin: Span,
    poll: Span,
}

/// A duration of at most 584 years in 8 bytes: a process may store a lease for each of many mutexes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Span(u64);

impl Span {
    const fn get(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        Self(nanos(duration))
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// The minimum ttl. With less, scheduling delays would end leases.
const MIN_TTL: Duration = Duration::from_millis(20);
/// The minimum transition, a fifth of the minimum ttl. With less there is no time to stop the work.
const MIN_TRANSITION: Duration = Duration::from_millis(4);
/// The maximum lease, so that a typing error does not lock a mutex for a month.
const MAX_TOTAL: Duration = Duration::from_secs(24 * 3600);
/// The maximum of a forced lease, which must fit into the stores' millisecond columns.
const MAX_FORCED: Duration = Duration::from_secs(365 * 24 * 3600);
/// The minimum margin for the drift between two hosts' clocks over one lease.
const MIN_MARGIN: Duration = Duration::from_millis(5);

impl Lease {
    /// Creates a lease of `ttl`, within which the holder must renew, plus `transition`, in which it can retry.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if `ttl` is under 20 ms, `transition` under a
    /// fifth of `ttl` (the holder could not survive one failed call), or both together over 24 hours.
    pub fn new(ttl: Duration, transition: Duration) -> Result<Self> {
        if transition < ttl / 5 {
            return Err(Error::invalid(format!(
                "a transition of {transition:?} leaves no time to retry a failed renewal: \
                 take at least {:?}, a fifth of the ttl (or Lease::forced)",
                ttl / 5
            )));
        }
        let lease = Self::forced(ttl, transition)?;
        if lease.total() > MAX_TOTAL {
            return Err(Error::invalid(format!(
                "ttl + transition of {:?} is over 24 hours, which a crashed holder would block: \
                 take less, renewals make it last (or Lease::forced)",
                lease.total()
            )));
        }
        Ok(lease)
    }

    /// Creates a lease with wider limits than [`new`](Self::new): any `transition` from 4 ms, up to a year in total.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if a value is outside of these limits.
    pub fn forced(ttl: Duration, transition: Duration) -> Result<Self> {
        if ttl < MIN_TTL {
            return Err(Error::invalid(format!("a ttl of {ttl:?} is too short: take at least {MIN_TTL:?}")));
        }
        let total = ttl.checked_add(transition).filter(|total| *total <= MAX_FORCED).ok_or_else(|| {
            Error::invalid(format!("ttl {ttl:?} + transition {transition:?} is over a year: take less"))
        })?;
        if transition < MIN_TRANSITION {
            return Err(Error::invalid(format!(
                "a transition of {transition:?} is too short: take at least {MIN_TRANSITION:?}"
            )));
        }
        let margin = (total / 100).max(MIN_MARGIN);
        let lease = Self {
            ttl: ttl.into(),
            transition: transition.into(),
            renew_at: (ttl / 3 * 2).into(),
            grace: (transition / 2).into(),
            margin: margin.into(),
            poll: ttl.into(),
        };
        lease.checked()
    }

    /// Sets the time from one renewal to the next; default 2/3 of `ttl`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) unless it is greater than 0 and before both the end of
    /// the ttl and *expiring*.
    pub fn with_renew_at(self, renew_at: Duration) -> Result<Self> {
        Self { renew_at: renew_at.into(), ..self }.checked()
    }

    /// Sets the time between *expiring* and the deadline; default half of `transition`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is zero, or *expiring* would be before the
    /// renewal.
    pub fn with_grace(self, grace: Duration) -> Result<Self> {
        if grace.is_zero() {
            return Err(Error::invalid("a grace of zero leaves the work no time to stop: take at least 1ms"));
        }
        Self { grace: grace.into(), ..self }.checked()
    }

    /// Sets the time between the deadline and the end of the lease at the store, for clocks of different rates;
    /// default 1 % of the lease, at least 5 ms.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is zero or leaves no time to hold.
    pub fn with_margin(self, margin: Duration) -> Result<Self> {
        if margin.is_zero() {
            return Err(Error::invalid("a margin of zero needs clocks of equal rate: take at least 1ms"));
        }
        Self { margin: margin.into(), ..self }.checked()
    }

    /// Sets the maximum time between two polls of a waiter, in case a wake-up is lost; default `ttl`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is under 1 ms or over 24 hours.
    pub fn with_poll(self, poll: Duration) -> Result<Self> {
        if poll < Duration::from_millis(1) || poll > MAX_TOTAL {
            return Err(Error::invalid(format!("a poll of {poll:?} is out of range: take 1ms to 24h")));
        }
        Ok(Self { poll: poll.into(), ..self })
    }

    /// Checks the order of the moments.
    fn checked(self) -> Result<Self> {
        let (ttl, transition, renew_at) = (self.ttl(), self.transition(), self.renew_at());
        let (grace, margin) = (self.grace(), self.margin());
        let Some(expiring) = grace
            .checked_add(margin)
            .and_then(|stop| self.total().checked_sub(stop))
            .filter(|d| !d.is_zero())
        else {
            return Err(Error::invalid(format!(
                "grace {grace:?} + margin {margin:?} use up ttl {ttl:?} + transition {transition:?}: \
                 shorten the grace or lengthen the transition"
            )));
        };
        if renew_at.is_zero() || renew_at >= ttl {
            return Err(Error::invalid(format!(
                "the renewal at {renew_at:?} must come after 0 and before the ttl {ttl:?} ends"
            )));
        }
        if renew_at >= expiring {
            return Err(Error::invalid(format!(
                "the renewal at {renew_at:?} is too late: the holder is notified to stop at {expiring:?} \
                 (ttl + transition - grace - margin); renew earlier, shorten the grace or lengthen the transition"
            )));
        }
        Ok(self)
    }

    /// Returns the time within which the holder must renew.
    #[must_use]
    pub const fn ttl(&self) -> Duration {
        self.ttl.get()
    }

    /// Returns the time after `ttl` in which only the holder may renew.
    #[must_use]
    pub const fn transition(&self) -> Duration {
        self.transition.get()
    }

    /// Returns the lease that is requested from the store: `ttl` + `transition`.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.ttl() + self.transition()
    }

    /// Returns the time from one renewal to the next.
    #[must_use]
    pub const fn renew_at(&self) -> Duration {
        self.renew_at.get()
    }

    /// Returns the time between *expiring* and the deadline.
    #[must_use]
    pub const fn grace(&self) -> Duration {
        self.grace.get()
    }

    /// Returns the time between the deadline and the end of the lease at the store.
    #[must_use]
    pub const fn margin(&self) -> Duration {
        self.margin.get()
    }

    /// Returns the maximum time between two polls of a waiter.
    #[must_use]
    pub const fn poll(&self) -> Duration {
        self.poll.get()
    }
}

impl Default for Lease {
    fn default() -> Self {
        Self::new(Duration::from_secs(10), Duration::from_secs(6)).expect("the defaults are valid")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn default_is_that_of_jvm_simba() {
        let lease = Lease::default();
        assert_eq!((lease.ttl(), lease.transition()), (ms(10_000), ms(6_000)));
        assert_eq!(lease.grace(), ms(3_000));
        assert_eq!(lease.margin(), ms(160));
        assert!(lease.renew_at() > ms(6_600) && lease.renew_at() < ms(6_700));
    }

    #[test]
    fn contradictory_settings_are_rejected_with_a_fix() {
        let refusal = |lease: Result<Lease>| lease.unwrap_err().to_string();
        let lease = Lease::default();
        assert!(refusal(Lease::new(ms(0), ms(0))).contains("at least 20ms"));
        assert!(refusal(Lease::new(ms(10_000), ms(100))).contains("take at least 2s"));
        assert!(refusal(Lease::new(ms(90_000_000), ms(20_000_000))).contains("24 hours"));
        assert!(refusal(Lease::forced(Duration::MAX, ms(1))).contains("over a year"));
        assert!(Lease::forced(ms(100), ms(5)).is_ok(), "forced has wider limits");
        assert!(refusal(lease.with_renew_at(ms(0))).contains("after 0"));
        assert!(refusal(lease.with_renew_at(ms(10_000))).contains("before the ttl"));
        assert!(refusal(Lease::forced(ms(100), ms(3))).contains("at least 4ms"));
        assert!(refusal(lease.with_grace(ms(0))).contains("grace of zero"));
        assert!(refusal(lease.with_grace(ms(10_000))).contains("too late"));
        assert!(refusal(lease.with_grace(Duration::MAX)).contains("shorten the grace"));
        assert!(refusal(lease.with_margin(ms(0))).contains("margin of zero"));
        assert!(refusal(lease.with_margin(ms(16_000))).contains("use up"));
        assert!(refusal(lease.with_poll(ms(0))).contains("out of range"));
    }
}
