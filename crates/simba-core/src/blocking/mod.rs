//! The same types for programs without an async runtime.
//!
//! One named thread runs the engine of each [`Simba`], so renewals continue while the caller computes or blocks.
//! Every method calls its async counterpart and waits; there is no second implementation. The methods work
//! on any thread. On a thread of an async runtime they block that thread.
//!
//! # Examples
//!
//! ```
//! use simba_core::{MemoryBackend, blocking};
//!
//! let simba = blocking::Simba::new(MemoryBackend::new())?;
//! let guard = simba.locker("orders").lock()?;
//! assert!(guard.is_held());
//! guard.release()?;
//! # Ok::<(), simba_core::Error>(())
//! ```

mod contention;
mod engine;
mod locker;
mod observer;
mod scheduler;
mod simba;

pub use crate::block::wait;
pub use contention::{Contender, Contention};
pub use locker::{Guard, Locker};
pub use observer::Observer;
pub use scheduler::{Job, Scheduler};
pub use simba::Simba;
