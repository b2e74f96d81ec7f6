//! `simba lead` and `simba schedule`: commands on the leader only.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::thread;
use std::time::{Duration, SystemTime};

use common::rows::{BEAT, LEASE, LEASE_LENGTH};
use common::{Running, World, is_alive, line, send, until, until_true};
use rustix::process::Signal;

fn lead(world: &World, script: &str) -> Running {
    world.spawn(&[&["lead", "m"], &LEASE[..], &["--", "sh", "-c", script]].concat())
}

fn schedule(world: &World, when: &[&str], script: &str) -> Running {
    world.spawn(&[&["schedule", "m"], when, &LEASE[..], &["--", "sh", "-c", script]].concat())
}

/// Waits until a second contender is in the queue.
fn until_waiting(world: &World) {
    until_true("second in the queue", || {
        world.run(&["status", "m", "--json"]).out.contains("\"waiters\": 1")
    });
}

/// A lease and a poll that outlast every wait here: only a release explains a change of the leader.
const LONG: [&str; 4] = ["--ttl", "60s", "--transition", "40s"];

#[test]
fn leader_that_is_asked_to_end_waits_for_its_command_and_wakes_the_next() {
    let world = World::new();
    let lead = |script: &str| world.spawn(&[&["lead", "m"], &LONG[..], &["--", "sh", "-c", script]].concat());
    let script = format!("trap 'sleep 0.5; echo $SIMBA_FENCING_TOKEN >> beats; exit 0' TERM; {BEAT}");
    let first = lead(&script);
    let token = world.beat_after(0);
    let second = lead(BEAT);
    until_waiting(&world);
    first.signal(Signal::TERM);
    let finished = first.wait().expect(0);
    assert!(finished.err.contains("SIGTERM") && finished.err.contains("released"), "{finished:?}");
    let next =
        common::within(Duration::from_secs(20), || world.beats().into_iter().find(|beat| *beat > token));
    assert!(next.is_some() && is_alive(second.pid()), "the release did not wake the next: {}", second.err());
    world.assert_no_overlap();
    // Nobody is left, and nothing held, after the second.
    second.signal(Signal::INT);
    second.wait().expect(0);
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

/// Works on for longer than the lease once it is asked to end.
const DRAIN: &str = "trap 'n=0; while [ $n -lt 160 ]; do n=$((n+1)); echo $SIMBA_FENCING_TOKEN >> beats; \
                     sleep 0.05; done; echo drained > drained; exit 0' TERM; \
                     while :; do echo $SIMBA_FENCING_TOKEN >> beats; sleep 0.01; done";

#[test]
fn command_that_drains_longer_than_the_lease_is_waited_for() {
    for every in [None, Some("1s")] {
        let world = World::new();
        let start = |script: &str| match every {
            Some(time) => schedule(&world, &["--every", time], script),
            None => lead(&world, script),
        };
        let first = start(DRAIN);
        let token = world.beat_after(0);
        let second = start(BEAT);
        first.signal(Signal::TERM);
        let finished = first.wait().expect(0);
        assert!(finished.err.contains("SIGTERM") && finished.err.contains("released"), "{finished:?}");
        assert_eq!(world.read("drained"), "drained\n", "{finished:?}");
        world.beat_after(token);
        world.assert_no_overlap();
        drop(second);
    }
}

#[test]
fn failure_of_a_command_that_drains_is_the_exit_code() {
    let script = "trap 'exit 7' TERM; echo up > up; while :; do sleep 0.01; done";
    for start in [lead, |world: &World, script: &str| schedule(world, &["--every", "1s"], script)] {
        let world = World::new();
        let leader = start(&world, script);
        line(&world.path("up"));
        leader.signal(Signal::TERM);
        let finished = leader.wait().expect(7);
        assert!(finished.err.contains("SIGTERM was passed on"), "{finished:?}");
    }
}

#[test]
fn command_that_drains_when_the_mutex_is_lost_is_killed_with_75() {
    let script = "trap 'echo asked > asked' TERM; echo up > up; while :; do sleep 0.01; done";
    for start in [lead, |world: &World, script: &str| schedule(world, &["--every", "1s"], script)] {
        let world = World::new();
        let mut leader = start(&world, script);
        line(&world.path("up"));
        leader.signal(Signal::TERM);
        line(&world.path("asked"));
        let hung = common::hang(&world);
        assert_eq!(leader.status().code(), Some(75), "{}", leader.err());
        assert!(leader.err().contains("the mutex was lost"), "{}", leader.err());
        assert_eq!(leader.processes(), Vec::<i32>::new());
        drop(hung);
    }
}

/// As under `simba run`: a service manager that has waited long enough kills.
#[test]
fn leader_whose_command_ignores_the_signal_leads_until_it_is_killed() {
    let world = World::new();
    let mut first = lead(&world, &format!("trap '' TERM; {BEAT}"));
    let token = world.beat_after(0);
    let second = lead(&world, BEAT);
    first.signal(Signal::TERM);
    thread::sleep(LEASE_LENGTH * 4 / 3);
    assert!(!first.is_over() && world.beats().iter().all(|beat| *beat == token), "{}", first.err());
    first.signal(Signal::KILL);
    world.beat_after(token);
    assert_eq!(first.work(), Vec::<i32>::new());
    world.assert_no_overlap();
    drop(second);
}

#[test]
fn a_command_is_started_again_when_it_ends_and_when_the_lead_was_lost() {
    let world = World::new();
    let mut leader = lead(&world, &format!("trap '' TERM; {BEAT}"));
    let first = world.beat_after(0);
    // Lost: the store hangs.
    let hung = common::hang(&world);
    until_true("end of the command", || common::children(leader.pid()).is_empty());
    drop(hung);
    let second = world.beat_after(first);
    // Ended: by somebody else.
    let command = until("command", || common::children(leader.guard()).first().copied());
    send(command, Signal::KILL);
    let third = world.beat_after(second);
    assert!(third > second && !leader.is_over());
    // The guard is killed.
    send(leader.guard(), Signal::KILL);
    world.beat_after(third);
    world.assert_no_overlap();
    leader.signal(Signal::INT);
    leader.wait().expect(0);
}

#[test]
fn a_killed_or_stopped_leader_leaves_no_command_beside_the_next() {
    for signal in [Signal::KILL, Signal::STOP] {
        let world = World::new();
        let first = lead(&world, BEAT);
        let token = world.beat_after(0);
        let second = lead(&world, BEAT);
        first.signal(signal);
        world.beat_after(token);
        assert_eq!(first.work(), Vec::<i32>::new());
        thread::sleep(Duration::from_millis(200));
        world.assert_no_overlap();
        drop(second);
    }
}

#[test]
fn a_leader_passes_other_signals_on_and_leaves_no_zombies() {
    let world = World::new();
    let leader = lead(&world, "trap 'echo heard > heard' USR1; echo up > up; while :; do sleep 0.01; done");
    line(&world.path("up"));
    leader.signal(Signal::USR1);
    line(&world.path("heard"));
    leader.signal(Signal::TERM);
    leader.wait().expect(0);
    let scheduler = schedule(&world, &["--every", "100ms"], "echo run >> runs");
    until_true("ten runs", || world.read("runs").lines().count() >= 10);
    until_true("no zombie", || common::children(scheduler.pid()).into_iter().all(is_alive));
    scheduler.signal(Signal::TERM);
    scheduler.wait().expect(0);
}

#[test]
fn who_waits_for_the_lead_ends_at_once() {
    let world = World::new();
    let first = lead(&world, BEAT);
    world.beat_after(0);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let second = lead(&world, "touch started");
        until_waiting(&world);
        second.signal(signal);
        second.wait().expect(0);
    }
    assert!(!world.path("started").exists());
    drop(first);
}

#[test]
fn a_schedule_runs_on_one_of_two_and_never_overlaps() {
    let world = World::new();
    let script = "trap 'rm -f busy; exit 0' TERM; [ -e busy ] && echo overlap >> runs; touch busy; echo $SIMBA_CONTENDER_ID >> runs; sleep 0.15; rm busy";
    let every = ["--every", "100ms"];
    let (first, second) = (schedule(&world, &every, script), schedule(&world, &every, script));
    until_true("some runs", || world.read("runs").lines().count() >= 8);
    let runs = world.read("runs");
    let leader = runs.lines().next().unwrap().to_owned();
    assert!(runs.lines().all(|run| run == leader), "one leader, one at a time: {runs}");
    // The other goes on when the leader ends.
    let pid = format!(".{}@", base36(first.pid()));
    let (leading, other) = if leader.contains(&pid) { (first, second) } else { (second, first) };
    leading.signal(Signal::TERM);
    leading.wait().expect(0);
    until_true("runs of the other", || world.read("runs").lines().any(|run| run != leader));
    assert!(!world.read("runs").contains("overlap"));
    other.signal(Signal::TERM);
    other.wait().expect(0);
    assert!(!world.path("busy").exists(), "a run that was begun came to its end or was ended");
}

fn base36(pid: i32) -> String {
    let (mut rest, mut digits) = (u32::try_from(pid).unwrap(), String::new());
    while rest > 0 {
        digits.insert(0, char::from_digit(rest % 36, 36).unwrap());
        rest /= 36;
    }
    digits
}

#[test]
fn a_delay_rests_between_two_runs() {
    let world = World::new();
    let script = "date +%s%N >> begun; sleep 0.3; date +%s%N >> ended";
    let scheduler = schedule(&world, &["--delay", "200ms"], script);
    until_true("three runs", || world.read("ended").lines().count() >= 3);
    let times = |name| world.read(name).lines().map(|line| line.parse().unwrap()).collect::<Vec<u64>>();
    let (begun, ended) = (times("begun"), times("ended"));
    for (end, begin) in ended.iter().zip(&begun[1..]) {
        // A little less: the clock of the scheduler is not the one of `date`.
        assert!(begin > end && begin - end >= 190_000_000, "{begun:?} {ended:?}");
    }
    scheduler.signal(Signal::TERM);
    scheduler.wait().expect(0);
}

/// Kathmandu is ahead by an hour that is not whole: who takes the expression for another zone's waits for hours.
#[test]
fn a_cron_expression_runs_at_its_second_in_its_zone() {
    let world = World::new();
    let due = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() + 8;
    let there = due + 5 * 3600 + 45 * 60;
    let cron = format!("{} {} {} * * *", there % 60, there / 60 % 60, there / 3600 % 24);
    let scheduler = schedule(&world, &["--cron", &cron, "--tz", "Asia/Kathmandu"], "date +%s >> runs");
    let ran =
        common::within(Duration::from_secs(30), || world.read("runs").lines().next().map(str::to_owned));
    let at: u64 = ran.expect("a run within seconds").parse().unwrap();
    assert!((due..due + 6).contains(&at), "at {due}, not at {at}");
    scheduler.signal(Signal::TERM);
    scheduler.wait().expect(0);
}

#[test]
fn a_run_of_a_schedule_that_is_told_to_end_is_told_and_waited_for() {
    let world = World::new();
    let script =
        "trap 'sleep 0.3; echo orderly > end; exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let mut scheduler = schedule(&world, &["--every", "1s"], script);
    line(&world.path("up"));
    scheduler.signal(Signal::TERM);
    assert_eq!(scheduler.status().code(), Some(0), "{}", scheduler.err());
    assert_eq!(world.read("end"), "orderly\n");
    assert_eq!(scheduler.processes(), Vec::<i32>::new());
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

#[test]
fn a_scheduler_that_is_killed_or_stopped_leaves_no_run_beside_the_next() {
    for signal in [Signal::KILL, Signal::STOP] {
        let world = World::new();
        let first = schedule(&world, &["--every", "100ms"], BEAT);
        let token = world.beat_after(0);
        let second = schedule(&world, &["--every", "100ms"], BEAT);
        first.signal(signal);
        world.beat_after(token);
        assert_eq!(first.work(), Vec::<i32>::new());
        thread::sleep(Duration::from_millis(200));
        world.assert_no_overlap();
        drop(second);
    }
}

#[test]
fn a_failed_run_is_told_and_the_next_comes() {
    let world = World::new();
    let scheduler = schedule(&world, &["--every", "100ms"], "echo run >> runs; exit 3");
    until_true("three runs", || world.read("runs").lines().count() >= 3);
    scheduler.signal(Signal::TERM);
    let finished = scheduler.wait();
    // The signal may come while the command runs, which then gives the exit code.
    assert!(matches!(finished.code(), 0 | 3) && finished.err.contains("failed"), "{finished:?}");
    fs::remove_file(world.path("runs")).unwrap();
}
