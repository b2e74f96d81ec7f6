//! The protocol and the policy of one contender as a pure state machine, without I/O, clock or runtime.
//!
//! The driver asks [`Machine::next`] for an [`Action`], performs it, and reports the reply of the store. All decisions
//! are made here: when to call, how long to wait, when to give up, what to release and how often to try it.

mod replies;

use std::time::Duration;

use super::action::{Action, Input, Mode, Request, Settings, Wait, Wake};
use super::pacing::Pacing;
use crate::backend::{Holding, Prior};
use crate::clock::Moment;
use crate::error::{Error, Result};
use crate::seeded::{self, Bug};
use crate::types::{ContenderId, FencingToken, Loss};

/// Renewals due at least this long before `expiring` may be coalesced.
const COALESCE_MARGIN: Duration = Duration::from_secs(1);

/// The state of one contender for one mutex.
#[derive(Debug)]
pub(crate) struct Machine {
    contender: ContenderId,
    settings: Settings,
    phase: Phase,
    /// The driver has a session.
    opened: bool,
    prior: Prior,
    /// The last call was a renewal.
    renews: bool,
    /// A call since the last answer may have changed what the store has of this contender.
    unanswered: bool,
    /// A call without an answer may still be in flight, and may acquire the mutex at any time from now on.
    in_flight: bool,
    /// The last call got no reply: requests may reach a store whose replies are lost.
    reply_missing: bool,
    held: Option<Held>,
    /// When the call was sent that began the tenure.
    acquired_at: Moment,
    /// The end of the tenure was announced.
    announced: bool,
    /// The token of the last tenure. The next tenure begins under a greater token only.
    last: Option<FencingToken>,
    /// The last release that the store did not confirm.
    unconfirmed: Option<Unconfirmed>,
    /// When the next call is due.
    due: Moment,
    /// When the last call was sent.
    sent: Moment,
    /// The earliest moment to which a hint moves the next call.
    not_before: Moment,
    /// When the current attempt began, which may open a session before its call.
    began: Option<Moment>,
    failing_since: Option<Moment>,
    failures: u32,
    vacant_polls: u32,
    useless_hints: u32,
    /// A hint came since the last call. Another one could not make the next call due any earlier.
    hinted: bool,
}

/// What the machine needs of the last [grant](crate::tenure::Grant): one is stored for every held mutex.
#[derive(Clone, Copy, Debug)]
struct Held {
    token: FencingToken,
    deadline: Moment,
    grace: Duration,
}

/// A release that the store did not confirm.
#[derive(Debug)]
struct Unconfirmed {
    error: Error,
    /// The end of the lease that the store may still have.
    until: Moment,
}

#[derive(Debug)]
enum Phase {
    /// Waits for the mutex or holds it.
    Contending,
    /// No further tenure begins, and the handle has not been notified.
    Ending(Result<()>),
    /// Releases what the store has.
    Leaving(Leaving),
    /// The store has nothing of this contender, or did not confirm that within one lease.
    Left(Then, Result<()>),
}

#[derive(Clone, Copy, Debug)]
struct Leaving {
    then: Then,
    /// The number of tries so far. The machine's `due` is that of the next one.
    tries: u32,
    /// The end of the last possible lease, set by the first try. After that there is nothing left to release.
    end: Moment,
}

#[derive(Clone, Copy, Debug)]
enum Then {
    Finish,
    /// Contends again, not before a cooldown has passed.
    Cooldown(Duration),
    /// Contends again, not before this moment, after the store gave the mutex under an old token.
    Retry(Moment),
}

impl Machine {
    /// Creates the machine of a contender that makes its first call at `start`.
    pub(crate) fn new(settings: Settings, contender: ContenderId, start: Moment) -> Self {
        Self {
            contender,
            settings,
            phase: Phase::Contending,
            opened: false,
            prior: Prior::Nothing,
            renews: false,
            unanswered: false,
            in_flight: false,
            reply_missing: false,
            held: None,
            acquired_at: start,
            announced: false,
            last: None,
            unconfirmed: None,
            due: start,
            sent: start,
            not_before: start,
            began: None,
            failing_since: None,
            failures: 0,
            vacant_polls: 0,
            useless_hints: 0,
            hinted: false,
        }
    }

    pub(crate) const fn contender(&self) -> &ContenderId {
        &self.contender
    }

    pub(crate) const fn settings(&self) -> &Settings {
        &self.settings
    }

    const fn pacing(&self) -> Pacing {
        Pacing::new(self.settings.lease)
    }

    /// Returns until when to wait for the previous driver of the handle to leave the store, so that a lock right after
    /// a release finds the mutex free: for at most the time limit of a call. Does not wait for one whose tenure, given
    /// by its begin and whether it was used, has a minimum hold left: the store reports it as the holder.
    pub(crate) fn previous_until(&self, now: Moment, tenure: Option<(Moment, bool)>) -> Moment {
        match tenure.and_then(|(acquired_at, used)| self.min_hold_end(acquired_at, used)) {
            Some(end) if now < end => now,
            _ => now + self.pacing().call_limit(None),
        }
    }

    /// Returns the end of the minimum hold. A lock that was cancelled before it returned a guard has none.
    fn min_hold_end(&self, acquired_at: Moment, used: bool) -> Option<Moment> {
        (used && !self.settings.min_hold.is_zero()).then(|| acquired_at + self.settings.min_hold)
    }

    // ===== actions =====

    /// Returns what to do now. An action that is not a call counts as done when this is called again.
    pub(crate) fn next(&mut self, now: Moment, input: Input) -> Action {
        let stopped = input.shutdown || input.request == Request::Stop;
        // A stop during a release ends with the result of that release.
        if let Phase::Leaving(Leaving { then, .. }) | Phase::Left(then, _) = &mut self.phase
            && stopped
            && !matches!(then, Then::Finish)
        {
            *then = Then::Finish;
            return Action::Conclude(Ok(()));
        }
        if let Phase::Leaving(Leaving { then, .. }) = self.phase
            && !self.must_release()
        {
            self.phase = Phase::Left(then, Ok(()));
        }
        match &self.phase {
            Phase::Contending => self.contend(now, input),
            Phase::Ending(outcome) => {
                let outcome = outcome.clone();
                self.begin_release(now, Then::Finish);
                Action::Conclude(outcome)
            }
            Phase::Leaving(leaving) => self.release(now, *leaving),
            Phase::Left(Then::Finish, left) => {
                Action::Finish(left.clone().and_then(|()| self.confirmed(now)))
            }
            Phase::Left(Then::Cooldown(_), left) => Action::StartAnew(left.clone()),
            // The error of the token says more than that of the release.
            Phase::Left(Then::Retry(_), _) => Action::StartAnew(Ok(())),
        }
    }

    fn contend(&mut self, now: Moment, input: Input) -> Action {
        let kept_until = match input.request {
            _ if input.shutdown => return self.stop(),
            Request::StepDown(cooldown) => {
                self.begin_release(now, Then::Cooldown(cooldown));
                return Action::Close(Loss::SteppedDown);
            }
            Request::Stop => match self.kept_until(now, input.used) {
                None => return self.stop(),
                end => end,
            },
            Request::Hold => None,
        };
        if kept_until.is_some() && !std::mem::replace(&mut self.announced, true) {
            return Action::Announce(Loss::Released);
        }
        if self.is_expired(now) {
            return Action::Lose(self.lapsed(now));
        }
        if now < self.due() { Action::Wait(self.wait(kept_until)) } else { self.call(now) }
    }

    fn stop(&mut self) -> Action {
        self.phase = Phase::Ending(Ok(()));
        Action::Close(Loss::Released)
    }

    /// Returns until when a stopped holder keeps the mutex for the rest of its minimum hold.
    fn kept_until(&self, now: Moment, used: bool) -> Option<Moment> {
        self.held?;
        self.min_hold_end(self.acquired_at, used).filter(|end| now < *end)
    }

    fn wait(&self, kept_until: Option<Moment>) -> Wait {
        let (due, hints) = (self.due(), !self.hinted);
        let expiring = self.held.map(|held| held.deadline.saturating_sub(held.grace));
        let approximate = expiring.is_some_and(|expiring| expiring >= due + COALESCE_MARGIN);
        match kept_until {
            Some(end) => Wait { until: due.min(end), wake: Wake::Shutdown, hints, approximate: false },
            None => Wait { until: due, wake: Wake::Request, hints, approximate },
        }
    }

    fn call(&mut self, now: Moment) -> Action {
        self.began.get_or_insert(now);
        self.hinted = false;
        let limit = self.pacing().call_limit(None);
        if !self.opened {
            return Action::Open(limit);
        }
        // Otherwise calls that arrive and whose replies are lost would acquire the mutex again and again for a contender
        // that cannot use it.
        if self.reply_missing && self.held.is_none() {
            return Action::Inspect(limit);
        }
        self.send(now)
    }

    fn send(&mut self, now: Moment) -> Action {
        let prior = self.prior;
        self.renews = prior == Prior::Held;
        if prior == Prior::Nothing {
            // Until it is answered, the call may have acquired the mutex.
            self.prior = Prior::Unknown;
        }
        self.sent = now;
        self.unanswered = true;
        let left = self.held.map(|held| held.deadline - now).filter(|_| !seeded::on(Bug::Resurrect));
        Action::Contend(prior, self.pacing().call_limit(left))
    }

    /// Returns the error of a release under an earlier id, as long as the store may have its lease.
    fn confirmed(&self, now: Moment) -> Result<()> {
        match &self.unconfirmed {
            Some(Unconfirmed { error, until }) if now < *until => Err(error.clone()),
            _ => Ok(()),
        }
    }

    fn begin_release(&mut self, now: Moment, then: Then) {
        self.due = now;
        self.phase = Phase::Leaving(Leaving { then, tries: 0, end: now });
    }

    /// Returns whether the store may have something of this contender: the mutex, or an entry in the queue.
    fn must_release(&self) -> bool {
        let nothing = self.settings.mode == Mode::Try && self.prior == Prior::Nothing;
        self.opened && !nothing && !seeded::on(Bug::NoRelease)
    }

    fn release(&mut self, now: Moment, leaving: Leaving) -> Action {
        if now < self.due {
            let until = self.due;
            return Action::Wait(Wait { until, wake: Wake::Never, hints: false, approximate: false });
        }
        if leaving.tries == 0 {
            let end = now + self.settings.lease.total();
            self.phase = Phase::Leaving(Leaving { end, ..leaving });
        }
        Action::Release(self.holding(), self.pacing().call_limit(None))
    }

    // ===== state =====

    fn is_expired(&self, now: Moment) -> bool {
        self.held.is_some_and(|held| now >= held.deadline) && !seeded::on(Bug::NoDeadline)
    }

    /// Returns when to act next: at the next call or at the deadline.
    fn due(&self) -> Moment {
        self.held.map_or(self.due, |held| self.due.min(held.deadline))
    }

    /// Returns the end of the maximum hold.
    fn cap(&self) -> Option<Moment> {
        self.settings.max_hold.map(|max_hold| self.acquired_at + max_hold)
    }

    /// Returns what there is to release.
    fn holding(&self) -> Holding {
        match (self.held, self.prior) {
            // A renewal without an answer may have acquired again a mutex whose hold the store had lost.
            _ if self.unanswered => Holding::Unknown,
            (Some(held), _) => Holding::Under(held.token),
            (None, Prior::Lapsed(token)) => Holding::Under(token),
            (None, Prior::Nothing) => Holding::Nothing,
            _ => Holding::Unknown,
        }
    }
}
