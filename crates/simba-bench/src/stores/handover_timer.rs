//! Measures the hand-overs of a lock between two contenders of a peer.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Moment, SystemClock};

/// The state that the two contenders share.
#[derive(Default)]
pub(super) struct HandoverTimer {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    released: Option<Moment>,
    times: Vec<Duration>,
}

impl HandoverTimer {
    /// Records an acquisition. Returns the number of hand-overs so far.
    pub(super) fn acquired(&self) -> usize {
        let mut inner = self.inner();
        let released = inner.released.take();
        inner.times.extend(released.map(|released| SystemClock.now() - released));
        inner.times.len()
    }

    /// Records the start of a release.
    pub(super) fn releasing(&self) {
        self.inner().released = Some(SystemClock.now());
    }

    /// Returns the times of the hand-overs so far.
    pub(super) fn take(&self) -> Vec<Duration> {
        std::mem::take(&mut self.inner().times)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
