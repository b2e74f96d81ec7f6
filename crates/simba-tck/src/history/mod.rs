//! A record of events, and whether they satisfy the rules.
//!
//! A [`History`] is filled by a test or a simulation, with times of one shared clock. Checking it needs no search: a
//! lease lock has an end of validity, so exclusion is a comparison of intervals.

mod check;
#[cfg(test)]
mod tests;
mod timeline;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::{FencingToken, Loss};

pub use check::{Rule, Violation};

/// One event.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// The time, on the shared clock.
    pub at: Duration,
    /// The contender. After a crash, a restarted contender is another one.
    pub who: String,
    /// The kind of the event.
    pub what: What,
}

/// The kinds of events.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum What {
    /// A tenure began: from now on the holder may act.
    Acquired {
        /// Its token.
        token: FencingToken,
    },
    /// The holder was asked to stop.
    Expiring,
    /// The holder was notified of the end of its tenure.
    Lost {
        /// The reason.
        loss: Loss,
        /// The end of its validity, on the shared clock: its deadline at the latest.
        valid_until: Duration,
    },
    /// A tenure that had been lost was valid again.
    Revived {
        /// Its token.
        token: FencingToken,
    },
    /// Work under the mutex began.
    WorkStarted {
        /// Its token.
        token: FencingToken,
    },
    /// That work ended or was dropped.
    WorkEnded,
    /// A scheduled job started.
    Tick {
        /// Its token.
        token: FencingToken,
        /// The planned interval of its ticks, at a fixed rate.
        period: Duration,
    },
    /// The process is paused until the next [`What::Resumed`].
    Paused,
    /// The process continues.
    Resumed,
    /// The process has crashed.
    Crashed,
    /// A remark for the timeline.
    Note(String),
}

/// A record of events with several writers.
#[derive(Clone, Debug, Default)]
pub struct History {
    events: Arc<Mutex<Vec<Event>>>,
}

impl History {
    /// Creates an empty history.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Records an event. Events are sorted by their time.
    pub fn record(&self, at: Duration, who: impl Into<String>, what: What) {
        let event = Event { at, who: who.into(), what };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// Returns all events so far, sorted by time.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        events.sort_by_key(|event| event.at);
        events
    }

    /// Returns every violation, sorted by time.
    #[must_use]
    pub fn check(&self) -> Vec<Violation> {
        check::check(&self.events())
    }

    /// Returns the events as readable lines, with the violations where they happened.
    #[must_use]
    pub fn timeline(&self) -> String {
        timeline::render(&self.events(), &self.check())
    }
}
