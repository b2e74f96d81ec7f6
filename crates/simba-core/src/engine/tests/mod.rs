//! Tests of the machine, without a driver.

#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod policy;
mod protocol;
mod simulated;

use std::time::Duration;

use super::action::{Action, Input, Mode, News, Reply, Request, Settings, Step, Wait, Wake};
use super::machine::Machine;
use crate::backend::{Answer, Ownership, Prior};
use crate::clock::Moment;
use crate::types::{ContenderId, FencingToken, Lease};

/// The lease of the tests at the store.
const LEASE: Duration = Duration::from_millis(1_000);
/// The time limit of a call with the lease of the tests.
const CALL: Duration = Duration::from_millis(200);

const HOLD: Input = Input { request: Request::Hold, shutdown: false, used: true };

fn at(ms: u64) -> Moment {
    Moment::ZERO + Duration::from_millis(ms)
}

fn id(name: &str) -> ContenderId {
    ContenderId::new(name).unwrap()
}

/// ttl 600 ms, transition 400 ms: renewed at 400 ms, expiring at 790 ms, deadline at 990 ms.
fn settings(mode: Mode) -> Settings {
    Settings::new(mode, Lease::new(Duration::from_millis(600), Duration::from_millis(400)).unwrap())
}

fn ownership(owner: &str, token: u64) -> Ownership {
    Ownership::new(id(owner), Some(FencingToken::new(token)), Duration::from_secs(1))
}

fn ours(token: u64) -> Answer {
    Answer::Ours(ownership("me", token))
}

fn theirs(token: u64) -> Answer {
    Answer::Held(ownership("other", token))
}

/// A machine whose calls are answered by the test, without jitter.
struct Contender {
    machine: Machine,
}

impl Contender {
    fn new(settings: Settings) -> Self {
        Self { machine: Machine::new(settings, id("me"), at(0)) }
    }

    fn forever() -> Self {
        Self::new(settings(Mode::Forever))
    }

    /// Returns a contender that acquired the mutex at 0.
    fn holding(token: u64) -> Self {
        let mut contender = Self::forever();
        assert!(matches!(contender.call(0, 10, ours(token)).news, News::Acquired(_)));
        contender
    }

    fn next(&mut self, now: u64) -> Action {
        self.machine.next(at(now), HOLD)
    }

    fn wait(&mut self, now: u64) -> Wait {
        match self.next(now) {
            Action::Wait(wait) => wait,
            action => panic!("at {now}: {action:?}"),
        }
    }

    /// Sends a call, after the session is open and replies arrive.
    fn send(&mut self, now: u64) -> Prior {
        match self.next(now) {
            Action::Open(_) => drop(self.machine.opened(at(now), Some(Ok(())), 0.0)),
            Action::Inspect(_) => drop(self.machine.inspected(at(now), Some(Ok(())), 0.0)),
            Action::Contend(prior, limit) => {
                assert!(limit <= self.machine.settings().lease.ttl() / 3);
                return prior;
            }
            action => panic!("at {now}: {action:?}"),
        }
        self.send(now)
    }

    fn reply(&mut self, now: u64, reply: Reply<Answer>) -> Step {
        self.machine.answered(at(now), reply, 0.0)
    }

    /// Makes a call that is sent at `sent` and answered at `now`.
    fn call(&mut self, sent: u64, now: u64, answer: Answer) -> Step {
        self.send(sent);
        self.reply(now, Some(Ok(answer)))
    }

    fn is_holding(&mut self, now: u64) -> bool {
        !matches!(self.next(now), Action::Lose(_))
    }
}
