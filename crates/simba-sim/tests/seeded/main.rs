//! Tests of the checkers: every deliberate bug must be detected by the intended rule.
//!
//! Bugs of the engine are compiled in with `--cfg simba_bugs`; bugs of a store are types of this test.
#![allow(missing_docs, clippy::print_stdout, clippy::unwrap_used)]

mod store;

use std::sync::Arc;

use simba_core::MemoryBackend;
use simba_core::spi::Backend;
use simba_sim::{Outcome, Plan, Scale, run_over};
use simba_tck::Rule;
use store::{BuggyBackend, StoreBug};

/// The number of seeds that must show each bug.
const SEEDS: u64 = 400;

/// Returns the first seed that violates this rule.
fn first_detected(rule: Rule, wrap: impl Fn(MemoryBackend) -> Arc<dyn Backend>) -> Option<Outcome> {
    (0..SEEDS)
        .map(|seed| run_over(Plan::new(seed, Scale::default()), &wrap))
        .find(|outcome| outcome.violations.iter().any(|violation| violation.rule == rule))
}

fn expect(rule: Rule, what: &str, outcome: Option<Outcome>) {
    let outcome = outcome.unwrap_or_else(|| panic!("{what}: no seed breaks {rule:?}"));
    let violation = outcome.violations.iter().find(|violation| violation.rule == rule).unwrap();
    println!("{what}: detected by {rule:?} with SIMBA_SEED={}: {violation}", outcome.plan.seed);
}

macro_rules! store_bugs {
    ($($name:ident: $bug:ident is detected by $rule:ident;)*) => {
        $(#[test]
        fn $name() {
            let wrap = |store| Arc::new(BuggyBackend::new(store, StoreBug::$bug)) as Arc<dyn Backend>;
            expect(Rule::$rule, stringify!($bug), first_detected(Rule::$rule, wrap));
        })*
    };
}

store_bugs! {
    a_store_that_grants_twice: GrantsTwice is detected by Exclusion;
    a_store_that_overstates_the_lease: OverstatesRemaining is detected by Exclusion;
    a_session_that_trusts_hints: TrustsHints is detected by Exclusion;
    a_connection_that_mixes_up_replies: MixesUpReplies is detected by Exclusion;
    a_release_that_frees_another_holder: FreesAnotherHolder is detected by Exclusion;
    a_renewal_that_renews_nothing: RenewsNothing is detected by Exclusion;
    a_token_that_restarts: TokenRestarts is detected by Tokens;
    a_token_that_never_grows: TokenNeverGrows is detected by Tokens;
    a_waiter_that_keeps_its_entry: KeepsItsEntry is detected by Leftovers;
    a_release_that_frees_nothing: FreesNothing is detected by Leftovers;
}

#[cfg(simba_bugs)]
mod engine {
    use simba_core::seeded::{self, Bug};

    use super::*;

    fn detected_in_engine(rule: Rule, bug: Bug) -> Option<Outcome> {
        seeded::set(Some(bug));
        let outcome = first_detected(rule, |store| Arc::new(store));
        seeded::set(None);
        outcome
    }

    macro_rules! engine_bugs {
        ($($name:ident: $bug:ident is detected by $rule:ident;)*) => {
            $(#[test]
            fn $name() {
                expect(Rule::$rule, stringify!($bug), detected_in_engine(Rule::$rule, Bug::$bug));
            })*
        };
    }

    engine_bugs! {
        a_lease_counted_from_the_reply: DeadlineFromReply is detected by Exclusion;
        a_lease_without_a_deadline: NoDeadline is detected by Exclusion;
        a_deadline_without_a_margin: NoMargin is detected by Exclusion;
        a_failed_renewal_that_extends_the_lease: FailureRenews is detected by Exclusion;
        a_mutex_freed_before_the_work_ends: FreeBeforeWorkEnds is detected by Work;
        a_holder_without_a_warning: NoExpiring is detected by Signals;
        a_dropped_guard_that_keeps_its_mutex: LeakOnDrop is detected by Liveness;
        a_contender_that_never_releases: NoRelease is detected by Leftovers;
        a_call_without_a_limit: NoCallLimit is detected by Liveness;
        a_schedule_that_catches_up_on_missed_ticks: Burst is detected by Ticks;
        a_tick_without_a_tenure: TickWithoutTenure is detected by Ticks;
        a_tenure_that_is_valid_again: Resurrect is detected by Finality;
    }
}
