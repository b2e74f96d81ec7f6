use std::time::{Duration, SystemTime};

#[cfg(feature = "cron")]
use std::sync::Arc;

#[cfg(feature = "cron")]
use super::cron::{Cron, CronPlan};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::seeded::{self, Bug};

/// Says when a job runs: at a fixed rate, with a fixed delay, or by a cron expression.
///
/// A schedule counts from the moment its process becomes the leader, and anew in each tenure. It never
/// catches up in a burst: whatever was missed while the process was paused makes one run, and what was
/// missed while the job itself ran makes none.
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

/// Below this, a schedule is a busy loop.
const MIN_PERIOD: Duration = Duration::from_millis(1);
/// A yearly job fits; a longer wait is a mistake in the unit.
const MAX_PERIOD: Duration = Duration::from_secs(366 * 24 * 3600);
/// The smallest step of a [`Moment`].
const INSTANT: Duration = Duration::from_nanos(1);

impl Schedule {
    /// Runs every `period`, counted from the first run: ticks keep their distance however long a job takes.
    ///
    /// A tick that passes while the job runs is skipped. After a pause of the process the job runs once and
    /// then at the next tick of the old beat.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if `period` is under 1 ms or over 366 days.
    pub fn fixed_rate(period: Duration) -> Result<Self> {
        Ok(Self::new(Kind::Rate(checked("period", period)?)))
    }

    /// Runs `delay` after the end of the last run.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if `delay` is under 1 ms or over 366 days.
    pub fn fixed_delay(delay: Duration) -> Result<Self> {
        Ok(Self::new(Kind::Delay(checked("delay", delay)?)))
    }

    /// Runs at the times of a cron expression, in UTC unless [`with_time_zone`](Self::with_time_zone) says
    /// otherwise.
    ///
    /// Five fields, or six with the seconds first: `[second] minute hour day-of-month month day-of-week`.
    /// Each takes `*`, numbers, lists `1,2`, ranges `1-5` and steps `*/5` or `10-50/5`; months and weekdays
    /// go by name too (`JAN`, `MON`), and Sunday is 0 and 7. A day of month may be `L` (the last) or `15W`
    /// (the working day closest to it), a day of week `5#2` (the second Friday) or `5#L` (the last). If both
    /// days are given either suffices; with a `+` before the day of week both must hold. Also `@hourly`,
    /// `@daily`, `@weekly`, `@monthly`, `@yearly` and `@annually`.
    ///
    /// # Wall clock
    ///
    /// A step of the wall clock is noticed within 30 seconds. If it jumps forward over several occurrences,
    /// the job runs once for all of them and goes on with the next one to come. If it is set back, what has
    /// run does not run again: after the clock is set back by an hour, the schedule pauses for that hour.
    /// That holds within one tenure; a new leader goes by its own clock and knows no earlier runs.
    ///
    /// # Summer time
    ///
    /// An expression with one time of day (one second, one minute, one hour: `30 2 * * *`) runs once on each
    /// of its days: at the end of the gap if the clocks skip that time, at the first of the two if it comes
    /// twice. Any other (`*/30 * * * *`, `0,30 2 * * *`) runs whenever the local clock shows a time of its:
    /// not at all at times that are skipped, and twice at times that come twice.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is no cron expression, is over 256 bytes long,
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

    /// Reads the cron expression as local time of `zone`, an IANA name such as `Europe/Berlin`.
    ///
    /// The zones are those of the host's database (the package `tzdata`), or of the one built in if it has none.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if the zone is unknown, if this is no cron schedule,
    /// or if all its times fall in the hour that the zone skips.
    #[cfg(feature = "cron")]
    pub fn with_time_zone(self, zone: &str) -> Result<Self> {
        match &self.kind {
            Kind::Cron(cron) => Ok(Self::new(Kind::Cron(Arc::new(cron.in_zone(zone)?)))),
            Kind::Rate(_) | Kind::Delay(_) => Err(Error::invalid(
                "a fixed rate or delay knows no time zone: leave the zone out, or use Schedule::cron",
            )),
        }
    }

    /// Waits `delay` before the first run of a tenure; default zero.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is over 366 days, or this is a cron schedule.
    pub fn with_initial_delay(self, delay: Duration) -> Result<Self> {
        #[cfg(feature = "cron")]
        if let Kind::Cron(_) = self.kind {
            return Err(Error::invalid(
                "a cron expression says itself when the first run is: leave the initial delay out",
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
    pub(crate) fn plan(&self, now: Moment, wall: SystemTime) -> Plan {
        let due = now + self.initial_delay;
        match &self.kind {
            Kind::Rate(period) => Plan::Rate(RatePlan { period: *period, due }),
            Kind::Delay(delay) => Plan::Delay(DelayPlan { delay: *delay, due }),
            #[cfg(feature = "cron")]
            Kind::Cron(cron) => Plan::Cron(CronPlan::new(Arc::clone(cron), wall)),
        }
    }
}

fn checked(what: &str, duration: Duration) -> Result<Duration> {
    if (MIN_PERIOD..=MAX_PERIOD).contains(&duration) {
        return Ok(duration);
    }
    Err(Error::invalid(format!("a {what} of {duration:?} is out of range: take 1ms to 366 days")))
}

/// What a plan asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Run now.
    Run,
    /// Sleep until then and ask again; always later than the moment of asking.
    At(Moment),
    /// Nothing will ever be due.
    #[cfg_attr(not(feature = "cron"), allow(dead_code, reason = "only a cron expression can run out"))]
    Never,
}

impl Next {
    /// Runs at `due`.
    fn due(due: Moment, now: Moment) -> Self {
        if due <= now { Self::Run } else { Self::At(due) }
    }
}

/// A [`Schedule`] in one tenure: what is due next.
///
/// Ask [`next`](Self::next); when it says [`Run`](Next::Run), call [`started`](Self::started), run the job,
/// call [`ended`](Self::ended) and ask again. Every call takes both clocks, read together.
#[derive(Debug)]
pub(crate) enum Plan {
    Rate(RatePlan),
    Delay(DelayPlan),
    #[cfg(feature = "cron")]
    Cron(CronPlan),
}

#[cfg_attr(not(feature = "cron"), expect(unused_variables, reason = "only cron reads the wall clock"))]
impl Plan {
    /// Says whether to run now or when to ask again.
    pub(crate) fn next(&mut self, now: Moment, wall: SystemTime) -> Next {
        match self {
            Self::Rate(plan) => Next::due(plan.due, now),
            Self::Delay(plan) => Next::due(plan.due, now),
            #[cfg(feature = "cron")]
            Self::Cron(plan) => plan.next(now, wall),
        }
    }

    /// Notes that the job which was due has started: it is due no more.
    pub(crate) fn started(&mut self, now: Moment, wall: SystemTime) {
        match self {
            Self::Rate(plan) => plan.started(now),
            Self::Delay(plan) => plan.rest(now),
            #[cfg(feature = "cron")]
            Self::Cron(plan) => plan.started(wall),
        }
    }

    /// Notes that the job has ended: what passed meanwhile is skipped.
    pub(crate) fn ended(&mut self, now: Moment, wall: SystemTime) {
        match self {
            Self::Rate(plan) => plan.ended(now),
            Self::Delay(plan) => plan.rest(now),
            #[cfg(feature = "cron")]
            Self::Cron(plan) => plan.ended(wall),
        }
    }
}

/// Fixed rate: `due` is always a tick of the beat that the first run began.
#[derive(Debug)]
pub(crate) struct RatePlan {
    period: Duration,
    due: Moment,
}

impl RatePlan {
    fn started(&mut self, now: Moment) {
        if seeded::on(Bug::Burst) {
            self.due = self.due + self.period;
            return;
        }
        self.due = self.tick_from(now + INSTANT);
    }

    /// A tick at this very moment has not passed yet.
    fn ended(&mut self, now: Moment) {
        if !seeded::on(Bug::Burst) {
            self.due = self.tick_from(now);
        }
    }

    /// The first tick at or after `moment`, but none before `due`.
    fn tick_from(&self, moment: Moment) -> Moment {
        match nanos(moment - self.due) % nanos(self.period) {
            0 => moment.max(self.due),
            late => moment + (self.period - Duration::from_nanos(late)),
        }
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

/// Fixed delay.
#[derive(Debug)]
pub(crate) struct DelayPlan {
    delay: Duration,
    due: Moment,
}

impl DelayPlan {
    fn rest(&mut self, now: Moment) {
        self.due = now + self.delay;
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

    /// A plan with a clock in whole seconds; the wall clock stands still, for no fixed schedule reads it.
    struct Bench(Plan);

    impl Bench {
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
    fn fixed_rate_keeps_the_beat_of_its_first_run() {
        let mut plan = Bench::begin(Schedule::fixed_rate(secs(10)), 7);
        plan.run(7, 9);
        assert_eq!(plan.next(9), Next::At(at(17)));
        plan.run(18, 20);
        assert_eq!(plan.next(20), Next::At(at(27)), "a late run does not shift the beat");
    }

    #[test]
    fn fixed_rate_skips_what_a_long_run_missed() {
        let mut plan = Bench::begin(Schedule::fixed_rate(secs(10)), 0);
        plan.run(0, 35);
        assert_eq!(plan.next(35), Next::At(at(40)));
        plan.run(40, 60);
        plan.run(60, 60);
        assert_eq!(
            plan.next(60),
            Next::At(at(70)),
            "the tick at the very end of a run was not missed, but is once"
        );
    }

    #[test]
    fn row_63_fixed_rate_after_a_pause_runs_once() {
        let mut plan = Bench::begin(Schedule::fixed_rate(secs(10)), 0);
        plan.run(0, 1);
        assert_eq!(plan.next(1), Next::At(at(10)));
        let year = 366 * 24 * 3600;
        plan.run(year + 3, year + 4);
        assert_eq!(
            plan.next(year + 4),
            Next::At(at(year + 10)),
            "one run, then the next tick of the old beat"
        );
        plan.run(year + 10, year + 11);
        assert_eq!(plan.next(year + 11), Next::At(at(year + 20)));
    }

    #[test]
    fn row_63_a_pause_within_a_run_makes_no_burst() {
        let mut plan = Bench::begin(Schedule::fixed_rate(secs(10)), 0);
        plan.run(0, 100_001);
        assert_eq!(plan.next(100_001), Next::At(at(100_010)));
    }

    #[test]
    fn fixed_delay_counts_from_the_end_of_the_last_run() {
        let mut plan = Bench::begin(Schedule::fixed_delay(secs(10)), 5);
        plan.run(5, 42);
        assert_eq!(plan.next(42), Next::At(at(52)));
        plan.run(1000, 1001);
        assert_eq!(plan.next(1001), Next::At(at(1011)));
    }

    #[test]
    fn what_has_started_is_due_no_more() {
        for schedule in [Schedule::fixed_rate(secs(10)), Schedule::fixed_delay(secs(10))] {
            let mut plan = Bench::begin(schedule, 0);
            assert_eq!(plan.next(0), Next::Run);
            assert_eq!(plan.next(0), Next::Run, "asking does not take the run");
            plan.0.started(at(0), UNIX_EPOCH);
            assert_eq!(plan.next(0), Next::At(at(10)));
        }
    }

    #[test]
    fn the_initial_delay_comes_before_the_first_run_of_each_tenure() {
        for make in [Schedule::fixed_rate, Schedule::fixed_delay] {
            let schedule = make(secs(10)).and_then(|schedule| schedule.with_initial_delay(secs(3)));
            for begin in [0, 77] {
                let mut plan = Bench::begin(schedule.clone(), begin);
                assert_eq!(plan.next(begin), Next::At(at(begin + 3)));
                plan.run(begin + 3, begin + 3);
                assert_eq!(plan.next(begin + 3), Next::At(at(begin + 13)));
            }
        }
    }

    #[test]
    fn durations_out_of_range_are_refused_with_the_range() {
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
        fn any_duration_makes_a_schedule_that_moves_on_or_is_invalid(
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
                let beat = (then - begin).saturating_sub(initial);
                prop_assert!(!rate || nanos(beat).is_multiple_of(nanos(period)), "off the beat");
            }
        }
    }
}
