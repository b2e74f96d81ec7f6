use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::engine::Engine;
use super::wait;
use crate::contention::Status;
use crate::error::{Error, Result};
use crate::tenure::Tenure;
use crate::types::{ContenderId, Lease, MutexOwner, MutexState};

/// Is notified when it gains the mutex, when it should stop, and when it has lost the mutex; may block. See
/// [`crate::Contender`].
pub trait Contender: Send + 'static {
    /// The mutex was gained.
    fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState);

    /// Stops the work, which the mutex may soon not cover any more. Called right after `on_acquired` if that
    /// returns later: watch [`Tenure::is_expiring`] there. Does nothing by default. See
    /// [`crate::Contender::on_expiring`].
    fn on_expiring(&mut self, tenure: &Tenure) {
        let _ = tenure;
    }

    /// The tenure is over, or its end is announced and the work under it has ended: stop what else depends on
    /// it before returning.
    fn on_released(&mut self, tenure: &Tenure, state: &MutexState);
}

/// Contends for one mutex for as long as it is started. See [`crate::Contention`].
#[derive(Debug)]
#[must_use = "dropping it stops it"]
pub struct Contention {
    inner: crate::Contention,
    _engine: Arc<Engine>,
}

impl Contention {
    pub(super) fn new(inner: crate::Contention, engine: Arc<Engine>) -> Self {
        Self { inner, _engine: engine }
    }

    /// Calls this contender back, on a thread where it may block.
    pub fn with_contender(self, contender: impl Contender) -> Self {
        let contender = OnThread(Arc::new(Mutex::new(contender)));
        Self { inner: self.inner.with_contender(contender), ..self }
    }

    /// Contends with this lease instead of the handle's.
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { inner: self.inner.with_lease(lease), ..self }
    }

    /// Begins the contender's ids with this label. See [`crate::Locker::with_label`].
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { inner: self.inner.with_label(label), ..self }
    }

    /// Waits this long after a start before it first contends.
    pub fn with_initial_delay(self, initial_delay: Duration) -> Self {
        Self { inner: self.inner.with_initial_delay(initial_delay), ..self }
    }

    /// Starts contending.
    ///
    /// # Errors
    ///
    /// As for [`crate::Contention::start`].
    pub fn start(&self) -> Result<()> {
        self.inner.start()
    }

    /// Stops contending, in order.
    ///
    /// # Errors
    ///
    /// As for [`crate::Contention::stop`].
    pub fn stop(&self) -> Result<()> {
        wait(self.inner.stop())
    }

    /// Gives the mutex up in order and stays away for `cooldown`.
    pub fn step_down(&self, cooldown: Duration) {
        self.inner.step_down(cooldown);
    }

    /// Waits until this contender holds the mutex; at once if it does.
    ///
    /// # Errors
    ///
    /// As for [`crate::Contention::acquired`].
    pub fn acquired(&self) -> Result<Tenure> {
        wait(self.inner.acquired())
    }

    /// Where it stands.
    #[must_use]
    pub fn status(&self) -> Status {
        self.inner.status()
    }

    /// The current tenure, if this contender holds the mutex.
    #[must_use]
    pub fn tenure(&self) -> Option<Tenure> {
        self.inner.tenure()
    }

    /// Whether this contender holds the mutex at this moment.
    #[must_use]
    pub fn is_owner(&self) -> bool {
        self.inner.is_owner()
    }

    /// The owner as last seen, this contender or another.
    #[must_use]
    pub fn owner(&self) -> MutexOwner {
        self.inner.owner()
    }

    /// Returns the label of its ids, if it has one.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.inner.label()
    }

    /// Returns the id that it contends under. See [`crate::Contention::id`].
    #[must_use]
    pub fn id(&self) -> Option<ContenderId> {
        self.inner.id()
    }

    /// What went wrong in the last call to the store; `None` once one succeeds.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.inner.last_error()
    }
}

/// A contender whose callbacks run where they may block.
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
