//! The capabilities of a store.

use std::time::Duration;

/// The capabilities of the store under test. A case that needs a missing capability prints `skipped: <reason>`.
///
/// # Default
///
/// Everything: by default a store is checked for every guarantee.
///
/// # Examples
///
/// ```
/// use simba_tck::Profile;
///
/// let polled = Profile::default().with_push(false).with_fifo(false);
/// assert!(polled.expires_without_client);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools)]
#[non_exhaustive]
#[must_use]
pub struct Profile {
    /// A release notifies the next waiter; without it, waiters poll.
    pub push: bool,
    /// Waiters acquire in FIFO order.
    pub fifo: bool,
    /// A mutex is freed in time after its holder's process has crashed.
    pub expires_without_client: bool,
    /// A hold survives a restart of the store; without it, its holder is notified of the loss.
    pub survives_restart: bool,
    /// Other contenders can see the holder's token.
    pub token_visible_to_observers: bool,
    /// How long a waiter whose process was killed blocks a free mutex for the next one; `None`: until its session or
    /// its entry in the queue ends. A store may skip a waiter that was notified and does not answer for as long.
    /// Default: one second.
    pub dead_waiter: Option<Duration>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            push: true,
            fifo: true,
            expires_without_client: true,
            survives_restart: true,
            token_visible_to_observers: true,
            dead_waiter: Some(Duration::from_secs(1)),
        }
    }
}

impl Profile {
    /// Sets whether a release [notifies](Self::push) the next waiter.
    pub const fn with_push(self, push: bool) -> Self {
        Self { push, ..self }
    }

    /// Sets whether waiters acquire [in order](Self::fifo).
    pub const fn with_fifo(self, fifo: bool) -> Self {
        Self { fifo, ..self }
    }

    /// Sets whether a dead holder's mutex is [freed](Self::expires_without_client).
    pub const fn with_expires_without_client(self, expires_without_client: bool) -> Self {
        Self { expires_without_client, ..self }
    }

    /// Sets whether holds [survive a restart](Self::survives_restart).
    pub const fn with_survives_restart(self, survives_restart: bool) -> Self {
        Self { survives_restart, ..self }
    }

    /// Sets whether others [see the token](Self::token_visible_to_observers).
    pub const fn with_token_visible_to_observers(self, token_visible_to_observers: bool) -> Self {
        Self { token_visible_to_observers, ..self }
    }

    /// Sets how long a [dead waiter](Self::dead_waiter) blocks others.
    pub const fn with_dead_waiter(self, dead_waiter: Option<Duration>) -> Self {
        Self { dead_waiter, ..self }
    }
}
