//! What a store can and cannot do.

use std::time::Duration;

/// What the store under test can do. What it cannot do gates a case: the case then prints `skipped:
/// <reason>`.
///
/// # Default
///
/// Everything: a store that says nothing is held to every promise.
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
    /// A release wakes the next waiter; without it, waiters poll.
    pub push: bool,
    /// Waiters get the mutex in the order in which they came.
    pub fifo: bool,
    /// A mutex is freed in time after its holder's process is gone without a word.
    pub expires_without_client: bool,
    /// A holder that gave the mutex up for lost and finds that it still has it keeps its token. Default: no,
    /// it gets a greater one.
    pub keeps_token_on_resume: bool,
    /// A hold survives a restart of the store; without it, its holder learns of the loss.
    pub survives_restart: bool,
    /// Others than the holder can see its token.
    pub token_visible_to_observers: bool,
    /// How long a waiter whose process was killed keeps a free mutex from the next one; `None`: until its session or
    /// its entry in the queue ends. Default: one second.
    pub dead_waiter: Option<Duration>,
}

impl Default for Profile {
    fn default() -> Self {
        Self {
            push: true,
            fifo: true,
            expires_without_client: true,
            keeps_token_on_resume: false,
            survives_restart: true,
            token_visible_to_observers: true,
            dead_waiter: Some(Duration::from_secs(1)),
        }
    }
}

impl Profile {
    /// Whether a release [wakes](Self::push) the next waiter.
    pub const fn with_push(self, push: bool) -> Self {
        Self { push, ..self }
    }

    /// Whether waiters are served [in order](Self::fifo).
    pub const fn with_fifo(self, fifo: bool) -> Self {
        Self { fifo, ..self }
    }

    /// Whether a dead holder's mutex is [freed](Self::expires_without_client).
    pub const fn with_expires_without_client(self, expires_without_client: bool) -> Self {
        Self { expires_without_client, ..self }
    }

    /// Whether a holder that resumes [keeps its token](Self::keeps_token_on_resume).
    pub const fn with_keeps_token_on_resume(self, keeps_token_on_resume: bool) -> Self {
        Self { keeps_token_on_resume, ..self }
    }

    /// Whether holds [survive a restart](Self::survives_restart).
    pub const fn with_survives_restart(self, survives_restart: bool) -> Self {
        Self { survives_restart, ..self }
    }

    /// Whether others [see the token](Self::token_visible_to_observers).
    pub const fn with_token_visible_to_observers(self, token_visible_to_observers: bool) -> Self {
        Self { token_visible_to_observers, ..self }
    }

    /// How long a [dead waiter](Self::dead_waiter) keeps others out.
    pub const fn with_dead_waiter(self, dead_waiter: Option<Duration>) -> Self {
        Self { dead_waiter, ..self }
    }
}
