//! Each rule detects a history that violates it, and accepts one that does not.

use std::time::Duration;

use simba_core::{FencingToken, Loss};

use super::{History, Rule, What};

const fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

const fn token(token: u64) -> FencingToken {
    FencingToken::new(token)
}

const fn acquired(number: u64) -> What {
    What::Acquired { token: token(number) }
}

const fn released(valid_until: u64) -> What {
    What::Lost { loss: Loss::Released, valid_until: ms(valid_until) }
}

const fn expired(valid_until: u64) -> What {
    What::Lost { loss: Loss::Deadline, valid_until: ms(valid_until) }
}

const fn works(number: u64) -> What {
    What::WorkStarted { token: token(number) }
}

const fn tick(number: u64) -> What {
    What::Tick { token: token(number), period: ms(100) }
}

fn history(events: impl IntoIterator<Item = (u64, &'static str, What)>) -> History {
    let history = History::new();
    for (at, who, what) in events {
        history.record(ms(at), who, what);
    }
    history
}

/// Returns the violated rules, sorted by time.
fn broken(events: impl IntoIterator<Item = (u64, &'static str, What)>) -> Vec<Rule> {
    history(events).check().into_iter().map(|violation| violation.rule).collect()
}

#[test]
fn empty_history_satisfies_every_rule() {
    assert_eq!(broken([]), []);
}

#[test]
fn two_valid_holders_at_once_break_exclusion() {
    let overlap =
        [(0, "a", acquired(1)), (50, "b", acquired(2)), (100, "a", released(100)), (200, "b", released(200))];
    assert_eq!(broken(overlap), [Rule::Exclusion]);
}

#[test]
fn holder_without_a_loss_still_excludes() {
    assert_eq!(broken([(0, "a", acquired(1)), (50, "b", acquired(2))]), [Rule::Exclusion]);
}

#[test]
fn holders_one_after_the_other_keep_exclusion() {
    let in_turn = [
        (0, "a", acquired(1)),
        (100, "a", released(100)),
        (100, "b", acquired(2)),
        (200, "b", released(200)),
    ];
    assert_eq!(broken(in_turn), []);
}

#[test]
fn end_of_validity_counts_and_not_its_notification() {
    let late = [
        (0, "a", acquired(1)),
        (80, "a", What::Expiring),
        (110, "b", acquired(2)),
        (120, "a", expired(100)),
        (200, "b", released(200)),
    ];
    assert_eq!(broken(late), []);
}

#[test]
fn token_that_does_not_grow_breaks_tokens() {
    for second in [4, 5] {
        let shrinks = [(0, "a", acquired(5)), (10, "a", released(10)), (20, "b", acquired(second))];
        assert_eq!(broken(shrinks), [Rule::Tokens], "{second} after 5");
    }
}

#[test]
fn tokens_that_grow_by_any_step_keep_tokens() {
    let grows = [(0, "a", acquired(5)), (10, "a", released(10)), (20, "b", acquired(500))];
    assert_eq!(broken(grows), []);
}

#[test]
fn contender_that_leads_again_may_keep_its_token_without_another_in_between() {
    let resumed = [(0, "a", acquired(5)), (10, "a", released(10)), (20, "a", acquired(5))];
    assert_eq!(broken(resumed), []);
    let after_another = [
        (0, "a", acquired(5)),
        (10, "a", released(10)),
        (20, "b", acquired(6)),
        (30, "b", released(30)),
        (40, "a", acquired(5)),
    ];
    assert_eq!(broken(after_another), [Rule::Tokens]);
}

#[test]
fn events_that_do_not_alternate_break_alternation() {
    assert_eq!(broken([(0, "a", acquired(1)), (10, "a", acquired(2))]), [Rule::Alternation]);
    assert_eq!(broken([(10, "a", released(10))]), [Rule::Alternation]);
    let twice = [(0, "a", acquired(1)), (10, "a", released(10)), (20, "a", released(20))];
    assert_eq!(broken(twice), [Rule::Alternation]);
}

#[test]
fn events_that_alternate_keep_alternation() {
    let alternate =
        [(0, "a", acquired(1)), (10, "a", released(10)), (20, "a", acquired(2)), (30, "a", released(30))];
    assert_eq!(broken(alternate), []);
}

#[test]
fn late_notification_of_a_loss_breaks_signals() {
    let late = [(0, "a", acquired(1)), (80, "a", What::Expiring), (151, "a", expired(100))];
    assert_eq!(broken(late), [Rule::Signals]);
    let in_time = [(0, "a", acquired(1)), (80, "a", What::Expiring), (150, "a", expired(100))];
    assert_eq!(broken(in_time), []);
}

#[test]
fn loss_at_the_deadline_without_a_warning_breaks_signals() {
    assert_eq!(broken([(0, "a", acquired(1)), (100, "a", expired(100))]), [Rule::Signals]);
    let too_late = [(0, "a", acquired(1)), (100, "a", What::Expiring), (101, "a", expired(100))];
    assert_eq!(broken(too_late), [Rule::Signals], "the warning came with the loss");
    assert_eq!(broken([(0, "a", acquired(1)), (100, "a", released(100))]), [], "a release needs no warning");
}

#[test]
fn warning_of_an_earlier_tenure_does_not_count() {
    let events = [
        (0, "a", acquired(1)),
        (10, "a", What::Expiring),
        (20, "a", released(20)),
        (30, "a", acquired(2)),
        (100, "a", expired(100)),
    ];
    assert_eq!(broken(events), [Rule::Signals]);
}

#[test]
fn paused_process_may_have_late_signals() {
    let paused = [
        (0, "a/0", acquired(1)),
        (50, "a", What::Paused),
        (500, "a", What::Resumed),
        (501, "a/0", expired(100)),
    ];
    assert_eq!(broken(paused), []);
    let another = [
        (0, "a/0", acquired(1)),
        (50, "b", What::Paused),
        (500, "b", What::Resumed),
        (501, "a/0", expired(100)),
    ];
    assert_eq!(broken(another), [Rule::Signals, Rule::Signals], "a pause of another process does not count");
    let earlier = [
        (0, "a/0", acquired(1)),
        (10, "a", What::Paused),
        (20, "a", What::Resumed),
        (80, "a/0", What::Expiring),
        (501, "a/0", expired(100)),
    ];
    assert_eq!(broken(earlier), [Rule::Signals], "an earlier pause does not count");
}

#[test]
fn tenure_that_is_valid_again_breaks_finality() {
    let revived =
        [(0, "a", acquired(1)), (10, "a", released(10)), (20, "a", What::Revived { token: token(1) })];
    assert_eq!(broken(revived), [Rule::Finality]);
}

#[test]
fn new_tenure_of_the_same_contender_keeps_finality() {
    assert_eq!(broken([(0, "a", acquired(1)), (10, "a", released(10)), (20, "a", acquired(2))]), []);
}

#[test]
fn work_that_overlaps_the_next_holder_breaks_work() {
    let outlasts = [
        (0, "a", acquired(1)),
        (1, "a", works(1)),
        (100, "a", released(100)),
        (110, "b", acquired(2)),
        (120, "a", What::WorkEnded),
    ];
    assert_eq!(broken(outlasts), [Rule::Work]);
}

#[test]
fn work_that_ends_before_another_holds_keeps_work() {
    let ends = [
        (0, "a", acquired(1)),
        (1, "a", works(1)),
        (100, "a", released(100)),
        (109, "a", What::WorkEnded),
        (110, "b", acquired(2)),
    ];
    assert_eq!(broken(ends), []);
    let own_next = [
        (0, "a", acquired(1)),
        (1, "a", works(1)),
        (100, "a", released(100)),
        (110, "a", acquired(2)),
        (120, "a", What::WorkEnded),
    ];
    assert_eq!(broken(own_next), [], "the own next tenure is no other holder");
}

#[test]
fn work_of_a_paused_process_may_overlap() {
    let paused = [
        (0, "a/0", acquired(1)),
        (1, "a/0", works(1)),
        (2, "a", What::Paused),
        (100, "a/0", released(50)),
        (110, "b", acquired(2)),
        (120, "a", What::Resumed),
        (121, "a/0", What::WorkEnded),
    ];
    assert_eq!(broken(paused), []);
}

#[test]
fn tick_without_a_tenure_breaks_ticks() {
    assert_eq!(broken([(10, "a", tick(1))]), [Rule::Ticks], "no holder");
    let after = [(0, "a", acquired(1)), (100, "a", released(100)), (101, "a", tick(1))];
    assert_eq!(broken(after), [Rule::Ticks], "the tenure was over");
    let others = [(0, "a", acquired(1)), (10, "b", tick(1))];
    assert_eq!(broken(others), [Rule::Ticks], "another held");
    let stale = [(0, "a", acquired(2)), (10, "a", tick(1))];
    assert_eq!(broken(stale), [Rule::Ticks], "it held under another token");
}

#[test]
fn three_ticks_in_one_period_break_ticks() {
    let burst = [(0, "a", acquired(1)), (100, "a", tick(1)), (110, "a", tick(1)), (120, "a", tick(1))];
    assert_eq!(broken(burst), [Rule::Ticks]);
}

#[test]
fn ticks_at_their_rate_keep_ticks_even_if_one_is_late() {
    let late = [(0, "a", acquired(1)), (100, "a", tick(1)), (290, "a", tick(1)), (300, "a", tick(1))];
    assert_eq!(broken(late), []);
}

#[test]
fn violations_are_sorted_by_time() {
    let events = [(0, "a", acquired(5)), (10, "b", acquired(4)), (20, "c", released(20))];
    assert_eq!(broken(events), [Rule::Exclusion, Rule::Tokens, Rule::Alternation]);
}

#[test]
fn timeline_shows_violations_where_they_happened() {
    let history = history([
        (1, "a", What::Note("the store restarts".into())),
        (2, "a", acquired(1)),
        (10, "b/0", acquired(2)),
        (12, "b/0", released(12)),
        (20, "a", expired(15)),
    ]);
    let lines = [
        "    0.001000 s  a    the store restarts",
        "    0.002000 s  a    acquired, token 1",
        "    0.010000 s  b/0  acquired, token 2",
        "                !!! Exclusion broken at 10ms: b/0 (token 2) became valid while a (token 1) was, until Some(15ms)",
        "    0.012000 s  b/0  lost: the holder released it; was valid until 0.012000 s",
        "    0.020000 s  a    lost: the lease could not be renewed in time; was valid until 0.015000 s",
        "                !!! Signals broken at 20ms: a lost at its deadline without a warning before it",
    ];
    assert_eq!(history.timeline().lines().collect::<Vec<_>>(), lines);
}
