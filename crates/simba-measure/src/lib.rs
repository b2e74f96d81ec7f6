//! Measures Simba on a store: uncontended lock/unlock cycles, hand-over, many held mutexes. Compares each figure with
//! a floor where there is one.
//!
//! `simba bench` measures the store of a user. The benchmarks of this project measure the same and compare it with
//! the raw client of every store. A [`Target`] is what is measured, a [`Row`] is a result. No measurement passes or
//! fails.

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

/// The length of a measurement.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Long enough to see a large change.
    Quick,
    /// Long enough for published figures.
    Full,
}

impl Effort {
    /// Returns `quick` or `full`, by the effort.
    #[must_use]
    pub fn pick<T>(self, quick: T, full: T) -> T {
        match self {
            Self::Quick => quick,
            Self::Full => full,
        }
    }
}
