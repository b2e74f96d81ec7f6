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

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

pub use contention::{Contender, Contention};
pub use locker::{Guard, Locker};
pub use observer::Observer;
pub use scheduler::{Job, Scheduler};
pub use simba::Simba;

/// Blocks this thread until a future of this crate completes, such as [`Tenure::lost`](crate::Tenure::lost). The future
/// must only wait for the engine.
pub fn wait<F: Future>(future: F) -> F::Output {
    // On a runtime's thread the current task may have no coop budget left, and gets none while it is blocked.
    let mut future = pin!(tokio::task::unconstrained(future));
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}
