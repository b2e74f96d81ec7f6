//! Between processes: who releases wakes the next waiter of its own process at once, long before others can
//! look. To let them in, it leaves the mutex alone now and then.

use std::time::Duration;

use simba_core::Moment;

/// How many hand-overs within the process come in a row at first.
const FIRST: u32 = 4;
/// For how many intervals they go on at the most, however lonely the process is.
const LONGEST: u32 = 16;

/// One mutex's hand-overs within this process.
///
/// A run is at first four hand-overs or one interval, then the mutex is left to others for one interval. If
/// none of them came, the next run is twice as long; if one did, the first length holds again.
#[derive(Clone, Debug)]
pub(crate) struct Courtesy {
    interval: Duration,
    allowed: u32,
    run: u32,
    since: Option<Moment>,
    rest_until: Option<Moment>,
}

impl Courtesy {
    pub(crate) const fn new(interval: Duration) -> Self {
        Self { interval, allowed: FIRST, run: 0, since: None, rest_until: None }
    }

    /// A waiter of this process may be woken by the release of another; counts it. Otherwise a rest begins.
    pub(crate) fn hand_on(&mut self, now: Moment) -> bool {
        if self.rests(now) {
            return false;
        }
        if self.rest_until.take().is_some() {
            // It went by and nobody came.
            self.allowed = self.allowed.saturating_mul(2);
            self.begin();
        }
        let since = *self.since.get_or_insert(now);
        let longest = self.interval * (self.allowed / FIRST).min(LONGEST);
        if self.run >= self.allowed || now - since >= longest {
            self.rest_until = Some(now + self.interval);
            return false;
        }
        self.run += 1;
        true
    }

    /// Whether the mutex is left to others now.
    pub(crate) fn rests(&self, now: Moment) -> bool {
        self.rest_until.is_some_and(|until| now < until)
    }

    /// When the rest ends, if there is one.
    pub(crate) const fn rest_until(&self) -> Option<Moment> {
        self.rest_until
    }

    /// Somebody in another process has had the mutex.
    pub(crate) fn another_came(&mut self) {
        *self = Self::new(self.interval);
    }

    fn begin(&mut self) {
        (self.run, self.since) = (0, None);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(250);

    fn at(ms: u64) -> Moment {
        Moment::ZERO + Duration::from_millis(ms)
    }

    #[test]
    fn four_in_a_row_then_an_interval_for_others() {
        let mut courtesy = Courtesy::new(INTERVAL);
        assert!((0..4).all(|n| courtesy.hand_on(at(n))));
        assert!(!courtesy.hand_on(at(5)));
        assert!(courtesy.rests(at(254)) && !courtesy.rests(at(255)));
    }

    #[test]
    fn long_holds_leave_it_after_an_interval() {
        let mut courtesy = Courtesy::new(INTERVAL);
        assert!(courtesy.hand_on(at(0)) && courtesy.hand_on(at(200)));
        assert!(!courtesy.hand_on(at(400)));
    }

    #[test]
    fn a_lonely_process_rests_less_and_less_and_company_brings_the_first_length_back() {
        let mut courtesy = Courtesy::new(INTERVAL);
        let run = |courtesy: &mut Courtesy, now: u64| (0..).take_while(|_| courtesy.hand_on(at(now))).count();
        assert_eq!([0, 1_000, 2_000].map(|now| run(&mut courtesy, now)), [4, 8, 16]);
        courtesy.another_came();
        assert_eq!(run(&mut courtesy, 3_000), 4);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..Default::default() })]

        #[test]
        fn others_get_a_whole_interval_within_seventeen(steps in proptest::collection::vec(1u64..400, 1..500)) {
            let (mut courtesy, mut now, mut since) = (Courtesy::new(INTERVAL), 0, None);
            for step in steps {
                now += step;
                match (courtesy.hand_on(at(now)), since) {
                    (true, None) => since = Some(now),
                    // One hold more than the longest run may be under way when it ends.
                    (true, Some(first)) => prop_assert!(now - first <= 16 * 250),
                    (false, _) => {
                        prop_assert!(courtesy.rests(at(now)));
                        since = None;
                    }
                }
            }
        }
    }
}
