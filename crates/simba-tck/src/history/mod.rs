//! What happened, who did it, and whether it kept the promises.
//!
//! A [`History`] is filled by a test or a simulation, in moments of one clock that everyone shares. Checking
//! it needs no search: a lease lock says until when it was valid, so exclusion is a matter of intervals.

mod check;
#[cfg(test)]
mod tests;
mod timeline;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::{FencingToken, Loss};

pub use check::{Rule, Violation};

/// One thing that happened.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Event {
    /// When, on the clock that everyone shares.
    pub at: Duration,
    /// To whom. A contender that comes again after a crash is another.
    pub who: String,
    /// What.
    pub what: What,
}

/// What can happen.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum What {
    /// A tenure began: from here on the holder may act.
    Acquired {
        /// Its token.
        token: FencingToken,
    },
    /// The holder was told to stop.
    Expiring,
    /// The holder learnt of the end of its tenure.
    Lost {
        /// Why.
        loss: Loss,
        /// When it stopped being valid, on the shared clock: at its deadline at the latest.
        valid_until: Duration,
    },
    /// A tenure that had been lost was valid again.
    Revived {
        /// Its token.
        token: FencingToken,
    },
    /// Work under the mutex began.
    WorkStarted {
        /// Under which token.
        token: FencingToken,
    },
    /// That work ended or was dropped.
    WorkEnded,
    /// A scheduled job started.
    Tick {
        /// Under which token.
        token: FencingToken,
        /// How far apart its ticks are meant to be, at a fixed rate.
        period: Duration,
    },
    /// The process stands still until the next [`What::Resumed`].
    Paused,
    /// It goes on.
    Resumed,
    /// It is gone without a word.
    Crashed,
    /// Anything worth reading in the timeline.
    Note(String),
}

/// A record of events that many can write to.
#[derive(Clone, Debug, Default)]
pub struct History {
    events: Arc<Mutex<Vec<Event>>>,
}

impl History {
    /// An empty history.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Writes an event down. Events come in the order of their time.
    pub fn record(&self, at: Duration, who: impl Into<String>, what: What) {
        let event = Event { at, who: who.into(), what };
        self.events.lock().unwrap_or_else(PoisonError::into_inner).push(event);
    }

    /// All events so far, in the order of their time.
    #[must_use]
    pub fn events(&self) -> Vec<Event> {
        let mut events = self.events.lock().unwrap_or_else(PoisonError::into_inner).clone();
        events.sort_by_key(|event| event.at);
        events
    }

    /// Every broken promise, in the order of their time.
    #[must_use]
    pub fn check(&self) -> Vec<Violation> {
        check::check(&self.events())
    }

    /// The events as lines that a person can read, with the violations where they happened.
    #[must_use]
    pub fn timeline(&self) -> String {
        timeline::render(&self.events(), &self.check())
    }
}
