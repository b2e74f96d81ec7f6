//! The rows of the fault matrix about processes: killed, stopped, told to end.
//!
//! Each contestant is a process of its own, the test program started once more. All of them write to one log
//! and to one resource that refuses stale tokens, so an overlap is judged by the order of what was written and
//! not by clocks that a stopped process cannot read.

#![allow(clippy::unwrap_used, clippy::missing_panics_doc)]

mod contestant;
mod field;
mod ledger;
mod rows;

#[doc(hidden)]
pub use contestant::contest;
#[doc(hidden)]
pub use rows::{
    row_01_a_killed_leader_is_succeeded, row_02_a_stopped_leader_wakes_up_as_none,
    row_03_a_short_stop_costs_no_leader, row_06_a_leader_told_to_end_ends_its_work_first,
    row_23_killed_waiters_keep_nobody_from_a_free_mutex,
};

use crate::Fixture;

/// A store that several processes reach by one address.
pub trait Shared: Fixture + Sized {
    /// The store for one test.
    fn start() -> Self;

    /// Where it is, for another process. One line.
    fn address(&self) -> String;

    /// The same store, in another process.
    fn attach(address: &str) -> Self;
}

/// Makes one `#[test]` of every row about processes, of a fixture that is [`Shared`].
///
/// The test that is ignored is the door of the contestants' processes.
#[macro_export]
macro_rules! processes {
    ($fixture:ty) => {
        #[test]
        #[ignore = "the way into a process of a contestant"]
        fn contestant() {
            $crate::processes::contest::<$fixture>();
        }

        $crate::processes!(@each $fixture;
            row_01_a_killed_leader_is_succeeded
            row_02_a_stopped_leader_wakes_up_as_none
            row_03_a_short_stop_costs_no_leader
            row_06_a_leader_told_to_end_ends_its_work_first
            row_23_killed_waiters_keep_nobody_from_a_free_mutex
        );
    };
    (@each $fixture:ty; $($row:ident)*) => {
        $(#[test]
        fn $row() {
            $crate::processes::$row::<$fixture>(concat!(module_path!(), "::contestant"));
        })*
    };
}
