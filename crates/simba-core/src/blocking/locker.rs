use std::sync::Arc;
use std::time::Duration;

use super::engine::Engine;
use super::wait;
use crate::clock::Moment;
use crate::delegate::{delegate, delegate_setters};
use crate::error::Result;
use crate::tenure::Tenure;
use crate::types::{ContenderId, FencingToken, Lease, Loss, MutexOwner};

/// Locks one mutex, one guard at a time. See [`crate::Locker`].
#[derive(Debug)]
pub struct Locker {
    pub(super) inner: crate::Locker,
    pub(super) engine: Arc<Engine>,
}

impl Locker {
    delegate_setters! {
        /// Locks with this lease instead of the handle's.
        #[must_use]
        fn with_lease(self, lease: Lease);

        /// Sets the label of the contender's ids. See [`crate::Locker::with_label`].
        #[must_use]
        fn with_label(self, label: impl AsRef<str>);

        /// Limits a hold to `max_hold`.
        #[must_use]
        fn with_max_hold(self, max_hold: Duration);

        /// Keeps the mutex for at least `min_hold`.
        #[must_use]
        fn with_min_hold(self, min_hold: Duration);

        /// Sets how long a lock waits for a store that cannot be reached.
        #[must_use]
        fn with_patience(self, patience: Duration);
    }

    /// Waits for the mutex.
    ///
    /// # Errors
    ///
    /// As for [`crate::Locker::lock`].
    pub fn lock(&self) -> Result<Guard> {
        wait(self.inner.lock()).map(|guard| self.guard(guard))
    }

    /// Acquires the mutex if that is possible at once.
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

    delegate! {
        inner {
            /// Returns the label of the contender's ids, if one is set.
            fn label(&self) -> Option<&str>;

            /// Returns the holder of the mutex at the last call of this locker to the store.
            fn last_holder(&self) -> MutexOwner;
        }
    }

    fn guard(&self, inner: crate::Guard) -> Guard {
        Guard { inner, _engine: Arc::clone(&self.engine) }
    }
}

/// A held mutex. See [`crate::Guard`].
///
/// # Drop
///
/// Dropping it frees the mutex in the background. A program that exits right afterwards may exit before
/// that: use [`release`](Self::release) or [`Simba::shutdown`](super::Simba::shutdown) at the end.
#[derive(Debug)]
#[must_use = "if unused the mutex is released at once"]
pub struct Guard {
    inner: crate::Guard,
    _engine: Arc<Engine>,
}

impl Guard {
    delegate! {
        inner {
            /// Returns the fencing token to pass to every resource that the work writes to.
            fn token(&self) -> FencingToken;

            /// Returns the id that the mutex is held under.
            fn contender(&self) -> &ContenderId;

            /// Returns whether the mutex is held now. Reads the clock.
            fn is_held(&self) -> bool;

            /// Returns whether the work should stop. See [`Tenure::is_expiring`].
            fn is_expiring(&self) -> bool;

            /// Returns how long the mutex stays held without a renewal; zero once it is lost.
            fn remaining(&self) -> Duration;

            /// Returns the moment at which the mutex is lost unless it is renewed before.
            fn deadline(&self) -> Moment;

            /// Returns the tenure, a value to pass to other threads.
            fn tenure(&self) -> Tenure;
        }
    }

    /// Waits until the work should stop.
    pub fn expiring(&self) {
        wait(self.inner.expiring());
    }

    /// Waits until the mutex is lost, and returns the reason.
    #[must_use]
    pub fn lost(&self) -> Loss {
        wait(self.inner.lost())
    }

    /// Releases the mutex and waits for the confirmation of the store.
    ///
    /// # Errors
    ///
    /// As for [`crate::Guard::release`].
    pub fn release(self) -> Result<()> {
        wait(self.inner.release())
    }
}
