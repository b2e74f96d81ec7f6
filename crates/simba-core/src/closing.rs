//! The shutdown of a handle: asked about with every step of a driver, waited for by those who rest.

use std::sync::atomic::{AtomicBool, Ordering};

use tokio_util::sync::{CancellationToken, WaitForCancellationFuture};

/// Whether a shutdown has begun.
#[derive(Default)]
pub(crate) struct Closing {
    /// The token alone would do, but asking it takes a lock that all drivers of a handle would share.
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
