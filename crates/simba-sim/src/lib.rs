//! The engine on virtual time over a faulty store.
//!
//! One seed decides everything: which contenders there are and what they do, how fast their clocks run, what
//! the network does to every message, who is stopped, killed or restarted, when the store loses its memory.
//! A run writes a [`History`](simba_tck::History), and the checkers of the compatibility kit judge it. The same
//! seed gives the same run.

mod actor;
mod node;
mod plan;
mod world;

pub use plan::{Plan, Scale};
pub use world::{Outcome, run, run_over};
