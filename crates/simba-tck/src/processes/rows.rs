//! The rows themselves.

use std::thread;

use rustix::process::Signal;

use super::Shared;
use super::contestant::WINDING_UP;
use super::field::Field;
use super::ledger::Note;
use crate::rows::{TAKE_OVER, rounds};
use crate::world::{SOON, STANDSTILL, long};

/// Row 1: the leader's process is killed; the next one leads within a lease.
pub fn row_01_a_killed_leader_is_succeeded<F: Shared>(door: &'static str) {
    let mut field = Field::<F>::start(door, 3);
    for _ in 0..rounds() {
        let leader = field.leader();
        let killed = field.signal(leader.pid, Signal::KILL);
        let next = field.successor(leader.token);
        let took = next.at.saturating_sub(killed);
        let limit = field.lease().total() + TAKE_OVER;
        assert!(took <= limit, "broken: a killed leader is succeeded within {limit:?}, not after {took:?}");
        field.bury(leader.pid);
        field.join();
    }
    field.assert_no_overlap(&[]);
}

/// Row 2: the leader's process stands still until another leads; when it goes on, it knows that it has lost, and
/// writes nothing.
pub fn row_02_a_stopped_leader_wakes_up_as_none<F: Shared>(door: &'static str) {
    let field = Field::<F>::start(door, 3);
    let mut stopped = Vec::new();
    for _ in 0..rounds() {
        let leader = field.leader();
        stopped.push(leader.token);
        field.stop(leader.pid);
        // From its first write on, the resource refuses what the stopped one may have been about to write.
        field.first("the next one works", |line| line.note == Note::Wrote && line.token > leader.token);
        let woken = field.signal(leader.pid, Signal::CONT);
        let lost = field.first("a leader that slept learns that it has lost", |line| {
            line.note == Note::Lost && line.token == leader.token
        });
        let took = lost.at.saturating_sub(woken);
        assert!(took <= STANDSTILL, "broken: a loss is told on waking up, not {took:?} later");
        let stale = |line: &&super::ledger::Line| {
            line.token == leader.token && line.note == Note::Wrote && line.at > woken
        };
        assert_eq!(field.lines().iter().find(stale), None, "broken: who has lost writes nothing");
    }
    field.assert_no_overlap(&stopped);
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
    field.assert_no_overlap(&[]);
}

/// Row 23: waiters that are killed keep a free mutex from the next one for no longer than the store
/// [promises](crate::Profile::dead_waiter).
pub fn row_23_killed_waiters_keep_nobody_from_a_free_mutex<F: Shared>(door: &'static str) {
    for _ in 0..rounds() {
        let store = Field::<F>::store();
        let usual = crate::rows::lease(&store);
        // A hand-over within the limit is explained by neither the long lease nor its poll.
        let (lease, limit) = match store.profile().dead_waiter {
            Some(limit) => (long(), limit + SOON),
            None => (usual, usual.total() * 3),
        };
        let mut field = Field::start_on(store, door, 1, lease);
        let leader = field.leader();
        let killed: Vec<_> = (0..3).map(|_| field.join_and_wait()).collect();
        for pid in killed {
            field.signal(pid, Signal::KILL);
            field.bury(pid);
        }
        let next = field.join_and_wait();
        let told = field.signal(leader.pid, Signal::TERM);
        let successor = field.successor(leader.token);
        let took = successor.at.saturating_sub(told);
        assert_eq!(successor.pid, next, "broken: the waiter that is left comes next");
        assert!(took <= limit, "broken: killed waiters keep nobody out for {took:?}, at most {limit:?}");
        field.assert_no_overlap(&[]);
    }
}
