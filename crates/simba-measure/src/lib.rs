//! What Simba does on a store: uncontended pairs, hand-over, many held mutexes; each beside a floor where there is
//! one.
//!
//! The same measures for `simba bench`, on the store of a user, and for the benchmarks of this project, which put
//! the raw client of every store beside them. A [`Target`] is what is measured, a [`Row`] what was found. Nothing
//! here passes or fails.

mod caller;
pub mod handover;
pub mod held;
pub mod pairs;
mod process;
mod report;
pub mod stats;
mod target;

pub use caller::{Caller, LockerCaller, SessionCaller};
pub use report::{Report, Row, Unit};
pub use target::{Peer, Target};

/// How long to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Enough to see a change that matters.
    Quick,
    /// Enough to quote.
    Full,
}

impl Effort {
    /// One of two, by the effort.
    #[must_use]
    pub fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}
