//! The reason why a tenure ended.

use std::fmt;

use super::ContenderId;

/// Why a tenure ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Loss {
    /// The lease was not renewed in time.
    Deadline,
    /// The store reports another holder.
    TakenBy(ContenderId),
    /// The store does not have this hold any more: evicted, flushed, or restored from an older state.
    Vanished,
    /// The maximum hold has ended.
    MaxHold,
    /// The holder stepped down.
    SteppedDown,
    /// The holder released the mutex, was stopped or was shut down.
    Released,
}

impl Loss {
    /// Returns a short lower-case name for logs and metrics.
    #[must_use]
    pub const fn as_str(&self) -> &'static str {
        match self {
            Self::Deadline => "deadline",
            Self::TakenBy(_) => "taken",
            Self::Vanished => "vanished",
            Self::MaxHold => "max_hold",
            Self::SteppedDown => "stepped_down",
            Self::Released => "released",
        }
    }
}

impl fmt::Display for Loss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deadline => f.write_str("the lease could not be renewed in time"),
            Self::TakenBy(other) => write!(f, "`{other}` holds it now"),
            Self::Vanished => f.write_str("the store no longer has this hold"),
            Self::MaxHold => f.write_str("the maximum hold has ended"),
            Self::SteppedDown => f.write_str("the holder stepped down"),
            Self::Released => f.write_str("the holder released it"),
        }
    }
}
