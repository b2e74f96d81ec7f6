//! What a driver and its handles share: the handles wish, the driver reports.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use crate::error::{Error, Result};
use crate::tenure::Tenure;
use crate::types::{ContenderId, MutexOwner, MutexState};
use crate::watched::Watched;

/// What the handle wants of its driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wish {
    /// Get the mutex and hold it.
    Hold,
    /// Give it up and stay away for a while.
    StepDown(Duration),
    /// Give it up and end.
    Stop,
}

/// The two ends of one contention. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    shared: Arc<Watched<Shared>>,
}

#[derive(Debug)]
struct Shared {
    contender: Option<ContenderId>,
    wish: Wish,
    tenure: Option<Tenure>,
    state: MutexState,
    error: Option<Error>,
    /// The store has answered at least once.
    answered: bool,
    /// No tenure comes any more.
    outcome: Option<Result<()>>,
    /// Nothing of the driver is left at the store either.
    done: Option<Result<()>>,
}

impl Link {
    pub(crate) fn new() -> Self {
        let shared = Shared {
            contender: None,
            wish: Wish::Hold,
            tenure: None,
            state: MutexState::none(),
            error: None,
            answered: false,
            outcome: None,
            done: None,
        };
        Self { shared: Arc::new(Watched::new(shared)) }
    }
}

// ===== the handle's side =====

impl Link {
    /// Asks the driver to give the mutex up and end. Never blocks, never fails, works anywhere.
    pub(crate) fn stop(&self) {
        self.shared.update(|shared| shared.wish = Wish::Stop);
    }

    pub(crate) fn step_down(&self, cooldown: Duration) {
        self.shared.update(|shared| {
            if shared.wish != Wish::Stop {
                shared.wish = Wish::StepDown(cooldown);
            }
        });
    }

    pub(crate) fn is_wanted(&self) -> bool {
        self.shared.read(|shared| shared.wish != Wish::Stop && shared.outcome.is_none())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.shared.read(|shared| shared.done.is_some())
    }

    /// Waits for the driver's end.
    pub(crate) async fn done(&self) -> Result<()> {
        self.shared.until(|shared| shared.done.clone()).await
    }

    /// Waits for a tenure under which work may start; `Err` with the driver's outcome if it ended instead.
    pub(crate) async fn acquired(&self) -> Result<Tenure, Result<()>> {
        self.shared.until(Shared::open_or_done).await
    }

    /// The tenure that [`acquired`](Self::acquired) would give at once.
    pub(crate) fn acquired_now(&self) -> Option<Tenure> {
        self.shared.read(Shared::open_or_done).and_then(Result::ok)
    }

    /// Waits for a tenure other than `last`, over or not; `None` once the driver ended.
    pub(crate) async fn next(&self, last: Option<&Tenure>) -> Option<(Tenure, MutexState)> {
        self.shared
            .until(|shared| match &shared.tenure {
                Some(tenure) if last.is_none_or(|last| !last.is_same(tenure)) => {
                    Some(Some((tenure.clone(), shared.state.clone())))
                }
                _ => shared.outcome.as_ref().map(|_| None),
            })
            .await
    }

    pub(crate) fn contender(&self) -> Option<ContenderId> {
        self.shared.read(|shared| shared.contender.clone())
    }

    pub(crate) fn tenure(&self) -> Option<Tenure> {
        self.shared.read(|shared| shared.tenure.clone())
    }

    pub(crate) fn state(&self) -> MutexState {
        self.shared.read(|shared| shared.state.clone())
    }

    pub(crate) fn owner(&self) -> MutexOwner {
        self.shared.read(|shared| shared.state.after.clone())
    }

    /// Whether the store has answered at least once.
    pub(crate) fn is_answered(&self) -> bool {
        self.shared.read(|shared| shared.answered)
    }

    /// Whether the handle asked for the end, reached or not.
    pub(crate) fn is_stopped(&self) -> bool {
        self.wish() == Wish::Stop
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.shared.read(|shared| shared.error.clone())
    }
}

impl Shared {
    fn open_or_done(&self) -> Option<Result<Tenure, Result<()>>> {
        match &self.tenure {
            Some(tenure) if tenure.is_open() => Some(Ok(tenure.clone())),
            _ => self.outcome.clone().map(Err),
        }
    }
}

// ===== the driver's side =====

impl Link {
    /// The driver contends under this id from now on.
    pub(crate) fn call(&self, contender: &ContenderId) {
        self.shared.update_quietly(|shared| shared.contender = Some(contender.clone()));
    }

    pub(crate) fn wish(&self) -> Wish {
        self.shared.read(|shared| shared.wish)
    }

    /// Waits until the handle wants something else than to hold.
    pub(crate) fn wishes_otherwise(&self) -> impl Future<Output = ()> + Send {
        self.shared.until(|shared| (shared.wish != Wish::Hold).then_some(()))
    }

    /// A step-down is being carried out; unless a stop comes meanwhile, contend again afterwards.
    pub(crate) fn steps_down(&self) {
        self.shared.update_quietly(|shared| {
            if shared.wish != Wish::Stop {
                shared.wish = Wish::Hold;
            }
        });
    }

    /// The store named this owner. Returns the change, if it is one.
    pub(crate) fn saw(&self, owner: MutexOwner) -> Option<MutexState> {
        self.shared.update_quietly(|shared| shared.saw(owner))
    }

    /// A tenure began.
    pub(crate) fn publish(&self, tenure: Tenure, owner: MutexOwner) {
        self.shared.update(|shared| {
            shared.saw(owner);
            shared.error = None;
            shared.tenure = Some(tenure);
        });
    }

    /// The tenure is over.
    pub(crate) fn withdraw(&self, owner: MutexOwner) {
        self.shared.update(|shared| {
            shared.saw(owner);
            shared.tenure = None;
        });
    }

    pub(crate) fn fail(&self, error: Option<Error>) {
        self.shared.update_quietly(|shared| shared.error = error);
    }

    /// No tenure comes any more; what is left to do at the store, no caller has to wait for.
    pub(crate) fn conclude(&self, outcome: Result<()>) {
        self.shared.update(|shared| {
            shared.error = outcome.as_ref().err().cloned().or_else(|| shared.error.take());
            shared.tenure = None;
            shared.outcome.get_or_insert(outcome).is_ok()
        });
    }

    /// The driver has left the store.
    pub(crate) fn finish(&self, left: Result<()>) {
        self.shared.update(|shared| {
            shared.error = left.as_ref().err().cloned().or_else(|| shared.error.take());
            let outcome = shared.outcome.clone().unwrap_or(Ok(()));
            shared.done = Some(outcome.and(left));
        });
    }
}

impl Shared {
    fn saw(&mut self, owner: MutexOwner) -> Option<MutexState> {
        self.answered = true;
        let owner = owner.since(&self.state.after);
        let before = std::mem::replace(&mut self.state.after, owner);
        if before.id == self.state.after.id {
            return None;
        }
        self.state.before = before;
        Some(self.state.clone())
    }
}
