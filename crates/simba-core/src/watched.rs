//! A value that tasks can wait on: level-triggered, and a fraction of a channel's size.

use std::future::Future;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// A value under a lock that notifies its waiters of changes.
#[derive(Debug, Default)]
pub(crate) struct Watched<T> {
    value: Mutex<T>,
    changed: Notify,
}

impl<T> Watched<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { value: Mutex::new(value), changed: Notify::new() }
    }

    pub(crate) fn read<R>(&self, read: impl FnOnce(&T) -> R) -> R {
        read(&self.lock())
    }

    /// Changes the value and notifies all waiters.
    pub(crate) fn update<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        let result = change(&mut self.lock());
        self.notify();
        result
    }

    /// Notifies all waiters, which check the value again.
    pub(crate) fn notify(&self) {
        self.changed.notify_waiters();
    }

    /// Changes the value without a notification, for changes that no waiter waits for.
    pub(crate) fn update_quietly<R>(&self, change: impl FnOnce(&mut T) -> R) -> R {
        change(&mut self.lock())
    }

    /// Waits until `check` returns `Some`. Cancel safe: the next call checks the same value.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    pub(crate) fn until<R>(&self, mut check: impl FnMut(&T) -> Option<R>) -> impl Future<Output = R> {
        async move {
            loop {
                // Created before the check: it receives every `notify_waiters` from here on.
                let notified = self.changed.notified();
                if let Some(found) = self.read(&mut check) {
                    return found;
                }
                notified.await;
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, T> {
        self.value.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
