//! The validated value types of the interface. They use no I/O, no clock and no engine.

mod contender_id;
mod fencing_token;
mod lease;
mod loss;
mod mutex_name;
mod owner;
mod text;

pub use contender_id::ContenderId;
pub(crate) use contender_id::Label;
pub use fencing_token::FencingToken;
pub use lease::Lease;
pub use loss::Loss;
pub use mutex_name::MutexName;
pub use owner::{MutexOwner, MutexState};
