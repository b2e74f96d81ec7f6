use std::fmt;
#[cfg(feature = "cron")]
use std::sync::Arc;
use std::time::{Duration, SystemTime};

#[cfg(feature = "cron")]
use super::cron::{Cron, CronPlan};
use crate::clock::{Moment, nanos};
use crate::error::{Error, Result};
use crate::seeded::{self, Bug};

/// Defines when a job runs: at a fixed rate, with a fixed delay, or by a cron expression.
///
/// A schedule starts again with each tenure of its process. It never
/// catches up in a burst: all ticks that were missed while the process was paused cause one run, and those
/// missed while the job itself ran cause none.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use simba_core::Schedule;
///
/// let schedule = Schedule::fixed_rate(Duration::from_secs(60))?.with_initial_delay(Duration::from_secs(5))?;
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug)]
#[must_use]
pub struct Schedule {
    kind: Kind,
    initial_delay: Duration,
}

#[derive(Clone, Debug)]
enum Kind {
    Rate(Duration),
    Delay(Duration),
    #[cfg(feature = "cron")]
    Cron(Arc<Cron>),
}

/// The minimum period. With less, a schedule is a busy loop.
const MIN_PERIOD: Duration = Duration::from_millis(1);
/// The maximum period, enough for a yearly job. A longer one is probably a wrong unit.
const MAX_PERIOD: Duration = Duration::from_secs(366 * 24 * 3600);
/// The smallest step of a [`Moment`].
const INSTANT: Duration = Duration::from_nanos(1);

impl Schedule {
    /// Creates a schedule that runs every `period`, counted from the first run, however long a run takes.
    ///
    /// A tick that passes while the job runs is skipped. After a pause of the process the job runs once and
    /// then at the next tick. The ticks do not shift.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if `period` is under 1 ms or over 366 days.
    pub fn fixed_rate(period: Duration) -> Result<Self> {
        Ok(Self::new(Kind::Rate(checked("period", period)?)))
    }

    /// Creates a schedule that runs `delay` after the end of the last run.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if `delay` is under 1 ms or over 366 days.
    pub fn fixed_delay(delay: Duration) -> Result<Self> {
        Ok(Self::new(Kind::Delay(checked("delay", delay)?)))
    }

    /// Creates a schedule that runs at the times of a cron expression, in UTC or in the zone of
    /// [`with_time_zone`](Self::with_time_zone).
    ///
    /// Five fields, or six with the seconds first: `[second] minute hour day-of-month month day-of-week`.
    /// Each accepts `*`, numbers, lists `1,2`, ranges `1-5` and steps `*/5` or `10-50/5`. Months and weekdays
    /// also have names (`JAN`, `MON`), and Sunday is 0 and 7. A day of month may be `L` (the last) or `15W`
    /// (the working day closest to it), a day of week `5#2` (the second Friday) or `5#L` (the last). If both
    /// days are given, one match is enough; with a `+` before the day of week both must match. Also `@hourly`,
    /// `@daily`, `@weekly`, `@monthly`, `@yearly` and `@annually`.
    ///
    /// # Wall clock
    ///
    /// A step of the wall clock is noticed within 30 seconds. If it jumps forward over several occurrences,
    /// the job runs once for all of them and continues with the next one. If it is set back, occurrences that have
    /// run do not run again: after the clock is set back by an hour, the schedule pauses for that hour.
    /// That holds within one tenure. A new leader uses its own clock and has no record of earlier runs.
    ///
    /// # Summer time
    ///
    /// An expression with one time of day (one second, one minute, one hour: `30 2 * * *`) runs once on each
    /// of its days: at the end of the gap if the clocks skip that time, at the first of the two if it occurs
    /// twice. Any other (`*/30 * * * *`, `0,30 2 * * *`) runs whenever the local clock shows one of its times:
    /// not at all at times that are skipped, and twice at times that occur twice.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is not a cron expression, is over 256 bytes long,
    /// or never occurs, such as February 30th.
    ///
    /// # Examples
    ///
    /// ```
    /// use simba_core::Schedule;
    ///
    /// let schedule = Schedule::cron("30 2 * * MON-FRI")?.with_time_zone("Europe/Berlin")?;
    /// assert!(Schedule::cron("0 0 30 2 *").is_err());
    /// # Ok::<(), simba_core::Error>(())
    /// ```
    #[cfg(feature = "cron")]
    pub fn cron(expression: &str) -> Result<Self> {
        Ok(Self::new(Kind::Cron(Arc::new(Cron::parse(expression)?))))
    }

    /// Sets the time zone of the cron expression, by an IANA name such as `Europe/Berlin`.
    ///
    /// The zones are those of the host's database (the package `tzdata`), or of the built-in one if it has none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the zone is unknown, if this is not a cron schedule,
    /// or if all its times are in the hour that the zone skips.
    #[cfg(feature = "cron")]
    pub fn with_time_zone(self, zone: &str) -> Result<Self> {
        match &self.kind {
            Kind::Cron(cron) => Ok(Self::new(Kind::Cron(Arc::new(cron.in_zone(zone)?)))),
            Kind::Rate(_) | Kind::Delay(_) => Err(Error::invalid(
                "a fixed rate or delay has no time zone: leave the zone out, or use Schedule::cron",
            )),
        }
    }

    /// Sets the delay before the first run of a tenure; default zero.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is over 366 days, or this is a cron schedule.
    pub fn with_initial_delay(self, delay: Duration) -> Result<Self> {
        #[cfg(feature = "cron")]
        if let Kind::Cron(_) = self.kind {
            return Err(Error::invalid(
                "a cron expression defines its first run: leave the initial delay out",
            ));
        }
        if delay > MAX_PERIOD {
            return Err(Error::invalid(format!(
                "an initial delay of {delay:?} is too long: take at most 366 days"
            )));
        }
        Ok(Self { initial_delay: delay, ..self })
    }

    fn new(kind: Kind) -> Self {
        Self { kind, initial_delay: Duration::ZERO }
    }

    /// Plans a tenure that begins now.
    #[cfg_attr(not(feature = "cron"), expect(unused_variables, reason = "only cron reads the wall clock"))]
    pub(crate) fn plan(&self, now: Moment, wall: SystemTime) -> Box<dyn Plan> {
        let due = now + self.initial_delay;
        match &self.kind {
            Kind::Rate(period) => Box::new(FixedPlan { period: *period, due, rate: true }),
            Kind::Delay(delay) => Box::new(FixedPlan { period: *delay, due, rate: false }),
            #[cfg(feature = "cron")]
            Kind::Cron(cron) => Box::new(CronPlan::new(Arc::clone(cron), wall)),
        }
    }
}

fn checked(what: &str, duration: Duration) -> Result<Duration> {
    if (MIN_PERIOD..=MAX_PERIOD).contains(&duration) {
        return Ok(duration);
    }
    Err(Error::invalid(format!("a {what} of {duration:?} is out of range: take 1ms to 366 days")))
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Run now.
    Run,
    /// Sleep until this moment and call again. Always later than the current moment.
    At(Moment),
    /// No run will ever be due.
    #[cfg_attr(not(feature = "cron"), allow(dead_code, reason = "only a cron expression can run out"))]
    Never,
}

/// The state of a [`Schedule`] in one tenure.
///
/// Call [`next`](Self::next). If it returns [`Run`](Next::Run), call [`started`](Self::started), run the job,
/// call [`ended`](Self::ended) and start again. Every call takes both clocks, read together.
pub(crate) trait Plan: fmt::Debug + Send {
    /// Returns whether to run now, or when to call again.
    fn next(&mut self, now: Moment, wall: SystemTime) -> Next;

    /// Records that the due run has started.
    fn started(&mut self, now: Moment, wall: SystemTime);

    /// Records that the run has ended. Ticks that passed meanwhile are skipped.
    fn ended(&mut self, now: Moment, wall: SystemTime);
}

/// A fixed rate, whose `due` is always a whole number of periods after the first run, or a fixed delay.
#[derive(Debug)]
struct FixedPlan {
    period: Duration,
    due: Moment,
    rate: bool,
}

impl Plan for FixedPlan {
    fn next(&mut self, now: Moment, _: SystemTime) -> Next {
        if self.due <= now { Next::Run } else { Next::At(self.due) }
    }

    fn started(&mut self, now: Moment, _: SystemTime) {
        self.due = match self.rate {
            true if seeded::on(Bug::Burst) => self.due + self.period,
            true => self.tick_from(now + INSTANT),
            false => now + self.period,
        };
    }

    /// Skips passed ticks. A tick at `now` has not passed yet.
    fn ended(&mut self, now: Moment, _: SystemTime) {
        self.due = match self.rate {
            true if seeded::on(Bug::Burst) => self.due,
            true => self.tick_from(now),
            false => now + self.period,
        };
    }
}

impl FixedPlan {
    /// Returns the first tick at or after `moment`, but none before `due`.
    fn tick_from(&self, moment: Moment) -> Moment {
        match nanos(moment - self.due) % nanos(self.period) {
            0 => moment.max(self.due),
            late => moment + (self.period - Duration::from_nanos(late)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;

    const fn secs(secs: u64) -> Duration {
        Duration::from_secs(secs)
    }

    fn at(secs: u64) -> Moment {
        Moment::ZERO + Duration::from_secs(secs)
    }

    /// A plan with a clock in whole seconds. The wall clock stops, since no fixed schedule reads it.
    struct TestPlan(Box<dyn Plan>);

    impl TestPlan {
        fn begin(schedule: Result<Schedule>, now: u64) -> Self {
            Self(schedule.unwrap().plan(at(now), UNIX_EPOCH))
        }

        fn next(&mut self, now: u64) -> Next {
            self.0.next(at(now), UNIX_EPOCH)
        }

        fn run(&mut self, start: u64, end: u64) {
            assert_eq!(self.next(start), Next::Run, "at {start}");
            self.0.started(at(start), UNIX_EPOCH);
            self.0.ended(at(end), UNIX_EPOCH);
        }
    }

    #[test]
    fn fixed_rate_keeps_the_ticks_of_its_first_run() {
        let mut plan = TestPlan::begin(Schedule::fixed_rate(secs(10)), 7);
        plan.run(7, 9);
        assert_eq!(plan.next(9), Next::At(at(17)));
        plan.run(18, 20);
        assert_eq!(plan.next(20), Next::At(at(27)), "a late run does not shift the ticks");
    }

    #[test]
    fn fixed_rate_skips_ticks_during_a_long_run() {
        let mut plan = TestPlan::begin(Schedule::fixed_rate(secs(10)), 0);
        plan.run(0, 35);
        assert_eq!(plan.next(35), Next::At(at(40)));
        plan.run(40, 60);
        plan.run(60, 60);
        assert_eq!(plan.next(60), Next::At(at(70)), "the tick at the end of a run is run once");
    }

    #[test]
    fn row_63_fixed_rate_after_a_pause_runs_once() {
        let mut plan = TestPlan::begin(Schedule::fixed_rate(secs(10)), 0);
        plan.run(0, 1);
        assert_eq!(plan.next(1), Next::At(at(10)));
        let year = 366 * 24 * 3600;
        plan.run(year + 3, year + 4);
        assert_eq!(plan.next(year + 4), Next::At(at(year + 10)), "one run, then the next tick");
        plan.run(year + 10, year + 11);
        assert_eq!(plan.next(year + 11), Next::At(at(year + 20)));
    }

    #[test]
    fn row_63_a_pause_within_a_run_makes_no_burst() {
        let mut plan = TestPlan::begin(Schedule::fixed_rate(secs(10)), 0);
        plan.run(0, 100_001);
        assert_eq!(plan.next(100_001), Next::At(at(100_010)));
    }

    #[test]
    fn fixed_delay_counts_from_the_end_of_the_last_run() {
        let mut plan = TestPlan::begin(Schedule::fixed_delay(secs(10)), 5);
        plan.run(5, 42);
        assert_eq!(plan.next(42), Next::At(at(52)));
        plan.run(1000, 1001);
        assert_eq!(plan.next(1001), Next::At(at(1011)));
    }

    #[test]
    fn started_run_is_no_longer_due() {
        for schedule in [Schedule::fixed_rate(secs(10)), Schedule::fixed_delay(secs(10))] {
            let mut plan = TestPlan::begin(schedule, 0);
            assert_eq!(plan.next(0), Next::Run);
            assert_eq!(plan.next(0), Next::Run, "next does not change the plan");
            plan.0.started(at(0), UNIX_EPOCH);
            assert_eq!(plan.next(0), Next::At(at(10)));
        }
    }

    #[test]
    fn initial_delay_precedes_the_first_run_of_each_tenure() {
        for make in [Schedule::fixed_rate, Schedule::fixed_delay] {
            let schedule = make(secs(10)).and_then(|schedule| schedule.with_initial_delay(secs(3)));
            for begin in [0, 77] {
                let mut plan = TestPlan::begin(schedule.clone(), begin);
                assert_eq!(plan.next(begin), Next::At(at(begin + 3)));
                plan.run(begin + 3, begin + 3);
                assert_eq!(plan.next(begin + 3), Next::At(at(begin + 13)));
            }
        }
    }

    #[test]
    fn durations_out_of_range_are_rejected_with_the_range() {
        for make in [Schedule::fixed_rate, Schedule::fixed_delay] {
            for bad in [Duration::ZERO, Duration::from_micros(999), MAX_PERIOD + INSTANT, Duration::MAX] {
                let error = make(bad).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Invalid);
                assert!(error.to_string().contains("take 1ms to 366 days"), "{error}");
            }
            assert!(make(MIN_PERIOD).is_ok() && make(MAX_PERIOD).is_ok());
        }
        let error = Schedule::fixed_rate(secs(1)).unwrap().with_initial_delay(Duration::MAX).unwrap_err();
        assert!(error.to_string().contains("at most 366 days"), "{error}");
    }

    fn durations() -> impl Strategy<Value = Duration> {
        prop_oneof![
            1 => prop::sample::select(vec![
                Duration::ZERO,
                INSTANT,
                MIN_PERIOD - INSTANT,
                MIN_PERIOD,
                MAX_PERIOD,
                MAX_PERIOD + INSTANT,
                Duration::MAX,
            ]),
            1 => any::<Duration>(),
            4 => (0..nanos(MAX_PERIOD)).prop_map(Duration::from_nanos),
            4 => (0..10_000_000_000_u64).prop_map(Duration::from_nanos),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_duration_is_invalid_or_makes_a_schedule_that_advances(
            period in durations(),
            initial in durations(),
            rate in any::<bool>(),
            begin in 0..u64::MAX / 4,
            steps in prop::collection::vec((0..nanos(MAX_PERIOD), 0..20_000_000_000_u64), 1..8),
        ) {
            let make = if rate { Schedule::fixed_rate } else { Schedule::fixed_delay };
            let schedule = match make(period).and_then(|schedule| schedule.with_initial_delay(initial)) {
                Ok(schedule) => schedule,
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::Invalid);
                    return Ok(());
                }
            };
            let begin = Moment::ZERO + Duration::from_nanos(begin);
            let mut now = begin;
            let mut plan = schedule.plan(now, UNIX_EPOCH);
            for (pause, job) in steps {
                if let Next::At(then) = plan.next(now, UNIX_EPOCH) {
                    prop_assert!(then > now);
                    now = then + Duration::from_nanos(pause);
                }
                prop_assert_eq!(plan.next(now, UNIX_EPOCH), Next::Run);
                plan.started(now, UNIX_EPOCH);
                now = now + Duration::from_nanos(job);
                plan.ended(now, UNIX_EPOCH);
                let then = match plan.next(now, UNIX_EPOCH) {
                    Next::At(then) => then,
                    _ => now,
                };
                prop_assert!(then <= now + period && (then > now || (rate && job > 0)));
                let since_first = (then - begin).saturating_sub(initial);
                prop_assert!(!rate || nanos(since_first).is_multiple_of(nanos(period)), "not a tick");
            }
        }
    }
}
