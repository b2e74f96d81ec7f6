use std::sync::Arc;
use std::time::Duration;

use super::engine::Engine;
use super::wait;
use crate::error::Result;
use crate::tenure::{Loss, Tenure};
use crate::types::{ContenderId, FencingToken, Lease, MutexOwner};

/// Locks one mutex, one guard at a time. See [`crate::Locker`].
#[derive(Debug)]
pub struct Locker {
    inner: crate::Locker,
    engine: Arc<Engine>,
}

impl Locker {
    pub(super) fn new(inner: crate::Locker, engine: Arc<Engine>) -> Self {
        Self { inner, engine }
    }

    /// Locks with this lease instead of the handle's.
    #[must_use]
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { inner: self.inner.with_lease(lease), ..self }
    }

    /// Begins the contender's ids with this label. See [`crate::Locker::with_label`].
    #[must_use]
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { inner: self.inner.with_label(label), ..self }
    }

    /// Gives the mutex up after `max_hold` at the latest.
    #[must_use]
    pub fn with_max_hold(self, max_hold: Duration) -> Self {
        Self { inner: self.inner.with_max_hold(max_hold), ..self }
    }

    /// Keeps the mutex for `min_hold` at the least.
    #[must_use]
    pub fn with_min_hold(self, min_hold: Duration) -> Self {
        Self { inner: self.inner.with_min_hold(min_hold), ..self }
    }

    /// Gives up waiting once the store could not be reached for this long.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { inner: self.inner.with_patience(patience), ..self }
    }

    /// Waits for the mutex.
    ///
    /// # Errors
    ///
    /// As for [`crate::Locker::lock`].
    pub fn lock(&self) -> Result<Guard> {
        wait(self.inner.lock()).map(|guard| self.guard(guard))
    }

    /// Takes the mutex if it is to be had at once.
    ///
    /// # Errors
    ///
    /// As for [`crate::Locker::try_lock`].
    pub fn try_lock(&self) -> Result<Option<Guard>> {
        Ok(wait(self.inner.try_lock())?.map(|guard| self.guard(guard)))
    }

    /// Waits for the mutex for at most `timeout`.
    ///
    /// # Errors
    ///
    /// As for [`crate::Locker::lock_timeout`].
    pub fn lock_timeout(&self, timeout: Duration) -> Result<Guard> {
        wait(self.inner.lock_timeout(timeout)).map(|guard| self.guard(guard))
    }

    /// Returns the label of its ids, if it has one.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.inner.label()
    }

    /// Who held the mutex when this locker last looked.
    #[must_use]
    pub fn last_holder(&self) -> MutexOwner {
        self.inner.last_holder()
    }

    fn guard(&self, inner: crate::Guard) -> Guard {
        Guard { inner, _engine: Arc::clone(&self.engine) }
    }
}

/// A held mutex. See [`crate::Guard`].
///
/// # Drop
///
/// Dropping it frees the mutex in the background. A program that ends right afterwards may be faster than
/// that: end with [`release`](Self::release) or [`Simba::shutdown`](super::Simba::shutdown).
#[derive(Debug)]
#[must_use = "if unused the mutex is released at once"]
pub struct Guard {
    inner: crate::Guard,
    _engine: Arc<Engine>,
}

impl Guard {
    /// The number to hand to every resource that the work touches.
    #[must_use]
    pub fn token(&self) -> FencingToken {
        self.inner.token()
    }

    /// Returns the id that the mutex is held under.
    #[must_use]
    pub fn contender(&self) -> &ContenderId {
        self.inner.contender()
    }

    /// Whether the mutex is held at this moment. Reads the clock.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.inner.is_held()
    }

    /// How long the mutex stays held without a renewal; zero once it is lost.
    #[must_use]
    pub fn remaining(&self) -> Duration {
        self.inner.remaining()
    }

    /// The hold as a value to hand to other threads.
    #[must_use]
    pub fn tenure(&self) -> Tenure {
        self.inner.tenure()
    }

    /// Waits until the work should stop.
    pub fn expiring(&self) {
        wait(self.inner.expiring());
    }

    /// Waits until the mutex is lost.
    #[must_use]
    pub fn lost(&self) -> Loss {
        wait(self.inner.lost())
    }

    /// Frees the mutex and waits until the store has done so.
    ///
    /// # Errors
    ///
    /// As for [`crate::Guard::release`].
    pub fn release(self) -> Result<()> {
        wait(self.inner.release())
    }
}
