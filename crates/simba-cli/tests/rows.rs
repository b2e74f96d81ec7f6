//! The rows of the fault matrix that concern the command, on every store.
//!
//! The number of rounds comes from `SIMBA_FAULT_ROUNDS`. Overlap is detected by what the commands write: every line
//! is a fencing token, the file keeps the order, and no token may follow a greater one.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use common::rows::{BEAT, LEASE, LEASE_LENGTH, ROOMY_LEASE};
use common::{Running, SOON, World, is_alive, line, send, stat, until_true, within};
use rustix::process::Signal;
use simba_servers::shared;
use simba_tck::rounds;

/// A command that holds the mutex, and one that waits.
struct Pair {
    world: World,
    first: Running,
    next: Running,
    token: u64,
}

impl Pair {
    fn start(world: World, mutex: &str, script: &str) -> Self {
        Self::start_under(&LEASE, world, mutex, script)
    }

    fn start_under(lease: &[&str], world: World, mutex: &str, script: &str) -> Self {
        let first = world.holder_under(lease, mutex, script);
        let token = world.beat_after(0);
        let next = world.next_holder(mutex);
        world.until_waiting(mutex, 1);
        Self { world, first, next, token }
    }

    /// Returns what a failure needs: the record of the mutex, the states of the processes and what they printed.
    fn describe(&self) -> String {
        let records = self.world.run(&["status", "--json"]);
        let process = |of: &Running| {
            let state = stat(of.pid(), 0);
            format!("simba {} in state {state:?}, {:?}; stderr: {}", of.pid(), of.processes(), of.err())
        };
        let (first, next) = (process(&self.first), process(&self.next));
        format!("token of the first {}\n{records:?}\nfirst: {first}\nnext: {next}", self.token)
    }

    /// Checks that the next one runs, and that no process of the first is alive.
    #[track_caller]
    fn assert_handed_over(&self) {
        let next = within(SOON, || self.world.find_beat_after(self.token));
        let next = next.unwrap_or_else(|| panic!("the next does not hold: {}", self.describe()));
        assert_eq!(
            self.first.work(),
            Vec::<i32>::new(),
            "processes of the first command are alive while another holds"
        );
        self.world.more_beats();
        assert_eq!(self.world.beats().last(), Some(&next));
        self.world.assert_no_overlap();
        assert!(is_alive(self.next.pid()));
    }
}

/// Returns a script that forks, creates sessions, forks twice, and ignores signals.
fn hard_to_kill(last: &str) -> String {
    format!(
        "trap '' TERM HUP INT; export BEAT='{BEAT}'; : >> beats; setsid sh -c \"$BEAT\" & \
         (setsid sh -c 'sh -c \"$BEAT\" & exit' &); sh -c \"$BEAT\" & \
         while [ $(wc -l < beats) -lt 60 ]; do sleep 0.01; done; {last}"
    )
}

fn row_69(world: World, mutex: &str) {
    let pair = Pair::start(world, mutex, BEAT);
    pair.first.signal(Signal::KILL);
    pair.assert_handed_over();
}

fn row_70(world: World, mutex: &str) {
    let mut pair = Pair::start_under(&ROOMY_LEASE, world, mutex, BEAT);
    pair.first.signal(Signal::STOP);
    pair.assert_handed_over();
    pair.first.signal(Signal::CONT);
    assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
    pair.world.assert_no_overlap();
}

/// Kills the tree at the deadline: `simba` is stopped, so the lease is not renewed.
fn row_71_deadline(world: World, mutex: &str) {
    let mut pair = Pair::start_under(&ROOMY_LEASE, world, mutex, &hard_to_kill("while :; do sleep 1; done"));
    until_true("complete process tree", || pair.world.beats().len() > 60);
    pair.first.signal(Signal::STOP);
    pair.assert_handed_over();
    pair.first.signal(Signal::CONT);
    assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
}

/// Kills the tree after a normal end: the command has ended, its children have not.
fn row_71_end(world: World, mutex: &str) {
    let mut pair = Pair::start(world, mutex, &hard_to_kill("while [ ! -e go ]; do sleep 0.01; done; exit 5"));
    fs::write(pair.world.path("go"), "").unwrap();
    assert_eq!(pair.first.status().code(), Some(5), "{}", pair.first.err());
    pair.assert_handed_over();
}

fn row_72(world: World, mutex: &str) {
    let mut pair = Pair::start(world, mutex, BEAT);
    send(pair.first.guard(), Signal::KILL);
    assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
    pair.assert_handed_over();
}

/// The guard is stopped, so it cannot kill, and the lease is not renewed: `simba` kills the command itself.
fn row_72_stopped<T>(world: World, mutex: &str, hang: impl FnOnce(&World) -> T) {
    let mut pair = Pair::start(world, mutex, &hard_to_kill("while :; do sleep 1; done"));
    send(pair.first.guard(), Signal::STOP);
    let hung = hang(&pair.world);
    assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
    drop(hung);
    pair.assert_handed_over();
}

/// A grace that is longer than the first part of the lease: a store that grants less time than requested shortens it in
/// proportion, otherwise the command would end before the first renewal.
fn long_grace(world: &World, mutex: &str) {
    let lease = ["--ttl", "9s", "--transition", "18s", "--grace", "16s"];
    world.run(&[&["run", mutex], &lease[..], &["--", "sleep", "3"]].concat()).expect(0);
}

macro_rules! rows {
    ($store:ident, $world:expr) => {
        mod $store {
            use super::*;

            fn each_round(row: impl Fn(World, &str)) {
                for _ in 0..rounds() {
                    let mutex = format!("row-{}-{}", std::process::id(), common::fresh());
                    row($world, &mutex);
                }
            }

            #[test]
            fn row_71_command_under_a_long_grace_runs_to_its_end() {
                long_grace(&$world, "long-grace");
            }

            #[test]
            fn row_69_command_of_a_killed_simba_does_not_overlap_the_next() {
                each_round(row_69);
            }

            #[test]
            fn row_70_command_of_a_stopped_simba_does_not_overlap_the_next_and_exit_code_is_75() {
                each_round(row_70);
            }

            #[test]
            fn row_71_tree_that_forks_and_ignores_signals_is_dead_at_the_deadline() {
                each_round(row_71_deadline);
            }

            #[test]
            fn row_71_tree_that_forks_and_ignores_signals_is_dead_after_a_normal_end() {
                each_round(row_71_end);
            }

            #[test]
            fn row_72_killed_guard_ends_the_command_at_once_with_75() {
                each_round(row_72);
            }
        }
    };
}

rows!(sqlite, World::new());
rows!(redis, World::on(&shared("SIMBA_TCK_REDIS")));
rows!(postgres, World::on(&shared("SIMBA_TCK_POSTGRES")));

mod on_servers {
    use super::*;

    rows!(mysql, World::on(&shared("SIMBA_TCK_MARIADB")));
    rows!(zookeeper, World::on(&shared("SIMBA_TCK_ZOOKEEPER")));
    rows!(etcd, World::on(&shared("SIMBA_TCK_ETCD")));
}

#[test]
fn row_72_stopped_guard_does_not_keep_the_command_alive() {
    for _ in 0..rounds() {
        row_72_stopped(World::new(), "m", common::hang);
    }
}

/// The guard is stopped and does not read the few signals that are passed on. Then an operator frees the mutex.
#[test]
fn row_72_stopped_guard_and_few_signals_do_not_keep_the_command_alive() {
    let mut pair = Pair::start(World::new(), "m", BEAT);
    send(pair.first.guard(), Signal::STOP);
    for _ in 0..20 {
        pair.first.signal(Signal::WINCH);
        thread::sleep(Duration::from_millis(3));
    }
    // Unless the next one holds it already.
    let freed = pair.world.run(&["release", "m", "--if-token", &pair.token.to_string(), "--yes"]);
    assert!(matches!(freed.code(), 0 | 1), "{freed:?}");
    // The first command may run until its next renewal is refused, which takes one ttl at most.
    until_true("end of the command of the first holder", || pair.first.work().is_empty());
    assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
    assert_eq!(pair.first.processes(), Vec::<i32>::new());
    pair.world.beat_after(pair.token);
}

/// The guard is stopped and `simba` is flooded with signals, which fills the socket to the guard. Then the guard does
/// not accept orders any more, and `simba` kills the command itself while it still renews the lease.
#[test]
fn row_72_stopped_guard_and_a_flood_of_signals_do_not_keep_the_command_alive() {
    let mut pair = Pair::start(World::new(), "m", BEAT);
    send(pair.first.guard(), Signal::STOP);
    // Signals that arrive at once count as one: the required number depends on the machine.
    until_true("end of the flooded holder", || {
        pair.first.signal(Signal::WINCH);
        pair.first.has_ended()
    });
    assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
    assert_eq!(pair.first.processes(), Vec::<i32>::new());
    pair.assert_handed_over();
}

/// A guard that reads its orders gets them all: the flood ends neither the command nor the lease.
#[test]
fn row_72_flood_of_signals_does_not_hide_renewals_from_the_guard() {
    let world = World::new();
    let mut first = world.holder("m", "trap 'exit 3' USR1; echo up > up; while :; do sleep 0.01; done");
    line(&world.path("up"));
    let begun = Instant::now();
    while begun.elapsed() < LEASE_LENGTH + Duration::from_secs(1) {
        first.signal(Signal::WINCH);
        // The socket has room for the signals of five seconds, in case the guard is paused.
        thread::sleep(Duration::from_millis(20));
    }
    first.signal(Signal::USR1);
    assert_eq!(first.status().code(), Some(3), "{}", first.err());
}

#[test]
fn command_ends_before_another_can_hold_when_the_store_hangs() {
    for _ in 0..rounds() {
        let mut pair = Pair::start(World::new(), "m", &format!("trap '' TERM; {BEAT}"));
        let hung = common::hang(&pair.world);
        assert_eq!(pair.first.status().code(), Some(75), "{}", pair.first.err());
        pair.first.assert_nothing_left();
        drop(hung);
        pair.assert_handed_over();
    }
}
