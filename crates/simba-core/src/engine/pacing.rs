//! When to act: every delay and all jitter, as pure functions of the lease.
//!
//! The baseline is the seeds' `ContendPeriod`: the owner acts when its ttl ends, a contender when the
//! owner's transition ends plus a random -200 to +1000 ms. Three rules differ, for reasons:
//!
//! | seeds | here | why |
//! |---|---|---|
//! | the owner renews at ttl | at 2/3 of ttl, up to a tenth earlier | a renewal due at the soft end is always late |
//! | a contender tries at transition end -200..+1000 ms | at its end + 0..2 % of the lease | an early try always fails; a fixed second is slow for a short lease and no spread for a long one |
//! | after an error everyone sleeps a whole ttl | short backoff that shrinks toward the deadline | the transition is there to be used |

use std::time::Duration;

use crate::clock::Moment;
use crate::seeded::{self, Bug};
use crate::types::{FencingToken, Lease};

/// What one answer of the store gives a holder, on the local clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Grant {
    pub(crate) token: FencingToken,
    pub(crate) sent: Moment,
    pub(crate) renew_at: Moment,
    pub(crate) deadline: Moment,
    pub(crate) grace: Duration,
}

/// All delays, from one lease. `roll` is a random number in 0..1 from the caller's seedable source.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Pacing {
    lease: Lease,
}

/// No call is waited for longer, however long the lease.
const MAX_CALL: Duration = Duration::from_secs(5);
/// The first pause after a failed call.
const FIRST_RETRY: Duration = Duration::from_millis(50);
/// An error that a person must mend is not tried more often than twice a second.
const PERMANENT_RETRY: Duration = Duration::from_millis(500);
/// The first pause after a hint that came to nothing.
const HINT_GAP: Duration = Duration::from_millis(1);
/// No delay is shorter, or a loop near a deadline would spin.
const FLOOR: Duration = Duration::from_millis(1);

impl Pacing {
    pub(crate) const fn new(lease: Lease) -> Self {
        Self { lease }
    }

    pub(crate) const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The terms that follow from `remaining`, granted by the store to a request sent at `sent`.
    ///
    /// A store that grants another length than asked for gets the same proportions.
    pub(crate) fn grant(&self, token: FencingToken, sent: Moment, remaining: Duration, roll: f64) -> Grant {
        let ratio = remaining.as_secs_f64() / self.lease.total().as_secs_f64();
        let margin = scaled(self.lease.margin(), ratio.max(1.0));
        let margin = if seeded::on(Bug::NoMargin) { Duration::ZERO } else { margin };
        Grant {
            token,
            sent,
            renew_at: sent + self.lease.renew_at().mul_f64(ratio * (1.0 - roll / 10.0)),
            deadline: sent + remaining.saturating_sub(margin),
            grace: scaled(self.lease.grace(), ratio.min(1.0)),
        }
    }

    /// How long one call to the store may take: a third of the ttl, five seconds, and never past the holder's
    /// deadline.
    pub(crate) fn call_limit(&self, left: Option<Duration>) -> Duration {
        let limit = (self.lease.ttl() / 3).min(MAX_CALL);
        left.map_or(limit, |left| limit.min(left)).max(FLOOR)
    }

    /// A waiter's pause while another holds for `remaining`: to the end of that lease, at most one poll.
    pub(crate) fn wait(&self, remaining: Duration, roll: f64) -> Duration {
        let poll = self.lease.poll().mul_f64(0.9 + roll / 10.0);
        let end = remaining.saturating_add((self.lease.total() / 50).mul_f64(roll));
        end.min(poll).max(FLOOR)
    }

    /// A waiter's pause while nobody holds and it is not its turn; grows with every look.
    pub(crate) fn wait_vacant(&self, looks: u32, roll: f64) -> Duration {
        spread(doubled(self.lease.ttl() / 200, looks), roll).clamp(FLOOR, self.lease.poll())
    }

    /// A waiter's pause after a failed call; grows with every failure up to the ttl or the poll.
    pub(crate) fn retry_waiting(&self, failures: u32, transient: bool, roll: f64) -> Duration {
        let cap = self.lease.ttl().min(self.lease.poll());
        let delay = spread(self.backoff(failures).min(cap), roll).max(FLOOR);
        if transient { delay } else { delay.max(PERMANENT_RETRY) }
    }

    /// A holder's pause after a failed renewal with `left` to its deadline: shrinks toward it, so that an
    /// outage that ends in time is never slept through.
    pub(crate) fn retry_holding(&self, failures: u32, left: Duration, roll: f64) -> Duration {
        let cap = (self.lease.ttl() / 4).min(left / 4);
        spread(self.backoff(failures).min(cap), roll).max(FLOOR)
    }

    /// The least distance between two looks that hints ask for, after `fruitless` ones in a row. The first
    /// are free; a flood of forged hints soon costs no more than one call in a tenth of the ttl.
    pub(crate) fn hint_gap(&self, fruitless: u32) -> Duration {
        match fruitless.checked_sub(2) {
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

/// Half the delay for sure, the other half by luck, so that contenders fall out of step.
fn spread(delay: Duration, roll: f64) -> Duration {
    delay / 2 + (delay / 2).mul_f64(roll)
}

/// To the nanosecond where nothing is to be scaled: a product is rounded.
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
    fn the_moments_of_a_grant_keep_the_lease_s_order() {
        let grant = pacing().grant(FencingToken::new(1), Moment::ZERO, 16 * SECOND, 0.0);
        assert_eq!(grant.deadline, Moment::ZERO + Duration::from_millis(15_840));
        assert_eq!(grant.grace, 3 * SECOND);
        let earlier = pacing().grant(FencingToken::new(1), Moment::ZERO, 16 * SECOND, 0.999);
        assert!(earlier.renew_at < grant.renew_at);
    }

    /// A hundred days in nanoseconds, times one, are not the same for a processor.
    #[test]
    fn a_whole_lease_has_its_margin_to_the_nanosecond() {
        let (ttl, margin) = (Duration::new(10_719_313, 55_053_880), Duration::new(8_391_833, 654_627_179));
        let lease = Lease::forced(ttl, Duration::new(470_704, 267_770_027)).unwrap();
        let lease = lease.with_renew_at(SECOND).and_then(|lease| lease.with_grace(SECOND));
        let lease = lease.and_then(|lease| lease.with_margin(margin)).unwrap();
        let grant = Pacing::new(lease).grant(FencingToken::new(1), Moment::ZERO, lease.total(), 0.0);
        assert_eq!(grant.deadline, Moment::ZERO + (lease.total() - margin));
    }

    #[test]
    fn a_waiter_outwaits_the_holder_but_not_the_poll() {
        let pacing = pacing();
        assert_eq!(pacing.wait(2 * SECOND, 0.0), 2 * SECOND);
        assert!(pacing.wait(2 * SECOND, 0.999) <= Duration::from_millis(2_320));
        assert_eq!(pacing.wait(Duration::MAX, 0.0), 9 * SECOND);
    }

    #[test]
    fn an_error_to_mend_is_tried_at_most_twice_a_second() {
        assert!(pacing().retry_waiting(1, false, 0.0) >= PERMANENT_RETRY);
        assert!(pacing().retry_waiting(1, true, 0.0) < PERMANENT_RETRY);
    }

    #[test]
    fn first_hints_are_heeded_at_once_and_floods_slow_down() {
        assert_eq!((pacing().hint_gap(0), pacing().hint_gap(1)), (Duration::ZERO, Duration::ZERO));
        assert_eq!(pacing().hint_gap(100), SECOND);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn a_deadline_never_lies_after_the_store_s_end(
            lease in any_lease(), sent in 0u64..u64::MAX / 2, granted in 0u64..7_200_000, roll in 0.0..1.0,
        ) {
            let (sent, remaining) = (Moment::ZERO + Duration::from_nanos(sent), Duration::from_millis(granted));
            let grant = Pacing::new(lease).grant(FencingToken::new(1), sent, remaining, roll);
            prop_assert!(grant.deadline < sent + remaining || remaining < lease.margin());
        }

        #[test]
        fn a_renewal_comes_before_the_holder_is_told_to_stop(
            lease in any_lease(), percent in 10u32..400, roll in 0.0..1.0,
        ) {
            let remaining = lease.total().mul_f64(f64::from(percent) / 100.0);
            let grant = Pacing::new(lease).grant(FencingToken::new(1), Moment::ZERO, remaining, roll);
            prop_assert!(grant.renew_at < grant.deadline.saturating_sub(grant.grace) || percent < 50);
        }

        #[test]
        fn a_holder_tries_again_before_its_deadline(
            lease in any_lease(), failures in 0u32..1000, left in 2u64..10_000, roll in 0.0..1.0,
        ) {
            let left = Duration::from_millis(left);
            prop_assert!(Pacing::new(lease).retry_holding(failures, left, roll) < left);
        }

        #[test]
        fn no_delay_is_zero_or_longer_than_promised(
            lease in any_lease(), n in 0u32..1000, ms in 0u64..u64::MAX, roll in 0.0..1.0,
        ) {
            let pacing = Pacing::new(lease);
            let ceiling = lease.poll().max(FLOOR);
            for delay in [pacing.wait(Duration::from_millis(ms), roll), pacing.wait_vacant(n, roll)] {
                prop_assert!(delay >= FLOOR && delay <= ceiling);
            }
            prop_assert!(pacing.retry_waiting(n, true, roll) <= lease.ttl().max(FLOOR));
            prop_assert!(pacing.call_limit(None) <= lease.ttl() / 3);
        }
    }
}
