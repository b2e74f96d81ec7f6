//! Watching who owns a mutex, without contending.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::{CancellationToken, DropGuard};

use crate::backend::{Claim, Intent, Ownership, Session};
use crate::clock::{Clock, Moment, within};
use crate::engine::Pacing;
use crate::error::{Error, ErrorKind, Result};
use crate::simba::Core;
use crate::types::{ContenderId, Lease, MutexName, MutexOwner};
use crate::watched::Watched;

/// What is known of a mutex's owner.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum View {
    /// Somebody owns it.
    Owned(MutexOwner),
    /// Nobody owns it.
    Vacant,
    /// The owner is unknown since this moment: the store cannot be asked, or the lease of the last known owner
    /// has ended and the store has not been asked since.
    Unknown {
        /// Since when.
        since: Moment,
    },
}

impl View {
    /// Returns what is known at `now`: an owner whose lease has ended since may have renewed it or not.
    fn at(&self, now: Moment) -> Self {
        match self {
            Self::Owned(owner) if !owner.has_owner(now) => Self::Unknown { since: owner.transition_at },
            view => view.clone(),
        }
    }

    /// Whether both say the same about who owns the mutex, whatever they say about how long.
    fn is_same(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Owned(one), Self::Owned(two)) => (&one.id, one.token) == (&two.id, two.token),
            (Self::Vacant, Self::Vacant) | (Self::Unknown { .. }, Self::Unknown { .. }) => true,
            _ => false,
        }
    }
}

/// Watches the owner of one mutex. Never contends, never queues.
///
/// It learns of changes from the store's hints and looks at least every
/// [`Lease::poll`]; a change that is undone between two looks may go unseen.
///
/// # Drop
///
/// Dropping it ends the watch.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> simba_core::Result<()> {
/// # use simba_core::View;
/// # let simba = simba_core::Simba::new(simba_core::MemoryBackend::new());
/// let mut observer = simba.observe("leader")?;
/// assert_eq!(observer.changed().await?, View::Vacant);
/// let guard = simba.locker("leader").lock().await?;
/// let View::Owned(owner) = observer.changed().await? else { panic!() };
/// assert_eq!(owner.token, Some(guard.token()));
/// # Ok(())
/// # }
/// ```
#[must_use = "dropping it ends the watch"]
pub struct Observer {
    mutex: MutexName,
    clock: Arc<dyn Clock>,
    shared: Arc<Watched<Shared>>,
    /// The number of changes that [`changed`](Self::changed) has returned.
    told: u64,
    /// The last change was an owner whose lease had ended, and was returned as unknown.
    lapsed: bool,
    _watch: DropGuard,
}

#[derive(Debug)]
struct Shared {
    view: View,
    changes: u64,
    error: Option<Error>,
    ended: bool,
}

impl Observer {
    pub(crate) fn start(core: &Arc<Core>, mutex: MutexName, lease: Lease) -> Result<Self> {
        let view = View::Unknown { since: core.clock.now() };
        let shared = Arc::new(Watched::new(Shared { view, changes: 0, error: None, ended: false }));
        let stop = CancellationToken::new();
        let watch = Watch {
            claim: Claim::new(mutex.clone(), ContenderId::generate(), lease).with_intent(Intent::Observe),
            pacing: Pacing::new(lease),
            random: fastrand::Rng::with_seed(core.seed()),
            session: None,
            failures: 0,
            fruitless: 0,
            shared: Arc::clone(&shared),
            core: Arc::clone(core),
        };
        core.spawn(watch.run(stop.clone()))?;
        let clock = Arc::clone(&core.clock);
        Ok(Self { mutex, clock, shared, told: 0, lapsed: false, _watch: stop.drop_guard() })
    }

    /// The mutex.
    #[must_use]
    pub fn mutex(&self) -> &MutexName {
        &self.mutex
    }

    /// Returns what is known at this moment. Reads the clock: an owner whose lease has ended is
    /// [`View::Unknown`] until the store is asked again.
    #[must_use]
    pub fn view(&self) -> View {
        self.shared.read(|shared| shared.view.at(self.clock.now()))
    }

    /// What went wrong in the last look; `None` once one succeeds.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.shared.read(|shared| shared.error.clone())
    }

    /// Waits for a change since the last call, and returns what is known at this moment, as [`view`](Self::view) does.
    /// The first call waits for the first look.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] after a shutdown.
    ///
    /// # Cancel safety
    ///
    /// A change is kept for the next call.
    pub async fn changed(&mut self) -> Result<View> {
        let (clock, told, lapsed) = (&self.clock, self.told, self.lapsed);
        let look = |shared: &Shared| {
            let view = shared.view.at(clock.now());
            let changed = match (&view, lapsed) {
                // The caller knows that the owner is unknown, but not that it has renewed its lease.
                (View::Unknown { .. }, true) => false,
                (View::Owned(_), true) => true,
                _ => shared.changes > told,
            };
            let lapsed = view != shared.view;
            match changed {
                true => Some(Ok((view, shared.changes, lapsed))),
                false => shared.ended.then(|| Err(Error::new(ErrorKind::Closed, "the handle was shut down"))),
            }
        };
        let seen = self.shared.until(look).await.map_err(|error| error.with_mutex(&self.mutex))?;
        let (view, changes, lapsed) = seen;
        (self.told, self.lapsed) = (changes, lapsed);
        Ok(view)
    }
}

impl fmt::Debug for Observer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Observer")
            .field("mutex", &self.mutex)
            .field("view", &self.view())
            .finish_non_exhaustive()
    }
}

/// The task behind an observer.
struct Watch {
    core: Arc<Core>,
    claim: Claim,
    pacing: Pacing,
    random: fastrand::Rng,
    session: Option<Box<dyn Session>>,
    failures: u32,
    /// Hints in a row that told nothing new.
    fruitless: u32,
    shared: Arc<Watched<Shared>>,
}

impl Watch {
    async fn run(mut self, stop: CancellationToken) {
        let core = Arc::clone(&self.core);
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = core.closing.begins() => {}
            () = self.look_for_ever() => {}
        }
    }

    async fn look_for_ever(&mut self) {
        let clock = Arc::clone(&self.core.clock);
        loop {
            let sent = clock.now();
            let limit = self.pacing.call_limit(None);
            let looked = within(&*clock, limit, self.inspect()).await;
            let silent = || Err(Error::new(ErrorKind::Unavailable, format!("no answer within {limit:?}")));
            match looked.unwrap_or_else(silent) {
                Ok(ownership) => {
                    let pause = self.saw(sent, ownership.as_ref());
                    self.rest(sent, pause).await;
                }
                // No hint shortens the pause after an error.
                Err(error) => {
                    let pause = self.failed(error);
                    clock.sleep_until(clock.now() + pause).await;
                }
            }
        }
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let session = match &mut self.session {
            Some(session) => session,
            None => self.session.insert(self.core.backend.open(self.claim.clone()).await?),
        };
        session.inspect().await
    }

    fn saw(&mut self, sent: Moment, ownership: Option<&Ownership>) -> Duration {
        self.failures = 0;
        let view = match ownership {
            Some(ownership) => View::Owned(MutexOwner::seen(ownership, sent, &self.claim.lease)),
            None => View::Vacant,
        };
        self.fruitless = if self.show(view, None) { 0 } else { self.fruitless.saturating_add(1) };
        let remaining = ownership.map_or(Duration::MAX, |ownership| ownership.remaining);
        self.pacing.wait(remaining, self.random.f64())
    }

    fn failed(&mut self, error: Error) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let pause = self.pacing.retry_waiting(self.failures, error.is_transient(), self.random.f64());
        let error = error.with_backend(self.core.backend.name()).with_mutex(&self.claim.mutex);
        self.show(View::Unknown { since: self.core.clock.now() }, Some(error));
        pause
    }

    /// Shows what was seen; whether it is news.
    fn show(&self, view: View, error: Option<Error>) -> bool {
        self.shared.update(|shared| {
            shared.error = error;
            let news = shared.changes == 0 || !shared.view.is_same(&view);
            shared.changes += u64::from(news);
            shared.view = match (view, &shared.view) {
                (View::Owned(now), View::Owned(before)) => View::Owned(now.since(before)),
                // The first failure counts, not the last.
                (View::Unknown { .. }, View::Unknown { since }) if !news => View::Unknown { since: *since },
                (View::Unknown { since }, View::Owned(before)) => {
                    View::Unknown { since: since.min(before.transition_at) }
                }
                (view, _) => view,
            };
            news
        })
    }

    /// Waits for the pause to end or for a hint, which is heeded the later the less the last ones told.
    async fn rest(&mut self, sent: Moment, pause: Duration) {
        let clock = Arc::clone(&self.core.clock);
        let until = clock.now() + pause;
        let heed = sent + self.pacing.hint_gap(self.fruitless);
        let hint = async {
            let hinted = match &mut self.session {
                Some(session) => session.changed().await.is_ok(),
                None => false,
            };
            if !hinted {
                std::future::pending().await
            }
        };
        tokio::select! {
            biased;
            () = clock.sleep_until(until) => self.fruitless = 0,
            () = hint => clock.sleep_until(heed.min(until)).await,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.update(|shared| shared.ended = true);
    }
}
