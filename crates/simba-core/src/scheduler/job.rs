//! The scheduler: runs a job on schedule, on the leader only.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use super::schedule::{Next, Schedule};
use crate::contention::{Contention, Status};
use crate::delegate::delegate;
use crate::error::{Error, Result};
use crate::seeded::{self, Bug};
use crate::tenure::Tenure;
use crate::types::{ContenderId, Lease, MutexOwner};
use crate::watched::Watched;

/// Runs a job on schedule while it holds its mutex.
///
/// - No run starts without a valid tenure, nor while the tenure is expiring.
/// - Runs never overlap and never follow each other in a burst: a missed tick is skipped.
/// - A run that reaches the end of its tenure is notified by [`Tenure::expiring`] and dropped before another contender
///   can lead. If the leader crashes during a run, the next leader may run the same tick again: make jobs idempotent,
///   or fence them with [`Tenure::token`].
/// - A job that fails or panics is logged, and the schedule continues.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// use std::time::Duration;
/// use simba_core::{MemoryBackend, Schedule, Simba};
///
/// let simba = Simba::new(MemoryBackend::new());
/// let (done, mut runs) = tokio::sync::mpsc::channel(1);
/// let job = simba.scheduler("report").start(
///     Schedule::fixed_rate(Duration::from_millis(10))?,
///     move |tenure| {
///         let done = done.clone();
///         async move { done.send(tenure.token()).await }
///     },
/// )?;
/// runs.recv().await;
/// job.stop().await?;
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
#[must_use = "a scheduler does nothing until it is started"]
pub struct Scheduler {
    contention: Contention,
}

impl Scheduler {
    pub(crate) fn new(contention: Contention) -> Self {
        Self { contention }
    }

    /// Contends with this lease instead of the handle's.
    pub fn with_lease(self, lease: Lease) -> Self {
        Self { contention: self.contention.with_lease(lease) }
    }

    /// Sets the label of the contender's ids. See [`Locker::with_label`](crate::Locker::with_label). An invalid
    /// label is an error of the start.
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { contention: self.contention.with_label(label) }
    }

    /// Starts contending, and runs `job` on `schedule` while leading.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) for an invalid name or label or outside a runtime,
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) after a shutdown.
    pub fn start<J, F, E>(self, schedule: Schedule, job: J) -> Result<Job>
    where
        J: FnMut(Tenure) -> F + Send + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
        E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
    {
        let contention = Arc::new(self.contention);
        let progress = Arc::new(Watched::default());
        contention.start()?;
        let runner =
            Runner { contention: Arc::clone(&contention), schedule, job, progress: Arc::clone(&progress) };
        contention.core().spawn_detached(runner.run())?;
        Ok(Job { contention, progress })
    }
}

/// A job that is scheduled.
///
/// # Drop
///
/// Dropping it stops the schedule in the background, as [`stop`](Self::stop) does.
#[must_use = "dropping it stops the schedule"]
pub struct Job {
    contention: Arc<Contention>,
    progress: Arc<Watched<Progress>>,
}

/// The counts of the runs of a job on this contender.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Progress {
    /// Runs that started.
    pub started: u64,
    /// Runs that succeeded.
    pub succeeded: u64,
    /// Runs that failed, panicked, or were dropped at the end of their tenure.
    pub failed: u64,
    /// The message of the last failed run.
    pub last_failure: Option<String>,
}

impl Job {
    /// Stops the schedule: no further run starts, the current one is notified to stop and awaited until the
    /// deadline at most, then the mutex is freed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm.
    ///
    /// # Cancel safety
    ///
    /// A dropped call continues in the background.
    pub async fn stop(&self) -> Result<()> {
        self.contention.stop().await
    }

    /// Returns whether this contender leads.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        self.contention.is_owner()
    }

    /// Releases the mutex gracefully and does not contend for `cooldown`, so that another contender can lead.
    pub fn step_down(&self, cooldown: Duration) {
        self.contention.step_down(cooldown);
    }

    /// Waits until this contender leads. See [`Contention::acquired`].
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`](crate::ErrorKind::Closed) once it is stopped.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: dropping it has no effect.
    pub async fn acquired(&self) -> Result<Tenure> {
        self.contention.acquired().await
    }

    delegate! {
        contention {
            /// Returns the current tenure, if this contender leads.
            fn tenure(&self) -> Option<Tenure>;

            /// Returns the status of the contention.
            fn status(&self) -> Status;

            /// Returns the label of the contender's ids, if one is set.
            fn label(&self) -> Option<&str>;

            /// Returns the contender's id. See [`Contention::id`].
            fn id(&self) -> Option<ContenderId>;

            /// Returns the leader in the last answer of the store, this contender or another.
            fn owner(&self) -> MutexOwner;

            /// Returns the error of the last call to the store; `None` if it succeeded.
            fn last_error(&self) -> Option<Error>;
        }
    }

    /// Returns the counts of the runs of this contender.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.read(Progress::clone)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.contention.request_stop();
    }
}

impl fmt::Debug for Job {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Job")
            .field("contention", &self.contention)
            .field("progress", &self.progress())
            .finish()
    }
}

/// The minimum pause between two checks of an expiring tenure.
const PAUSE: Duration = Duration::from_millis(1);

/// The task of a job.
struct Runner<J> {
    contention: Arc<Contention>,
    schedule: Schedule,
    job: J,
    progress: Arc<Watched<Progress>>,
}

impl<J, F, E> Runner<J>
where
    J: FnMut(Tenure) -> F + Send + 'static,
    F: Future<Output = Result<(), E>> + Send + 'static,
    E: Into<Box<dyn StdError + Send + Sync>> + Send + 'static,
{
    async fn run(mut self) {
        let contention = Arc::clone(&self.contention);
        let _stop = contention.stop_on_panic();
        while let Ok(tenure) = contention.acquired().await {
            self.run_ticks(&tenure).await;
        }
    }

    /// Runs ticks until the end of the tenure is announced or reached. This never interrupts a run:
    /// [`Tenure::run`] drops it in time.
    async fn run_ticks(&mut self, tenure: &Tenure) {
        let clock = Arc::clone(&self.contention.core().clock);
        let mut plan = self.schedule.plan(clock.now(), clock.wall());
        while tenure.is_open() || seeded::on(Bug::TickWithoutTenure) {
            let next = match plan.next(clock.now(), clock.wall()) {
                // A tick that is due while the tenure is expiring waits for a renewal.
                Next::Run if tenure.is_expiring() && !seeded::on(Bug::TickWithoutTenure) => {
                    clock.now() + tenure.remaining() / 8 + PAUSE
                }
                Next::Run => {
                    plan.started(clock.now(), clock.wall());
                    self.tick(tenure).await;
                    plan.ended(clock.now(), clock.wall());
                    continue;
                }
                Next::At(moment) => moment,
                Next::Never => return tenure.end_announced().await,
            };
            tokio::select! {
                biased;
                () = tenure.end_announced(), if !seeded::on(Bug::TickWithoutTenure) => {}
                () = clock.sleep_until(next) => {}
            }
        }
    }

    async fn tick(&mut self, tenure: &Tenure) {
        self.progress.update(|progress| progress.started += 1);
        let job = &mut self.job;
        let work = async { job(tenure.clone()).await };
        if seeded::on(Bug::TickWithoutTenure) {
            return drop(AssertUnwindSafe(work).catch_unwind().await);
        }
        // All user code may panic: the job, the drop of a run, and the conversion and `Display` of its error.
        let failed = async {
            match tenure.run(work).await {
                Ok(Ok(())) => None,
                Ok(Err(error)) => Some(error.into().to_string()),
                Err(lost) => Some(lost.to_string()),
            }
        };
        let failure = match AssertUnwindSafe(failed).catch_unwind().await {
            Ok(None) => return self.progress.update(|progress| progress.succeeded += 1),
            Ok(Some(failure)) => failure,
            Err(panic) => format!("the job panicked: {}", panic_message(&*panic)),
        };
        tracing::error!(mutex = %tenure.mutex(), contender = %tenure.contender(), failure, "a scheduled job failed");
        self.progress.update(|progress| {
            progress.failed += 1;
            progress.last_failure = Some(failure);
        });
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
