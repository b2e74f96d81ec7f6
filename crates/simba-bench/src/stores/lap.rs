//! A lock that goes to and fro between the two sides of a peer.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Moment, SystemClock};

/// What the two sides share.
#[derive(Default)]
pub(super) struct Lap {
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    released: Option<Moment>,
    taken: Vec<Duration>,
}

impl Lap {
    /// Somebody has it; how often it went over so far.
    pub(super) fn took(&self) -> usize {
        let mut inner = self.inner();
        let released = inner.released.take();
        inner.taken.extend(released.map(|released| SystemClock.now() - released));
        inner.taken.len()
    }

    pub(super) fn releases(&self) {
        self.inner().released = Some(SystemClock.now());
    }

    /// How long each hand-over took so far.
    pub(super) fn take(&self) -> Vec<Duration> {
        std::mem::take(&mut self.inner().taken)
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
