//! A machine at a simulated store: runs a plan of faults and requests, and records what the machine did.

use proptest::prelude::*;

use super::*;
use crate::backend::Holding;
use crate::error::{Error, ErrorKind, Result};
use crate::tenure::Grant;
use crate::types::Loss;

/// What happens to one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fate {
    pub(super) arrives: bool,
    pub(super) outcome: Outcome,
    pub(super) took: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Answered,
    Silent,
    Unavailable,
    Denied,
}

pub(super) const FINE: Fate = Fate { arrives: true, outcome: Outcome::Answered, took: 1 };

pub(super) fn fate() -> impl Strategy<Value = Fate> {
    let outcome = prop_oneof![
        6 => Just(Outcome::Answered),
        2 => Just(Outcome::Silent),
        2 => Just(Outcome::Unavailable),
        1 => Just(Outcome::Denied),
    ];
    (any::<bool>(), outcome, 0u64..200).prop_map(|(arrives, outcome, took)| Fate {
        arrives: arrives || outcome == Outcome::Answered,
        outcome,
        took,
    })
}

/// A change of the store, before a call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Change {
    Nothing,
    LosesHold,
    Other(bool),
}

pub(super) fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        6 => Just(Change::Nothing),
        1 => Just(Change::LosesHold),
        1 => any::<bool>().prop_map(Change::Other),
    ]
}

/// A contender, what happens to its calls, and what its handle requests and when.
#[derive(Clone, Debug)]
pub(super) struct Plan {
    pub(super) settings: Settings,
    /// The calls after them are fine.
    pub(super) calls: Vec<(Change, Fate)>,
    pub(super) used: bool,
    pub(super) request: Request,
    pub(super) requested_at: u64,
    pub(super) shutdown_at: u64,
    /// Hints come at once whenever the machine waits for one.
    pub(super) hints: bool,
}

impl Plan {
    /// Returns a plan without faults that is stopped at `requested_at`.
    pub(super) fn new(settings: Settings, requested_at: u64) -> Self {
        let (calls, request) = (Vec::new(), Request::Stop);
        Self { settings, calls, used: true, request, requested_at, shutdown_at: u64::MAX, hints: false }
    }

    /// Runs the plan to its end, or for a minute.
    pub(super) fn run(self) -> Log {
        let mut run = Run {
            machine: Machine::new(self.settings, id("me"), at(0)),
            store: Store::default(),
            calls: self.calls.clone().into_iter(),
            accepted: false,
            now: Moment::ZERO,
            log: Vec::new(),
            plan: self,
        };
        while run.now < at(60_000) && !run.step() {}
        Log { entries: run.log, store: run.store }
    }
}

/// What the machine did.
#[derive(Debug)]
pub(super) enum Entry {
    Opened,
    Inspected { replied: bool },
    Contended { replied: bool },
    Waited(Wait),
    Announced,
    Refused,
    Acquired(Grant),
    Renewed(Grant),
    Lost(Loss),
    Closed(Loss),
    Concluded(Result<()>),
    Released { replied: bool },
    Anew,
    Finished(Result<()>),
}

/// The entries, each with the moment at which it began, and the store after them.
#[derive(Debug)]
pub(super) struct Log {
    pub(super) entries: Vec<(Moment, Entry)>,
    pub(super) store: Store,
}

impl Log {
    /// Returns the moment of the first such entry.
    pub(super) fn first(&self, is: impl Fn(&Entry) -> bool) -> Option<Moment> {
        self.entries.iter().find(|(_, entry)| is(entry)).map(|(at, _)| *at)
    }

    pub(super) fn outcome(&self) -> Option<(Moment, &Result<()>)> {
        self.entries.iter().find_map(|(at, entry)| match entry {
            Entry::Concluded(outcome) => Some((*at, outcome)),
            _ => None,
        })
    }
}

struct Run {
    plan: Plan,
    machine: Machine,
    store: Store,
    calls: std::vec::IntoIter<(Change, Fate)>,
    accepted: bool,
    now: Moment,
    log: Vec<(Moment, Entry)>,
}

impl Run {
    /// Performs one action. Returns whether it was the last one.
    fn step(&mut self) -> bool {
        let shutdown = self.now >= at(self.plan.shutdown_at);
        let requested = self.now >= at(self.plan.requested_at) && !self.accepted;
        let request = if requested { self.plan.request } else { Request::Hold };
        let input = Input { request, shutdown, used: self.plan.used };
        match self.machine.next(self.now, input) {
            Action::Open(limit) => {
                self.note(Entry::Opened);
                let reply = self.call(limit, |_, _| ());
                self.machine.opened(self.now, reply, 0.5);
            }
            Action::Inspect(limit) => {
                let (began, reply) = (self.now, self.call(limit, |_, _| ()));
                self.log.push((began, Entry::Inspected { replied: reply.is_some() }));
                self.machine.inspected(self.now, reply, 0.5);
            }
            Action::Contend(prior, limit) => {
                let (began, reply) = (self.now, self.call(limit, |store, now| store.contend(prior, now)));
                self.log.push((began, Entry::Contended { replied: reply.is_some() }));
                let step = self.machine.answered(self.now, reply, 0.5);
                self.apply(step);
            }
            Action::Wait(wait) => self.wait(wait),
            Action::Announce(_) => self.note(Entry::Announced),
            Action::Lose(loss) => self.note(Entry::Lost(loss)),
            Action::Close(why) => {
                self.accepted |= matches!(self.plan.request, Request::StepDown(_));
                self.note(Entry::Closed(why));
            }
            Action::Conclude(outcome) => self.note(Entry::Concluded(outcome)),
            Action::Release(holding, limit) => {
                let (began, reply) = (self.now, self.call(limit, |store, _| store.release(holding)));
                self.log.push((began, Entry::Released { replied: matches!(reply, Some(Ok(()))) }));
                self.machine.released(self.now, reply, 0.5);
            }
            Action::StartAnew(_) => {
                self.note(Entry::Anew);
                self.store.rename();
                self.machine.start_anew(self.now, id("me"));
            }
            Action::Finish(left) => {
                self.note(Entry::Finished(left));
                return true;
            }
        }
        false
    }

    fn note(&mut self, entry: Entry) {
        self.log.push((self.now, entry));
    }

    fn call<T>(&mut self, limit: Duration, process: impl FnOnce(&mut Store, Moment) -> T) -> Reply<T> {
        let (change, fate) = self.calls.next().unwrap_or((Change::Nothing, FINE));
        self.store.change(change);
        let processed = fate.arrives.then(|| process(&mut self.store, self.now));
        self.now = self.now + Duration::from_millis(fate.took).min(limit);
        let kind = match fate.outcome {
            Outcome::Answered => return processed.map(Ok),
            Outcome::Silent => return None,
            Outcome::Unavailable => ErrorKind::Unavailable,
            Outcome::Denied => ErrorKind::Denied,
        };
        Some(Err(Error::new(kind, "as planned")))
    }

    fn apply(&mut self, step: Step) {
        if let Some(loss) = step.lost {
            self.note(Entry::Lost(loss));
        }
        match step.news {
            News::Acquired(grant) => self.note(Entry::Acquired(grant)),
            News::Renewed(grant) => self.note(Entry::Renewed(grant)),
            News::Nothing => self.note(Entry::Refused),
            News::Failed(_) | News::OldToken(_) => {}
        }
    }

    /// Waits, until a request that ends the wait, or a hint.
    fn wait(&mut self, wait: Wait) {
        self.note(Entry::Waited(wait));
        let Plan { requested_at, shutdown_at, hints, .. } = self.plan;
        let mut until = wait.until;
        if wait.wake == Wake::Request && !self.accepted {
            until = until.min(at(requested_at));
        }
        if wait.wake != Wake::Never {
            until = until.min(at(shutdown_at));
        }
        if hints && wait.hints {
            return self.machine.hinted(self.now, &Ok(()));
        }
        assert!(until > self.now, "a wait that does not wait: {wait:?}");
        self.now = until;
    }
}

/// A store that keeps the contract of backends, from the view of one contender.
#[derive(Clone, Debug, Default)]
pub(super) struct Store {
    pub(super) ours: Option<u64>,
    other: bool,
    last: u64,
    /// The end of the lease of the contender, if it holds the mutex.
    until: Option<Moment>,
    /// The end of the lease of a hold under an earlier id of the contender.
    earlier: Option<Moment>,
}

impl Store {
    /// Returns whether a hold of the contender is left at `now`, under its id or an earlier one.
    pub(super) fn is_left(&self, now: Moment) -> bool {
        self.ours.is_some() || self.earlier.is_some_and(|until| now < until)
    }

    fn change(&mut self, change: Change) {
        match change {
            Change::Nothing => {}
            Change::LosesHold => self.ours = None,
            Change::Other(holds) => {
                self.ours = self.ours.filter(|_| !holds);
                self.other = holds;
                self.earlier = None;
            }
        }
    }

    /// Gives the contender a new id: what its release left belongs to another id from now on.
    fn rename(&mut self) {
        if self.ours.take().is_some() {
            self.other = true;
            self.earlier = self.until;
        }
    }

    fn contend(&mut self, prior: Prior, now: Moment) -> Answer {
        let lapsed = self.ours.is_some_and(|token| prior == Prior::Lapsed(FencingToken::new(token)));
        if self.other {
            return theirs(self.last);
        }
        if self.ours.is_none() || lapsed {
            self.last += 1;
            self.ours = Some(self.last);
        }
        self.until = Some(now + LEASE);
        self.ours.map_or(Answer::Vacant, ours)
    }

    fn release(&mut self, holding: Holding) {
        self.ours = match holding {
            Holding::Nothing => self.ours,
            Holding::Unknown => None,
            Holding::Under(token) => self.ours.filter(|ours| *ours != token.get()),
        };
    }
}
