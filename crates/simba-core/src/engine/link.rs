//! The state that a driver and its handles share: requests of the handles, reports of the driver.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use super::action::Request;
use crate::error::{Error, Result};
use crate::tenure::Tenure;
use crate::types::{ContenderId, MutexOwner, MutexState};
use crate::watched::Watched;

/// The connection between a driver and its handles. Cheap to clone.
#[derive(Clone, Debug)]
pub(crate) struct Link {
    shared: Arc<Watched<Shared>>,
}

#[derive(Debug)]
struct Shared {
    contender: Option<ContenderId>,
    request: Request,
    tenure: Option<Tenure>,
    owner: MutexOwner,
    /// The owner before it, if there was one. Boxed: most mutexes are free when they are acquired.
    before: Option<Box<MutexOwner>>,
    error: Option<Error>,
    /// The driver has no task and needs none: its caller polls it.
    inline: bool,
    /// The store has answered at least once.
    answered: bool,
    /// An attempt to acquire the mutex was refused.
    refused: bool,
    /// Set once no further tenure can begin.
    outcome: Option<Result<()>>,
    /// Set once the driver has left the store as well.
    done: Option<Result<()>>,
}

impl Link {
    pub(crate) fn new() -> Self {
        let shared = Shared {
            contender: None,
            request: Request::Hold,
            tenure: None,
            owner: MutexOwner::none(),
            before: None,
            error: None,
            inline: false,
            answered: false,
            refused: false,
            outcome: None,
            done: None,
        };
        Self { shared: Arc::new(Watched::new(shared)) }
    }
}

// ===== the handle's side =====

impl Link {
    /// Requests that the driver releases the mutex and ends. Never blocks, never fails, needs no runtime.
    pub(crate) fn stop(&self) {
        self.shared.update(|shared| shared.request = Request::Stop);
    }

    pub(crate) fn step_down(&self, cooldown: Duration) {
        self.shared.update(|shared| {
            if shared.request != Request::Stop {
                shared.request = Request::StepDown(cooldown);
            }
        });
    }

    /// Returns whether the driver contends or holds, and no stop was requested.
    pub(crate) fn is_active(&self) -> bool {
        self.shared.read(|shared| shared.request != Request::Stop && shared.outcome.is_none())
    }

    pub(crate) fn is_done(&self) -> bool {
        self.shared.read(|shared| shared.done.is_some())
    }

    /// Waits until the driver has left the store, and returns its outcome.
    pub(crate) async fn done(&self) -> Result<()> {
        self.shared.until(|shared| shared.done.clone()).await
    }

    /// Waits for a tenure under which work may start. Returns the driver's outcome as `Err` if it ended instead.
    pub(crate) async fn acquired(&self) -> Result<Tenure, Result<()>> {
        self.shared.until(Shared::open_or_done).await
    }

    /// Returns the tenure with which [`acquired`](Self::acquired) would complete at once.
    pub(crate) fn acquired_now(&self) -> Option<Tenure> {
        self.shared.read(Shared::open_or_done).and_then(Result::ok)
    }

    /// Waits for a tenure other than `last`, ended or not. Returns `None` once the driver has ended.
    pub(crate) async fn next(&self, last: Option<&Tenure>) -> Option<(Tenure, MutexState)> {
        self.shared
            .until(|shared| match &shared.tenure {
                Some(tenure) if last.is_none_or(|last| !last.is_same(tenure)) => {
                    Some(Some((tenure.clone(), shared.state())))
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
        self.shared.read(Shared::state)
    }

    pub(crate) fn owner(&self) -> MutexOwner {
        self.shared.read(|shared| shared.owner.clone())
    }

    /// Returns whether the store has answered at least once.
    pub(crate) fn is_answered(&self) -> bool {
        self.shared.read(|shared| shared.answered)
    }

    /// Returns whether the driver was refused at least once, so that it waited for the mutex.
    pub(crate) fn was_refused(&self) -> bool {
        self.shared.read(|shared| shared.refused)
    }

    /// Returns whether the handle requested a stop, completed or not.
    pub(crate) fn is_stopped(&self) -> bool {
        self.request() == Request::Stop
    }

    pub(crate) fn error(&self) -> Option<Error> {
        self.shared.read(|shared| shared.error.clone())
    }
}

impl Shared {
    fn state(&self) -> MutexState {
        let before = self.before.as_deref().cloned().unwrap_or_else(MutexOwner::none);
        MutexState::new(before, self.owner.clone())
    }

    fn open_or_done(&self) -> Option<Result<Tenure, Result<()>>> {
        match &self.tenure {
            Some(tenure) if tenure.is_open() => Some(Ok(tenure.clone())),
            _ => self.outcome.clone().map(Err),
        }
    }
}

// ===== the driver's side =====

impl Link {
    /// Sets the id that the driver contends under from now on.
    pub(crate) fn set_contender(&self, contender: &ContenderId) {
        self.shared.update_quietly(|shared| shared.contender = Some(contender.clone()));
    }

    /// Records whether the driver can go on without a task, polled by its caller.
    pub(crate) fn set_inline(&self, inline: bool) {
        self.shared.update_quietly(|shared| shared.inline = inline);
    }

    pub(crate) fn is_inline(&self) -> bool {
        self.shared.read(|shared| shared.inline)
    }

    pub(crate) fn request(&self) -> Request {
        self.shared.read(|shared| shared.request)
    }

    /// Waits until a stop or step-down is requested.
    pub(crate) fn interrupted(&self) -> impl Future<Output = ()> + Send {
        self.shared.until(|shared| (shared.request != Request::Hold).then_some(()))
    }

    /// Accepts a request to step down. The driver contends again afterwards, unless another request came meanwhile.
    pub(crate) fn accept_step_down(&self, accepted: Request) {
        self.shared.update_quietly(|shared| {
            if shared.request == accepted && accepted != Request::Stop {
                shared.request = Request::Hold;
            }
        });
    }

    /// Records the owner that the store named in the answer to a call.
    pub(crate) fn observe(&self, owner: MutexOwner) {
        self.shared.update_quietly(|shared| {
            shared.observe(owner);
            shared.error = None;
        });
    }

    /// Records a refusal, and the owner that the store named.
    pub(crate) fn refuse(&self, owner: MutexOwner) {
        self.shared.update_quietly(|shared| shared.refused = true);
        self.observe(owner);
    }

    /// Publishes a tenure that began.
    pub(crate) fn publish(&self, tenure: Tenure, owner: MutexOwner) {
        self.shared.update(|shared| {
            shared.observe(owner);
            shared.error = None;
            shared.tenure = Some(tenure);
        });
    }

    /// Withdraws a tenure that ended.
    pub(crate) fn withdraw(&self, owner: MutexOwner) {
        self.shared.update(|shared| {
            shared.observe(owner);
            shared.tenure = None;
        });
    }

    pub(crate) fn set_error(&self, error: Error) {
        self.shared.update_quietly(|shared| shared.error = Some(error));
    }

    /// Sets the outcome: no further tenure begins. Callers need not wait for what is left to do at the store.
    pub(crate) fn conclude(&self, outcome: Result<()>) {
        self.shared.update(|shared| {
            shared.error = outcome.as_ref().err().cloned().or_else(|| shared.error.take());
            shared.tenure = None;
            shared.outcome = Some(outcome);
        });
    }

    /// Records that the driver has left the store, or that it ended before that.
    pub(crate) fn finish(&self, left: Result<()>) {
        self.shared.update(|shared| {
            shared.error = left.as_ref().err().cloned().or_else(|| shared.error.take());
            shared.tenure = None;
            let outcome = shared.outcome.get_or_insert_with(|| left.clone()).clone();
            shared.done = Some(outcome.and(left));
        });
    }
}

impl Shared {
    fn observe(&mut self, owner: MutexOwner) {
        self.answered = true;
        let owner = owner.since(&self.owner);
        let before = std::mem::replace(&mut self.owner, owner);
        if before.id != self.owner.id {
            self.before = before.id.is_some().then(|| Box::new(before));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn step_down_that_comes_before_another_is_accepted_stays_requested() {
        let (short, long) = (Duration::from_secs(1), Duration::from_secs(3_600));
        let link = Link::new();
        link.step_down(short);
        let accepted = link.request();
        link.step_down(long);
        link.accept_step_down(accepted);
        assert_eq!(link.request(), Request::StepDown(long));
        link.accept_step_down(link.request());
        assert_eq!(link.request(), Request::Hold);
        link.stop();
        link.accept_step_down(link.request());
        assert_eq!(link.request(), Request::Stop);
    }
}
