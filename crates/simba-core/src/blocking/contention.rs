use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::engine::Engine;
use super::wait;
use crate::contention::Status;
use crate::delegate::{delegate, delegate_setters};
use crate::error::{Error, Result};
use crate::tenure::Tenure;
use crate::types::{ContenderId, Lease, MutexOwner, MutexState};

/// Is notified when it gains the mutex, when it should stop, and when it has lost the mutex. May block. See
/// [`crate::Contender`].
pub trait Contender: Send + 'static {
    /// Called when the mutex was acquired.
    fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState);

    /// Called when the work should stop. If `on_acquired` still runs then, this is called right after it: check
    /// [`Tenure::is_expiring`] there. Does nothing by default. See [`crate::Contender::on_expiring`].
    fn on_expiring(&mut self, tenure: &Tenure) {
        let _ = tenure;
    }

    /// Called when the tenure has ended, or its end is announced and the work under it has ended. Stop everything else
    /// that depends on the tenure before returning.
    fn on_released(&mut self, tenure: &Tenure, state: &MutexState);
}

/// Contends for one mutex from start to stop. See [`crate::Contention`].
#[derive(Debug)]
#[must_use = "dropping it stops it"]
pub struct Contention {
    pub(super) inner: crate::Contention,
    pub(super) _engine: Arc<Engine>,
}

impl Contention {
    /// Sets the contender, whose callbacks are called on a thread that they may block.
    pub fn with_contender(self, contender: impl Contender) -> Self {
        let contender = OnThread(Arc::new(Mutex::new(contender)));
        Self { inner: self.inner.with_contender(contender), ..self }
    }

    delegate_setters! {
        /// Contends with this lease instead of the handle's.
        fn with_lease(self, lease: Lease);

        /// Sets the label of the contender's ids. See [`crate::Locker::with_label`].
        fn with_label(self, label: impl AsRef<str>);

        /// Sets the delay between a start and the first call to the store.
        fn with_initial_delay(self, initial_delay: Duration);
    }

    /// Starts contending.
    ///
    /// # Errors
    ///
    /// As for [`crate::Contention::start`].
    pub fn start(&self) -> Result<()> {
        self.inner.start()
    }

    /// Stops contending gracefully.
    ///
    /// # Errors
    ///
    /// As for [`crate::Contention::stop`].
    pub fn stop(&self) -> Result<()> {
        wait(self.inner.stop())
    }

    /// Releases the mutex gracefully and does not contend for `cooldown`.
    pub fn step_down(&self, cooldown: Duration) {
        self.inner.step_down(cooldown);
    }

    /// Waits until this contender holds the mutex. Returns at once if it does.
    ///
    /// # Errors
    ///
    /// As for [`crate::Contention::acquired`].
    pub fn acquired(&self) -> Result<Tenure> {
        wait(self.inner.acquired())
    }

    delegate! {
        inner {
            /// Returns the status.
            fn status(&self) -> Status;

            /// Returns the current tenure, if this contender holds the mutex.
            fn tenure(&self) -> Option<Tenure>;

            /// Returns whether this contender holds the mutex now.
            fn is_owner(&self) -> bool;

            /// Returns whether this contender holds the mutex and its ttl has not ended, so renewals succeed.
            fn is_in_ttl(&self) -> bool;

            /// Returns the owner in the last answer of the store, this contender or another.
            fn owner(&self) -> MutexOwner;

            /// Returns the last change of owners that this contender observed.
            fn state(&self) -> MutexState;

            /// Returns the label of the contender's ids, if one is set.
            fn label(&self) -> Option<&str>;

            /// Returns the contender's id. See [`crate::Contention::id`].
            fn id(&self) -> Option<ContenderId>;

            /// Returns the error of the last call to the store; `None` if it succeeded.
            fn last_error(&self) -> Option<Error>;
        }
    }
}

/// A contender whose callbacks run on a thread that they may block.
struct OnThread<C>(Arc<Mutex<C>>);

impl<C: Contender> OnThread<C> {
    async fn call(&self, callback: impl FnOnce(&mut C) + Send + 'static) {
        let contender = Arc::clone(&self.0);
        let call = move || callback(&mut contender.lock().unwrap_or_else(PoisonError::into_inner));
        if let Err(error) = tokio::task::spawn_blocking(call).await {
            tracing::error!(%error, "a contender's callback panicked");
        }
    }
}

impl<C: Contender> crate::Contender for OnThread<C> {
    async fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) {
        let (tenure, state) = (tenure.clone(), state.clone());
        self.call(move |contender| contender.on_acquired(&tenure, &state)).await;
    }

    async fn on_expiring(&mut self, tenure: &Tenure) {
        let tenure = tenure.clone();
        self.call(move |contender| contender.on_expiring(&tenure)).await;
    }

    async fn on_released(&mut self, tenure: &Tenure, state: &MutexState) {
        let (tenure, state) = (tenure.clone(), state.clone());
        self.call(move |contender| contender.on_released(&tenure, &state)).await;
    }
}
