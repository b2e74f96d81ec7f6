//! A value that one side changes and others wait on: level-triggered, and a fraction of a channel's size.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A value under a lock, and a bell for those who wait for it to change.
#[derive(Debug, Default)]
pub(crate) struct Watched<T> {
    value: Mutex<T>,
    bell: Notify,
}

impl<T> Watched<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), bell: Notify::new() }
    }

    pub(crate) fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.lock())
    }

    /// Changes the value and lets everyone who waits look at it.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.notify();
        result
    }

    /// Lets everyone who waits look at the value.
    pub(crate) fn notify(&self) {
        self.bell.notify_waiters();
    }

    /// Changes the value in a way that nobody waits for.
    pub(crate) fn update_quietly<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        change(&mut self.lock())
    }

    /// Waits until `look` finds what it wants. Cancel safe: the value keeps what the look would find.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    pub(crate) fn until<R>(&self, mut look: impl FnMut(&T) -> Option<R>) -> impl Future<Output = R> {
        async move {
            loop {
                // From here on `notify_waiters` is heard, so that no change falls between the look and the wait.
                let rung = self.bell.notified();
                if let Some(found) = self.read(&mut look) {
                    return found;
                }
                rung.await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
