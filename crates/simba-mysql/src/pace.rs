//! When to look at the table: as seldom as a handle was told to, faster where a release is to be expected, and
//! never more than ten times a second over any ten seconds.

use std::time::Duration;

use simba_core::Moment;

/// The distance of two looks while a release is expected.
const FAST: Duration = Duration::from_millis(25);
/// For how long a release is expected at a time.
pub(crate) const BURST: Duration = Duration::from_secs(1);
/// Looks per second that can go on for ever, and looks that can be saved up: together a hundred in ten seconds.
const RATE: f64 = 6.0;
const DEPTH: f64 = 40.0;

/// What the waiters want.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Until when a release is expected.
    pub(crate) fast_until: Moment,
    /// The moment of the next thing that is known to happen: the end of a lease, of a rest.
    pub(crate) wake_at: Option<Moment>,
}

/// The rhythm of one handle's looks.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    interval: Duration,
    last: Option<Moment>,
    saved: f64,
    counted: Moment,
}

impl Pace {
    pub(crate) const fn new(interval: Duration, now: Moment) -> Self {
        Self { interval, last: None, saved: DEPTH, counted: now }
    }

    /// When to look next.
    pub(crate) fn next(&self, now: Moment, plan: &Plan) -> Moment {
        let Some(last) = self.last else { return self.affordable(now) };
        let slow = last + self.interval;
        let fast = Some(last + FAST).filter(|at| *at < plan.fast_until);
        let event = plan.wake_at.filter(|at| *at > last);
        let wanted = [fast, event].into_iter().flatten().fold(slow, Moment::min);
        self.affordable(wanted.max(now))
    }

    /// A look goes out.
    pub(crate) fn spend(&mut self, now: Moment) {
        self.saved = self.saved_at(now) - 1.0;
        self.counted = now;
        self.last = Some(now);
    }

    /// The first moment from `at` on at which a look may go out.
    fn affordable(&self, at: Moment) -> Moment {
        let missing = 1.0 - self.saved_at(at);
        // A little later than exactly then, against rounding.
        if missing > 0.0 { at + Duration::from_secs_f64(missing / RATE + 1e-6) } else { at }
    }

    fn saved_at(&self, at: Moment) -> f64 {
        (self.saved + (at - self.counted).as_secs_f64() * RATE).min(DEPTH)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(250);
    const CALM: Plan = Plan { fast_until: Moment::ZERO, wake_at: None };

    fn at(ms: u64) -> Moment {
        Moment::ZERO + Duration::from_millis(ms)
    }

    /// The looks of `seconds` under a plan that may change with time.
    fn looks(interval: Duration, seconds: u64, plan: impl Fn(Moment) -> Plan) -> Vec<Moment> {
        let (mut pace, mut now, mut looks) = (Pace::new(interval, at(0)), at(0), Vec::new());
        loop {
            let next = pace.next(now, &plan(now));
            if next >= at(seconds * 1_000) {
                return looks;
            }
            if next > now {
                // The plan may change meanwhile, as it does when a waiter comes.
                now = next.min(now + Duration::from_millis(5));
                continue;
            }
            pace.spend(now);
            looks.push(now);
        }
    }

    fn most_in_ten_seconds(looks: &[Moment]) -> usize {
        let within = |from: &Moment| {
            looks.iter().filter(|at| *at >= from && **at - *from <= Duration::from_secs(10)).count()
        };
        looks.iter().map(within).max().unwrap_or(0)
    }

    #[test]
    fn the_first_look_is_at_once_and_the_next_after_an_interval() {
        let mut pace = Pace::new(INTERVAL, at(0));
        assert_eq!(pace.next(at(7), &CALM), at(7));
        pace.spend(at(7));
        assert_eq!(pace.next(at(8), &CALM), at(257));
    }

    #[test]
    fn an_expected_release_is_looked_for_fast_and_an_end_at_its_moment() {
        let mut pace = Pace::new(INTERVAL, at(0));
        pace.spend(at(0));
        assert_eq!(pace.next(at(0), &Plan { fast_until: at(1_000), wake_at: None }), at(25));
        assert_eq!(pace.next(at(0), &Plan { fast_until: at(0), wake_at: Some(at(90)) }), at(90));
        assert_eq!(pace.next(at(0), &Plan { fast_until: at(0), wake_at: Some(at(900)) }), at(250));
    }

    #[test]
    fn the_configured_interval_can_be_kept_for_ever() {
        let looks = looks(INTERVAL, 60, |_| CALM);
        assert!(looks.windows(2).skip(1).all(|two| two[1] - two[0] <= Duration::from_millis(255)));
    }

    #[test]
    fn even_a_release_that_is_always_expected_costs_a_hundred_looks_in_ten_seconds() {
        let looks = looks(INTERVAL, 60, |now| Plan { fast_until: now + BURST, wake_at: None });
        let most = most_in_ten_seconds(&looks);
        assert!((90..=100).contains(&most), "{most}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

        #[test]
        fn no_plan_costs_more_than_a_hundred_looks_in_ten_seconds(
            interval in 1u64..2_000, bursts in proptest::collection::vec(0u64..40_000, 0..40),
            ends in proptest::collection::vec(0u64..40_000, 0..200),
        ) {
            let plan = |now: Moment| Plan {
                fast_until: bursts
                    .iter()
                    .map(|burst| at(*burst))
                    .filter(|burst| *burst <= now)
                    .max()
                    .map_or(Moment::ZERO, |burst| burst + BURST),
                wake_at: ends.iter().map(|end| at(*end)).filter(|end| *end > now).min(),
            };
            let looks = looks(Duration::from_millis(interval), 40, plan);
            prop_assert!(most_in_ten_seconds(&looks) <= 100);
        }

        #[test]
        fn a_look_is_never_further_away_than_the_interval_allows(
            interval in 170u64..5_000, spent in 0u64..60,
        ) {
            let mut pace = Pace::new(Duration::from_millis(interval), at(0));
            (0..spent).for_each(|_| pace.spend(at(0)));
            // A waiter that comes late, with everything spent, waits for one look at the most.
            prop_assume!(spent <= 40);
            let next = pace.next(at(0), &CALM);
            prop_assert!(next <= at(interval.max(170)));
        }
    }
}
