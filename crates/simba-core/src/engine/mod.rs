//! The engine: a pure machine that decides, and one driver per contender that performs its actions over any backend.
//!
//! It depends on the backend interface, the tenure, the clock and the value types, and on none of the handles built on it.

mod action;
mod closing;
mod core;
mod driver;
mod inline;
mod link;
mod machine;
mod pacing;
#[cfg(test)]
mod tests;

pub(crate) use action::{Mode, Settings};
pub(crate) use core::Core;
pub(crate) use driver::{Driver, DriverConfig};
pub(crate) use inline::Inline;
pub(crate) use link::Link;
pub(crate) use pacing::Pacing;
