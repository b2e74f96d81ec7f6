//! A simulation of the engine on virtual time with a faulty store.
//!
//! One seed determines everything: the contenders and their actions, the rates of their clocks, the faults of every
//! message, the pauses, crashes and restarts of processes, the data losses of the store. A run fills a
//! [`History`](simba_tck::History), which the checkers of the conformance suite check. The same seed gives the same
//! run.

mod actor;
mod node;
mod plan;
mod world;

pub use plan::{Plan, Scale};
pub use world::{Outcome, run, run_over};
