//! The one task behind every contender: asks the store, heeds the machine, tells the handle.

use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;

use super::link::{Link, Wish};
use super::machine::{Machine, Step};
use super::pacing::Grant;
use super::ride::{Ride, Rider};
use crate::backend::{Answer, Claim, Intent, Prior, Session};
use crate::clock::{Moment, Sleep, by, within};
use crate::error::{Error, ErrorKind, Result};
use crate::seeded::{self, Bug};
use crate::simba::Core;
use crate::telemetry;
use crate::tenure::{Loss, Tenure, Terms};
use crate::types::{ContenderId, FencingToken, Label, Lease, MutexName, MutexOwner};

/// How long before a holder is told to stop a renewal has time.
const UNHURRIED: Duration = Duration::from_secs(1);

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
    /// Begins every id of the driver.
    pub(crate) label: Option<Label>,
    pub(crate) lease: Lease,
    pub(crate) mode: Mode,
    pub(crate) initial_delay: Duration,
    pub(crate) max_hold: Option<Duration>,
    pub(crate) min_hold: Duration,
}

/// One contender at work. It alone touches its session; handles only see its [`Link`].
pub(crate) struct Driver {
    core: Arc<Core>,
    mutex: MutexName,
    label: Option<Label>,
    mode: Mode,
    min_hold: Duration,
    link: Link,
    machine: Machine,
    session: Option<Box<dyn Session>>,
    tenure: Option<Tenure>,
    failing_since: Option<Moment>,
    /// The last call got no reply at all: requests may arrive where no reply comes back from.
    deaf: bool,
    /// It was logged that the tokens of the store went back, and no tenure has begun since.
    token_reported: bool,
    random: fastrand::Rng,
}

/// Whether the driver goes on after a turn.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Flow {
    On,
    Finished,
    /// The store gave the mutex under the token of an earlier tenure.
    GiveBack(FencingToken),
}

/// A driver that has made its first call.
pub(crate) struct Begun {
    driver: Driver,
    first: Result<Flow>,
}

impl Begun {
    /// Gives the driver a task for what remains to be done.
    pub(crate) fn go_on(self, runtime: &Handle) {
        let Self { mut driver, first } = self;
        let core = Arc::clone(&driver.core);
        match first {
            Ok(Flow::On) => core.spawn_on(async move { driver.drive().await }, runtime),
            ended => core.spawn_on(async move { driver.end(ended.map(drop)).await }, runtime),
        }
    }

    /// Whether it holds the mutex and has nothing to do for so long, unless the handle wishes otherwise.
    pub(crate) fn has_leisure(&self, time: Duration) -> bool {
        let Self { driver, first } = self;
        let due = driver.machine.due() - driver.core.clock.now();
        matches!(first, Ok(Flow::On)) && driver.tenure.is_some() && due >= time
    }

    /// What remains to be done, for whoever has [leisure](Self::has_leisure).
    pub(crate) async fn finish(mut self: Box<Self>) {
        self.driver.drive().await;
    }
}

impl Driver {
    /// Starts a driver; its first call comes after the driver behind `before` has left the store.
    pub(crate) fn start(core: &Arc<Core>, order: Order, link: &Link, before: Option<Link>) -> Result<()> {
        let mut driver = Self::new(Arc::clone(core), order, link.clone());
        core.spawn(async move {
            driver.follow(before).await;
            driver.drive().await;
        })
    }

    /// Starts a driver that rides with its caller at first, where that is on the runtime of the engine.
    pub(crate) fn ride(
        core: &Arc<Core>,
        order: Order,
        link: &Link,
        before: Option<Link>,
    ) -> Result<Option<Ride>> {
        let Some(runtime) = core.runtime_of_caller()? else {
            return Self::start(core, order, link, before).map(|()| None);
        };
        let mut driver = Self::new(Arc::clone(core), order, link.clone());
        let begins = Box::pin(async move {
            driver.follow(before).await;
            // A lock that was given up before its first call makes none.
            let first = if driver.is_stopped() { Ok(Flow::On) } else { driver.attempt().await };
            Begun { driver, first }
        });
        Ok(Some(Ride::new(Arc::clone(core), Rider::new(begins, runtime, core.token()))))
    }

    /// Waits until the driver behind `before` has left the store, for as long as a call may take. A lock right
    /// after a release then finds the mutex free. If `before` is not done by then, or keeps the mutex for its
    /// shortest hold, the store answers who holds it.
    async fn follow(&mut self, before: Option<Link>) {
        let Some(before) = before else { return };
        let clock = &*self.core.clock;
        let now = clock.now();
        if before.tenure().and_then(|tenure| self.shortest_hold(&tenure)).is_none_or(|end| end <= now) {
            by(clock, now + self.machine.pacing().call_limit(None), before.done()).await;
        }
    }

    fn new(core: Arc<Core>, order: Order, link: Link) -> Self {
        // The rest of the order is the machine's, once.
        let Order { mutex, label, lease, mode, initial_delay, max_hold, min_hold } = order;
        core.uses(&lease);
        let start = core.clock.now() + initial_delay;
        let machine = Machine::new(new_id(label.as_ref()), lease, max_hold, start);
        link.call(machine.me());
        let random = fastrand::Rng::with_seed(core.seed());
        Self {
            core,
            mutex,
            label,
            mode,
            min_hold,
            link,
            machine,
            session: None,
            tenure: None,
            failing_since: None,
            deaf: false,
            token_reported: false,
            random,
        }
    }

    /// Contends until the mode or the handle ends it, then leaves nothing behind at the store.
    async fn drive(&mut self) {
        let outcome = self.turns().await;
        self.end(outcome).await;
    }

    /// Tells the handle at once, then leaves nothing behind at the store.
    fn end(&mut self, outcome: Result<()>) -> impl Future<Output = ()> + Send {
        self.link.conclude(outcome);
        async move {
            let left = self.leave().await;
            // The next driver of this handle must not meet what the session still has at the store.
            self.session = None;
            self.link.finish(left);
        }
    }

    async fn turns(&mut self) -> Result<()> {
        // Whoever is wanted for something else would be woken at once.
        let rests = self.link.wish() == Wish::Hold || self.lingers();
        if rests && self.core.clock.now() < self.machine.due() {
            self.rest().await;
        }
        loop {
            if self.core.closing.has_begun() {
                self.link.stop();
            }
            match self.link.wish() {
                Wish::Stop if !self.lingers() => {
                    self.close(Loss::Released).await;
                    return Ok(());
                }
                // Boxed: seldom, and larger than all that a driver does often.
                Wish::StepDown(cooldown) => Box::pin(self.step_down(cooldown)).await,
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
        let began = self.core.clock.now();
        self.lose_expired(began)?;
        if let Err(error) = self.open(began).await {
            return self.failed(began, error);
        }
        // The store may have taken long to open the session. A call that is sent now could win the mutex for a handle
        // that is about to close its connections.
        if !self.machine.is_holding() && self.is_stopped() {
            return Ok(Flow::On);
        }
        if self.deaf && !self.machine.is_holding() {
            // Boxed: seldom, as above.
            if let Err(error) = Box::pin(self.listen()).await {
                return self.failed(began, error);
            }
        }
        let sent = self.core.clock.now();
        let (prior, limit) = self.machine.send(sent);
        let answer = by(&*self.core.clock, sent + limit, contend(&mut self.session, prior)).await;
        self.deaf = answer.is_none();
        let answer = answer.unwrap_or_else(|| Err(unanswered(limit))).and_then(checked);
        let now = self.core.clock.now();
        // The deadline may have passed meanwhile; no answer brings it back.
        if !seeded::on(Bug::Resurrect) {
            self.lose_expired(now)?;
        }
        let flow = match answer {
            Ok(answer) => self.answered(sent, prior, now, &answer),
            Err(error) => self.failed(began, error),
        };
        match flow {
            // Boxed: seldom, as above.
            Ok(Flow::GiveBack(token)) => Box::pin(self.give_back(sent, token)).await,
            flow => flow,
        }
    }

    async fn open(&mut self, now: Moment) -> Result<()> {
        if self.session.is_some() {
            return Ok(());
        }
        let intent = if self.mode == Mode::Try { Intent::Try } else { Intent::Queue };
        let (mutex, contender) = (self.mutex.clone(), self.machine.me().clone());
        let claim = Claim::new(mutex, contender, *self.machine.lease()).with_intent(intent);
        let limit = self.machine.pacing().call_limit(None);
        let opened = by(&*self.core.clock, now + limit, self.core.backend.open(claim)).await;
        self.session = Some(opened.unwrap_or_else(|| Err(unanswered(limit)))?);
        Ok(())
    }

    /// Makes sure that replies come through, by a look that takes nothing. Else calls that arrive and are never
    /// answered would take the mutex again and again for a contender that cannot use it.
    async fn listen(&mut self) -> Result<()> {
        let Some(session) = &mut self.session else { return Ok(()) };
        let limit = self.machine.pacing().call_limit(None);
        let looked = within(&*self.core.clock, limit, session.inspect()).await;
        self.deaf = looked.is_none();
        looked.unwrap_or_else(|| Err(unanswered(limit))).map(drop)
    }

    fn answered(&mut self, sent: Moment, prior: Prior, now: Moment, answer: &Answer) -> Result<Flow> {
        self.failing_since = None;
        self.link.fail(None);
        let roll = self.random.f64();
        let owner = self.owner(sent, answer);
        match self.machine.observed(sent, prior, now, answer, roll) {
            Step::Keep => {
                self.link.saw(owner);
                return Ok(if self.mode == Mode::Try { Flow::Finished } else { Flow::On });
            }
            Step::Acquired(grant) => self.acquire(grant, owner),
            Step::Renewed(grant) => {
                self.link.saw(owner);
                self.measure_renewal(sent, now);
                if !self.tenure.as_ref().is_some_and(|tenure| tenure.extend(grant.deadline, grant.grace)) {
                    self.machine.forget(now);
                    return self.lose(Loss::Deadline, MutexOwner::none());
                }
                self.core.held_until(grant.deadline);
            }
            Step::Lost(loss) => return self.lose(loss, owner),
            Step::Replaced(loss, grant) => {
                self.lose(loss, MutexOwner::none())?;
                self.acquire(grant, owner);
            }
            Step::TooLate => return self.failed(sent, too_late()),
            Step::OldToken(token) => {
                if self.tenure.is_some() {
                    self.lose(Loss::Vanished, MutexOwner::none())?;
                }
                return Ok(Flow::GiveBack(token));
            }
        }
        Ok(Flow::On)
    }

    /// Records how close the deadline came, before it moves.
    fn measure_renewal(&self, sent: Moment, now: Moment) {
        if let Some(tenure) = &self.tenure {
            let (mutex, contender) = (tenure.mutex(), tenure.contender());
            let (took, left) = (now - sent, tenure.deadline() - now);
            tracing::trace!(%mutex, %contender, token = tenure.token().get(), ?took, ?left, "renewed");
            telemetry::renewed(self.core.backend.name(), took, left);
        }
    }

    /// A failed call is neither a loss nor a renewal. What it ends is the patience of a waiter.
    fn failed(&mut self, began: Moment, error: Error) -> Result<Flow> {
        let error = error.with_backend(self.core.backend.name()).with_mutex(&self.mutex);
        telemetry::failed(self.core.backend.name(), error.kind());
        let now = self.core.clock.now();
        let since = *self.failing_since.get_or_insert(began);
        tracing::debug!(mutex = %self.mutex, contender = %self.machine.me(), %error, "call failed");
        let gives_up = match self.mode {
            _ if self.machine.is_holding() => false,
            Mode::Try => true,
            // A call that began before the patience was over may have missed the end of the fault.
            Mode::Once(patience) => !error.is_transient() || began - since >= patience,
            Mode::Forever => false,
        };
        if gives_up {
            return Err(error);
        }
        self.machine.failed(now, error.is_transient(), self.random.f64());
        if let (Mode::Once(patience), false) = (self.mode, self.machine.is_holding()) {
            // The last try is not slept away.
            self.machine.due_by(since + patience);
        }
        if let (true, Some(tenure)) = (seeded::on(Bug::FailureRenews), &self.tenure) {
            tenure.extend(now + self.machine.lease().total(), self.machine.lease().grace());
        }
        self.link.fail(Some(error));
        Ok(Flow::On)
    }

    /// Whether the handle asked for the end, or a shutdown has begun.
    fn is_stopped(&self) -> bool {
        self.link.is_stopped() || self.core.closing.has_begun()
    }

    fn owner(&self, sent: Moment, answer: &Answer) -> MutexOwner {
        match answer {
            Answer::Ours(ownership) | Answer::Held(ownership) => {
                MutexOwner::seen(ownership, sent, self.machine.lease())
            }
            Answer::Vacant => MutexOwner::none(),
        }
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
                () = self.core.closing.begins() => return,
                () = self.sleep_until(until, lingers) => return,
                // One hint is enough: the look that it asks for is due as early as any could be.
                hint = hint(&mut self.session), if hints => {
                    hints = false;
                    if hint.is_ok() {
                        self.machine.hinted(self.core.clock.now());
                    }
                }
            }
        }
    }

    /// What comes long before the holder is told to stop is not due to the millisecond; everything else is.
    fn sleep_until(&self, until: Moment, lingers: bool) -> Sleep {
        let grace = self.machine.lease().grace();
        let stop = self.tenure.as_ref().map(|tenure| tenure.deadline().saturating_sub(grace));
        match stop {
            Some(stop) if !lingers && stop >= until + UNHURRIED => self.core.clock.sleep_until_about(until),
            _ => self.core.clock.sleep_until(until),
        }
    }

    /// Whether a stopped holder keeps the mutex for the rest of the shortest hold.
    fn lingers(&self) -> bool {
        let stopped = self.link.wish() == Wish::Stop && !self.core.closing.has_begun();
        let lingers = stopped && self.linger_end().is_some_and(|end| self.core.clock.now() < end);
        if let (true, Some(tenure)) = (lingers, &self.tenure) {
            tenure.close(Loss::Released);
        }
        lingers
    }

    fn linger_end(&self) -> Option<Moment> {
        self.tenure.as_ref().and_then(|tenure| self.shortest_hold(tenure))
    }

    /// Returns when the shortest hold of `tenure` ends, if there is one: a lock that was cancelled before it had a
    /// guard keeps nothing.
    fn shortest_hold(&self, tenure: &Tenure) -> Option<Moment> {
        let keeps = !self.min_hold.is_zero() && tenure.was_used();
        keeps.then(|| tenure.acquired_at() + self.min_hold)
    }

    // ===== beginning and ending a tenure =====

    fn acquire(&mut self, grant: Grant, owner: MutexOwner) {
        let (mutex, contender) = (&self.mutex, self.machine.me());
        let terms = Terms {
            mutex: mutex.clone(),
            contender: contender.clone(),
            token: grant.token,
            acquired_at: grant.sent,
            deadline: grant.deadline,
            grace: grant.grace,
            max_hold: self.machine.max_hold(),
        };
        tracing::debug!(%mutex, %contender, token = grant.token.get(), "acquired");
        telemetry::acquired(self.core.backend.name());
        self.token_reported = false;
        self.core.held_until(grant.deadline);
        let tenure = Tenure::new(Arc::clone(&self.core.clock), terms);
        self.tenure = Some(tenure.clone());
        self.link.publish(tenure, owner);
    }

    fn lose_expired(&mut self, now: Moment) -> Result<Flow> {
        if self.machine.expired(now) {
            return self.lose(Loss::Deadline, MutexOwner::none());
        }
        Ok(Flow::On)
    }

    /// Ends the tenure at once. Who wanted one only has nothing more to come.
    fn lose(&mut self, loss: Loss, owner: MutexOwner) -> Result<Flow> {
        let mut loss = loss;
        if let Some(tenure) = self.tenure.take() {
            loss = tenure.end(loss);
            let (mutex, contender) = (tenure.mutex(), tenure.contender());
            tracing::warn!(%mutex, %contender, token = tenure.token().get(), %loss, "lost");
            self.measure_end(&tenure, &loss);
            self.link.withdraw(owner);
        }
        if self.mode == Mode::Forever {
            return Ok(Flow::On);
        }
        let lost = Error::new(ErrorKind::Lost, format!("the mutex is lost: {loss}"));
        Err(lost.with_backend(self.core.backend.name()).with_mutex(&self.mutex))
    }

    /// Ends a tenure in order: tell the work, wait for it until the deadline at most, then end.
    async fn close(&mut self, why: Loss) {
        let Some(tenure) = self.tenure.clone() else { return };
        tenure.close(why);
        if !seeded::on(Bug::FreeBeforeWorkEnds) {
            tenure.wound_up().await;
        }
        let loss = tenure.end_announced(Loss::Released);
        self.tenure = None;
        let (mutex, contender) = (tenure.mutex(), tenure.contender());
        tracing::debug!(%mutex, %contender, token = tenure.token().get(), %loss, "released");
        self.measure_end(&tenure, &loss);
        self.link.withdraw(MutexOwner::none());
    }

    fn measure_end(&self, tenure: &Tenure, loss: &Loss) {
        if telemetry::ON {
            let held = self.core.clock.now() - tenure.acquired_at();
            telemetry::ended(self.core.backend.name(), held, loss);
        }
    }

    async fn step_down(&mut self, cooldown: Duration) {
        self.link.steps_down();
        self.close(Loss::SteppedDown).await;
        let released = self.leave().await;
        self.begin_anew(self.core.clock.now() + cooldown);
        if let Err(error) = released {
            self.link.fail(Some(error));
        }
    }

    /// Gives back what the store gave under the token of an earlier tenure, and asks again as a new contender: work
    /// under that token would not be fenced off from what the earlier tenure left behind.
    async fn give_back(&mut self, sent: Moment, token: FencingToken) -> Result<Flow> {
        // Without an answer the lease runs out, and the new contender finds it held until then.
        let _ = self.leave().await;
        self.begin_anew(self.core.clock.now());
        let error = old_token(token, self.machine.last_token());
        if !std::mem::replace(&mut self.token_reported, true) {
            tracing::error!(mutex = %self.mutex, backend = self.core.backend.name(), %error, "the mutex is refused");
        }
        self.failed(sent, error)
    }

    /// Contends as another, under a new id and with a new session, from `due` on. A release that was repeated
    /// may arrive once more, late: it finds another id in the store.
    fn begin_anew(&mut self, due: Moment) {
        self.machine = self.machine.renamed(new_id(self.label.as_ref()), due);
        self.link.call(self.machine.me());
        self.session = None;
    }

    // ===== leaving =====

    /// Frees the mutex, leaves the queue and passes a wake-up on, unless the store surely has nothing of us.
    /// Tries for as long as a lease of ours could last; after that there is nothing to free.
    async fn leave(&mut self) -> Result<()> {
        let queued = self.mode != Mode::Try;
        if seeded::on(Bug::NoRelease) {
            return Ok(());
        }
        let Some(session) = self.session.as_mut().filter(|_| queued || !self.machine.has_nothing()) else {
            return Ok(());
        };
        let (clock, pacing) = (&*self.core.clock, self.machine.pacing());
        let limit = pacing.call_limit(None);
        let holding = self.machine.holding();
        let mut now = clock.now();
        let end = now + self.machine.lease().total();
        for tried in 1.. {
            let released = by(clock, now + limit, session.release(holding)).await;
            let error = match released.unwrap_or_else(|| Err(unanswered(limit))) {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            let again = clock.now() + pacing.retry_waiting(tried, true, self.random.f64());
            if again >= end || !error.is_transient() {
                return Err(error.with_backend(self.core.backend.name()).with_mutex(&self.mutex));
            }
            clock.sleep_until(again).await;
            now = clock.now();
        }
        Ok(())
    }
}

/// A runtime that ends drops its tasks. The tenure goes before the session, which may give the mutex up by
/// being dropped; and nobody must wait for this driver for ever.
impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(tenure) = self.tenure.take() {
            tenure.abandon(if self.is_stopped() { Loss::Released } else { Loss::Vanished });
        }
        if !self.link.is_done() {
            let error = Error::new(ErrorKind::Closed, "the runtime ended before the contender did");
            self.link.conclude(Err(error.with_mutex(&self.mutex)));
            self.link.finish(Ok(()));
        }
    }
}

async fn contend(session: &mut Option<Box<dyn Session>>, prior: Prior) -> Result<Answer> {
    match session {
        Some(session) => session.contend(prior).await,
        None => Err(Error::new(ErrorKind::Unavailable, "no session is open")),
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

/// Draws the id of a new session.
fn new_id(label: Option<&Label>) -> ContenderId {
    label.map_or_else(ContenderId::generate, ContenderId::labelled)
}

fn old_token(token: FencingToken, last: FencingToken) -> Error {
    let message = format!(
        "the store gave the mutex under token {token}, but the last tenure had token {last}: the store was restored from \
         an older state, or breaks the contract of backends. This contender does not hold the mutex until the store \
         gives a greater token than {last}. Fix: raise the token in the store, or restart this process if no resource \
         has seen token {last}"
    );
    Error::new(ErrorKind::Protocol, message)
}

fn too_late() -> Error {
    let message = "the store gave the mutex with too little of its lease left: it is too slow, or grants too short a \
                   lease";
    Error::new(ErrorKind::Unavailable, message)
}

fn unanswered(limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the store did not answer within {limit:?}"))
}
