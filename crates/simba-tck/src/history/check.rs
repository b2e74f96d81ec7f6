//! The rules, one function each, for a finished history.

use std::collections::HashMap;
use std::fmt;
use std::time::Duration;

use simba_core::{FencingToken, Loss};

use super::{Event, What};

/// A rule that can be violated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Rule {
    /// At most one contender is valid at any instant.
    Exclusion,
    /// Tokens grow in the order of acquisition.
    Tokens,
    /// Acquired and lost alternate for every contender.
    Alternation,
    /// A loss is notified when validity ends, and expiring before it.
    Signals,
    /// A lost tenure stays lost.
    Finality,
    /// Work under the mutex ends before another holds it.
    Work,
    /// No tick starts without a valid tenure, and ticks come in no burst.
    Ticks,
    /// A contender leads within the guaranteed time after the faults have ended.
    Liveness,
    /// Nothing is left behind: no owner, no waiter.
    Leftovers,
}

/// A violation of a rule.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Violation {
    /// The rule.
    pub rule: Rule,
    /// The time.
    pub at: Duration,
    /// The details.
    pub message: String,
}

impl Violation {
    /// Creates a violation that was not found by [`History::check`](super::History::check).
    pub fn new(rule: Rule, at: Duration, message: impl Into<String>) -> Self {
        Self { rule, at, message: message.into() }
    }
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} broken at {:?}: {}", self.rule, self.at, self.message)
    }
}

/// Two clocks that run at the limit of the margin agree on one instant; rounding must not violate it.
const ROUNDING: Duration = Duration::from_micros(1);
/// How late a timer may be, on clocks that count whole milliseconds.
const TIMER: Duration = Duration::from_millis(2);
/// How late a signal may come in a process that is not paused.
const SIGNAL_SLACK: Duration = Duration::from_millis(50);

/// One interval of validity.
#[derive(Debug)]
struct Hold<'a> {
    who: &'a str,
    token: FencingToken,
    from: Duration,
    /// `None`: still valid when the history ends, or the process has crashed.
    until: Option<Duration>,
}

pub(super) fn check(events: &[Event]) -> Vec<Violation> {
    let (holds, mut found) = holds(events);
    found.extend(exclusion(&holds));
    found.extend(tokens(&holds));
    found.extend(signals(events));
    found.extend(work(events, &holds));
    found.extend(ticks(events, &holds));
    found.sort_by_key(|violation| (violation.at, violation.rule));
    found
}

/// Returns the intervals of validity, and every event that does not alternate.
fn holds(events: &[Event]) -> (Vec<Hold<'_>>, Vec<Violation>) {
    let mut holds: Vec<Hold<'_>> = Vec::new();
    let mut open: HashMap<&str, usize> = HashMap::new();
    let mut found = Vec::new();
    for Event { at, who, what } in events {
        match what {
            What::Acquired { token } => {
                holds.push(Hold { who, token: *token, from: *at, until: None });
                if open.insert(who, holds.len() - 1).is_some() {
                    found.push(Violation::new(Rule::Alternation, *at, format!("{who} acquired twice")));
                }
            }
            What::Lost { valid_until, .. } => match open.remove(who.as_str()) {
                Some(index) => holds[index].until = Some(*valid_until),
                None => {
                    found.push(Violation::new(Rule::Alternation, *at, format!("{who} lost without holding")));
                }
            },
            _ => {}
        }
    }
    (holds, found)
}

fn exclusion(holds: &[Hold<'_>]) -> Vec<Violation> {
    let mut found = Vec::new();
    for (index, one) in holds.iter().enumerate() {
        let until = one.until.unwrap_or(Duration::MAX);
        let overlaps =
            |other: &&Hold<'_>| other.from.saturating_add(ROUNDING) < until && other.who != one.who;
        for other in holds[index + 1..].iter().filter(overlaps) {
            let message = format!(
                "{} (token {}) became valid while {} (token {}) was, until {:?}",
                other.who, other.token, one.who, one.token, one.until
            );
            found.push(Violation::new(Rule::Exclusion, other.from, message));
        }
    }
    found
}

/// Checks that a later acquisition has a greater token. A contender that leads again without another in between may
/// keep its own, on stores that cannot issue another.
fn tokens(holds: &[Hold<'_>]) -> Vec<Violation> {
    let shrinks = |pair: &&[Hold<'_>]| {
        let resumed = pair[0].who == pair[1].who && pair[0].token == pair[1].token;
        pair[1].token <= pair[0].token && !resumed
    };
    let violation = |pair: &[Hold<'_>]| {
        let (one, other) = (&pair[0], &pair[1]);
        let message = format!("{} got {} after {} had {}", other.who, other.token, one.who, one.token);
        Violation::new(Rule::Tokens, other.from, message)
    };
    holds.windows(2).filter(shrinks).map(violation).collect()
}

fn signals(events: &[Event]) -> Vec<Violation> {
    let mut expiring: HashMap<&str, Duration> = HashMap::new();
    let mut found = Vec::new();
    for (index, Event { at, who, what }) in events.iter().enumerate() {
        match what {
            What::Acquired { .. } => {
                expiring.remove(who.as_str());
            }
            What::Expiring => {
                expiring.insert(who, *at);
            }
            What::Revived { token } => {
                let message = format!("{who} was valid again under token {token}");
                found.push(Violation::new(Rule::Finality, *at, message));
            }
            What::Lost { loss, valid_until } => {
                let frozen = || was_paused(&events[..index], who, *valid_until, *at);
                if *at > *valid_until + SIGNAL_SLACK && !frozen() {
                    let message = format!("{who} was notified of the loss {:?} late", *at - *valid_until);
                    found.push(Violation::new(Rule::Signals, *at, message));
                }
                let in_time = expiring.get(who.as_str()).is_some_and(|expiring| expiring < valid_until);
                if *loss == Loss::Deadline && !in_time && !frozen() {
                    let message = format!("{who} lost at its deadline without a warning before it");
                    found.push(Violation::new(Rule::Signals, *at, message));
                }
            }
            _ => {}
        }
    }
    found
}

/// Returns whether the process was paused at any time from `from` to `to`.
fn was_paused(events: &[Event], who: &str, from: Duration, to: Duration) -> bool {
    let node = node_of(who);
    let mut paused_since = None;
    for event in events.iter().filter(|event| node_of(&event.who) == node && event.at <= to) {
        match event.what {
            What::Paused => paused_since = Some(event.at),
            What::Resumed if event.at >= from && paused_since.is_some() => return true,
            What::Resumed => paused_since = None,
            _ => {}
        }
    }
    paused_since.is_some()
}

/// Returns the process of a contender: the part of its name before the first `/`.
fn node_of(who: &str) -> &str {
    who.split_once('/').map_or(who, |(node, _)| node)
}

/// Checks that work under a token has ended before another contender holds, unless its process was paused or has
/// crashed.
fn work(events: &[Event], holds: &[Hold<'_>]) -> Vec<Violation> {
    let mut open: HashMap<&str, (Duration, FencingToken)> = HashMap::new();
    let mut found = Vec::new();
    for (index, Event { at, who, what }) in events.iter().enumerate() {
        match what {
            What::WorkStarted { token } => {
                open.insert(who, (*at, *token));
            }
            What::WorkEnded => {
                let Some((from, token)) = open.remove(who.as_str()) else { continue };
                let next = holds.iter().find(|hold| hold.token > token && hold.who != who);
                let Some(next) = next.filter(|next| next.from + TIMER < *at) else { continue };
                if !was_paused(&events[..=index], who, from, *at) {
                    let message = format!(
                        "{who} worked under token {token} from {from:?} until {at:?}, but {} held since {:?}",
                        next.who, next.from
                    );
                    found.push(Violation::new(Rule::Work, next.from, message));
                }
            }
            _ => {}
        }
    }
    found
}

/// Checks that every tick is within the validity of its token, and that no three ticks of a tenure are within one
/// period: one may be late and the next on time, but more is a burst.
fn ticks(events: &[Event], holds: &[Hold<'_>]) -> Vec<Violation> {
    let mut last: HashMap<(&str, FencingToken), [Option<Duration>; 2]> = HashMap::new();
    let mut found = Vec::new();
    for Event { at, who, what } in events {
        let What::Tick { token, period } = what else { continue };
        let valid = |hold: &Hold<'_>| {
            hold.who == who && hold.token == *token && hold.until.is_none_or(|until| *at < until + ROUNDING)
        };
        if !holds.iter().any(valid) {
            let message = format!("{who} started a tick under token {token} without holding");
            found.push(Violation::new(Rule::Ticks, *at, message));
        }
        let [one, two] = last.entry((who, *token)).or_default();
        // Clocks differ by one or two percent.
        if one.is_some_and(|one| *at - one < period.mul_f64(0.95)) {
            let message = format!("{who} started three ticks within {:?}", *at - one.unwrap_or_default());
            found.push(Violation::new(Rule::Ticks, *at, message));
        }
        (*one, *two) = (*two, Some(*at));
    }
    found
}
