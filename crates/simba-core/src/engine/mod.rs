//! The engine: a pure machine that knows what an answer means, pure pacing that knows when to act, and one
//! driver that does both for a contender, over any backend.

mod driver;
mod link;
mod machine;
mod pacing;
mod ride;

pub(crate) use driver::{Driver, Mode, Order};
pub(crate) use link::Link;
pub(crate) use pacing::Pacing;
pub(crate) use ride::{Ride, Rides};
