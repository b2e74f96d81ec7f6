//! `simba lead` and `simba schedule`: commands on the leader only.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::thread;
use std::time::{Duration, SystemTime};

use common::rows::{BEAT, LEASE, LEASE_LENGTH, ROOMY_LEASE};
use common::{Running, World, is_alive, line, send, until, until_true};
use rustix::process::Signal;

fn lead(world: &World, script: &str) -> Running {
    lead_under(&LEASE, world, script)
}

fn lead_under(lease: &[&str], world: &World, script: &str) -> Running {
    world.spawn(&[&["lead", "m"], lease, &["--", "sh", "-c", script]].concat())
}

fn schedule(world: &World, when: &[&str], script: &str) -> Running {
    schedule_under(&LEASE, world, when, script)
}

fn schedule_under(lease: &[&str], world: &World, when: &[&str], script: &str) -> Running {
    world.spawn(&[&["schedule", "m"], when, lease, &["--", "sh", "-c", script]].concat())
}

/// A lease and a poll that are longer than every wait here: only a release explains a change of the leader.
const LONG: [&str; 4] = ["--ttl", "60s", "--transition", "40s"];

#[test]
fn terminated_leader_waits_for_its_command_and_notifies_the_next() {
    let world = World::new();
    let lead = |script: &str| lead_under(&LONG, &world, script);
    let script = format!("trap 'sleep 0.5; echo $SIMBA_FENCING_TOKEN >> beats; exit 0' TERM; {BEAT}");
    let first = lead(&script);
    let token = world.beat_after(0);
    let second = lead(BEAT);
    world.until_waiting("m", 1);
    first.signal(Signal::TERM);
    let finished = first.wait().expect(0);
    assert!(finished.err.contains("SIGTERM") && finished.err.contains("released"), "{finished:?}");
    let next =
        common::within(Duration::from_secs(20), || world.beats().into_iter().find(|beat| *beat > token));
    assert!(
        next.is_some() && is_alive(second.pid()),
        "the release did not notify the next waiter: {}",
        second.err()
    );
    world.assert_no_overlap();
    // Nothing is held after the second has ended.
    second.signal(Signal::INT);
    second.wait().expect(0);
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

/// A script that continues for longer than the lease after TERM.
const DRAIN: &str = "trap 'n=0; while [ $n -lt 200 ]; do n=$((n+1)); echo $SIMBA_FENCING_TOKEN >> beats; \
                     sleep 0.05; done; echo drained > drained; exit 0' TERM; \
                     while :; do echo $SIMBA_FENCING_TOKEN >> beats; sleep 0.01; done";

#[test]
fn leader_waits_for_a_command_that_drains_longer_than_the_lease() {
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
fn signal_that_arrives_before_the_end_of_the_command_counts_as_passed_on() {
    let world = World::new();
    world.fifo("go");
    let leader = lead_under(&LONG, &world, "echo up > up; read go < go; exit 7");
    line(&world.path("up"));
    let guard = leader.guard();
    leader.signal(Signal::STOP);
    leader.signal(Signal::TERM);
    fs::write(world.path("go"), "\n").unwrap();
    until_true("end of the guard", || !is_alive(guard));
    leader.signal(Signal::CONT);
    leader.wait().expect(7);
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
        leader.assert_nothing_left();
        drop(hung);
    }
}

/// As under `simba run`: a service manager sends KILL after its own time limit.
#[test]
fn leader_whose_command_ignores_term_leads_until_it_is_killed() {
    let world = World::new();
    let mut first = lead(&world, &format!("trap '' TERM; {BEAT}"));
    let token = world.beat_after(0);
    let second = lead(&world, BEAT);
    first.signal(Signal::TERM);
    thread::sleep(LEASE_LENGTH + Duration::from_secs(1));
    assert!(!first.has_ended() && world.beats().iter().all(|beat| *beat == token), "{}", first.err());
    first.signal(Signal::KILL);
    world.beat_after(token);
    assert_eq!(first.work(), Vec::<i32>::new());
    world.assert_no_overlap();
    drop(second);
}

#[test]
fn command_is_restarted_after_its_end_and_after_a_loss() {
    let world = World::new();
    let mut leader = lead(&world, &format!("trap '' TERM; {BEAT}"));
    let first = world.beat_after(0);
    // Lost: the store hangs.
    let hung = common::hang(&world);
    until_true("end of the command", || common::children(leader.pid()).is_empty());
    drop(hung);
    let second = world.beat_after(first);
    // Ended: killed by another process.
    let command = until("command", || common::children(leader.guard()).first().copied());
    send(command, Signal::KILL);
    let third = world.beat_after(second);
    assert!(third > second && !leader.has_ended());
    // The guard is killed.
    send(leader.guard(), Signal::KILL);
    world.beat_after(third);
    world.assert_no_overlap();
    leader.signal(Signal::INT);
    leader.wait().expect(0);
}

/// Starts two contenders and sends the first a signal that it cannot handle. Its command must end before the next
/// one's starts.
fn commands_do_not_overlap_after(signal: Signal, start: impl Fn(&World) -> Running) {
    let world = World::new();
    let first = start(&world);
    let token = world.beat_after(0);
    let second = start(&world);
    first.signal(signal);
    world.beat_after(token);
    assert_eq!(first.work(), Vec::<i32>::new());
    world.more_beats();
    world.assert_no_overlap();
    drop(second);
}

#[test]
fn command_of_a_killed_leader_does_not_overlap_the_next() {
    commands_do_not_overlap_after(Signal::KILL, |world| lead(world, BEAT));
}

#[test]
fn command_of_a_stopped_leader_does_not_overlap_the_next() {
    commands_do_not_overlap_after(Signal::STOP, |world| lead_under(&ROOMY_LEASE, world, BEAT));
}

#[test]
fn leader_passes_other_signals_on_and_leaves_no_zombies() {
    let world = World::new();
    let leader = lead(&world, "trap 'echo usr1 > usr1' USR1; echo up > up; while :; do sleep 0.01; done");
    line(&world.path("up"));
    leader.signal(Signal::USR1);
    line(&world.path("usr1"));
    leader.signal(Signal::TERM);
    leader.wait().expect(0);
    let scheduler = schedule(&world, &["--every", "100ms"], "echo run >> runs");
    until_true("ten runs", || world.read("runs").lines().count() >= 10);
    until_true("no zombie", || common::children(scheduler.pid()).into_iter().all(is_alive));
    scheduler.signal(Signal::TERM);
    scheduler.wait().expect(0);
}

#[test]
fn waiter_for_leadership_ends_at_once() {
    let world = World::new();
    let first = lead(&world, BEAT);
    world.beat_after(0);
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        let second = lead(&world, "touch started");
        world.until_waiting("m", 1);
        second.signal(signal);
        second.wait().expect(0);
    }
    assert!(!world.path("started").exists());
    drop(first);
}

#[test]
fn schedule_runs_on_one_of_two_processes_without_overlap() {
    let world = World::new();
    let script = "trap 'rm -f busy; exit 0' TERM; [ -e busy ] && echo overlap >> runs; touch busy; echo $SIMBA_CONTENDER_ID >> runs; sleep 0.15; rm busy";
    let every = ["--every", "100ms"];
    let (first, second) = (schedule(&world, &every, script), schedule(&world, &every, script));
    until_true("some runs", || world.read("runs").lines().count() >= 8);
    let runs = world.read("runs");
    let leader = runs.lines().next().unwrap().to_owned();
    assert!(runs.lines().all(|run| run == leader), "more than one leader: {runs}");
    // The other takes over when the leader ends.
    let pid = format!(".{}@", base36(first.pid()));
    let (leading, other) = if leader.contains(&pid) { (first, second) } else { (second, first) };
    leading.signal(Signal::TERM);
    leading.wait().expect(0);
    until_true("runs of the other", || world.read("runs").lines().any(|run| run != leader));
    assert!(!world.read("runs").contains("overlap"));
    other.signal(Signal::TERM);
    other.wait().expect(0);
    assert!(!world.path("busy").exists(), "a run was neither finished nor ended");
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
fn delay_separates_two_runs() {
    let world = World::new();
    let script = "date +%s%N >> begun; sleep 0.3; date +%s%N >> ended";
    let scheduler = schedule(&world, &["--delay", "200ms"], script);
    until_true("three runs", || world.read("ended").lines().count() >= 3);
    let times = |name| world.read(name).lines().map(|line| line.parse().unwrap()).collect::<Vec<u64>>();
    let (begun, ended) = (times("begun"), times("ended"));
    for (end, begin) in ended.iter().zip(&begun[1..]) {
        // Slightly less: the clock of the scheduler is not the one of `date`.
        assert!(begin > end && begin - end >= 190_000_000, "{begun:?} {ended:?}");
    }
    scheduler.signal(Signal::TERM);
    scheduler.wait().expect(0);
}

/// Kathmandu has an offset of 5:45 h: with the expression in another zone, the test would wait for hours.
#[test]
fn cron_expression_runs_at_its_second_in_its_zone() {
    let world = World::new();
    let due = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs() + 20;
    let there = due + 5 * 3600 + 45 * 60;
    let cron = format!("{} {} {} * * *", there % 60, there / 60 % 60, there / 3600 % 24);
    let when = ["-v", "--cron", &cron, "--tz", "Asia/Kathmandu"];
    let scheduler = schedule_under(&LONG, &world, &when, "date +%s >> runs");
    let ran =
        common::within(Duration::from_secs(60), || world.read("runs").lines().next().map(str::to_owned));
    let Some(ran) = ran else { panic!("no run at {due}: {}", scheduler.err()) };
    let at: u64 = ran.parse().unwrap();
    assert!((due..due + 30).contains(&at), "at {due}, not at {at}");
    scheduler.signal(Signal::TERM);
    scheduler.wait().expect(0);
}

#[test]
fn terminated_schedule_passes_the_signal_on_and_waits_for_its_run() {
    let world = World::new();
    let script =
        "trap 'sleep 0.3; echo orderly > end; exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let mut scheduler = schedule(&world, &["--every", "1s"], script);
    line(&world.path("up"));
    scheduler.signal(Signal::TERM);
    assert_eq!(scheduler.status().code(), Some(0), "{}", scheduler.err());
    assert_eq!(world.read("end"), "orderly\n");
    scheduler.assert_nothing_left();
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

#[test]
fn run_of_a_killed_scheduler_does_not_overlap_the_next() {
    commands_do_not_overlap_after(Signal::KILL, |world| schedule(world, &["--every", "100ms"], BEAT));
}

#[test]
fn run_of_a_stopped_scheduler_does_not_overlap_the_next() {
    let start = |world: &World| schedule_under(&ROOMY_LEASE, world, &["--every", "100ms"], BEAT);
    commands_do_not_overlap_after(Signal::STOP, start);
}

#[test]
fn failed_run_is_logged_and_the_next_one_starts() {
    let world = World::new();
    let scheduler = schedule(&world, &["--every", "100ms"], "echo run >> runs; exit 3");
    until_true("three runs", || world.read("runs").lines().count() >= 3);
    scheduler.signal(Signal::TERM);
    let finished = scheduler.wait();
    // The signal may arrive while the command runs, whose exit code is then returned.
    assert!(matches!(finished.code(), 0 | 3) && finished.err.contains("failed"), "{finished:?}");
    fs::remove_file(world.path("runs")).unwrap();
}
