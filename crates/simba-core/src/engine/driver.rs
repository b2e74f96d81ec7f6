//! The one task behind every contender: asks the store, heeds the machine, tells the handle.

use std::sync::Arc;
use std::time::Duration;

use super::link::{Link, Wish};
use super::machine::{Machine, Step};
use super::pacing::Grant;
use crate::backend::{Answer, Claim, Intent, Prior, Session};
use crate::clock::{Moment, within};
use crate::error::{Error, ErrorKind, Result};
use crate::simba::Core;
use crate::tenure::{Loss, Tenure, Terms};
use crate::types::{ContenderId, Lease, MutexName, MutexOwner};

/// How long a contender goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// One look, at most one tenure.
    Try,
    /// One tenure, waited for; given up after the store could not be reached for this long.
    Once(Duration),
    /// Tenure after tenure until stopped.
    Forever,
}

/// What a driver is to do.
#[derive(Debug)]
pub(crate) struct Order {
    pub(crate) mutex: MutexName,
    pub(crate) contender: ContenderId,
    pub(crate) lease: Lease,
    pub(crate) mode: Mode,
    pub(crate) initial_delay: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Duration,
}

/// One contender at work. It alone touches its session; handles only see its [`Link`].
pub(crate) struct Driver {
    core: Arc<Core>,
    order: Order,
    link: Link,
    machine: Machine,
    session: Option<Box<dyn Session>>,
    tenure: Option<Tenure>,
    failing_since: Option<Moment>,
    random: fastrand::Rng,
}

/// Whether the driver goes on after a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Finished,
}

/// How often a release is tried; what is left then, the lease ends.
const RELEASE_TRIES: u32 = 3;

impl Driver {
    /// Starts a driver; its first call comes after the driver behind `before` has left the store.
    pub(crate) fn start(core: &Arc<Core>, order: Order, link: &Link, before: Option<Link>) -> Result<()> {
        let driver = Self::new(Arc::clone(core), order, link.clone());
        core.spawn(async move {
            if let Some(before) = before {
                // What it could not free, its lease ends; that is its own handle's news.
                let _ = before.done().await;
            }
            driver.drive().await;
        })
    }

    fn new(core: Arc<Core>, order: Order, link: Link) -> Self {
        let now = core.clock.now();
        let machine =
            Machine::new(order.contender.clone(), order.lease, order.max_hold, now + order.initial_delay);
        let random = fastrand::Rng::with_seed(core.seed());
        Self { core, order, link, machine, session: None, tenure: None, failing_since: None, random }
    }

    /// Contends until the mode or the handle ends it, then leaves nothing behind at the store.
    async fn drive(mut self) {
        let outcome = self.turns().await;
        self.lose(Loss::Vanished, MutexOwner::none());
        let left = match &outcome {
            // The mutex and the place in the queue are another's, who has our id.
            Err(error) if error.kind() == ErrorKind::Config && self.machine.has_nothing() => Ok(()),
            _ => self.leave().await,
        };
        self.link.finish(outcome.and(left));
    }

    async fn turns(&mut self) -> Result<()> {
        self.rest().await;
        loop {
            if self.core.closing.is_cancelled() {
                self.link.stop();
            }
            match self.link.wish() {
                Wish::Stop if !self.lingers() => {
                    self.close(Loss::Released).await;
                    return Ok(());
                }
                Wish::StepDown(cooldown) => self.step_down(cooldown).await,
                Wish::Stop | Wish::Hold => {
                    if self.attempt().await? == Flow::Finished {
                        return Ok(());
                    }
                }
            }
            self.rest().await;
        }
    }

    // ===== asking =====

    /// One call to the store, and what follows from its answer.
    async fn attempt(&mut self) -> Result<Flow> {
        if self.lose_expired() == Flow::Finished {
            return Ok(Flow::Finished);
        }
        if let Err(error) = self.open().await {
            return self.failed(error);
        }
        let sent = self.core.clock.now();
        let (prior, limit) = self.machine.send(sent);
        let answer = within(&*self.core.clock, limit, contend(&mut self.session, prior)).await;
        let answer = answer.unwrap_or_else(|| Err(unanswered(limit))).and_then(checked);
        // The deadline may have passed meanwhile; no answer brings it back.
        if self.lose_expired() == Flow::Finished {
            return Ok(Flow::Finished);
        }
        match answer {
            Ok(answer) => self.answered(sent, prior, &answer),
            Err(error) => self.failed(error),
        }
    }

    async fn open(&mut self) -> Result<()> {
        if self.session.is_some() {
            return Ok(());
        }
        let Order { mutex, contender, lease, mode, .. } = &self.order;
        let intent = if *mode == Mode::Try { Intent::Try } else { Intent::Queue };
        let claim = Claim::new(mutex.clone(), contender.clone(), *lease).with_intent(intent);
        let limit = lease.ttl() / 3;
        let opened = within(&*self.core.clock, limit, self.core.backend.open(claim)).await;
        self.session = Some(opened.unwrap_or_else(|| Err(unanswered(limit)))?);
        Ok(())
    }

    fn answered(&mut self, sent: Moment, prior: Prior, answer: &Answer) -> Result<Flow> {
        self.failing_since = None;
        self.link.fail(None);
        let now = self.core.clock.now();
        let roll = self.random.f64();
        let owner = self.owner(sent, answer);
        match self.machine.observed(sent, prior, now, answer, roll) {
            Step::Keep => {
                self.link.saw(owner);
                return Ok(if self.order.mode == Mode::Try { Flow::Finished } else { Flow::On });
            }
            Step::Acquired(grant) => self.acquire(grant, owner),
            Step::Renewed(grant) => {
                self.link.saw(owner);
                if !self.tenure.as_ref().is_some_and(|tenure| tenure.extend(grant.deadline)) {
                    self.machine.forget(now);
                    return Ok(self.lose(Loss::Deadline, MutexOwner::none()));
                }
            }
            Step::Lost(loss) => return Ok(self.lose(loss, owner)),
            Step::Replaced(loss, grant) => {
                if self.lose(loss, MutexOwner::none()) == Flow::Finished {
                    return Ok(Flow::Finished);
                }
                self.acquire(grant, owner);
            }
            Step::Duplicate => return Err(self.duplicate()),
        }
        Ok(Flow::On)
    }

    /// A failed call is neither a loss nor a renewal. What it ends is the patience of a waiter.
    fn failed(&mut self, error: Error) -> Result<Flow> {
        let error = error.with_backend(self.core.backend.name()).with_mutex(&self.order.mutex);
        let now = self.core.clock.now();
        let since = *self.failing_since.get_or_insert(now);
        tracing::debug!(mutex = %self.order.mutex, contender = %self.order.contender, %error, "call failed");
        let gives_up = match self.order.mode {
            _ if self.machine.is_holding() => false,
            Mode::Try => true,
            Mode::Once(patience) => !error.is_transient() || now - since >= patience,
            Mode::Forever => false,
        };
        if gives_up {
            return Err(error);
        }
        self.machine.failed(now, error.is_transient(), self.random.f64());
        self.link.fail(Some(error));
        Ok(Flow::On)
    }

    fn owner(&self, sent: Moment, answer: &Answer) -> MutexOwner {
        match answer {
            Answer::Ours(ownership) | Answer::Held(ownership) => {
                MutexOwner::seen(ownership, sent, self.machine.lease())
            }
            Answer::Vacant => MutexOwner::none(),
        }
    }

    fn duplicate(&self) -> Error {
        let message = "another live contender has the same id: leave the id out, or give each its own";
        Error::new(ErrorKind::Config, message)
            .with_backend(self.core.backend.name())
            .with_mutex(&self.order.mutex)
            .with_holder(self.order.contender.clone())
    }

    // ===== resting =====

    /// Waits until the next call is due, a hint comes, or the handle wishes otherwise.
    async fn rest(&mut self) {
        let mut hints = true;
        let lingers = self.lingers();
        loop {
            let until = self.machine.due();
            let until = self.linger_end().filter(|_| lingers).map_or(until, |end| until.min(end));
            tokio::select! {
                biased;
                () = self.link.wishes_otherwise(), if !lingers => return,
                () = self.core.closing.cancelled() => return,
                () = self.core.clock.sleep_until(until) => return,
                hint = hint(&mut self.session), if hints => match hint {
                    Ok(()) => self.machine.hinted(self.core.clock.now()),
                    Err(_) => hints = false,
                },
            }
        }
    }

    /// Whether a stopped holder keeps the mutex for the rest of the shortest allowed hold.
    fn lingers(&self) -> bool {
        let stopped = self.link.wish() == Wish::Stop && !self.core.closing.is_cancelled();
        let lingers = stopped && self.linger_end().is_some_and(|end| self.core.clock.now() < end);
        if let (true, Some(tenure)) = (lingers, &self.tenure) {
            tenure.close(Loss::Released);
        }
        lingers
    }

    fn linger_end(&self) -> Option<Moment> {
        self.tenure.as_ref().map(|tenure| tenure.acquired_at() + self.order.min_hold)
    }

    // ===== beginning and ending a tenure =====

    fn acquire(&mut self, grant: Grant, owner: MutexOwner) {
        let Order { mutex, contender, max_hold, .. } = &self.order;
        let terms = Terms {
            mutex: mutex.clone(),
            contender: contender.clone(),
            token: grant.token,
            acquired_at: grant.sent,
            deadline: grant.deadline,
            grace: grant.grace,
            max_hold: *max_hold,
        };
        tracing::debug!(%mutex, %contender, token = grant.token.get(), "acquired");
        let tenure = Tenure::new(Arc::clone(&self.core.clock), terms);
        self.tenure = Some(tenure.clone());
        self.link.publish(tenure, owner);
    }

    fn lose_expired(&mut self) -> Flow {
        if self.machine.expired(self.core.clock.now()) {
            return self.lose(Loss::Deadline, MutexOwner::none());
        }
        Flow::On
    }

    fn lose(&mut self, loss: Loss, owner: MutexOwner) -> Flow {
        if let Some(tenure) = self.tenure.take() {
            let loss = tenure.end(loss);
            let Order { mutex, contender, .. } = &self.order;
            tracing::warn!(%mutex, %contender, token = tenure.token().get(), %loss, "lost");
            self.link.withdraw(owner);
        }
        if self.order.mode == Mode::Forever { Flow::On } else { Flow::Finished }
    }

    /// Ends a tenure in order: tell the work, wait for it until the deadline at most, then end.
    async fn close(&mut self, why: Loss) {
        let Some(tenure) = self.tenure.take() else { return };
        tenure.close(why.clone());
        tokio::select! {
            biased;
            () = tenure.idle() => {}
            _ = tenure.lost() => {}
        }
        let loss = tenure.end(why);
        let Order { mutex, contender, .. } = &self.order;
        tracing::debug!(%mutex, %contender, token = tenure.token().get(), %loss, "released");
        self.link.withdraw(MutexOwner::none());
    }

    async fn step_down(&mut self, cooldown: Duration) {
        self.close(Loss::SteppedDown).await;
        let released = self.leave().await;
        let due = self.core.clock.now() + cooldown;
        match released {
            Ok(()) => self.machine.released(due),
            // The store may still have it; the next call takes it anew or finds it expired.
            Err(error) => {
                self.machine.forget(due);
                self.link.fail(Some(error));
            }
        }
        self.link.stepped_down();
    }

    // ===== leaving =====

    /// Frees the mutex, leaves the queue and passes a wake-up on, unless the store surely has nothing of us.
    async fn leave(&mut self) -> Result<()> {
        let queued = self.order.mode != Mode::Try;
        let Some(session) = self.session.as_mut().filter(|_| queued || !self.machine.has_nothing()) else {
            return Ok(());
        };
        let limit = self.order.lease.ttl() / 3;
        let mut tried = 0;
        loop {
            let released = within(&*self.core.clock, limit, session.release()).await;
            let error = match released.unwrap_or_else(|| Err(unanswered(limit))) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            tried += 1;
            if tried == RELEASE_TRIES || !error.is_transient() {
                return Err(error.with_backend(self.core.backend.name()).with_mutex(&self.order.mutex));
            }
            let pause = self.order.lease.ttl() / 20;
            self.core.clock.sleep_until(self.core.clock.now() + pause).await;
        }
    }
}

async fn contend(session: &mut Option<Box<dyn Session>>, prior: Prior) -> Result<Answer> {
    match session {
        Some(session) => session.contend(prior).await,
        None => Err(Error::new(ErrorKind::Unavailable, "no session is open")),
    }
}

/// A runtime that ends drops its tasks: nobody must wait for this one for ever. What it held stays held until
/// its deadline, for the store and for the tenure alike.
impl Drop for Driver {
    fn drop(&mut self) {
        if !self.link.is_done() {
            let error = Error::new(ErrorKind::Closed, "the runtime ended before the contender did");
            self.link.finish(Err(error.with_mutex(&self.order.mutex)));
        }
    }
}

/// The hint of a session that may not be open yet.
async fn hint(session: &mut Option<Box<dyn Session>>) -> Result<()> {
    match session {
        Some(session) => session.changed().await,
        None => std::future::pending().await,
    }
}

fn checked(answer: Answer) -> Result<Answer> {
    match &answer {
        Answer::Ours(ownership) if ownership.token.is_none() => {
            Err(Error::new(ErrorKind::Protocol, "the store gave the mutex without a fencing token"))
        }
        _ => Ok(answer),
    }
}

fn unanswered(limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the store did not answer within {limit:?}"))
}
