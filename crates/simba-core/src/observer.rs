//! The observer: watches the owner of a mutex without contending.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{self, Stream};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::backend::{Claim, Intent, Ownership, Session};
use crate::clock::{Clock, Moment, within};
use crate::engine::{Core, Pacing};
use crate::error::{Error, ErrorKind, Result};
use crate::types::{ContenderId, Lease, MutexName, MutexOwner};
use crate::watched::Watched;

/// What is known about the owner of a mutex.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum View {
    /// The mutex has this owner.
    Owned(MutexOwner),
    /// The mutex has no owner.
    Vacant,
    /// The owner is unknown: calls to the store fail, or the lease of the last known owner
    /// has ended and no call was answered since.
    Unknown {
        /// The moment since which it is unknown.
        since: Moment,
    },
}

impl View {
    /// Returns what is known at `now`. An owner whose lease has ended becomes unknown: it may have renewed the lease.
    fn at(&self, now: Moment) -> Self {
        match self {
            Self::Owned(owner) if !owner.has_owner(now) => Self::Unknown { since: owner.transition_at },
            view => view.clone(),
        }
    }

    /// Returns whether both have the same owner and token, or are both vacant or unknown.
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
/// It polls after every hint of the store and at least every [`Lease::poll`]. A change that is
/// undone between two polls may be missed.
///
/// # Drop
///
/// Dropping it ends the observation.
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
#[must_use = "dropping it ends the observation"]
pub struct Observer {
    mutex: MutexName,
    clock: Arc<dyn Clock>,
    shared: Arc<Watched<Shared>>,
    /// The number of changes that [`changed`](Self::changed) has returned.
    returned: u64,
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
            useless_hints: 0,
            shared: Arc::clone(&shared),
            core: Arc::clone(core),
        };
        core.spawn(watch.run(stop.clone()))?;
        let clock = Arc::clone(&core.clock);
        Ok(Self { mutex, clock, shared, returned: 0, lapsed: false, _watch: stop.drop_guard() })
    }

    /// Returns the mutex.
    #[must_use]
    pub fn mutex(&self) -> &MutexName {
        &self.mutex
    }

    /// Returns what is known now. Reads the clock: an owner whose lease has ended is
    /// [`View::Unknown`] until the next answer of the store.
    #[must_use]
    pub fn view(&self) -> View {
        self.shared.read(|shared| shared.view.at(self.clock.now()))
    }

    /// Returns the error of the last poll; `None` if it succeeded.
    #[must_use]
    pub fn last_error(&self) -> Option<Error> {
        self.shared.read(|shared| shared.error.clone())
    }

    /// Waits for a change since the last call, and returns what is known now, as [`view`](Self::view) does.
    /// The first call waits for the first poll.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Closed`] after a shutdown.
    ///
    /// # Cancel safety
    ///
    /// A change is kept for the next call.
    pub async fn changed(&mut self) -> Result<View> {
        let (clock, returned, lapsed) = (&self.clock, self.returned, self.lapsed);
        let check = |shared: &Shared| {
            let view = shared.view.at(clock.now());
            let changed = match (&view, lapsed) {
                // Unknown was returned already. A renewal of the owner is a change.
                (View::Unknown { .. }, true) => false,
                (View::Owned(_), true) => true,
                _ => shared.changes > returned,
            };
            let lapsed = view != shared.view;
            match changed {
                true => Some(Ok((view, shared.changes, lapsed))),
                false => shared.ended.then(|| Err(Error::new(ErrorKind::Closed, "the handle was shut down"))),
            }
        };
        let change = self.shared.until(check).await.map_err(|error| error.with_mutex(&self.mutex))?;
        let (view, changes, lapsed) = change;
        (self.returned, self.lapsed) = (changes, lapsed);
        Ok(view)
    }

    /// Returns a stream of the views that [`changed`](Self::changed) returns. It ends with a shutdown.
    pub fn into_stream(self) -> impl Stream<Item = View> + Send {
        stream::unfold(self, |mut observer| async move {
            let view = observer.changed().await.ok()?;
            Some((view, observer))
        })
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

/// The task of an observer.
struct Watch {
    core: Arc<Core>,
    claim: Claim,
    pacing: Pacing,
    random: fastrand::Rng,
    session: Option<Box<dyn Session>>,
    failures: u32,
    /// The number of hints in a row without a change.
    useless_hints: u32,
    shared: Arc<Watched<Shared>>,
}

impl Watch {
    async fn run(mut self, stop: CancellationToken) {
        let core = Arc::clone(&self.core);
        tokio::select! {
            biased;
            () = stop.cancelled() => {}
            () = core.closing.begins() => {}
            () = self.poll_forever() => {}
        }
    }

    async fn poll_forever(&mut self) {
        let clock = Arc::clone(&self.core.clock);
        loop {
            let sent = clock.now();
            let limit = self.pacing.call_limit(None);
            let answer = within(&*clock, limit, self.inspect()).await;
            let timeout = || Err(Error::new(ErrorKind::Unavailable, format!("no answer within {limit:?}")));
            match answer.unwrap_or_else(timeout) {
                Ok(ownership) => {
                    let pause = self.observed(sent, ownership.as_ref());
                    self.wait(sent, pause).await;
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

    fn observed(&mut self, sent: Moment, ownership: Option<&Ownership>) -> Duration {
        self.failures = 0;
        let view = match ownership {
            Some(ownership) => View::Owned(MutexOwner::observed(ownership, sent, &self.claim.lease)),
            None => View::Vacant,
        };
        self.useless_hints = if self.publish(view, None) { 0 } else { self.useless_hints.saturating_add(1) };
        let remaining = ownership.map_or(Duration::MAX, |ownership| ownership.remaining);
        self.pacing.wait(remaining, self.random.f64())
    }

    fn failed(&mut self, error: Error) -> Duration {
        self.failures = self.failures.saturating_add(1);
        let pause = self.pacing.retry_waiting(self.failures, error.is_transient(), self.random.f64());
        let error = error.with_backend(self.core.backend.name()).with_mutex(&self.claim.mutex);
        self.publish(View::Unknown { since: self.core.clock.now() }, Some(error));
        pause
    }

    /// Publishes the result of a poll, and returns whether it is a change.
    fn publish(&self, view: View, error: Option<Error>) -> bool {
        self.shared.update(|shared| {
            shared.error = error;
            let new = shared.changes == 0 || !shared.view.is_same(&view);
            shared.changes += u64::from(new);
            shared.view = match (view, &shared.view) {
                (View::Owned(now), View::Owned(before)) => View::Owned(now.since(before)),
                // Unknown since the first failure, not the last.
                (View::Unknown { .. }, View::Unknown { since }) if !new => View::Unknown { since: *since },
                (View::Unknown { since }, View::Owned(before)) => {
                    View::Unknown { since: since.min(before.transition_at) }
                }
                (view, _) => view,
            };
            new
        })
    }

    /// Waits for the end of the pause or for a hint. After useless hints in a row, a hint ends the wait later.
    async fn wait(&mut self, sent: Moment, pause: Duration) {
        let clock = Arc::clone(&self.core.clock);
        let until = clock.now() + pause;
        let earliest = sent + self.pacing.hint_gap(self.useless_hints);
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
            () = clock.sleep_until(until) => self.useless_hints = 0,
            () = hint => clock.sleep_until(earliest.min(until)).await,
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.shared.update(|shared| shared.ended = true);
    }
}
