use std::fmt;
use std::time::Duration;

use crate::error::{Error, Result};

/// How long a mutex is held without a renewal, and when its holder acts.
///
/// ```text
/// sent        renew_at     ttl        expiring   deadline  store frees
///  |-------------|----------|------------|----------|--------|
///  |<------- ttl ---------->|<---------- transition -------->|
///                                        |<- grace >|<margin>|
/// ```
///
/// The holder renews at `renew_at`. If that fails it tries again and again; at *expiring* its work is told
/// to stop, at the *deadline* it has lost. All moments count from before the request was sent, so the
/// deadline passes before the store can give the mutex to another.
///
/// # Default
///
/// `ttl` 10 s and `transition` 6 s, as in the seeds; the rest follows from them.
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

/// A duration of at most 584 years in half the space: a process may keep a lease for each of many mutexes.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct Span(u64);

impl Span {
    const fn get(self) -> Duration {
        Duration::from_nanos(self.0)
    }
}

impl From<Duration> for Span {
    fn from(duration: Duration) -> Self {
        Self(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX))
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}

/// Below this, scheduling noise decides who holds.
const MIN_TTL: Duration = Duration::from_millis(20);
/// A fifth of the shortest ttl: with less there is no time to stop.
const MIN_TRANSITION: Duration = Duration::from_millis(4);
/// A typing error must not lock a mutex for a month.
const MAX_TOTAL: Duration = Duration::from_secs(24 * 3600);
/// Even a forced lease must fit the stores' millisecond columns with room to spare.
const MAX_FORCED: Duration = Duration::from_secs(365 * 24 * 3600);
/// Drift between two hosts' clocks over one lease, at the least.
const MIN_MARGIN: Duration = Duration::from_millis(5);

impl Lease {
    /// A lease of `ttl`, in which the holder renews, plus `transition`, in which it may still save itself.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if `ttl` is under 20 ms, `transition` under a
    /// fifth of `ttl` (the holder could not ride out one failed call), or both together over 24 hours.
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

    /// Like [`new`](Self::new) without its advice: any `transition` from 4 ms, up to a year in all.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if no holder could work under it.
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

    /// Renews `renew_at` after the last renewal; default 2/3 of `ttl`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) unless it lies after 0 and before both the end of
    /// the ttl and *expiring*.
    pub fn with_renew_at(self, renew_at: Duration) -> Result<Self> {
        Self { renew_at: renew_at.into(), ..self }.checked()
    }

    /// Tells the holder to stop `grace` before the deadline; default half of `transition`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is zero, or *expiring* would come before the
    /// renewal.
    pub fn with_grace(self, grace: Duration) -> Result<Self> {
        if grace.is_zero() {
            return Err(Error::invalid("a grace of zero leaves the work no time to stop: take at least 1ms"));
        }
        Self { grace: grace.into(), ..self }.checked()
    }

    /// Ends `margin` before the store does, against clocks of different rate; default 1 % of the lease,
    /// at least 5 ms.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is zero or leaves no time to hold.
    pub fn with_margin(self, margin: Duration) -> Result<Self> {
        if margin.is_zero() {
            return Err(Error::invalid("a margin of zero trusts all clocks to run alike: take at least 1ms"));
        }
        Self { margin: margin.into(), ..self }.checked()
    }

    /// Looks at least every `poll` while waiting, should every wake-up be lost; default `ttl`.
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

    /// The order of the moments, checked where they meet.
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
                "the renewal at {renew_at:?} comes too late: the holder is told to stop at {expiring:?} \
                 (ttl + transition - grace - margin); renew earlier, shorten the grace or lengthen the transition"
            )));
        }
        Ok(self)
    }

    /// The window in which the holder renews.
    #[must_use]
    pub const fn ttl(&self) -> Duration {
        self.ttl.get()
    }

    /// The window after `ttl` in which only the holder may renew.
    #[must_use]
    pub const fn transition(&self) -> Duration {
        self.transition.get()
    }

    /// What is asked of the store: `ttl` + `transition`.
    #[must_use]
    pub fn total(&self) -> Duration {
        self.ttl() + self.transition()
    }

    /// When the holder renews, counted from the last renewal.
    #[must_use]
    pub const fn renew_at(&self) -> Duration {
        self.renew_at.get()
    }

    /// How long before the deadline the holder is told to stop.
    #[must_use]
    pub const fn grace(&self) -> Duration {
        self.grace.get()
    }

    /// How long before the store's end the holder's deadline lies.
    #[must_use]
    pub const fn margin(&self) -> Duration {
        self.margin.get()
    }

    /// The longest a waiter rests without looking.
    #[must_use]
    pub const fn poll(&self) -> Duration {
        self.poll.get()
    }
}

impl Default for Lease {
    fn default() -> Self {
        Self::new(Duration::from_secs(10), Duration::from_secs(6)).expect("the defaults are in order")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_default_is_the_seeds() {
        let lease = Lease::default();
        assert_eq!((lease.ttl(), lease.transition()), (ms(10_000), ms(6_000)));
        assert_eq!(lease.grace(), ms(3_000));
        assert_eq!(lease.margin(), ms(160));
        assert!(lease.renew_at() > ms(6_600) && lease.renew_at() < ms(6_700));
    }

    #[test]
    fn contradictions_are_refused_with_the_cure() {
        let refusal = |lease: Result<Lease>| lease.unwrap_err().to_string();
        let lease = Lease::default();
        assert!(refusal(Lease::new(ms(0), ms(0))).contains("at least 20ms"));
        assert!(refusal(Lease::new(ms(10_000), ms(100))).contains("take at least 2s"));
        assert!(refusal(Lease::new(ms(90_000_000), ms(20_000_000))).contains("24 hours"));
        assert!(refusal(Lease::forced(Duration::MAX, ms(1))).contains("over a year"));
        assert!(Lease::forced(ms(100), ms(5)).is_ok(), "forced waives the advice alone");
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
