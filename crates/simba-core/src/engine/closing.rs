//! The shutdown flag of a handle: drivers check it at every step, and wait for it while they sleep.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// The state of a shutdown: begun or not.
#[derive(Default)]
pub(crate) struct Closing {
    /// A copy of the token's state. Reading the token takes a lock that all drivers of a handle would share.
    begun: AtomicBool,
    token: CancellationToken,
}

impl Closing {
    pub(crate) fn begin(&self) {
        self.begun.store(true, Ordering::SeqCst);
        self.token.cancel();
    }

    pub(crate) fn has_begun(&self) -> bool {
        self.begun.load(Ordering::SeqCst)
    }

    /// Waits until a shutdown begins.
    pub(crate) fn begins(&self) -> WaitForCancellationFuture<'_> {
        self.token.cancelled()
    }
}
