//! The same nouns for programs without a runtime of their own.
//!
//! One named thread runs the engine of each [`Simba`], so renewals go on while the caller computes or blocks.
//! Every call hands over to the async original and waits; there is no second implementation. The calls work
//! on any thread, also where an async runtime runs, which they then block.
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

use std::future::Future;

pub use contention::{Contender, Contention};
pub use locker::{Guard, Locker};
pub use observer::Observer;
pub use scheduler::{Job, Scheduler};
pub use simba::Simba;

/// Waits on this thread for a future of this crate that only listens, such as
/// [`Tenure::lost`](crate::Tenure::lost).
pub fn wait<F: Future>(future: F) -> F::Output {
    crate::park::block_on(future)
}
