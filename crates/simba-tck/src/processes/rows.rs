//! The rows themselves.

use std::thread;
use std::time::Duration;

use rustix::process::Signal;

use super::Shared;
use super::contestant::WINDING_UP;
use super::field::Field;
use super::ledger::Note;
use crate::StolenTime;
use crate::rows::rounds;
use crate::world::SLACK;

/// How much later than by the lease alone the next one may lead, on a machine where processes start meanwhile.
const TAKE_OVER: Duration = Duration::from_secs(1);

/// Row 1: the leader's process is killed; the next one leads within a lease.
pub fn row_01_a_killed_leader_is_succeeded<F: Shared>(door: &'static str) {
    let mut field = Field::<F>::start(door, 3);
    for _ in 0..rounds() {
        let leader = field.leader();
        let stolen = StolenTime::mark();
        let killed = field.signal(leader.pid, Signal::KILL);
        let next = field.successor(leader.token);
        let took = next.at.saturating_sub(killed);
        let limit = field.lease().total() + TAKE_OVER + stolen.so_far();
        assert!(took <= limit, "broken: a killed leader is succeeded within {limit:?}, not after {took:?}");
        field.bury(leader.pid);
        field.join();
    }
    field.assert_no_overlap();
}

/// Row 2: the leader's process stands still for three leases; when it goes on, it knows that it has lost, and
/// writes nothing.
pub fn row_02_a_stopped_leader_wakes_up_as_none<F: Shared>(door: &'static str) {
    let field = Field::<F>::start(door, 3);
    for _ in 0..rounds() {
        let leader = field.leader();
        field.stop(leader.pid);
        thread::sleep(field.lease().total() * 3);
        field.successor(leader.token);
        let stolen = StolenTime::mark();
        let woken = field.signal(leader.pid, Signal::CONT);
        let lost = field.first("a leader that slept learns that it has lost", |line| {
            line.note == Note::Lost && line.token == leader.token
        });
        let (took, limit) = (lost.at.saturating_sub(woken), SLACK + stolen.so_far());
        assert!(took <= limit, "broken: a loss is told on waking up, not {took:?} later");
        let stale = |line: &&super::ledger::Line| {
            line.token == leader.token && line.note == Note::Wrote && line.at > woken
        };
        assert_eq!(field.lines().iter().find(stale), None, "broken: who has lost writes nothing");
    }
    field.assert_no_overlap();
}

/// Row 3: a stop for half the ttl costs nothing.
pub fn row_03_a_short_stop_costs_no_leader<F: Shared>(door: &'static str) {
    let field = Field::<F>::start(door, 3);
    let (leader, lease) = (field.leader(), field.lease());
    for _ in 0..rounds() {
        field.stop(leader.pid);
        thread::sleep(lease.ttl() / 2);
        field.signal(leader.pid, Signal::CONT);
        thread::sleep(lease.ttl());
    }
    let acquired = field.lines().iter().filter(|line| line.note == Note::Acquired).count();
    assert_eq!(acquired, 1, "broken: a short stop costs no leader:\n{:#?}", &*field.lines());
}

/// Row 6: a leader that is told to end lets its work end first; only then does the next one lead.
pub fn row_06_a_leader_told_to_end_ends_its_work_first<F: Shared>(door: &'static str) {
    let mut field = Field::<F>::start(door, 3);
    for _ in 0..rounds() * 3 {
        let leader = field.leader();
        let told = field.signal(leader.pid, Signal::TERM);
        let next = field.successor(leader.token);
        let ended = field.first("work that is told to end ends in order", |line| {
            line.note == Note::Ended && line.token == leader.token
        });
        assert!(ended.at.saturating_sub(told) >= WINDING_UP, "broken: the work has its time to end");
        assert!(next.at >= ended.at, "broken: nobody leads before the work has ended");
        field.bury(leader.pid);
        field.join();
    }
    field.assert_no_overlap();
}
