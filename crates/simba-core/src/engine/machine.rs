//! What an answer means: the protocol as a pure state machine, without I/O, clock or runtime.

use std::time::Duration;

use super::pacing::{Grant, Pacing};
use crate::backend::{Answer, Ownership, Prior};
use crate::clock::Moment;
use crate::seeded::{self, Bug};
use crate::tenure::Loss;
use crate::types::{ContenderId, FencingToken, Lease};

/// One contender's knowledge of one mutex.
#[derive(Debug)]
pub(crate) struct Machine {
    me: ContenderId,
    pacing: Pacing,
    prior: Prior,
    /// A call since the last answer may have changed what the store has of us.
    unanswered: bool,
    /// A call without an answer may still be under way, and may win at any time from now on.
    doubt: bool,
    held: Option<Grant>,
    max_hold: Option<Duration>,
    /// The end of the longest allowed hold.
    cap: Option<Moment>,
    /// When the next call is due.
    due: Moment,
    /// When the last call was sent.
    sent: Moment,
    /// No hint brings the next call forward beyond this.
    not_before: Moment,
    failures: u32,
    looks: u32,
    fruitless: u32,
}

/// What the driver has to do about an answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// Nothing changed for us.
    Keep,
    /// A tenure begins.
    Acquired(Grant),
    /// The tenure goes on until a later deadline.
    Renewed(Grant),
    /// The tenure is over.
    Lost(Loss),
    /// The tenure is over, and a new one begins with the same answer.
    Replaced(Loss, Grant),
    /// Ours, but with too little of the lease left to work under it.
    TooLate,
    /// Somebody else uses our id.
    Duplicate,
}

impl Machine {
    pub(crate) fn new(me: ContenderId, lease: Lease, max_hold: Option<Duration>, now: Moment) -> Self {
        Self {
            me,
            pacing: Pacing::new(lease),
            prior: Prior::Nothing,
            unanswered: false,
            doubt: false,
            held: None,
            max_hold,
            cap: None,
            due: now,
            sent: now,
            not_before: now,
            failures: 0,
            looks: 0,
            fruitless: 0,
        }
    }

    pub(crate) const fn me(&self) -> &ContenderId {
        &self.me
    }

    /// The store may have something under our id from a contender before us.
    pub(crate) fn inherit(&mut self) {
        self.doubt = true;
        self.prior = Prior::Unknown;
    }

    /// A call goes out: what the session may have, and how long the call may take.
    pub(crate) fn send(&mut self, now: Moment) -> (Prior, Duration) {
        let prior = self.prior;
        if prior == Prior::Nothing {
            // From here to the answer, the call may have won.
            self.prior = Prior::Unknown;
        }
        self.sent = now;
        self.unanswered = true;
        let left = self.held.map(|held| held.deadline - now).filter(|_| !seeded::on(Bug::Resurrect));
        (prior, self.pacing.call_limit(left))
    }

    /// The answer to a call that was sent at `sent` with `prior`.
    pub(crate) fn observed(
        &mut self,
        sent: Moment,
        prior: Prior,
        now: Moment,
        answer: &Answer,
        roll: f64,
    ) -> Step {
        self.unanswered = false;
        match answer {
            Answer::Ours(ours) => self.ours(sent, prior, now, ours, roll),
            Answer::Held(other) => self.refused(now + self.pacing.wait(other.remaining, roll), prior, other),
            Answer::Vacant => {
                let due = now + self.pacing.wait_vacant(self.looks, roll);
                self.looks = self.looks.saturating_add(1);
                self.not_ours(due).map_or(Step::Keep, |_| Step::Lost(Loss::Vanished))
            }
        }
    }

    fn ours(&mut self, sent: Moment, prior: Prior, now: Moment, ours: &Ownership, roll: f64) -> Step {
        let token = ours.token.unwrap_or(FencingToken::new(0));
        let sent = if seeded::on(Bug::DeadlineFromReply) { now } else { sent };
        let grant = self.pacing.grant(token, sent, ours.remaining, roll);
        let late = now >= grant.deadline.saturating_sub(grant.grace);
        match self.held {
            // The lease ended here before the answer to its renewal came. What was lost stays lost: ask again,
            // with a prior that tells.
            None if prior == Prior::Held => {
                self.due = now;
                Step::Keep
            }
            None if late => Step::TooLate,
            None => {
                self.fruitless = 0;
                self.cap = self.max_hold.map(|max_hold| sent + max_hold);
                self.hold(grant);
                Step::Acquired(grant)
            }
            Some(held) if held.token == token => {
                self.hold(grant);
                Step::Renewed(grant)
            }
            Some(_) => {
                self.cap = self.max_hold.map(|max_hold| sent + max_hold);
                self.hold(grant);
                Step::Replaced(Loss::Vanished, grant)
            }
        }
    }

    fn refused(&mut self, due: Moment, prior: Prior, other: &Ownership) -> Step {
        self.looks = 0;
        let twin = other.owner == self.me;
        match self.not_ours(due) {
            None if twin && prior == Prior::Nothing => Step::Duplicate,
            // Our own id, but not ours: what a session of ours that is gone left behind.
            Some(_) if twin => Step::Lost(Loss::Vanished),
            Some(_) => Step::Lost(Loss::TakenBy(other.owner.clone())),
            None => Step::Keep,
        }
    }

    fn hold(&mut self, grant: Grant) {
        self.prior = Prior::Held;
        let deadline = self.cap.map_or(grant.deadline, |cap| grant.deadline.min(cap));
        self.held = Some(Grant { deadline, ..grant });
        self.due = grant.renew_at;
        self.looks = 0;
        self.failures = 0;
    }

    fn not_ours(&mut self, due: Moment) -> Option<Grant> {
        self.prior = if self.doubt { Prior::Unknown } else { Prior::Nothing };
        self.due = due;
        self.failures = 0;
        self.held.take()
    }

    /// A call failed or was not answered in time: neither a loss nor a renewal.
    pub(crate) fn failed(&mut self, now: Moment, transient: bool, roll: f64) {
        self.failures = self.failures.saturating_add(1);
        self.doubt |= self.unanswered;
        if let (true, Some(held)) = (seeded::on(Bug::FailureRenews), &mut self.held) {
            held.deadline = now + self.pacing.lease().total();
        }
        self.due = now
            + match self.held {
                Some(held) => self.pacing.retry_holding(self.failures, held.deadline - now, roll),
                None => self.pacing.retry_waiting(self.failures, transient, roll),
            };
        if !transient && self.held.is_none() {
            self.not_before = self.due;
        }
    }

    /// Whether the deadline has passed. From then on the store may have what we have no more.
    pub(crate) fn expired(&mut self, now: Moment) -> bool {
        let expired = self.held.is_some_and(|held| now >= held.deadline) && !seeded::on(Bug::NoDeadline);
        if expired {
            self.forget(now);
        }
        expired
    }

    /// Gives the tenure up for lost here, whatever the store has of it.
    pub(crate) fn forget(&mut self, now: Moment) {
        if let Some(held) = self.held.take() {
            self.prior = Prior::Lapsed(held.token);
        }
        self.not_before = now;
        self.due = now;
    }

    /// The mutex was given back and the store said so. Nothing is tried before `due`.
    pub(crate) fn released(&mut self, due: Moment) {
        self.not_ours(due);
        self.not_before = due;
        self.looks = 0;
    }

    /// A hint came: look early, but not more often than hints deserve.
    pub(crate) fn hinted(&mut self, now: Moment) {
        if now - self.sent >= self.pacing.hint_gap(u32::MAX) {
            self.fruitless = 0;
        }
        let at = (self.sent + self.pacing.hint_gap(self.fruitless)).max(now).max(self.not_before);
        if at < self.due {
            self.due = at;
            self.fruitless = self.fruitless.saturating_add(1);
        }
    }

    /// When to act next: the due call, or the deadline.
    pub(crate) fn due(&self) -> Moment {
        self.held.map_or(self.due, |held| self.due.min(held.deadline))
    }

    pub(crate) fn is_holding(&self) -> bool {
        self.held.is_some()
    }

    /// The token to release by, where it is sure.
    pub(crate) fn token(&self) -> Option<FencingToken> {
        match (self.held, self.prior) {
            // A renewal that was not answered changes no token.
            (Some(held), _) => Some(held.token),
            (None, Prior::Lapsed(token)) if !self.unanswered => Some(token),
            _ => None,
        }
    }

    /// Whether the store surely has nothing of ours.
    pub(crate) fn has_nothing(&self) -> bool {
        self.prior == Prior::Nothing
    }

    pub(crate) const fn lease(&self) -> &Lease {
        self.pacing.lease()
    }
}
