//! Polls the table for all waiters and watchers of a handle by one statement: at the configured interval,
//! faster while a release is expected, and never more than ten times a second over any ten seconds.

use std::sync::Arc;
use std::time::Duration;

use simba_core::{Moment, MutexName, Result};
use tokio::sync::Mutex;

use crate::connection::Connection;
use crate::error::NAME;
use crate::shared::Shared;
use crate::statements::MAX_READ;

const LIMIT: Duration = Duration::from_secs(1);
/// The time between two polls while a release is expected.
const FAST_INTERVAL: Duration = Duration::from_millis(25);
/// How long a release is expected after a sign of one.
pub(crate) const FAST_PERIOD: Duration = Duration::from_secs(1);
/// The sustained number of polls per second, and the number of polls that can be saved up: together a hundred
/// in ten seconds.
const RATE: f64 = 6.0;
const MAX_BUDGET: f64 = 40.0;

/// What the subscribers need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Plan {
    /// The time until which a release is expected.
    pub(crate) fast_until: Moment,
    /// The time of the next known event: the end of a lease or of a pause in hand-overs.
    pub(crate) wake_at: Option<Moment>,
}

/// The schedule of one handle's polls, limited by a token bucket.
#[derive(Clone, Debug)]
pub(crate) struct Pace {
    interval: Duration,
    last: Option<Moment>,
    budget: f64,
    updated: Moment,
}

impl Pace {
    pub(crate) const fn new(interval: Duration, now: Moment) -> Self {
        Self { interval, last: None, budget: MAX_BUDGET, updated: now }
    }

    /// Returns when to poll next.
    pub(crate) fn next(&self, now: Moment, plan: &Plan) -> Moment {
        let Some(last) = self.last else { return self.affordable(now) };
        let slow = last + self.interval;
        let fast = Some(last + FAST_INTERVAL).filter(|at| *at < plan.fast_until);
        let event = plan.wake_at.filter(|at| *at > last);
        let next = [fast, event].into_iter().flatten().fold(slow, Moment::min);
        self.affordable(next.max(now))
    }

    /// Records a poll.
    pub(crate) fn spend(&mut self, now: Moment) {
        self.budget = self.budget_at(now) - 1.0;
        self.updated = now;
        self.last = Some(now);
    }

    /// Returns the earliest time from `at` on at which the budget allows a poll.
    fn affordable(&self, at: Moment) -> Moment {
        let missing = 1.0 - self.budget_at(at);
        // One microsecond more, against rounding.
        if missing > 0.0 { at + Duration::from_secs_f64(missing / RATE + 1e-6) } else { at }
    }

    fn budget_at(&self, at: Moment) -> f64 {
        (self.budget + (at - self.updated).as_secs_f64() * RATE).min(MAX_BUDGET)
    }
}

/// The polling task of a handle. It polls only while there are subscribers.
pub(crate) struct Poller {
    shared: Arc<Shared>,
    connection: Arc<Mutex<Connection>>,
    pace: Pace,
    /// The number of the connection that the last poll used.
    epoch: u64,
}

impl Poller {
    pub(crate) fn new(shared: Arc<Shared>, connection: Arc<Mutex<Connection>>) -> Self {
        let pace = Pace::new(shared.config.poll, shared.clock.now());
        Self { shared, connection, pace, epoch: 1 }
    }

    /// Polls until the task is aborted.
    pub(crate) async fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        loop {
            let now = shared.clock.now();
            let Some(plan) = shared.wakeups.plan(now) else {
                shared.wakeups.plan_changed.notified().await;
                continue;
            };
            let at = self.pace.next(now, &plan);
            tokio::select! {
                biased;
                () = shared.clock.sleep_until(at) => {}
                () = shared.wakeups.plan_changed.notified() => continue,
            }
            self.pace.spend(shared.clock.now());
            if let Err(error) = self.poll().await {
                tracing::debug!(backend = NAME, %error, "a poll failed");
            }
        }
    }

    async fn poll(&mut self) -> Result<()> {
        let connection = Arc::clone(&self.connection);
        let mut connection = connection.lock().await;
        connection.ready().await?;
        if connection.epoch != self.epoch {
            // Any change may have been missed.
            self.epoch = connection.epoch;
            self.shared.wakeups.notify_all();
        }
        for asked in self.shared.wakeups.topics().chunks(MAX_READ) {
            let text = self.shared.statements.read(asked.iter().map(MutexName::as_str));
            let sent = self.shared.clock.now();
            let rows = connection.each_row(LIMIT, &text).await?;
            // A row that is not Simba's must not cost the waiters of other mutexes their notifications.
            let rows: Vec<_> = rows.into_iter().flatten().collect();
            // Counted from before the statement, so that the end of a lease is not expected too late.
            self.shared.wakeups.polled(asked, &rows, sent);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(250);
    const NO_EVENTS: Plan = Plan { fast_until: Moment::ZERO, wake_at: None };

    fn at(ms: u64) -> Moment {
        Moment::ZERO + Duration::from_millis(ms)
    }

    /// Returns the polls of `seconds` under a plan that may change with time.
    fn polls(interval: Duration, seconds: u64, plan: impl Fn(Moment) -> Plan) -> Vec<Moment> {
        let (mut pace, mut now, mut polls) = (Pace::new(interval, at(0)), at(0), Vec::new());
        loop {
            let next = pace.next(now, &plan(now));
            if next >= at(seconds * 1_000) {
                return polls;
            }
            if next > now {
                // The plan may change meanwhile, as it does when a waiter arrives.
                now = next.min(now + Duration::from_millis(5));
                continue;
            }
            pace.spend(now);
            polls.push(now);
        }
    }

    fn max_in_ten_seconds(polls: &[Moment]) -> usize {
        let within = |from: &Moment| {
            polls.iter().filter(|at| *at >= from && **at - *from <= Duration::from_secs(10)).count()
        };
        polls.iter().map(within).max().unwrap_or(0)
    }

    #[test]
    fn the_first_poll_is_immediate_and_the_next_after_an_interval() {
        let mut pace = Pace::new(INTERVAL, at(0));
        assert_eq!(pace.next(at(7), &NO_EVENTS), at(7));
        pace.spend(at(7));
        assert_eq!(pace.next(at(8), &NO_EVENTS), at(257));
    }

    #[test]
    fn an_expected_release_is_polled_fast_and_an_event_at_its_time() {
        let mut pace = Pace::new(INTERVAL, at(0));
        pace.spend(at(0));
        assert_eq!(pace.next(at(0), &Plan { fast_until: at(1_000), wake_at: None }), at(25));
        assert_eq!(pace.next(at(0), &Plan { fast_until: at(0), wake_at: Some(at(90)) }), at(90));
        assert_eq!(pace.next(at(0), &Plan { fast_until: at(0), wake_at: Some(at(900)) }), at(250));
    }

    #[test]
    fn the_configured_interval_is_within_the_budget() {
        let polls = polls(INTERVAL, 60, |_| NO_EVENTS);
        assert!(polls.windows(2).skip(1).all(|two| two[1] - two[0] <= Duration::from_millis(255)));
    }

    #[test]
    fn a_release_that_is_always_expected_costs_a_hundred_polls_in_ten_seconds() {
        let polls = polls(INTERVAL, 60, |now| Plan { fast_until: now + FAST_PERIOD, wake_at: None });
        let most = max_in_ten_seconds(&polls);
        assert!((90..=100).contains(&most), "{most}");
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..Default::default() })]

        #[test]
        fn no_plan_costs_more_than_a_hundred_polls_in_ten_seconds(
            interval in 1u64..2_000, bursts in proptest::collection::vec(0u64..40_000, 0..40),
            ends in proptest::collection::vec(0u64..40_000, 0..200),
        ) {
            let plan = |now: Moment| Plan {
                fast_until: bursts
                    .iter()
                    .map(|burst| at(*burst))
                    .filter(|burst| *burst <= now)
                    .max()
                    .map_or(Moment::ZERO, |burst| burst + FAST_PERIOD),
                wake_at: ends.iter().map(|end| at(*end)).filter(|end| *end > now).min(),
            };
            let polls = polls(Duration::from_millis(interval), 40, plan);
            prop_assert!(max_in_ten_seconds(&polls) <= 100);
        }

        #[test]
        fn the_next_poll_is_at_most_one_interval_away(
            interval in 170u64..5_000, spent in 0u64..60,
        ) {
            let mut pace = Pace::new(Duration::from_millis(interval), at(0));
            (0..spent).for_each(|_| pace.spend(at(0)));
            // A waiter that arrives late, with the budget spent, waits for at most one poll.
            prop_assume!(spent <= 40);
            let next = pace.next(at(0), &NO_EVENTS);
            prop_assert!(next <= at(interval.max(170)));
        }
    }
}
