//! Limits hand-overs within one process. A release notifies the next waiter of the same process immediately,
//! long before other processes can poll. To let those acquire, the process pauses such hand-overs from time
//! to time.

use std::time::Duration;

use simba_core::Moment;

/// The number of hand-overs of the first run.
const INITIAL: u32 = 4;
/// The maximum length of a run in intervals, however long no other process acquires.
const MAX_INTERVALS: u32 = 16;

/// The hand-overs of one mutex within this process.
///
/// The first run lasts four hand-overs or one interval; then hand-overs pause for one interval. If no other
/// process acquired meanwhile, the next run is twice as long; if one did, the limit starts again at four.
#[derive(Clone, Debug)]
pub(crate) struct LocalHandoverLimit {
    interval: Duration,
    allowed: u32,
    handovers: u32,
    since: Option<Moment>,
    paused_until: Option<Moment>,
}

impl LocalHandoverLimit {
    pub(crate) const fn new(interval: Duration) -> Self {
        Self { interval, allowed: INITIAL, handovers: 0, since: None, paused_until: None }
    }

    /// Returns whether a release may notify a waiter of this process, and counts the hand-over. Otherwise a
    /// pause begins.
    pub(crate) fn allow(&mut self, now: Moment) -> bool {
        if self.is_paused(now) {
            return false;
        }
        if self.paused_until.take().is_some() {
            // No other process acquired during the pause.
            self.allowed = self.allowed.saturating_mul(2);
            (self.handovers, self.since) = (0, None);
        }
        let since = *self.since.get_or_insert(now);
        let longest = self.interval * (self.allowed / INITIAL).min(MAX_INTERVALS);
        if self.handovers >= self.allowed || now - since >= longest {
            self.paused_until = Some(now + self.interval);
            return false;
        }
        self.handovers += 1;
        true
    }

    /// Returns whether hand-overs are paused.
    pub(crate) fn is_paused(&self, now: Moment) -> bool {
        self.paused_until.is_some_and(|until| now < until)
    }

    /// Returns the end of the last pause, if there was one.
    pub(crate) const fn paused_until(&self) -> Option<Moment> {
        self.paused_until
    }

    /// Starts again at the first run: another process has held the mutex.
    pub(crate) fn reset(&mut self) {
        *self = Self::new(self.interval);
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
    fn four_handovers_then_a_pause_of_one_interval() {
        let mut limit = LocalHandoverLimit::new(INTERVAL);
        assert!((0..4).all(|n| limit.allow(at(n))));
        assert!(!limit.allow(at(5)));
        assert!(limit.is_paused(at(254)) && !limit.is_paused(at(255)));
    }

    #[test]
    fn long_holds_end_a_run_after_one_interval() {
        let mut limit = LocalHandoverLimit::new(INTERVAL);
        assert!(limit.allow(at(0)) && limit.allow(at(200)));
        assert!(!limit.allow(at(400)));
    }

    #[test]
    fn the_limit_doubles_until_another_process_acquires() {
        let mut limit = LocalHandoverLimit::new(INTERVAL);
        let handovers =
            |limit: &mut LocalHandoverLimit, now: u64| (0..).take_while(|_| limit.allow(at(now))).count();
        assert_eq!([0, 1_000, 2_000].map(|now| handovers(&mut limit, now)), [4, 8, 16]);
        limit.reset();
        assert_eq!(handovers(&mut limit, 3_000), 4);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..Default::default() })]

        #[test]
        fn others_get_one_of_seventeen_intervals(steps in proptest::collection::vec(1u64..400, 1..500)) {
            let (mut limit, mut now, mut since) = (LocalHandoverLimit::new(INTERVAL), 0, None);
            for step in steps {
                now += step;
                match (limit.allow(at(now)), since) {
                    (true, None) => since = Some(now),
                    // One more hold may be in progress when the longest run ends.
                    (true, Some(first)) => prop_assert!(now - first <= 16 * 250),
                    (false, _) => {
                        prop_assert!(limit.is_paused(at(now)));
                        since = None;
                    }
                }
            }
        }
    }
}
