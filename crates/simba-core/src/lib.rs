//! Simba core.

pub mod backend;
pub mod clock;
mod error;
mod hub;
pub mod operate;
mod types;

pub use async_trait::async_trait;
pub use backend::{Answer, Backend, Claim, Intent, Ownership, Prior, Session};
pub use clock::{Clock, Moment, SystemClock, TokioClock};
pub use error::{Error, ErrorKind, Result};
pub use hub::{Demand, Hub, Listener};
pub use operate::Operate;
pub use types::{ContenderId, FencingToken, Lease, MutexName, MutexOwner, MutexState};
