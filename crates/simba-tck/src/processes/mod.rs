//! The rows of the fault matrix about processes: killed, stopped, terminated.
//!
//! Each contestant is a separate process that runs the test program again. All of them write to one log and to one
//! resource that refuses stale tokens, so an overlap is detected by the order of the lines and not by clocks that a
//! stopped process cannot read.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

mod contestant;
mod contestants;
mod rows;
mod shared_log;

#[doc(hidden)]
pub use contestant::contest;
#[doc(hidden)]
pub use rows::{
    row_01_a_killed_leader_is_succeeded, row_02_a_resumed_leader_has_lost,
    row_03_a_short_stop_causes_no_loss, row_06_a_terminated_leader_ends_its_work_first,
    row_23_killed_waiters_are_skipped,
};

use crate::Fixture;

/// A store that several processes reach by one address.
pub trait Shared: Fixture + Sized {
    /// Starts the store for one test.
    fn start() -> Self;

    /// Returns the address of the store, for another process. One line.
    fn address(&self) -> String;

    /// Connects to the same store, in another process.
    fn attach(address: &str) -> Self;
}

/// Expands to one `#[test]` per row about processes, for a fixture that is [`Shared`].
///
/// The ignored test is the entry point of the contestants' processes.
#[macro_export]
macro_rules! processes {
    ($fixture:ty) => {
        #[test]
        #[ignore = "the entry point of a contestant's process"]
        fn contestant() {
            $crate::processes::contest::<$fixture>();
        }

        $crate::processes!(@each $fixture;
            row_01_a_killed_leader_is_succeeded
            row_02_a_resumed_leader_has_lost
            row_03_a_short_stop_causes_no_loss
            row_06_a_terminated_leader_ends_its_work_first
            row_23_killed_waiters_are_skipped
        );
    };
    (@each $fixture:ty; $($row:ident)*) => {
        $(#[test]
        fn $row() {
            $crate::processes::$row::<$fixture>(concat!(module_path!(), "::contestant"));
        })*
    };
}
