//! All delays and all jitter, as pure functions of the lease.
//!
//! The baseline is the `ContendPeriod` of JVM Simba: the owner acts when its ttl ends, a contender when the
//! owner's transition ends plus a random -200 to +1000 ms. Three rules differ:
//!
//! | JVM Simba | here | why |
//! |---|---|---|
//! | the owner renews at ttl | at 2/3 of ttl, with up to 10 % random jitter before it | a renewal due at the end of the ttl is always late |
//! | a contender tries at transition end -200..+1000 ms | at its end + 0..2 % of the lease | an attempt before the end always fails; one second is long for a short lease and too little jitter for a long one |
//! | after an error all contenders sleep a whole ttl | short backoff that shrinks toward the deadline | the transition is the time for retries |

use std::time::Duration;

use crate::clock::Moment;
use crate::seeded::{self, Bug};
use crate::tenure::Grant;
use crate::types::{FencingToken, Lease};

/// Computes all delays from one lease. `random` is a number in 0..1 from the caller's seedable source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacing {
    lease: Lease,
}

/// The maximum time limit of a call, however long the lease.
const MAX_CALL: Duration = Duration::from_secs(5);
/// The first pause after a failed call.
const FIRST_RETRY: Duration = Duration::from_millis(50);
/// The minimum pause after a permanent error: at most two attempts a second.
const PERMANENT_RETRY: Duration = Duration::from_millis(500);
/// The first pause after a useless hint.
const HINT_GAP: Duration = Duration::from_millis(1);
/// The minimum of all delays. Without it a loop near a deadline would spin.
const FLOOR: Duration = Duration::from_millis(1);

impl Pacing {
    pub(crate) const fn new(lease: Lease) -> Self {
        Self { lease }
    }

    /// Returns the grant for `remaining`, which the store granted to a request sent at `sent`.
    ///
    /// If the store grants another length than requested, the proportions stay the same.
    pub(crate) fn grant(&self, token: FencingToken, sent: Moment, remaining: Duration, random: f64) -> Grant {
        let ratio = remaining.as_secs_f64() / self.lease.total().as_secs_f64();
        let margin = scaled(self.lease.margin(), ratio.max(1.0));
        let margin = if seeded::on(Bug::NoMargin) { Duration::ZERO } else { margin };
        Grant {
            token,
            sent,
            renew_at: sent + self.lease.renew_at().mul_f64(ratio * (1.0 - random / 10.0)),
            deadline: sent + remaining.saturating_sub(margin),
            grace: scaled(self.lease.grace(), ratio.min(1.0)),
        }
    }

    /// Returns the time limit of one call to the store: a third of the ttl, at most five seconds, and never past the
    /// holder's deadline.
    pub(crate) fn call_limit(&self, left: Option<Duration>) -> Duration {
        let limit = (self.lease.ttl() / 3).min(MAX_CALL);
        left.map_or(limit, |left| limit.min(left)).max(FLOOR)
    }

    /// Returns a waiter's pause while another contender holds for `remaining`: to the end of that lease, at most one
    /// poll interval.
    pub(crate) fn wait(&self, remaining: Duration, random: f64) -> Duration {
        let poll = self.lease.poll().mul_f64(0.9 + random / 10.0);
        let end = remaining.saturating_add((self.lease.total() / 50).mul_f64(random));
        end.min(poll).max(FLOOR)
    }

    /// Returns a waiter's pause while the mutex is free and another waiter is first. Grows with every poll.
    pub(crate) fn wait_vacant(&self, polls: u32, random: f64) -> Duration {
        spread(doubled(self.lease.ttl() / 200, polls), random).clamp(FLOOR, self.lease.poll())
    }

    /// Returns a waiter's pause after a failed call. Grows with every failure, up to the ttl or the poll interval.
    pub(crate) fn retry_waiting(&self, failures: u32, transient: bool, random: f64) -> Duration {
        let cap = self.lease.ttl().min(self.lease.poll());
        let delay = spread(self.backoff(failures).min(cap), random).max(FLOOR);
        if transient { delay } else { delay.max(PERMANENT_RETRY) }
    }

    /// Returns a holder's pause after a failed renewal with `left` to its deadline. It shrinks toward the deadline, so
    /// that the holder renews if the outage ends in time.
    pub(crate) fn retry_holding(&self, failures: u32, left: Duration, random: f64) -> Duration {
        let cap = (self.lease.ttl() / 4).min(left / 4);
        spread(self.backoff(failures).min(cap), random).max(FLOOR)
    }

    /// Returns the minimum time between two calls caused by hints, after `useless` hints in a row. It is zero for the
    /// first two. A flood of forged hints causes at most one call per tenth of the ttl.
    pub(crate) fn hint_gap(&self, useless: u32) -> Duration {
        match useless.checked_sub(2) {
            Some(many) => doubled(HINT_GAP, many).min(self.lease.ttl() / 10),
            None => Duration::ZERO,
        }
    }

    fn backoff(&self, failures: u32) -> Duration {
        doubled(FIRST_RETRY.min(self.lease.ttl() / 20), failures.saturating_sub(1))
    }
}

fn doubled(base: Duration, times: u32) -> Duration {
    base.saturating_mul(1u32.checked_shl(times).unwrap_or(u32::MAX))
}

/// Randomizes the second half of a delay, so that contenders do not call at the same time.
fn spread(delay: Duration, random: f64) -> Duration {
    delay / 2 + (delay / 2).mul_f64(random)
}

/// Scales a duration. A ratio of 1 returns it unchanged, since a product is rounded.
fn scaled(duration: Duration, ratio: f64) -> Duration {
    if ratio == 1.0 { duration } else { duration.mul_f64(ratio) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn pacing() -> Pacing {
        Pacing::new(Lease::default())
    }

    fn any_lease() -> impl Strategy<Value = Lease> {
        (20u64..3_600_000, 20u64..100).prop_map(|(ttl, percent)| {
            let ttl = Duration::from_millis(ttl);
            Lease::new(ttl, ttl.mul_f64(percent as f64 / 100.0)).unwrap()
        })
    }

    #[test]
    fn grant_has_the_deadline_and_grace_of_the_lease() {
        let grant = pacing().grant(FencingToken::new(1), Moment::ZERO, 16 * SECOND, 0.0);
        assert_eq!(grant.deadline, Moment::ZERO + Duration::from_millis(15_840));
        assert_eq!(grant.grace, 3 * SECOND);
        let earlier = pacing().grant(FencingToken::new(1), Moment::ZERO, 16 * SECOND, 0.999);
        assert!(earlier.renew_at < grant.renew_at);
    }

    /// Floating-point multiplication of a hundred days in nanoseconds by one changes the value.
    #[test]
    fn whole_lease_has_its_margin_to_the_nanosecond() {
        let (ttl, margin) = (Duration::new(10_719_313, 55_053_880), Duration::new(8_391_833, 654_627_179));
        let lease = Lease::forced(ttl, Duration::new(470_704, 267_770_027)).unwrap();
        let lease = lease.with_renew_at(SECOND).and_then(|lease| lease.with_grace(SECOND));
        let lease = lease.and_then(|lease| lease.with_margin(margin)).unwrap();
        let grant = Pacing::new(lease).grant(FencingToken::new(1), Moment::ZERO, lease.total(), 0.0);
        assert_eq!(grant.deadline, Moment::ZERO + (lease.total() - margin));
    }

    #[test]
    fn waiter_pauses_to_the_end_of_the_lease_and_at_most_one_poll_interval() {
        let pacing = pacing();
        assert_eq!(pacing.wait(2 * SECOND, 0.0), 2 * SECOND);
        assert!(pacing.wait(2 * SECOND, 0.999) <= Duration::from_millis(2_320));
        assert_eq!(pacing.wait(Duration::MAX, 0.0), 9 * SECOND);
    }

    #[test]
    fn permanent_error_is_retried_at_most_twice_a_second() {
        assert!(pacing().retry_waiting(1, false, 0.0) >= PERMANENT_RETRY);
        assert!(pacing().retry_waiting(1, true, 0.0) < PERMANENT_RETRY);
    }

    #[test]
    fn first_hints_cause_calls_at_once_and_floods_are_limited() {
        assert_eq!((pacing().hint_gap(0), pacing().hint_gap(1)), (Duration::ZERO, Duration::ZERO));
        assert_eq!(pacing().hint_gap(100), SECOND);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn deadline_is_before_the_end_of_the_lease_at_the_store(
            lease in any_lease(), sent in 0u64..u64::MAX / 2, granted in 0u64..7_200_000, random in 0.0..1.0,
        ) {
            let (sent, remaining) = (Moment::ZERO + Duration::from_nanos(sent), Duration::from_millis(granted));
            let grant = Pacing::new(lease).grant(FencingToken::new(1), sent, remaining, random);
            prop_assert!(grant.deadline < sent + remaining || remaining < lease.margin());
        }

        #[test]
        fn renewal_is_due_before_expiring(
            lease in any_lease(), percent in 10u32..400, random in 0.0..1.0,
        ) {
            let remaining = lease.total().mul_f64(f64::from(percent) / 100.0);
            let grant = Pacing::new(lease).grant(FencingToken::new(1), Moment::ZERO, remaining, random);
            prop_assert!(grant.renew_at < grant.deadline.saturating_sub(grant.grace) || percent < 50);
        }

        #[test]
        fn holder_retries_before_its_deadline(
            lease in any_lease(), failures in 0u32..1000, left in 2u64..10_000, random in 0.0..1.0,
        ) {
            let left = Duration::from_millis(left);
            prop_assert!(Pacing::new(lease).retry_holding(failures, left, random) < left);
        }

        #[test]
        fn delays_are_within_their_bounds(
            lease in any_lease(), n in 0u32..1000, ms in 0u64..u64::MAX, random in 0.0..1.0,
        ) {
            let pacing = Pacing::new(lease);
            let ceiling = lease.poll().max(FLOOR);
            for delay in [pacing.wait(Duration::from_millis(ms), random), pacing.wait_vacant(n, random)] {
                prop_assert!(delay >= FLOOR && delay <= ceiling);
            }
            prop_assert!(pacing.retry_waiting(n, true, random) <= lease.ttl().max(FLOOR));
            prop_assert!(pacing.call_limit(None) <= lease.ttl() / 3);
        }
    }
}
