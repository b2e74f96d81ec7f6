//! The rows about processes.

use std::thread;

use rustix::process::Signal;

use super::Shared;
use super::contestant::WORK_END;
use super::contestants::Contestants;
use super::shared_log::Note;
use crate::rows::{TAKE_OVER, longer_lease, rounds};
use crate::world::{MAX_DELAY, MAX_PAUSE, SOON, long};

/// Row 1: the leader's process is killed; the next one leads within a lease.
pub fn row_01_a_killed_leader_is_succeeded<F: Shared>(entry_test: &'static str) {
    let mut contestants = Contestants::<F>::start(entry_test, 3);
    for _ in 0..rounds() {
        let leader = contestants.leader();
        let killed = contestants.signal(leader.pid, Signal::KILL);
        let next = contestants.successor(leader.token);
        let took = next.at.saturating_sub(killed);
        let limit = contestants.lease().total() + TAKE_OVER;
        assert!(took <= limit, "broken: a killed leader is succeeded within {limit:?}, not after {took:?}");
        contestants.wait_for_exit(leader.pid);
        contestants.join();
    }
    contestants.assert_no_overlap(&[]);
}

/// Row 2: the leader's process is stopped until another leads; when it is resumed, it is notified of the loss, and
/// writes nothing.
pub fn row_02_a_resumed_leader_has_lost<F: Shared>(entry_test: &'static str) {
    let contestants = Contestants::<F>::start(entry_test, 3);
    let mut stopped = Vec::new();
    for _ in 0..rounds() {
        let leader = contestants.leader();
        stopped.push(leader.token);
        contestants.stop(leader.pid);
        // From the first write of the next one on, the resource refuses what the stopped one may have been about to
        // write.
        contestants.first("the next one works", |line| line.note == Note::Wrote && line.token > leader.token);
        let resumed = contestants.signal(leader.pid, Signal::CONT);
        let lost = contestants.first("a resumed leader is notified of the loss", |line| {
            line.note == Note::Lost && line.token == leader.token
        });
        let took = lost.at.saturating_sub(resumed);
        assert!(took <= MAX_DELAY, "broken: a loss is notified on resume, not {took:?} later");
        let stale = |line: &&super::shared_log::Line| {
            line.token == leader.token && line.note == Note::Wrote && line.at > resumed
        };
        assert_eq!(
            contestants.lines().iter().find(stale),
            None,
            "broken: a leader that has lost writes nothing"
        );
    }
    contestants.assert_no_overlap(&stopped);
}

/// Row 3: a stop for half the ttl has no effect.
pub fn row_03_a_short_stop_causes_no_loss<F: Shared>(entry_test: &'static str) {
    let store = Contestants::<F>::store();
    // The stop may take longer by a pause of the machine.
    let lease = longer_lease(&store, MAX_PAUSE * 2);
    let contestants = Contestants::start_on(store, entry_test, 3, lease);
    let leader = contestants.leader();
    for _ in 0..rounds() {
        contestants.stop(leader.pid);
        thread::sleep(lease.ttl() / 2);
        contestants.signal(leader.pid, Signal::CONT);
        thread::sleep(lease.ttl());
    }
    let acquired = contestants.lines().iter().filter(|line| line.note == Note::Acquired).count();
    assert_eq!(acquired, 1, "broken: a short stop causes no loss:\n{:#?}", &*contestants.lines());
}

/// Row 6: a leader that gets SIGTERM lets its work end first; only then does the next one lead.
pub fn row_06_a_terminated_leader_ends_its_work_first<F: Shared>(entry_test: &'static str) {
    let mut contestants = Contestants::<F>::start(entry_test, 3);
    for _ in 0..rounds() * 3 {
        let leader = contestants.leader();
        let terminated = contestants.signal(leader.pid, Signal::TERM);
        let next = contestants.successor(leader.token);
        let ended = contestants.first("work ends gracefully after SIGTERM", |line| {
            line.note == Note::Ended && line.token == leader.token
        });
        assert!(ended.at.saturating_sub(terminated) >= WORK_END, "broken: the work has time to end");
        assert!(next.at >= ended.at, "broken: no other leads before the work has ended");
        contestants.wait_for_exit(leader.pid);
        contestants.join();
    }
    contestants.assert_no_overlap(&[]);
}

/// Row 23: killed waiters block a free mutex for no longer than the store
/// [guarantees](crate::Profile::dead_waiter).
pub fn row_23_killed_waiters_are_skipped<F: Shared>(entry_test: &'static str) {
    for _ in 0..rounds() {
        let store = Contestants::<F>::store();
        let short = crate::rows::lease(&store);
        // A hand-over within the limit is explained by neither the long lease nor its poll.
        let (lease, limit) = match store.profile().dead_waiter {
            Some(limit) => (long(), limit + SOON),
            None => (short, short.total() * 3),
        };
        let mut contestants = Contestants::start_on(store, entry_test, 1, lease);
        let leader = contestants.leader();
        let killed: Vec<_> = (0..3).map(|_| contestants.join_and_wait()).collect();
        for pid in killed {
            contestants.signal(pid, Signal::KILL);
            contestants.wait_for_exit(pid);
        }
        let next = contestants.join_and_wait();
        let terminated = contestants.signal(leader.pid, Signal::TERM);
        let successor = contestants.successor(leader.token);
        let took = successor.at.saturating_sub(terminated);
        assert_eq!(successor.pid, next, "broken: the remaining waiter acquires next");
        assert!(took <= limit, "broken: killed waiters are skipped within {limit:?}, not after {took:?}");
        contestants.assert_no_overlap(&[]);
    }
}
