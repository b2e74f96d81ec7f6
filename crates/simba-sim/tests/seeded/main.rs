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
fn caught_by(rule: Rule, wrap: impl Fn(MemoryBackend) -> Arc<dyn Backend>) -> Option<Outcome> {
    (0..SEEDS)
        .map(|seed| run_over(Plan::new(seed, Scale::default()), &wrap))
        .find(|outcome| outcome.violations.iter().any(|violation| violation.rule == rule))
}

fn expect(rule: Rule, what: &str, outcome: Option<Outcome>) {
    let outcome = outcome.unwrap_or_else(|| panic!("{what}: no seed breaks {rule:?}"));
    let violation = outcome.violations.iter().find(|violation| violation.rule == rule).unwrap();
    println!("{what}: caught by {rule:?} with SIMBA_SEED={}: {violation}", outcome.plan.seed);
}

macro_rules! store_bugs {
    ($($name:ident: $bug:ident is caught by $rule:ident;)*) => {
        $(#[test]
        fn $name() {
            let wrap = |store| Arc::new(BuggyBackend::new(store, StoreBug::$bug)) as Arc<dyn Backend>;
            expect(Rule::$rule, stringify!($bug), caught_by(Rule::$rule, wrap));
        })*
    };
}

store_bugs! {
    a_store_that_grants_twice: GrantsTwice is caught by Exclusion;
    a_store_that_promises_more_than_it_keeps: OverstatesRemaining is caught by Exclusion;
    a_session_that_believes_events: BelievesHints is caught by Exclusion;
    a_connection_that_mixes_replies_up: MixesRepliesUp is caught by Exclusion;
    a_release_that_frees_another_s: FreesAnothers is caught by Exclusion;
    a_renewal_that_renews_nothing: RenewsNothing is caught by Exclusion;
    a_token_that_starts_over: TokenStartsOver is caught by Tokens;
    a_token_that_stays: TokenStays is caught by Tokens;
    a_waiter_that_leaves_its_place_behind: KeepsItsEntry is caught by Leftovers;
    a_release_that_frees_nothing: FreesNothing is caught by Leftovers;
}

#[cfg(simba_bugs)]
mod engine {
    use simba_core::seeded::{self, Bug};

    use super::*;

    fn engine_caught_by(rule: Rule, bug: Bug) -> Option<Outcome> {
        seeded::set(Some(bug));
        let outcome = caught_by(rule, |store| Arc::new(store));
        seeded::set(None);
        outcome
    }

    macro_rules! engine_bugs {
        ($($name:ident: $bug:ident is caught by $rule:ident;)*) => {
            $(#[test]
            fn $name() {
                expect(Rule::$rule, stringify!($bug), engine_caught_by(Rule::$rule, Bug::$bug));
            })*
        };
    }

    engine_bugs! {
        a_lease_counted_from_the_reply: DeadlineFromReply is caught by Exclusion;
        a_lease_without_a_deadline: NoDeadline is caught by Exclusion;
        a_deadline_without_a_margin: NoMargin is caught by Exclusion;
        a_failed_renewal_that_counts: FailureRenews is caught by Exclusion;
        a_mutex_freed_before_the_work_ends: FreeBeforeWorkEnds is caught by Work;
        a_holder_that_is_not_told: NoExpiring is caught by Signals;
        a_dropped_guard_that_goes_on_holding: LeakOnDrop is caught by Liveness;
        a_contender_that_gives_nothing_back: NoRelease is caught by Leftovers;
        a_call_without_a_limit: NoCallLimit is caught by Liveness;
        a_schedule_that_makes_up_for_lost_time: Burst is caught by Ticks;
        a_tick_without_a_tenure: TickWithoutTenure is caught by Ticks;
        a_lease_that_comes_back: Resurrect is caught by Finality;
    }
}
