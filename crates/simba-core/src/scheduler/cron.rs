use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use croner::parser::{CronParser, Seconds, Year};
use croner::{CronPattern, JobType};
use jiff::civil::DateTime;
use jiff::tz::{AmbiguousOffset, TimeZone};
use jiff::{SignedDuration, Timestamp};

use super::schedule::{Next, Plan};
use crate::clock::Moment;
use crate::error::{Error, Result};

/// The maximum length of an expression, so that a longer one costs neither time nor memory.
const MAX_LEN: usize = 256;
/// The maximum time between two readings of the wall clock, which may be set.
const RECHECK: Duration = Duration::from_secs(30);
/// The year 4900, the maximum of all times, because croner's search ends at the year 5000.
const LATEST: Timestamp = Timestamp::constant(92_461_910_400, 0);
/// The maximum search range, which is enough: a given weekday is on February 29th at least every 40 years.
const HORIZON: SignedDuration = SignedDuration::from_hours(99 * 365 * 24);
const INSTANT: SignedDuration = SignedDuration::from_nanos(1);

/// A cron expression in a time zone.
pub(super) struct Cron {
    expression: Box<str>,
    pattern: croner::Cron,
    zone: TimeZone,
}

impl Cron {
    /// Parses an expression, in UTC.
    pub(super) fn parse(expression: &str) -> Result<Self> {
        if expression.len() > MAX_LEN {
            return Err(Error::invalid(format!(
                "a cron expression of {} bytes is too long: take at most {MAX_LEN}",
                expression.len()
            )));
        }
        let mut pattern = parser().parse(expression).map_err(|error| {
            Error::invalid(format!(
                "{expression:?} is no cron expression: take 5 fields, minute first, or 6 with seconds first"
            ))
            .with_source(error)
        })?;
        check_fields(expression, &pattern.pattern)?;
        fold_sunday(&mut pattern.pattern);
        Self { expression: expression.into(), pattern, zone: TimeZone::UTC }.occurring()
    }

    /// Returns the same expression in another zone.
    pub(super) fn in_zone(&self, zone: &str) -> Result<Self> {
        let zone = find_zone(zone)?;
        Self { expression: self.expression.clone(), pattern: self.pattern.clone(), zone }.occurring()
    }

    /// Rejects an expression that never occurs. It searches the last century that croner supports: there a search
    /// without a result is short, and each of the fourteen kinds of year occurs.
    fn occurring(self) -> Result<Self> {
        if self.after(LATEST).is_some() {
            return Ok(self);
        }
        Err(Error::invalid(format!(
            "the cron expression {:?} never occurs in the time zone {}: fix its days and times",
            self.expression,
            self.zone_name()
        )))
    }

    fn zone_name(&self) -> &str {
        self.zone.iana_name().unwrap_or("UTC")
    }

    /// Returns the first occurrence later than `after`.
    ///
    /// croner searches in local time only. Its own search in a zone lets `30 1 * * *` run a second time, at
    /// 03:00, on the day when the clocks go from 02:00 to 03:00, and can take half a minute (4.0.2).
    fn after(&self, after: Timestamp) -> Option<Timestamp> {
        match self.pattern.determine_job_type() {
            JobType::FixedTime => self.fixed_after(after),
            JobType::IntervalWildcard => self.interval_after(after),
        }
    }

    /// Searches for one time of day: each local time is one instant.
    fn fixed_after(&self, after: Timestamp) -> Option<Timestamp> {
        let local = self.local_after(self.zone.to_datetime(after), false)?;
        let locals = std::iter::successors(Some(local), |local| self.local_after(*local, false));
        locals.map_while(|local| self.instant_of(local)).find(|instant| *instant > after)
    }

    /// Returns the instant of a local time: the end of the gap if the clocks skip it, the first of two if it occurs
    /// twice.
    fn instant_of(&self, local: DateTime) -> Option<Timestamp> {
        match self.zone.to_ambiguous_timestamp(local).offset() {
            AmbiguousOffset::Unambiguous { offset } => offset.to_timestamp(local).ok(),
            AmbiguousOffset::Fold { before, .. } => before.to_timestamp(local).ok(),
            AmbiguousOffset::Gap { after, .. } => {
                let before_gap = after.to_timestamp(local).ok()?;
                self.zone.following(before_gap).next().map(|change| change.timestamp())
            }
        }
    }

    /// Searches for many times of day: an instant occurs if the local clock then shows a time of the expression.
    /// The search covers the periods between two changes of the zone's offset one by one, since the offset is constant
    /// there.
    fn interval_after(&self, after: Timestamp) -> Option<Timestamp> {
        let horizon = after.checked_add(HORIZON).ok()?;
        let mut found = self.same_offset_after(after, false)?;
        for change in self.zone.following(after) {
            if found < change.timestamp() || change.timestamp() > horizon {
                break;
            }
            found = self.same_offset_after(change.timestamp(), true)?;
        }
        Some(found).filter(|found| *found <= horizon)
    }

    /// Returns the first occurrence with the offset of `from`.
    fn same_offset_after(&self, from: Timestamp, inclusive: bool) -> Option<Timestamp> {
        let offset = self.zone.to_offset(from);
        let local = self.local_after(offset.to_datetime(from), inclusive)?;
        offset.to_timestamp(local).ok()
    }

    fn local_after(&self, local: DateTime, inclusive: bool) -> Option<DateTime> {
        self.pattern.find_next_occurrence(&local, inclusive).ok()
    }
}

/// Shows the expression and the zone. The pattern would be a thousand lines of bits.
impl fmt::Debug for Cron {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cron({:?} in {})", self.expression, self.zone_name())
    }
}

fn parser() -> CronParser {
    CronParser::builder().seconds(Seconds::Optional).year(Year::Disallowed).build()
}

/// Rejects a field without a value, such as `,`: croner accepts it and then searches for minutes (4.0.2).
fn check_fields(expression: &str, pattern: &CronPattern) -> Result<()> {
    let fields = [
        ("second", &pattern.seconds),
        ("minute", &pattern.minutes),
        ("hour", &pattern.hours),
        ("day of month", &pattern.days),
        ("month", &pattern.months),
        ("day of week", &pattern.days_of_week),
    ];
    match fields.into_iter().find(|(_, field)| field.values().is_empty() && !field.has_modifiers()) {
        None => Ok(()),
        Some((name, _)) => Err(Error::invalid(format!(
            "the {name} of the cron expression {expression:?} is empty: give a number or `*`"
        ))),
    }
}

/// Makes `7#L` the last Sunday: croner converts 7 to 0 for all marks of a weekday except `L` (4.0.2).
fn fold_sunday(pattern: &mut CronPattern) {
    let days = &mut pattern.days_of_week;
    for mark in (0..u8::BITS).map(|bit| 1 << bit) {
        if days.is_bit_set(7, mark).is_ok_and(|set| set) {
            // Neither can fail: both days and the mark are in the range of the field.
            let _ = days.unset_bit(7, mark).and_then(|()| days.set_bit(0, mark));
        }
    }
}

/// Finds a zone in the host's database, or in the built-in one if the host has none, as in a container image.
fn find_zone(name: &str) -> Result<TimeZone> {
    if name.len() > MAX_LEN {
        return Err(Error::invalid(format!("a time zone's name has at most {MAX_LEN} bytes")));
    }
    TimeZone::get(name).map_err(|error| {
        Error::invalid(format!(
            "the time zone {name:?} is unknown: take an IANA name such as \"Europe/Berlin\" (a zone newer \
             than the host's database: update tzdata)"
        ))
        .with_source(error)
    })
}

/// A [`Cron`] in one tenure.
#[derive(Debug)]
pub(super) struct CronPlan {
    cron: Arc<Cron>,
    /// The occurrence that ran last, or the start of the tenure. Only later occurrences run.
    floor: Timestamp,
    /// The last reading of the wall clock.
    last_wall: Timestamp,
    due: Option<Timestamp>,
}

impl CronPlan {
    pub(super) fn new(cron: Arc<Cron>, wall: SystemTime) -> Self {
        let begin = timestamp(wall);
        let due = cron.after(begin);
        Self { cron, floor: begin, last_wall: begin, due }
    }

    /// Reads the wall clock. If it was set back, occurrences that the jump forward had skipped are due again.
    fn read_wall(&mut self, wall: SystemTime) -> Timestamp {
        let wall = timestamp(wall);
        if wall < self.last_wall {
            self.set_due_after(wall);
        }
        self.last_wall = wall;
        wall
    }

    fn set_due_after(&mut self, wall: Timestamp) {
        self.due = self.cron.after(self.floor.max(wall));
    }
}

impl Plan for CronPlan {
    fn next(&mut self, now: Moment, wall: SystemTime) -> Next {
        let wall = self.read_wall(wall);
        match self.due {
            None => Next::Never,
            Some(due) if due <= wall => Next::Run,
            Some(due) => Next::At(now + due.duration_since(wall).unsigned_abs().min(RECHECK)),
        }
    }

    /// Sets the floor to the occurrence, not to the clock: a wrong clock that is corrected then costs one run only.
    fn started(&mut self, _: Moment, wall: SystemTime) {
        self.floor = self.due.unwrap_or(self.floor);
        self.last_wall = timestamp(wall);
        self.set_due_after(self.last_wall);
    }

    /// Skips passed occurrences. One at this instant has not passed yet.
    fn ended(&mut self, _: Moment, wall: SystemTime) {
        let wall = self.read_wall(wall);
        if self.due.is_some_and(|due| due < wall) {
            self.set_due_after(wall.checked_sub(INSTANT).unwrap_or(wall));
        }
    }
}

fn timestamp(wall: SystemTime) -> Timestamp {
    Timestamp::try_from(wall).map_or(LATEST, |wall| wall.min(LATEST))
}

#[cfg(test)]
mod tests {
    use std::error::Error as _;

    use proptest::prelude::*;

    use super::*;
    use crate::error::ErrorKind;
    use crate::scheduler::Schedule;

    const BERLIN: &str = "Europe/Berlin";

    fn stamp(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn secs(secs: i64) -> SignedDuration {
        SignedDuration::from_secs(secs)
    }

    fn cron(expression: &str, zone: &str) -> Cron {
        Cron::parse(expression).and_then(|cron| cron.in_zone(zone)).unwrap()
    }

    /// Returns the occurrences after `from`, up to and including `to`.
    fn between(cron: &Cron, from: Timestamp, to: Timestamp) -> Vec<Timestamp> {
        std::iter::successors(cron.after(from), |at| cron.after(*at)).take_while(|at| *at <= to).collect()
    }

    /// Returns the occurrences of two days from `day` at 00:00 UTC, in local time.
    fn two_days(expression: &str, zone: &str, day: &str) -> Vec<String> {
        let cron = cron(expression, zone);
        let from = stamp(&format!("{day}T00:00:00Z")) - INSTANT;
        let show = |at: &Timestamp| at.to_zoned(cron.zone.clone()).strftime("%d %H:%M%:z").to_string();
        between(&cron, from, from + secs(2 * 24 * 3600)).iter().map(show).collect()
    }

    fn refusal(expression: &str) -> String {
        let error = Schedule::cron(expression).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{expression}");
        error.to_string()
    }

    /// A plan whose clocks run together until the wall clock is set.
    struct TestPlan {
        plan: CronPlan,
        now: Moment,
        wall: Timestamp,
    }

    impl TestPlan {
        fn begin(expression: &str, wall: &str) -> Self {
            let (now, wall) = (Moment::ZERO, stamp(wall));
            let plan = CronPlan::new(Arc::new(cron(expression, "UTC")), wall.into());
            Self { plan, now, wall }
        }

        fn set(&mut self, wall: &str) {
            self.wall = stamp(wall);
        }

        fn advance(&mut self, time: Duration) {
            self.now = self.now + time;
            self.wall += time;
        }

        fn next(&mut self) -> Next {
            self.plan.next(self.now, self.wall.into())
        }

        /// Sleeps until a run is due, and returns the wall clock.
        fn wait(&mut self) -> Timestamp {
            while let Next::At(then) = self.next() {
                assert!(then > self.now && then - self.now <= RECHECK);
                self.advance(then - self.now);
            }
            assert_eq!(self.next(), Next::Run);
            self.wall
        }

        fn run(&mut self, time: Duration) {
            assert_eq!(self.next(), Next::Run);
            self.plan.started(self.now, self.wall.into());
            self.advance(time);
            self.plan.ended(self.now, self.wall.into());
        }

        fn wait_and_run(&mut self) -> String {
            let at = self.wait();
            self.run(Duration::from_secs(1));
            at.to_string()
        }
    }

    #[test]
    fn five_fields_six_with_seconds_first_and_nicknames() {
        let first =
            |expression| cron(expression, "UTC").after(stamp("2026-07-01T10:20:30Z")).unwrap().to_string();
        assert_eq!(first("* * * * *"), "2026-07-01T10:21:00Z");
        assert_eq!(first("*/15 * * * *"), "2026-07-01T10:30:00Z");
        assert_eq!(first("*/20 * * * * *"), "2026-07-01T10:20:40Z");
        assert_eq!(first("30 20 10 * * *"), "2026-07-02T10:20:30Z", "strictly later");
        assert_eq!(first("0 9 * JAN mon-fri"), "2027-01-01T09:00:00Z");
        assert_eq!(first("0 0 L * *"), "2026-07-31T00:00:00Z");
        assert_eq!(first("0 0 13 * +FRI"), "2026-11-13T00:00:00Z");
        for (nickname, expected) in [
            ("@hourly", "2026-07-01T11:00:00Z"),
            ("@daily", "2026-07-02T00:00:00Z"),
            ("@weekly", "2026-07-05T00:00:00Z"),
            ("@monthly", "2026-08-01T00:00:00Z"),
            ("@yearly", "2027-01-01T00:00:00Z"),
            ("@annually", "2027-01-01T00:00:00Z"),
        ] {
            assert_eq!(first(nickname), expected);
        }
    }

    #[test]
    fn last_sunday_has_four_notations() {
        for sunday in ["SUN#L", "0#L", "7#L", "7L"] {
            assert_eq!(
                two_days(&format!("0 0 * * {sunday}"), "UTC", "2026-05-31"),
                ["31 00:00+00:00"],
                "{sunday}"
            );
        }
        assert_eq!(
            two_days("0 0 * * SAT-SUN#L", "UTC", "2026-05-30"),
            ["30 00:00+00:00", "31 00:00+00:00"],
            "a range over the end of the week"
        );
    }

    #[test]
    fn invalid_expressions_are_rejected() {
        for bad in [
            "",
            " ",
            "x",
            "* * * *",
            "* * * * * * *",
            "60 * * * *",
            "* 24 * * *",
            "@reboot",
            "\0",
            "* * * * \u{df}",
        ] {
            assert!(refusal(bad).contains("take 5 fields"), "{bad}");
        }
        assert!(Schedule::cron("60 * * * *").unwrap_err().source().is_some(), "croner says what is wrong");
        assert!(refusal(&"*".repeat(MAX_LEN + 1)).contains("at most 256"));
    }

    #[test]
    fn expressions_that_never_occur_are_rejected_at_once() {
        for bad in ["0 0 30 2 *", "0 0 31 2,4,6,9,11 *", "* * * 30 2 +MON", "0 0 * * L"] {
            assert!(refusal(bad).contains("never occurs in the time zone UTC"), "{bad}");
        }
        for bad in
            [", * * * * *", ", * * * *", "* , * * *", "* * , * *", "* * * , *", "* * * * ,", "* * * * +"]
        {
            assert!(refusal(bad).contains("is empty"), "{bad}");
        }
        for rare in ["0 0 29 2 *", "0 0 29 2 +MON", "* * * 29 2 +SUN#5", "0 0 31W * +FRI"] {
            assert!(Schedule::cron(rare).is_ok(), "{rare}");
        }
    }

    #[test]
    fn expression_only_in_the_skipped_hour_is_rejected_in_that_zone() {
        for always_skipped in ["0,30 2 * 3 +SUN#L", "* * 2 * 3 +SUN#L"] {
            let schedule = Schedule::cron(always_skipped).unwrap();
            assert!(schedule.clone().with_time_zone("Asia/Tokyo").is_ok());
            let error = schedule.with_time_zone(BERLIN).unwrap_err();
            assert!(error.to_string().contains("never occurs in the time zone Europe/Berlin"), "{error}");
        }
    }

    #[test]
    fn times_follow_the_offset_of_the_zone() {
        assert_eq!(two_days("0 9 * * *", BERLIN, "2026-01-10"), ["10 09:00+01:00", "11 09:00+01:00"]);
        assert_eq!(two_days("0 9 * * *", BERLIN, "2026-07-10"), ["10 09:00+02:00", "11 09:00+02:00"]);
        assert_eq!(two_days("0 9 * * *", "utc", "2026-07-10"), ["10 09:00+00:00", "11 09:00+00:00"]);
    }

    #[test]
    fn only_cron_has_zones_and_cron_has_no_initial_delay() {
        let schedule = Schedule::cron("* * * * *").unwrap();
        for unknown in ["", "Mars/Base", "../../etc/passwd", "/etc/localtime", "CET-1CEST", "\0"] {
            let error = schedule.clone().with_time_zone(unknown).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert!(error.to_string().contains("IANA name"), "{error}");
        }
        assert!(schedule.clone().with_time_zone(&"x".repeat(1_000_000)).unwrap_err().to_string().len() < 100);
        let error = schedule.with_initial_delay(Duration::ZERO).unwrap_err();
        assert!(error.to_string().contains("leave the initial delay out"), "{error}");
        let error = Schedule::fixed_rate(Duration::from_secs(1)).unwrap().with_time_zone("UTC").unwrap_err();
        assert!(error.to_string().contains("use Schedule::cron"), "{error}");
    }

    #[test]
    fn one_skipped_time_of_day_runs_at_the_end_of_the_gap() {
        assert_eq!(two_days("30 2 * * *", BERLIN, "2026-03-29"), ["29 03:00+02:00", "30 02:30+02:00"]);
        assert_eq!(
            two_days("30 2 * * *", "America/New_York", "2026-03-08"),
            ["08 03:00-04:00", "09 02:30-04:00"]
        );
        assert_eq!(
            two_days("0 0 * * *", "America/Santiago", "2026-09-06"),
            ["06 01:00-03:00", "07 00:00-03:00"]
        );
    }

    #[test]
    fn one_time_of_day_before_the_gap_runs_once() {
        assert_eq!(
            two_days("30 1 * * *", BERLIN, "2026-03-29"),
            ["29 01:30+01:00", "30 01:30+02:00", "31 01:30+02:00"]
        );
        assert_eq!(
            two_days("0 23 * * *", "America/Santiago", "2026-09-06"),
            ["05 23:00-04:00", "06 23:00-03:00"]
        );
    }

    #[test]
    fn one_time_of_day_that_occurs_twice_runs_at_the_first() {
        assert_eq!(two_days("30 2 * * *", BERLIN, "2026-10-25"), ["25 02:30+02:00", "26 02:30+01:00"]);
        assert_eq!(
            two_days("30 1 * * *", "America/New_York", "2026-11-01"),
            ["01 01:30-04:00", "02 01:30-05:00"]
        );
        let second_time = cron("30 2 * * *", BERLIN).after(stamp("2026-10-25T01:10:00Z"));
        assert_eq!(second_time, Some(stamp("2026-10-26T01:30:00Z")), "not again the second time");
    }

    #[test]
    fn many_times_of_day_run_as_the_local_clock_shows_them() {
        assert_eq!(two_days("0,30 2 * * *", BERLIN, "2026-03-29"), ["30 02:00+02:00", "30 02:30+02:00"]);
        assert_eq!(
            two_days("*/30 1-3 * * +SUN", BERLIN, "2026-03-29"),
            ["29 01:00+01:00", "29 01:30+01:00", "29 03:00+02:00", "29 03:30+02:00"]
        );
        assert_eq!(
            two_days("*/30 2 * * +SUN", BERLIN, "2026-10-25"),
            ["25 02:00+02:00", "25 02:30+02:00", "25 02:00+01:00", "25 02:30+01:00"]
        );
    }

    #[test]
    fn many_times_of_day_agree_with_a_check_of_every_minute() {
        let changes = [
            (BERLIN, "2026-03-28T12:00:00Z"),
            (BERLIN, "2026-10-24T12:00:00Z"),
            ("America/Santiago", "2026-04-04T12:00:00Z"),
            ("Australia/Lord_Howe", "2026-04-04T06:00:00Z"),
            ("Australia/Lord_Howe", "2026-10-03T06:00:00Z"),
            ("Antarctica/Troll", "2026-03-28T12:00:00Z"),
            ("Pacific/Apia", "2011-12-29T12:00:00Z"),
        ];
        for expression in [
            "*/7 * * * *",
            "15,45 2 * * *",
            "0 */2 * * *",
            "* 0-3 * * SUN",
            "59 1,23 * * *",
            "0,1 12 29-31 * *",
        ] {
            for (zone, from) in changes {
                let (cron, from) = (cron(expression, zone), stamp(from) - INSTANT);
                let minutes = (0..36 * 60).map(|minute| from + INSTANT + secs(60 * minute));
                let shows =
                    |at: &Timestamp| cron.pattern.is_time_matching(&cron.zone.to_datetime(*at)).unwrap();
                let expected: Vec<_> = minutes.filter(shows).collect();
                let actual = between(&cron, from, from + secs(36 * 3600));
                assert_eq!(actual, expected, "{expression} in {zone}");
            }
        }
    }

    #[test]
    fn plan_sleeps_for_at_most_30_seconds_and_runs_on_time() {
        let mut test = TestPlan::begin("*/5 * * * *", "2026-07-01T10:00:00Z");
        assert_eq!(test.next(), Next::At(Moment::ZERO + RECHECK), "10:00 itself was before the tenure");
        assert_eq!(test.wait_and_run(), "2026-07-01T10:05:00Z");
        assert_eq!(test.wait_and_run(), "2026-07-01T10:10:00Z");
        test.set("2026-07-01T10:14:50.5Z");
        assert_eq!(test.next(), Next::At(test.now + Duration::from_millis(9500)));
    }

    #[test]
    fn occurrences_during_a_run_are_skipped() {
        let mut test = TestPlan::begin("*/5 * * * *", "2026-07-01T10:00:00Z");
        test.wait();
        test.run(Duration::from_secs(12 * 60));
        assert_eq!(test.wait_and_run(), "2026-07-01T10:20:00Z");
        test.wait();
        test.run(Duration::from_secs(10 * 60));
        assert_eq!(
            test.wait_and_run(),
            "2026-07-01T10:35:00Z",
            "an occurrence at the end of a run is not missed"
        );
        assert_eq!(test.wait_and_run(), "2026-07-01T10:40:00Z");
    }

    #[test]
    fn jump_forward_runs_once_and_continues_with_the_next() {
        let mut test = TestPlan::begin("*/5 * * * *", "2026-07-01T10:00:00Z");
        test.set("2026-07-03T17:31:00Z");
        assert_eq!(test.wait_and_run(), "2026-07-03T17:31:00Z");
        assert_eq!(test.wait_and_run(), "2026-07-03T17:35:00Z");
    }

    #[test]
    fn clock_set_back_pauses_and_runs_nothing_twice() {
        let mut test = TestPlan::begin("*/5 * * * *", "2026-07-01T10:00:00Z");
        assert_eq!(test.wait_and_run(), "2026-07-01T10:05:00Z");
        test.set("2026-07-01T09:05:00Z");
        assert_eq!(test.wait_and_run(), "2026-07-01T10:10:00Z");
        test.wait();
        test.plan.started(test.now, test.wall.into());
        test.set("2026-07-01T10:14:00Z");
        test.plan.ended(test.now, test.wall.into());
        assert_eq!(test.wait_and_run(), "2026-07-01T10:20:00Z", "set back within the run");
    }

    #[test]
    fn clock_set_back_before_the_tenure_pauses_until_its_start() {
        let mut test = TestPlan::begin("*/5 * * * *", "2026-07-01T10:02:00Z");
        test.set("2026-07-01T09:02:00Z");
        assert_eq!(test.wait_and_run(), "2026-07-01T10:05:00Z");
    }

    #[test]
    fn wrong_clock_that_is_corrected_costs_one_run() {
        for wrong in ["2099-01-01T00:00:00Z", "4999-12-31T23:59:59Z", "9999-12-30T22:00:00Z"] {
            let mut test = TestPlan::begin("*/5 * * * *", "2026-07-01T10:00:00Z");
            test.set(wrong);
            test.run(Duration::ZERO);
            assert!(matches!(test.next(), Next::At(_)), "{wrong}");
            test.set("2026-07-01T10:01:00Z");
            assert_eq!(test.wait_and_run(), "2026-07-01T10:10:00Z", "10:05 has run already");
        }
    }

    #[test]
    fn debug_output_is_one_line() {
        let schedule = Schedule::cron("0 3 * * *").unwrap().with_time_zone(BERLIN).unwrap();
        assert!(format!("{schedule:?}").contains(r#"Cron("0 3 * * *" in Europe/Berlin)"#));
        let plan = schedule.plan(Moment::ZERO, SystemTime::UNIX_EPOCH);
        assert!(format!("{plan:?}").len() < 200);
    }

    /// A valid field.
    fn valid(low: u32, high: u32) -> impl Strategy<Value = String> {
        let number = low..=high;
        let range = (number.clone(), number.clone()).prop_map(|(a, b)| format!("{}-{}", a.min(b), a.max(b)));
        prop_oneof![
            3 => Just("*".to_owned()),
            3 => number.clone().prop_map(|number| number.to_string()),
            1 => range,
            1 => (1..=high).prop_map(|step| format!("*/{step}")),
            1 => (number.clone(), number).prop_map(|(a, b)| format!("{a},{b}")),
        ]
    }

    /// Text that resembles a field, valid or not.
    fn odd() -> impl Strategy<Value = String> {
        prop_oneof![
            2 => "[0-9]{1,2}-[0-9]{1,2}(/[0-9]{1,2})?",
            2 => "[0-9]{0,2}(,[0-9]{0,2}){1,3}",
            2 => r"\+?(SUN|MON|FRI|SAT|sun|jan|FEB|DEC|[0-7])(-(SUN|TUE|[0-7]))?(#[0-9L])?",
            2 => r"L|LW|W|[0-9]{1,2}W|[0-7]L|#|\?|\+|,|-|/|@daily|[0-9]{5,6}",
            1 => r"[-0-9*,/LW#?+@]{1,6}",
        ]
    }

    /// Six valid fields or five; or with one replaced by an odd one, one too few, one too many.
    fn cronish() -> impl Strategy<Value = String> {
        let time = (valid(0, 59), valid(0, 59), valid(0, 23));
        let fields = (time, (valid(1, 31), valid(1, 12), valid(0, 7)));
        let odd_one = prop::option::of((0..8_usize, odd()));
        (fields, 0..=2_usize, odd_one).prop_map(|(((s, m, h), (d, mo, w)), skip, odd_one)| {
            let mut fields = vec![s, m, h, d, mo, w];
            match odd_one {
                Some((at, odd)) if at < 6 => fields[at] = odd,
                Some((_, odd)) => fields.push(odd),
                None => {}
            }
            fields[skip..].join(" ")
        })
    }

    fn zones() -> impl Strategy<Value = &'static str> {
        prop::sample::select(vec!["UTC", BERLIN, "America/New_York", "Australia/Lord_Howe", "Pacific/Apia"])
    }

    /// Steps of the wall clock in seconds: small, large and extreme, in both directions.
    fn steps() -> impl Strategy<Value = Vec<i64>> {
        let step = prop_oneof![
            0..100_i64,
            -10_000..10_000_i64,
            -100_000_000..100_000_000_i64,
            any::<i32>().prop_map(|s| 60 * i64::from(s))
        ];
        prop::collection::vec(step, 1..6)
    }

    fn check_plan(cron: Cron, steps: Vec<i64>) -> std::result::Result<(), TestCaseError> {
        let mut wall = stamp("2026-03-28T22:00:00Z");
        let mut plan = CronPlan::new(Arc::new(cron), wall.into());
        for step in steps {
            wall = wall.checked_add(secs(step)).unwrap_or(Timestamp::MAX);
            match plan.next(Moment::ZERO, wall.into()) {
                Next::At(then) => prop_assert!(then > Moment::ZERO && then - Moment::ZERO <= RECHECK),
                Next::Never => prop_assert!(false, "the expression occurs"),
                Next::Run => {
                    let ran = plan.floor;
                    plan.started(Moment::ZERO, wall.into());
                    prop_assert!(plan.floor > ran, "an occurrence ran twice");
                    plan.ended(Moment::ZERO, wall.into());
                    prop_assert!(matches!(plan.next(Moment::ZERO, wall.into()), Next::At(_)), "a burst");
                }
            }
        }
        Ok(())
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..Default::default() })]

        #[test]
        fn any_cronish_text_makes_a_plan_or_is_invalid(text in cronish(), zone in zones(), steps in steps()) {
            match Cron::parse(&text).and_then(|cron| cron.in_zone(zone)) {
                Ok(cron) => check_plan(cron, steps)?,
                Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Invalid),
            }
        }

        #[test]
        fn any_text_makes_a_schedule_or_is_invalid(
            text in prop_oneof![any::<String>(), r"(?s).{0,300}", r"[ -~]{0,40}"],
        ) {
            if let Err(error) = Schedule::cron(&text) {
                prop_assert_eq!(error.kind(), ErrorKind::Invalid);
            }
            if let Err(error) = Schedule::cron("@daily").and_then(|daily| daily.with_time_zone(&text)) {
                prop_assert_eq!(error.kind(), ErrorKind::Invalid);
            }
        }
    }
}
