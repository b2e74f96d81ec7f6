//! The driver of one contender: performs the actions of its machine on the store, and reports to the handle.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use super::action::{Action, Input, Mode, News, Request, Settings, Step, Wait, Wake};
use super::core::Core;
use super::inline::{Inline, MIN_RENEWAL};
use super::link::Link;
use super::machine::Machine;
use crate::backend::{Answer, Claim, Holding, Intent, Prior, Session};
use crate::clock::{Moment, by};
use crate::error::{Error, ErrorKind, Result};
use crate::seeded::{self, Bug};
use crate::telemetry;
use crate::tenure::{Grant, Tenure};
use crate::types::{ContenderId, Label, Loss, MutexName, MutexOwner};

/// What a driver contends for, and how.
#[derive(Debug)]
pub(crate) struct DriverConfig {
    pub(crate) mutex: MutexName,
    /// The prefix of every id of the driver.
    pub(crate) label: Option<Label>,
    pub(crate) settings: Settings,
    /// The delay before the first call.
    pub(crate) initial_delay: Duration,
}

/// The driver of one contender. Only the driver uses its session; handles share its [`Link`].
pub(crate) struct Driver {
    core: Arc<Core>,
    mutex: MutexName,
    label: Option<Label>,
    link: Link,
    machine: Machine,
    session: Option<Box<dyn Session>>,
    tenure: Option<Tenure>,
    /// A token of the store that was too small has been logged, and no tenure has begun since.
    token_reported: bool,
    random: fastrand::Rng,
}

impl Driver {
    /// Starts a driver in a spawned task. It makes its first call after the driver of `previous` has left the store.
    pub(crate) fn start(
        core: &Arc<Core>,
        config: DriverConfig,
        link: &Link,
        previous: Option<Link>,
    ) -> Result<()> {
        core.spawn(Self::new(core, config, link, core.clock.now()).run(previous))
    }

    /// Starts a driver in the caller's task, or in a spawned one if the engine runs on another runtime, if the first
    /// renewal is due too soon, or if the driver of `previous` had to wait for the mutex: this one will probably wait as
    /// well, and a driver that waits needs a task.
    pub(crate) fn start_inline(
        core: &Arc<Core>,
        config: DriverConfig,
        link: &Link,
        previous: Option<Link>,
    ) -> Result<Option<Inline>> {
        let waits = config.settings.mode != Mode::Try && previous.as_ref().is_some_and(Link::was_refused);
        match core.runtime_of_caller()? {
            Some(runtime) if !waits && config.settings.lease.renew_at() >= MIN_RENEWAL => {
                let now = core.clock.now();
                let driver = Self::new(core, config, link, now).run(previous);
                Ok(Some(Inline::start(core, runtime, link.clone(), now, driver)))
            }
            _ => Self::start(core, config, link, previous).map(|()| None),
        }
    }

    fn new(core: &Arc<Core>, config: DriverConfig, link: &Link, now: Moment) -> Self {
        let DriverConfig { mutex, label, settings, initial_delay } = config;
        core.uses(&settings.lease);
        let machine = Machine::new(settings, new_id(label.as_ref()), now + initial_delay);
        link.set_contender(machine.contender());
        Self {
            core: Arc::clone(core),
            mutex,
            label,
            link: link.clone(),
            machine,
            session: None,
            tenure: None,
            token_reported: false,
            random: fastrand::Rng::with_seed(core.seed()),
        }
    }

    /// Waits for the driver of `previous`, then performs the actions of the machine until it has left the store.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    fn run(mut self, previous: Option<Link>) -> impl Future<Output = ()> + Send {
        async move {
            if let Some(previous) = previous {
                self.follow(previous).await;
            }
            while !self.link.is_done() {
                let (now, input) = (self.core.clock.now(), self.input());
                let action = self.machine.next(now, input);
                // Waits here, where the action is dropped: a driver waits for as long as its mutex is held.
                if let Some(wait) = self.perform(action, now, input.request).await {
                    self.wait(wait).await;
                }
            }
        }
    }

    /// Performs the action that the machine returned for `request`. Returns the wait that it asks for.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    fn perform(
        &mut self,
        action: Action,
        now: Moment,
        request: Request,
    ) -> impl Future<Output = Option<Wait>> + Send {
        async move {
            match action {
                Action::Open(limit) => self.open(now + limit).await,
                // Boxed: rare, and larger than everything that a driver does often.
                Action::Inspect(limit) => Box::pin(self.inspect(now + limit)).await,
                Action::Contend(prior, limit) => self.contend(now, prior, limit).await,
                Action::Wait(wait) => return Some(wait),
                Action::Announce(why) => drop(self.tenure.as_ref().map(|tenure| tenure.announce_end(why))),
                Action::Lose(loss) => self.end(loss, MutexOwner::none()),
                Action::Close(why) => {
                    self.link.accept_step_down(request);
                    self.end_after_work(why).await;
                }
                Action::Conclude(outcome) => self.link.conclude(self.in_context(outcome)),
                Action::Release(holding, limit) => self.release(now + limit, holding).await,
                Action::StartAnew(left) => self.start_anew(left, now),
                Action::Finish(left) => self.finish(left),
            }
            None
        }
    }

    /// Waits until the driver of `previous` has left the store, as long as the machine allows.
    async fn follow(&mut self, previous: Link) {
        let clock = &*self.core.clock;
        let tenure = previous.tenure().map(|tenure| (tenure.acquired_at(), tenure.was_used()));
        let now = clock.now();
        let until = self.machine.previous_until(now, tenure);
        if now < until {
            by(clock, until, previous.done()).await;
        }
    }

    fn input(&self) -> Input {
        let shutdown = self.core.closing.has_begun();
        if shutdown {
            self.link.stop();
        }
        let request = self.link.request();
        let used = request == Request::Stop && self.tenure.as_ref().is_some_and(Tenure::was_used);
        Input { request, shutdown, used }
    }

    fn in_context<T>(&self, result: Result<T>) -> Result<T> {
        result.map_err(|error| error.with_backend(self.core.backend.name()).with_mutex(&self.mutex))
    }

    // ===== calls, all but the first on an open session =====

    async fn open(&mut self, end: Moment) {
        let Settings { mode, lease, .. } = *self.machine.settings();
        let intent = if mode == Mode::Try { Intent::Try } else { Intent::Queue };
        let claim = Claim::new(self.mutex.clone(), self.machine.contender().clone(), lease);
        let opened = self.core.backend.open(claim.with_intent(intent));
        let reply = by(&*self.core.clock, end, opened).await;
        let reply = reply.map(|opened| opened.map(|session| self.session = Some(session)));
        let now = self.core.clock.now();
        let news = self.machine.opened(now, reply, self.random.f64());
        self.report(news, now);
    }

    async fn inspect(&mut self, end: Moment) {
        let Some(session) = &mut self.session else { return };
        let reply = by(&*self.core.clock, end, session.inspect()).await;
        let reply = reply.map(|inspected| inspected.map(drop));
        let now = self.core.clock.now();
        let news = self.machine.inspected(now, reply, self.random.f64());
        self.report(news, now);
    }

    async fn contend(&mut self, sent: Moment, prior: Prior, limit: Duration) {
        let Some(session) = &mut self.session else { return };
        let reply = by(&*self.core.clock, sent + limit, session.contend(prior)).await;
        let now = self.core.clock.now();
        let owner = match &reply {
            Some(Ok(Answer::Ours(ownership) | Answer::Held(ownership))) => {
                MutexOwner::observed(ownership, sent, &self.machine.settings().lease)
            }
            _ => MutexOwner::none(),
        };
        let Step { lost, news } = self.machine.answered(now, reply, self.random.f64());
        if let Some(loss) = lost {
            let next = if let News::Nothing = news { owner.clone() } else { MutexOwner::none() };
            self.end(loss, next);
        }
        match news {
            News::Nothing => self.link.refuse(owner),
            News::Acquired(grant) => self.acquire(grant, owner),
            News::Renewed(grant) => {
                self.link.observe(owner);
                self.renew(grant, now);
            }
            news => self.report(news, now),
        }
    }

    async fn release(&mut self, end: Moment, holding: Holding) {
        let Some(session) = &mut self.session else { return };
        let reply = by(&*self.core.clock, end, session.release(holding)).await;
        self.machine.released(self.core.clock.now(), reply, self.random.f64());
    }

    /// Reports a failed call.
    fn report(&mut self, news: News, now: Moment) {
        let (error, old_token) = match news {
            News::Failed(error) => (error, false),
            News::OldToken(error) => (error, true),
            _ => return,
        };
        let backend = self.core.backend.name();
        let error = error.with_backend(backend).with_mutex(&self.mutex);
        telemetry::failed(backend, error.kind());
        if old_token && !std::mem::replace(&mut self.token_reported, true) {
            tracing::error!(mutex = %self.mutex, backend, %error, "the mutex is refused");
        }
        tracing::debug!(mutex = %self.mutex, contender = %self.machine.contender(), %error, "call failed");
        if let (true, Some(tenure)) = (seeded::on(Bug::FailureRenews), &self.tenure) {
            let lease = self.machine.settings().lease;
            tenure.extend(now + lease.total(), lease.grace());
        }
        self.link.set_error(error);
    }

    // ===== waiting =====

    /// Waits until the moment, the hint or the request that the machine waits for.
    #[expect(clippy::manual_async_fn, reason = "an async fn keeps its arguments twice, for every held mutex")]
    fn wait(&mut self, wait: Wait) -> impl Future<Output = ()> + Send {
        async move {
            let Wait { until, wake, hints, approximate } = wait;
            if self.link.is_inline() {
                if wake == Wake::Request && self.tenure.is_some() {
                    // The caller has its guard and polls again to release it. Until then nothing has to be set up, such
                    // as a timer: the driver is spawned long before its first renewal is due.
                    return pending_once().await;
                }
                self.link.set_inline(false);
            }
            let clock = &self.core.clock;
            let sleep = if approximate { clock.sleep_until_about(until) } else { clock.sleep_until(until) };
            let hint = tokio::select! {
                biased;
                () = self.link.interrupted(), if wake == Wake::Request => None,
                () = self.core.closing.begins(), if wake != Wake::Never => None,
                () = sleep => None,
                hint = hint(&mut self.session), if hints => Some(hint),
            };
            if let Some(hint) = hint {
                self.machine.hinted(self.core.clock.now(), &hint);
            }
        }
    }

    // ===== beginning and ending a tenure =====

    fn acquire(&mut self, grant: Grant, owner: MutexOwner) {
        let (mutex, contender) = (&self.mutex, self.machine.contender());
        tracing::debug!(%mutex, %contender, token = grant.token.get(), "acquired");
        telemetry::acquired(self.core.backend.name());
        self.token_reported = false;
        self.core.held_until(grant.deadline);
        let (clock, max_hold) = (Arc::clone(&self.core.clock), self.machine.settings().max_hold);
        let tenure = Tenure::new(clock, mutex.clone(), contender.clone(), grant, max_hold);
        self.tenure = Some(tenure.clone());
        self.link.publish(tenure, owner);
    }

    fn renew(&mut self, grant: Grant, now: Moment) {
        let Some(tenure) = &self.tenure else { return };
        // Measured before the renewal moves the deadline.
        let (took, left) = (now - grant.sent, tenure.deadline() - now);
        let (mutex, contender) = (tenure.mutex(), tenure.contender());
        tracing::trace!(%mutex, %contender, token = tenure.token().get(), ?took, ?left, "renewed");
        telemetry::renewed(self.core.backend.name(), took, left);
        if tenure.extend(grant.deadline, grant.grace) {
            self.core.held_until(grant.deadline);
        } else {
            let loss = self.machine.lapsed(self.core.clock.now());
            self.end(loss, MutexOwner::none());
        }
    }

    /// Ends the tenure gracefully: announces the end, waits for the work until the deadline at most, then ends it.
    async fn end_after_work(&mut self, why: Loss) {
        let Some(tenure) = &self.tenure else { return };
        let announced = tenure.announce_end(why);
        if !seeded::on(Bug::FreeBeforeWorkEnds) {
            // Boxed for the same reason as an inspection.
            Box::pin(tenure.work_ended()).await;
        }
        self.end(announced, MutexOwner::none());
    }

    /// Ends the tenure at once with reason `why`, unless it has ended already. `owner` is the one after it.
    fn end(&mut self, why: Loss, owner: MutexOwner) {
        let Some(tenure) = self.tenure.take() else { return };
        let loss = tenure.end(why);
        let (mutex, contender, token) = (tenure.mutex(), tenure.contender(), tenure.token().get());
        match loss {
            Loss::Released | Loss::SteppedDown => {
                tracing::debug!(%mutex, %contender, token, %loss, "released");
            }
            _ => tracing::warn!(%mutex, %contender, token, %loss, "lost"),
        }
        telemetry::ended(self.core.backend.name(), self.core.clock.now() - tenure.acquired_at(), &loss);
        self.link.withdraw(owner);
    }

    // ===== leaving =====

    fn start_anew(&mut self, left: Result<()>, now: Moment) {
        self.session = None;
        self.machine.start_anew(now, new_id(self.label.as_ref()));
        self.link.set_contender(self.machine.contender());
        if let Err(error) = self.in_context(left) {
            self.link.set_error(error);
        }
    }

    fn finish(&mut self, left: Result<()>) {
        // Before `finish`: the next driver of this handle must not find what the session still has at the store.
        self.session = None;
        self.link.finish(self.in_context(left));
    }
}

/// Runs when a runtime ends and drops its tasks, and when a call panics. Ends the tenure before the session, whose drop
/// may release the mutex, and ends every wait for this driver.
impl Drop for Driver {
    fn drop(&mut self) {
        if let Some(tenure) = self.tenure.take() {
            let stopped = self.link.is_stopped() || self.core.closing.has_begun();
            tenure.abandon(if stopped { Loss::Released } else { Loss::Vanished });
        }
        if !self.link.is_done() {
            // An error even after the outcome: the store did not confirm the release.
            let error = Error::new(ErrorKind::Closed, "the runtime ended before the contender did");
            self.link.finish(self.in_context(Err(error)));
        }
    }
}

/// Waits for a hint of a session that may not be open yet. Returns the session's future itself: an async function around
/// it would only make the future of every held mutex larger.
fn hint(session: &mut Option<Box<dyn Session>>) -> Pin<Box<dyn Future<Output = Result<()>> + Send + '_>> {
    match session {
        Some(session) => session.changed(),
        None => Box::pin(std::future::pending()),
    }
}

/// Is pending once, and does not wake its task: for a driver that is polled again when there is something to do.
async fn pending_once() {
    let mut polled = false;
    poll_fn(|_| if std::mem::replace(&mut polled, true) { Poll::Ready(()) } else { Poll::Pending }).await;
}

/// Generates the id of a new session.
fn new_id(label: Option<&Label>) -> ContenderId {
    label.map_or_else(ContenderId::generate, ContenderId::labelled)
}
