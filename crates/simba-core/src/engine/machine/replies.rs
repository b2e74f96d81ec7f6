//! What the machine makes of replies, hints and deadlines.

use std::time::Duration;

use super::{Held, Machine, Phase, Then, Unconfirmed};
use crate::backend::{Answer, Ownership, Prior};
use crate::clock::Moment;
use crate::engine::action::{Mode, News, Reply, Step};
use crate::error::{Error, ErrorKind, Result};
use crate::seeded::{self, Bug};
use crate::tenure::Grant;
use crate::types::{ContenderId, FencingToken, Loss};

impl Machine {
    /// Processes the reply to [`Action::Open`].
    pub(crate) fn opened(&mut self, now: Moment, reply: Reply<()>, random: f64) -> News {
        let opened = in_time(reply, self.pacing().call_limit(None));
        self.opened = opened.is_ok();
        opened.map_or_else(|error| self.failed(now, error, random), |()| News::Nothing)
    }

    /// Processes the reply to [`Action::Inspect`]. Only the fact that there is one matters.
    pub(crate) fn inspected(&mut self, now: Moment, reply: Reply<()>, random: f64) -> News {
        self.reply_missing = reply.is_none();
        let inspected = in_time(reply, self.pacing().call_limit(None));
        inspected.map_or_else(|error| self.failed(now, error, random), |()| News::Nothing)
    }

    /// Processes the reply to [`Action::Contend`].
    pub(crate) fn answered(&mut self, now: Moment, reply: Reply<Answer>, random: f64) -> Step {
        self.reply_missing = reply.is_none();
        let left = self.held.map(|held| held.deadline - self.sent);
        let reply = in_time(reply, self.pacing().call_limit(left));
        // The deadline may have passed meanwhile. No answer makes the tenure valid again.
        let expired = self.is_expired(now) && !seeded::on(Bug::Resurrect);
        let lost = expired.then(|| self.lapsed(now));
        let step = match reply {
            Ok(answer) => self.observed(now, &answer, random),
            Err(error) => Step::new(self.failed(now, error, random)),
        };
        Step { lost: lost.or(step.lost), ..step }
    }

    /// Processes the reply to [`Action::Release`]. A release that fails is retried until the lease has ended.
    pub(crate) fn released(&mut self, now: Moment, reply: Reply<()>, random: f64) {
        let pacing = self.pacing();
        let released = in_time(reply, pacing.call_limit(None));
        let Phase::Leaving(leaving) = &mut self.phase else { return };
        leaving.tries += 1;
        self.due = now + pacing.retry_waiting(leaving.tries, true, random);
        let retries = released.as_ref().is_err_and(Error::is_transient);
        if !retries || self.due >= leaving.end {
            if let Err(error) = &released {
                self.unconfirmed = Some(Unconfirmed { error: error.clone(), until: leaving.end });
            }
            self.phase = Phase::Left(leaving.then, released);
        }
    }

    /// Processes a hint, or that there are none for now: moves the next call forward, by less the more hints in a row
    /// were useless.
    pub(crate) fn hinted(&mut self, now: Moment, hint: &Result<()>) {
        self.hinted = true;
        if hint.is_err() {
            return;
        }
        if now - self.sent >= self.pacing().hint_gap(u32::MAX) {
            self.useless_hints = 0;
        }
        let gap = self.pacing().hint_gap(self.useless_hints);
        let at = (self.sent + gap).max(now).max(self.not_before);
        if at < self.due {
            self.due = at;
            self.useless_hints = self.useless_hints.saturating_add(1);
        }
    }

    /// Contends under a new id and with a new session, so that a repeated release that arrives late finds another id
    /// in the store. The tokens of the tenures keep increasing.
    pub(crate) fn start_anew(&mut self, now: Moment, id: ContenderId) {
        let due = match self.phase {
            Phase::Left(Then::Cooldown(cooldown), _) => now + cooldown,
            Phase::Left(Then::Retry(due), _) => due,
            _ => now,
        };
        let unconfirmed = self.unconfirmed.take();
        let Self { settings, last, failures, failing_since, .. } = *self;
        *self = Self { last, unconfirmed, failures, failing_since, ..Self::new(settings, id, due) };
    }

    /// Ends the tenure here at its deadline, whether the store still has it or not. Returns the reason.
    pub(crate) fn lapsed(&mut self, now: Moment) -> Loss {
        let held = self.held.take();
        if let Some(held) = held {
            self.prior = Prior::Lapsed(held.token);
        }
        (self.not_before, self.due) = (now, now);
        let at_cap = held.is_some_and(|held| self.cap() == Some(held.deadline));
        self.lost(if at_cap { Loss::MaxHold } else { Loss::Deadline })
    }

    fn observed(&mut self, now: Moment, answer: &Answer, random: f64) -> Step {
        self.unanswered = false;
        match answer {
            Answer::Ours(ours) => match ours.token {
                Some(token) => self.ours(now, token, ours.remaining, random),
                None => Step::new(self.failed(now, no_token(), random)),
            },
            Answer::Held(other) => {
                self.vacant_polls = 0;
                let due = now + self.pacing().wait(other.remaining, random);
                self.not_ours(due, Some(other))
            }
            Answer::Vacant => {
                let due = now + self.pacing().wait_vacant(self.vacant_polls, random);
                self.vacant_polls = self.vacant_polls.saturating_add(1);
                self.not_ours(due, None)
            }
        }
    }

    fn ours(&mut self, now: Moment, token: FencingToken, remaining: Duration, random: f64) -> Step {
        let sent = if seeded::on(Bug::DeadlineFromReply) { now } else { self.sent };
        let grant = self.pacing().grant(token, sent, remaining, random);
        match self.held {
            Some(held) if held.token == token => Step::new(News::Renewed(self.hold(grant))),
            // The tenure ended here before the answer to its renewal arrived. A lost tenure stays lost: call again
            // with a prior that says so.
            None if self.renews => {
                if self.prior != Prior::Lapsed(token) {
                    self.prior = Prior::Unknown;
                }
                self.due = now;
                Step::default()
            }
            _ if self.last.is_some_and(|last| token <= last) => self.old_token(now, token, random),
            // The call acquired the mutex: a release must free that hold as well.
            None if now >= grant.deadline.saturating_sub(grant.grace) => {
                self.prior = Prior::Unknown;
                Step::new(self.failed(now, too_late(), random))
            }
            before => self.acquired(grant, before.is_some()),
        }
    }

    /// Begins a tenure, after the end of one whose hold the store had lost. A contender for one tenure only ends.
    fn acquired(&mut self, grant: Grant, replaces: bool) -> Step {
        let lost = replaces.then(|| self.lost(Loss::Vanished));
        if lost.is_some() && self.settings.mode != Mode::Forever {
            self.held = None;
            self.prior = Prior::Lapsed(grant.token);
            return Step { lost, news: News::Nothing };
        }
        self.useless_hints = 0;
        self.acquired_at = grant.sent;
        self.announced = false;
        self.last = Some(grant.token);
        self.unconfirmed = None;
        Step { lost, news: News::Acquired(self.hold(grant)) }
    }

    /// Refuses the mutex under a token that is not greater than that of the last tenure: work under it would not be
    /// fenced off from late writes of that tenure. Gives it back and contends again as a new contender.
    fn old_token(&mut self, now: Moment, token: FencingToken, random: f64) -> Step {
        let last = self.last.unwrap_or(token);
        let lost = self.held.take().map(|_| self.lost(Loss::Vanished));
        self.prior = Prior::Lapsed(token);
        let error = old_token(token, last);
        self.failed(now, error.clone(), random);
        if let Phase::Contending = self.phase {
            // If the release is not confirmed, the new contender finds the mutex held until the lease ends.
            let due = self.due;
            self.begin_release(now, Then::Retry(due));
        }
        Step { lost, news: News::OldToken(error) }
    }

    /// Holds the mutex as granted, within the maximum hold. The grace is at most a quarter of the maximum hold.
    fn hold(&mut self, mut grant: Grant) -> Grant {
        if let (Some(max_hold), Some(cap)) = (self.settings.max_hold, self.cap()) {
            grant.deadline = grant.deadline.min(cap);
            grant.grace = grant.grace.min(max_hold / 4);
        }
        self.prior = Prior::Held;
        self.held = Some(Held { token: grant.token, deadline: grant.deadline, grace: grant.grace });
        self.due = grant.renew_at;
        self.vacant_polls = 0;
        self.succeeded();
        grant
    }

    fn not_ours(&mut self, due: Moment, other: Option<&Ownership>) -> Step {
        self.prior = if self.in_flight { Prior::Unknown } else { Prior::Nothing };
        self.due = due;
        self.succeeded();
        let lost = self.held.take().map(|_| match other {
            Some(other) if other.owner != self.contender => Loss::TakenBy(other.owner.clone()),
            // Free, or held by an ended store session of this contender.
            _ => Loss::Vanished,
        });
        let lost = lost.map(|loss| self.lost(loss));
        if self.settings.mode == Mode::Try {
            self.end(Ok(()));
        }
        Step { lost, news: News::Nothing }
    }

    fn succeeded(&mut self) {
        self.failures = 0;
        (self.began, self.failing_since) = (None, None);
    }

    /// Processes a failed call, which is neither a loss nor a renewal. It can only use up the patience of a waiter.
    fn failed(&mut self, now: Moment, error: Error, random: f64) -> News {
        let transient = error.is_transient();
        self.failures = self.failures.saturating_add(1);
        self.in_flight |= self.unanswered;
        let began = self.began.take().unwrap_or(now);
        let since = *self.failing_since.get_or_insert(began);
        if let (true, Some(held)) = (seeded::on(Bug::FailureRenews), &mut self.held) {
            held.deadline = now + self.settings.lease.total();
        }
        if let Some(held) = self.held {
            self.due = now + self.pacing().retry_holding(self.failures, held.deadline - now, random);
            return News::Failed(error);
        }
        self.due = now + self.pacing().retry_waiting(self.failures, transient, random);
        if !transient {
            self.not_before = self.due;
        }
        match self.settings.mode {
            Mode::Forever => {}
            // A call that began before the patience was used up may have missed the end of the fault.
            Mode::Once(patience) if transient && began - since < patience => {
                // Makes the last attempt when the patience ends, not after a longer pause.
                self.due = self.due.min(since + patience);
            }
            Mode::Try | Mode::Once(_) => self.end(Err(error.clone())),
        }
        News::Failed(error)
    }

    /// Records the end of a tenure, after which a contender for one tenure only ends. Returns the reason.
    fn lost(&mut self, loss: Loss) -> Loss {
        if self.settings.mode != Mode::Forever {
            self.end(Err(Error::lost(loss.clone())));
        }
        loss
    }

    /// Sets the outcome, unless there is one already.
    fn end(&mut self, outcome: Result<()>) {
        if let Phase::Contending = self.phase {
            self.phase = Phase::Ending(outcome);
        }
    }
}

fn in_time<T>(reply: Reply<T>, limit: Duration) -> Result<T> {
    reply.unwrap_or_else(|| {
        Err(Error::new(ErrorKind::Unavailable, format!("the store did not answer within {limit:?}")))
    })
}

fn no_token() -> Error {
    Error::new(ErrorKind::Protocol, "the store gave the mutex without a fencing token")
}

fn too_late() -> Error {
    let message = "the store gave the mutex with too little of its lease left: it is too slow, or grants too short a \
                   lease";
    Error::new(ErrorKind::Unavailable, message)
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
