use std::error::Error as StdError;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::engine::Engine;
use super::wait;
use crate::contention::Status;
use crate::delegate::{delegate, delegate_setters};
use crate::error::{Error, Result};
use crate::scheduler::{Progress, Schedule};
use crate::tenure::Tenure;
use crate::types::{ContenderId, Lease, MutexOwner};

/// Runs a job on schedule while it holds its mutex. See [`crate::Scheduler`].
#[derive(Debug)]
#[must_use = "a scheduler does nothing until it is started"]
pub struct Scheduler {
    pub(super) inner: crate::Scheduler,
    pub(super) engine: Arc<Engine>,
}

impl Scheduler {
    delegate_setters! {
        /// Contends with this lease instead of the handle's.
        fn with_lease(self, lease: Lease);

        /// Sets the label of the contender's ids. See [`crate::Locker::with_label`].
        fn with_label(self, label: impl AsRef<str>);
    }

    /// Starts contending, and runs `job` on `schedule` while leading, on a thread that it may block.
    ///
    /// A thread cannot be ended from outside: the job must check [`Tenure::is_expiring`]. A run that
    /// continues after its tenure counts as failed, and the next run starts only after its end.
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
                    // A previous run may have held the lock until this tenure ended.
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
    /// Stops the schedule gracefully.
    ///
    /// # Errors
    ///
    /// As for [`crate::Job::stop`].
    pub fn stop(&self) -> Result<()> {
        wait(self.inner.stop())
    }

    /// Releases the mutex gracefully and does not contend for `cooldown`, so that another contender can lead.
    pub fn step_down(&self, cooldown: Duration) {
        self.inner.step_down(cooldown);
    }

    /// Waits until this contender leads.
    ///
    /// # Errors
    ///
    /// As for [`crate::Job::acquired`].
    pub fn acquired(&self) -> Result<Tenure> {
        wait(self.inner.acquired())
    }

    delegate! {
        inner {
            /// Returns whether this contender leads.
            fn is_leading(&self) -> bool;

            /// Returns the current tenure, if this contender leads.
            fn tenure(&self) -> Option<Tenure>;

            /// Returns the status of the contention.
            fn status(&self) -> Status;

            /// Returns the label of the contender's ids, if one is set.
            fn label(&self) -> Option<&str>;

            /// Returns the contender's id. See [`crate::Contention::id`].
            fn id(&self) -> Option<ContenderId>;

            /// Returns the leader in the last answer of the store, this contender or another.
            fn owner(&self) -> MutexOwner;

            /// Returns the error of the last call to the store; `None` if it succeeded.
            fn last_error(&self) -> Option<Error>;

            /// Returns the counts of the runs of this contender.
            fn progress(&self) -> Progress;
        }
    }
}
