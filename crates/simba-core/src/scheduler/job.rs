//! Running a job on schedule, on the leader only.

use std::error::Error as StdError;
use std::fmt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;

use super::schedule::{Next, Schedule};
use crate::contention::{Contention, Status};
use crate::error::{Error, Result};
use crate::seeded::{self, Bug};
use crate::tenure::Tenure;
use crate::types::{ContenderId, Lease, MutexOwner};
use crate::watched::Watched;

/// Runs a job on schedule, wherever its mutex is held.
///
/// - No run starts without a valid tenure, nor while the tenure is expiring.
/// - Runs never overlap and never come in a burst: a tick that was missed is skipped.
/// - A run that outlives its tenure is told to stop by [`Tenure::expiring`] and dropped before another can
///   lead. If its leader dies within it, the next leader may run the same tick again: make jobs idempotent,
///   or fence them with [`Tenure::token`].
/// - A job that fails or panics is reported, and the schedule goes on.
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

    /// Begins the contender's ids with this label. See [`Locker::with_label`](crate::Locker::with_label). A wrong
    /// label is an error of the start.
    pub fn with_label(self, label: impl AsRef<str>) -> Self {
        Self { contention: self.contention.with_label(label) }
    }

    /// Starts contending, and runs `job` on `schedule` while leading.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) for a wrong name or label or outside a runtime,
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

/// What a job has done on this contender.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Progress {
    /// Runs started.
    pub started: u64,
    /// Runs that ended well.
    pub succeeded: u64,
    /// Runs that failed, panicked, or outlived their tenure.
    pub failed: u64,
    /// What the last failed run said.
    pub last_failure: Option<String>,
}

impl Job {
    /// Stops the schedule: no run starts any more, the running one is told to stop and waited for until the
    /// deadline at most, then the mutex is freed.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Unavailable`](crate::ErrorKind::Unavailable) if the store did not confirm.
    ///
    /// # Cancel safety
    ///
    /// A dropped call goes on in the background.
    pub async fn stop(&self) -> Result<()> {
        self.contention.stop().await
    }

    /// Whether the job runs here.
    #[must_use]
    pub fn is_leading(&self) -> bool {
        self.contention.is_owner()
    }

    /// Gives the mutex up in order and stays away for `cooldown`, so that another can lead.
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
    /// Only listens.
    pub async fn acquired(&self) -> Result<Tenure> {
        self.contention.acquired().await
    }

    /// The current tenure, if this contender leads.
    #[must_use]
    pub fn tenure(&self) -> Option<Tenure> {
        self.contention.tenure()
    }

    /// Where the contention behind the schedule stands.
    #[must_use]
    pub fn status(&self) -> Status {
        self.contention.status()
    }

    /// Returns the label of its ids, if it has one.
    #[must_use]
    pub fn label(&self) -> Option<&str> {
        self.contention.label()
    }

    /// Returns the id that it contends under. See [`Contention::id`].
    #[must_use]
    pub fn id(&self) -> Option<ContenderId> {
        self.contention.id()
    }

    /// The leader as last seen, this contender or another.
    #[must_use]
    pub fn owner(&self) -> MutexOwner {
        self.contention.owner()
    }

    /// What went wrong in the last call to the store; `None` once one succeeds.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.contention.last_error()
    }

    /// What the job has done here so far.
    #[must_use]
    pub fn progress(&self) -> Progress {
        self.progress.read(Progress::clone)
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        self.contention.stop_soon();
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

/// The least pause between two looks at an expiring tenure.
const PAUSE: Duration = Duration::from_millis(1);

/// The task behind a job.
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
        while let Ok(tenure) = self.contention.acquired().await {
            self.lead(&tenure).await;
        }
    }

    /// Runs tick after tick until the end of the tenure is announced or reached. The end never interrupts a
    /// run from here: [`Tenure::run`] tells it to stop and drops it in time.
    async fn lead(&mut self, tenure: &Tenure) {
        let clock = Arc::clone(&self.contention.core().clock);
        let mut plan = self.schedule.plan(clock.now(), clock.wall());
        while tenure.is_open() || seeded::on(Bug::TickWithoutTenure) {
            let next = match plan.next(clock.now(), clock.wall()) {
                // A tick that is due while the tenure may end waits for the renewal.
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
                Next::Never => return tenure.closing().await,
            };
            tokio::select! {
                biased;
                () = tenure.closing(), if !seeded::on(Bug::TickWithoutTenure) => {}
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
        // All code of the user may panic: the job, the drop of a run that is cut off, and its error's conversion
        // and text.
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

/// A runner that panicked runs nothing any more, so it leaves the mutex to others.
impl<J> Drop for Runner<J> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.contention.stop_soon();
        }
    }
}

fn panic_message(panic: &(dyn std::any::Any + Send)) -> &str {
    panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message")
}
