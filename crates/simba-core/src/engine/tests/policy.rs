//! The policy, as properties of every plan: patience, try, minimum and maximum hold, step-down, release.

use proptest::prelude::*;

use super::simulated::{Change, Entry, FINE, Fate, Log, Outcome, Plan, change, fate};
use super::*;
use crate::error::ErrorKind;
use crate::types::Loss;

/// The minimum time limit of a call, which a call right before the deadline has as well.
const SHORTEST_CALL: Duration = Duration::from_millis(1);

fn millis(range: std::ops::Range<u64>) -> impl Strategy<Value = Duration> {
    range.prop_map(Duration::from_millis)
}

fn mode() -> impl Strategy<Value = Mode> {
    prop_oneof![Just(Mode::Try), millis(0..5_000).prop_map(Mode::Once), Just(Mode::Forever)]
}

fn any_settings() -> impl Strategy<Value = Settings> {
    (mode(), millis(0..2_000), prop::option::of(millis(2_000..5_000)))
        .prop_map(|(mode, min_hold, max_hold)| Settings { min_hold, max_hold, ..settings(mode) })
}

fn request() -> impl Strategy<Value = Request> {
    prop_oneof![3 => Just(Request::Stop), 1 => millis(0..3_000).prop_map(Request::StepDown)]
}

/// Any plan. A shutdown ends those that a stop does not end.
fn any_plan() -> impl Strategy<Value = Plan> {
    let calls = prop::collection::vec((change(), fate()), 0..40);
    let times = (0u64..6_000, 0u64..12_000);
    (any_settings(), calls, any::<bool>(), request(), times, any::<bool>()).prop_map(
        |(settings, calls, used, request, (requested_at, shutdown_at), hints)| Plan {
            settings,
            calls,
            used,
            request,
            requested_at,
            shutdown_at,
            hints,
        },
    )
}

fn transient() -> impl Strategy<Value = Fate> {
    (any::<bool>(), 0u64..200).prop_map(|(silent, took)| {
        let outcome = if silent { Outcome::Silent } else { Outcome::Unavailable };
        Fate { arrives: false, outcome, took }
    })
}

/// Returns when the call was sent that acquired the mutex.
fn acquired_at(log: &Log) -> Option<Moment> {
    log.entries.iter().find_map(|(_, entry)| match entry {
        Entry::Acquired(grant) => Some(grant.sent),
        _ => None,
    })
}

fn closed_at(log: &Log) -> Option<Moment> {
    log.first(|entry| matches!(entry, Entry::Closed(_)))
}

/// Returns when the contender ended. Checks that it has left nothing in the store, or reported an error.
fn ended_clean(log: &Log) -> Moment {
    let Some((ended, Entry::Finished(left))) = log.entries.last() else { panic!("{log:?}") };
    assert!(left.is_err() || !log.store.is_left(*ended), "left behind: {log:?}");
    *ended
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1_000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn every_plan_ends_in_time_and_leaves_nothing(plan in any_plan()) {
        let shutdown_at = at(plan.shutdown_at);
        let log = plan.run();
        let ended = ended_clean(&log);
        let latest = shutdown_at + LEASE + 2 * CALL;
        prop_assert!(ended <= latest, "{ended:?} is after {latest:?}");
        let concluded = log.entries.iter().filter(|(_, entry)| matches!(entry, Entry::Concluded(_))).count();
        prop_assert_eq!(concluded, 1);
    }

    #[test]
    fn tenures_alternate_have_greater_tokens_and_end_in_time(plan in any_plan()) {
        let max_hold = plan.settings.max_hold;
        let (mut held, mut last, mut cap) = (None::<Moment>, None, None);
        for (now, entry) in plan.run().entries {
            match entry {
                Entry::Acquired(grant) => {
                    prop_assert!(held.is_none() && grant.deadline > now && Some(grant.token) > last);
                    cap = max_hold.map(|max_hold| grant.sent + max_hold);
                    (held, last) = (Some(cap.map_or(grant.deadline, |cap| grant.deadline.min(cap))), Some(grant.token));
                }
                Entry::Renewed(grant) => {
                    prop_assert!(held.is_some_and(|deadline| now < deadline) && Some(grant.token) == last);
                    held = Some(cap.map_or(grant.deadline, |cap| grant.deadline.min(cap)));
                }
                Entry::Lost(loss) => {
                    prop_assert!(held.take().is_some_and(|deadline| now <= deadline + SHORTEST_CALL));
                    prop_assert!(loss != Loss::MaxHold || cap.is_some_and(|cap| now >= cap));
                }
                Entry::Closed(_) => held = None,
                Entry::Announced => prop_assert!(held.is_some()),
                Entry::Waited(wait) => prop_assert!(held.is_none_or(|deadline| wait.until <= deadline)),
                Entry::Concluded(_) | Entry::Anew => prop_assert!(held.is_none()),
                _ => {}
            }
        }
    }

    #[test]
    fn replies_are_checked_after_a_missing_one(plan in any_plan()) {
        let (mut missing, mut held) = (false, false);
        for (now, entry) in plan.run().entries {
            match entry {
                Entry::Contended { replied } => {
                    prop_assert!(held || !missing, "at {now:?}");
                    missing = !replied;
                }
                Entry::Inspected { replied } => {
                    prop_assert!(missing && !held);
                    missing = !replied;
                }
                Entry::Acquired(_) => held = true,
                Entry::Lost(_) | Entry::Closed(_) => held = false,
                Entry::Anew => missing = false,
                _ => {}
            }
        }
    }

    #[test]
    fn try_makes_one_call_and_never_waits_for_the_mutex(plan in any_plan()) {
        let settings = Settings { mode: Mode::Try, ..plan.settings };
        let log = Plan { settings, requested_at: 60_000, shutdown_at: 60_000, ..plan }.run();
        let until = log.entries.iter().position(|(_, entry)| {
            matches!(entry, Entry::Acquired(_) | Entry::Concluded(_))
        });
        let first = &log.entries[..until.unwrap_or(log.entries.len())];
        prop_assert!(first.iter().all(|(_, entry)| matches!(entry, Entry::Opened | Entry::Contended { .. } | Entry::Refused)), "{log:?}");
        prop_assert!(first.len() <= 3, "one call");
    }

    #[test]
    fn lock_gives_up_when_its_patience_ends_and_not_before(
        patience in 0u64..5_000, fates in prop::collection::vec(transient(), 1..100),
    ) {
        let patience = Duration::from_millis(patience);
        let settings = settings(Mode::Once(patience));
        let calls: Vec<_> = fates.into_iter().map(|fate| (Change::Nothing, fate)).collect();
        let count = calls.len();
        let log = Plan { calls, ..Plan::new(settings, 20_000) }.run();
        let made = log.entries.iter().filter(|(_, entry)| {
            matches!(entry, Entry::Opened | Entry::Contended { .. } | Entry::Inspected { .. })
        }).count();
        let (ended, outcome) = log.outcome().unwrap();
        match outcome {
            // The store was reached in time.
            Ok(()) => prop_assert!(made > count && acquired_at(&log).unwrap() <= at(0) + patience + 3 * CALL),
            Err(error) => {
                prop_assert_eq!(error.kind(), ErrorKind::Unavailable);
                prop_assert!(ended >= at(0) + patience && ended <= at(0) + patience + 2 * CALL, "at {:?}", ended);
            }
        }
    }

    #[test]
    fn success_renews_the_patience(before in prop::collection::vec(transient(), 1..5), patience in 2_000u64..4_000) {
        let settings = settings(Mode::Once(Duration::from_millis(patience)));
        let mut calls: Vec<_> = before.into_iter().map(|fate| (Change::Other(true), fate)).collect();
        calls.extend([FINE; 3].map(|fate| (Change::Nothing, fate)));
        let down = Fate { arrives: false, outcome: Outcome::Unavailable, took: 0 };
        calls.extend([(Change::Nothing, down); 1_000]);
        let log = Plan { calls, ..Plan::new(settings, 20_000) }.run();
        let answered = log.first(|entry| matches!(entry, Entry::Refused));
        let (ended, outcome) = log.outcome().unwrap();
        prop_assert!(outcome.is_err());
        prop_assert!(answered.is_none_or(|at| ended >= at + Duration::from_millis(patience)), "{log:?}");
    }

    #[test]
    fn permanent_error_ends_a_lock_at_once(patience in 0u64..5_000) {
        let settings = settings(Mode::Once(Duration::from_millis(patience)));
        let denied = Fate { outcome: Outcome::Denied, ..FINE };
        let calls = vec![(Change::Nothing, FINE), (Change::Nothing, denied)];
        let log = Plan { calls, ..Plan::new(settings, 20_000) }.run();
        prop_assert_eq!(log.outcome().unwrap().0, at(2));
    }

    #[test]
    fn used_tenure_is_kept_for_its_minimum_hold_and_no_longer(
        min_hold in 0u64..5_000, requested_at in 2u64..6_000, shutdown_at in 2u64..10_000,
    ) {
        let settings = Settings { min_hold: Duration::from_millis(min_hold), ..settings(Mode::Once(LEASE)) };
        let log = Plan { shutdown_at, ..Plan::new(settings, requested_at) }.run();
        let end = acquired_at(&log).unwrap() + settings.min_hold;
        prop_assert_eq!(closed_at(&log).unwrap(), at(requested_at).max(end).min(at(shutdown_at)));
    }

    #[test]
    fn faults_do_not_shorten_the_minimum_hold(plan in any_plan()) {
        let (settings, shutdown_at) = (Settings { mode: Mode::Once(LEASE), ..plan.settings }, at(plan.shutdown_at));
        let mut acquired = None;
        for (now, entry) in (Plan { settings, used: true, request: Request::Stop, ..plan }).run().entries {
            match entry {
                Entry::Acquired(grant) => acquired = Some(grant.sent),
                Entry::Lost(_) => acquired = None,
                Entry::Closed(_) => {
                    let ends = acquired.map(|acquired| (acquired + settings.min_hold).min(shutdown_at));
                    prop_assert!(ends.is_none_or(|ends| now >= ends), "closed at {now:?}, not at {ends:?}");
                }
                _ => {}
            }
        }
    }

    #[test]
    fn cancelled_lock_has_no_minimum_hold(requested_at in 0u64..6_000, calls in prop::collection::vec(fate(), 0..9)) {
        let settings = Settings { min_hold: Duration::from_secs(3_600), ..settings(Mode::Once(LEASE)) };
        let calls = calls.into_iter().map(|fate| (Change::Nothing, fate)).collect();
        let log = Plan { calls, used: false, ..Plan::new(settings, requested_at) }.run();
        let Some((ended, Entry::Finished(_))) = log.entries.last() else { panic!("{log:?}") };
        prop_assert!(*ended <= at(requested_at) + LEASE + 3 * CALL);
        prop_assert!(!log.entries.iter().any(|(_, entry)| matches!(entry, Entry::Announced)));
    }

    #[test]
    fn maximum_hold_ends_the_tenure_whatever_is_granted(max_hold in 100u64..5_000) {
        let settings = Settings { max_hold: Some(Duration::from_millis(max_hold)), ..settings(Mode::Once(LEASE)) };
        let log = Plan::new(settings, 20_000).run();
        let (ended, outcome) = log.outcome().unwrap();
        prop_assert_eq!(ended, at(1 + max_hold));
        prop_assert_eq!(outcome.as_ref().unwrap_err().loss(), Some(&Loss::MaxHold));
        prop_assert_eq!(log.store.ours, None, "and frees the mutex");
    }

    #[test]
    fn step_down_releases_and_does_not_contend_before_the_end_of_its_cooldown(
        plan in any_plan(), cooldown in millis(0..5_000),
    ) {
        let settings = settings(Mode::Forever);
        let request = Request::StepDown(cooldown);
        let log = Plan { settings, request, shutdown_at: 30_000, ..plan }.run();
        let anew = log.entries.iter().position(|(_, entry)| matches!(entry, Entry::Anew)).unwrap();
        let (began, _) = log.entries[anew];
        let before = &log.entries[..anew];
        let closed = before.iter().rposition(|(_, entry)| matches!(entry, Entry::Closed(Loss::SteppedDown)));
        let closed = closed.unwrap();
        prop_assert!(before[closed + 1..].iter().all(|(_, entry)| {
            matches!(entry, Entry::Released { .. } | Entry::Waited(_))
        }), "{log:?}");
        let next = log.entries[anew..].iter().find(|(_, entry)| matches!(entry, Entry::Opened));
        prop_assert!(next.is_none_or(|(at, _)| *at >= began + cooldown), "hints do not shorten it: {log:?}");
    }

    #[test]
    fn stop_soon_after_a_step_down_leaves_nothing(
        fates in prop::collection::vec((change(), fate()), 1..20), cooldown in millis(0..3_000),
        requested_at in 2u64..300, stopped_after in 0u64..1_500,
    ) {
        let calls = [(Change::Nothing, FINE); 2].into_iter().chain(fates).collect();
        let plan = Plan { calls, request: Request::StepDown(cooldown), ..Plan::new(settings(Mode::Forever), requested_at) };
        let log = Plan { shutdown_at: requested_at + stopped_after, ..plan }.run();
        let ended = ended_clean(&log);
        prop_assert!(ended <= at(requested_at + stopped_after) + LEASE + 2 * CALL, "{log:?}");
    }

    #[test]
    fn stop_and_shutdown_end_a_cooldown_at_once(cooldown in 1_000u64..5_000, ended_at in 100u64..1_000) {
        let request = Request::StepDown(Duration::from_millis(cooldown));
        let plan = Plan { request, ..Plan::new(settings(Mode::Forever), 50) };
        let log = Plan { shutdown_at: ended_at, ..plan }.run();
        prop_assert_eq!(log.outcome().unwrap().0, at(ended_at));
        let mut contender = Contender::forever();
        let step_down = Input { request, ..HOLD };
        prop_assert!(matches!(contender.machine.next(at(50), step_down), Action::Close(Loss::SteppedDown)));
        prop_assert!(matches!(contender.next(50), Action::StartAnew(Ok(()))));
        contender.machine.start_anew(at(50), id("new"));
        let wait = contender.wait(50);
        prop_assert_eq!((wait.until, wait.wake), (at(50 + cooldown), Wake::Request));
        let stop = Input { request: Request::Stop, ..HOLD };
        prop_assert!(matches!(contender.machine.next(at(ended_at), stop), Action::Close(Loss::Released)));
    }

    #[test]
    fn release_is_retried_for_one_lease(
        fates in prop::collection::vec(transient(), 1..60), requested_at in 2u64..300,
    ) {
        let mut calls = vec![(Change::Nothing, FINE); 2];
        calls.extend(fates.iter().map(|fate| (Change::Nothing, *fate)));
        let log = Plan { calls, ..Plan::new(settings(Mode::Once(LEASE)), requested_at) }.run();
        let tries: Vec<_> = log.entries.iter().filter_map(|(at, entry)| match entry {
            Entry::Released { replied } => Some((*at, *replied)),
            _ => None,
        }).collect();
        let (first, last) = (tries[0].0, *tries.last().unwrap());
        prop_assert_eq!(first, at(requested_at), "at once");
        prop_assert!(last.0 < first + LEASE);
        let Some((_, Entry::Finished(left))) = log.entries.last() else { panic!("{log:?}") };
        prop_assert_eq!(left.is_ok(), last.1);
        prop_assert!(left.is_ok() || tries.len() >= 4, "several tries within a lease: {}", tries.len());
    }

    #[test]
    fn waits_for_a_predecessor_are_short_and_none_for_a_minimum_hold(
        now in 0u64..10_000, acquired_at in 0u64..10_000, used in any::<bool>(), min_hold in 0u64..5_000,
    ) {
        let settings = Settings { min_hold: Duration::from_millis(min_hold), ..settings(Mode::Try) };
        let contender = Contender::new(settings);
        let until = contender.machine.previous_until(at(now), Some((at(acquired_at), used)));
        let keeps = used && min_hold > 0 && now < acquired_at + min_hold;
        prop_assert_eq!(until, if keeps { at(now) } else { at(now) + CALL });
        prop_assert_eq!(contender.machine.previous_until(at(now), None), at(now) + CALL);
    }
}
