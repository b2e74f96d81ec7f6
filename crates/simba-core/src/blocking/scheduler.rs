use std::error::Error as StdError;
use std::sync::{Arc, Mutex, PoisonError};

use super::engine::Engine;
use super::wait;
use crate::error::Result;
use crate::scheduler::{Progress, Schedule};
use crate::tenure::Tenure;
use crate::types::Lease;

/// Runs a job on schedule, wherever its mutex is held. See [`crate::Scheduler`].
#[derive(Debug)]
#[must_use = "a scheduler does nothing until it is started"]
pub struct Scheduler {
    inner: crate::Scheduler,
    engine: Arc<Engine>,
}

impl Scheduler {
    pub(super) fn new(inner: crate::Scheduler, engine: Arc<Engine>) -> Self {
        Self { inner, engine }
    }

    /// Contends with this lease instead of the handle's.
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { inner: self.inner.with_lease(lease), ..self }
    }

    /// Begins the contender's ids with this label. See [`crate::Locker::with_label`].
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { inner: self.inner.with_label(label), ..self }
    }

    /// Starts contending, and runs `job` on `schedule` while leading, on a thread where it may block.
    ///
    /// A thread cannot be ended from outside: the job itself must look at [`Tenure::is_expiring`]. A run that
    /// outlives its tenure counts as failed and keeps the next one from starting until it is over.
    ///
    /// # Errors
    ///
    /// As for [`crate::Scheduler::start`].
    pub fn start<J, E>(self, schedule: Schedule, job: J) -> Result<Job>
    where
        J: FnMut(&Tenure) -> Result<(), E> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        let job = Arc::new(Mutex::new(job));
        let run = move |tenure: Tenure| {
            let job = Arc::clone(&job);
            async move {
                let run = move || {
                    let mut job = job.lock().unwrap_or_else(PoisonError::into_inner);
                    // A run before may have outlived its tenure, and this one its own while it waited.
                    if !tenure.is_open() {
                        return Err("the tenure ended before the run could start".into());
                    }
                    job(&tenure).map_err(Into::into)
                };
                match tokio::task::spawn_blocking(run).await {
                    Ok(outcome) => outcome,
                    Err(panic) => Err(panic.into()),
                }
            }
        };
        let inner = self.inner.start::<_, _, Box<dyn StdError + Send + Sync>>(schedule, run)?;
        Ok(Job { inner, _engine: self.engine })
    }
}

/// A job that is scheduled. See [`crate::Job`].
#[derive(Debug)]
#[must_use = "dropping it stops the schedule"]
pub struct Job {
    inner: crate::Job,
    _engine: Arc<Engine>,
}

impl Job {
    /// Stops the schedule, in order.
    ///
    /// # Errors
    ///
    /// As for [`crate::Job::stop`].
    pub fn stop(&self) -> Result<()> {
        wait(self.inner.stop())
    }

    /// Whether the job runs here.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        self.inner.is_leading()
    }

    /// What the job has done here so far.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.inner.progress()
    }
}
