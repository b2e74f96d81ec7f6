//! The words of the interface as validated values: no I/O, no clock, no engine.

mod contender_id;
mod fencing_token;
mod lease;
mod mutex_name;
mod owner;

pub use contender_id::ContenderId;
pub(crate) use contender_id::Label;
pub use fencing_token::FencingToken;
pub use lease::Lease;
pub use mutex_name::MutexName;
pub use owner::{MutexOwner, MutexState};
