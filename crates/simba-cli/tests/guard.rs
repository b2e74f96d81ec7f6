//! The guard by itself: what it does when `simba` says nothing, too little, or too late.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::io::{BufRead as _, BufReader, IoSlice, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::Stdio;
use std::time::Duration;

use common::{Running, World, children, is_alive, is_guard, line, send, stat, tool, until, until_true};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};

/// A guard, with us in the place of `simba`.
struct Guarded {
    running: Running,
    line: UnixStream,
}

impl Guarded {
    /// Starts a guard that may let the script run until so many milliseconds from now.
    fn start(world: &World, script: &str, end: i64, kill: i64) -> Self {
        let guarded = Self::start_without_orders(world, script);
        guarded.send_first_order(end, kill);
        guarded
    }

    /// Starts a guard that waits for its first order.
    fn start_without_orders(world: &World, script: &str) -> Self {
        let (line, theirs) = UnixStream::pair().unwrap();
        let mut command = world.bare();
        command.args(["__guard", "0", "sh", "-c", script]).stdin(Stdio::from(OwnedFd::from(theirs)));
        Self { running: world.start(command), line }
    }

    fn send_first_order(&self, end: i64, kill: i64) {
        let input = fs::File::open("/dev/null").unwrap();
        let fds = [input.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        rights.push(SendAncillaryMessage::ScmRights(&fds));
        let text = until_line(end, kill);
        sendmsg(&self.line, &[IoSlice::new(text.as_bytes())], &mut rights, SendFlags::empty()).unwrap();
    }

    fn order(&mut self, order: &str) {
        self.line.write_all(order.as_bytes()).unwrap();
    }

    /// All that it says until it is gone.
    fn reports(self) -> Vec<String> {
        self.line.set_read_timeout(Some(common::SOON)).unwrap();
        let said = BufReader::new(&self.line).lines().map_while(Result::ok).collect();
        let mut running = self.running;
        running.status();
        assert_eq!(running.processes(), Vec::<i32>::new(), "nothing is left");
        said
    }
}

/// An order about time, on the clock of the leases.
fn until_line(end: i64, kill: i64) -> String {
    let now = clock_gettime(ClockId::Boottime);
    let at = |ms: i64| now.tv_sec * 1_000_000_000 + now.tv_nsec + ms * 1_000_000;
    format!("until {} {}\n", at(end), at(kill))
}

#[test]
fn a_command_whose_time_is_up_is_not_started() {
    let world = World::new();
    let guarded = Guarded::start(&world, "touch started", -1, 1000);
    assert_eq!(guarded.reports(), ["overdue"]);
    assert!(!world.path("started").exists());
}

/// The mutex is acquired and the guard knows until when, but it is stopped before it starts the command.
#[test]
fn guard_that_is_stopped_until_the_time_is_up_starts_nothing() {
    let world = World::new();
    let guarded = Guarded::start_without_orders(&world, "touch started");
    until_true("guard that waits for its first order", || is_guard(guarded.running.pid()));
    guarded.running.signal(Signal::STOP);
    until_true("stopped guard", || stat(guarded.running.pid(), 0).as_deref() == Some("T"));
    guarded.send_first_order(1000, 60_000);
    std::thread::sleep(Duration::from_millis(1500));
    guarded.running.signal(Signal::CONT);
    assert_eq!(guarded.reports(), ["overdue"]);
    assert!(!world.path("started").exists());
}

#[test]
fn silence_ends_the_command_first_by_word_then_by_force() {
    let world = World::new();
    let script = "trap 'echo told > told' TERM; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 60_000, 61_000);
    line(&world.path("up"));
    guarded.order(&until_line(500, 3500));
    let said = guarded.reports();
    assert_eq!(world.read("told"), "told\n");
    assert!(said[0].starts_with("started ") && said.last().unwrap() == "overdue", "{said:?}");
    assert!(said.contains(&"signaled 9".to_owned()), "{said:?}");
}

#[test]
fn a_renewal_that_is_heard_gives_more_time() {
    let world = World::new();
    let script = "trap 'echo told > told; exit 0' TERM; sleep 2; sleep 2; exit 3";
    let mut guarded = Guarded::start(&world, script, 3000, 3500);
    guarded.order(&until_line(60_000, 61_000));
    let said = guarded.reports();
    assert_eq!(said[1..], ["exited 3", "clean"], "{said:?}");
    assert_eq!(world.read("told"), "");
}

#[test]
fn what_was_told_to_end_is_not_told_otherwise() {
    let world = World::new();
    let script = "trap '' TERM; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 60_000, 6000);
    line(&world.path("up"));
    guarded.order("end\n");
    guarded.order(&until_line(60_000, 61_000));
    assert_eq!(guarded.reports().last().unwrap(), "overdue");
}

#[test]
fn a_line_that_breaks_ends_everything() {
    let world = World::new();
    let guarded =
        Guarded::start(&world, "trap '' TERM; echo up > up; while :; do sleep 0.01; done", 60_000, 61_000);
    line(&world.path("up"));
    let Guarded { mut running, line: ours } = guarded;
    drop(ours);
    running.status();
    assert_eq!(running.processes(), Vec::<i32>::new());
}

#[test]
fn half_an_order_and_nonsense_do_no_harm() {
    let world = World::new();
    let mut guarded = Guarded::start(
        &world,
        "trap 'exit 5' USR1; echo up > up; while :; do sleep 0.01; done",
        60_000,
        61_000,
    );
    line(&world.path("up"));
    for piece in ["nonsense\n", "until\n", "signal x\n", "signal 64000\n", "\n\n", "sig"] {
        guarded.order(piece);
        std::thread::sleep(Duration::from_millis(20));
    }
    guarded.order("nal 10\n");
    assert_eq!(guarded.reports()[1..], ["exited 5", "clean"]);
}

#[test]
fn signals_to_the_guard_do_not_end_it() {
    let world = World::new();
    let mut guarded = Guarded::start(&world, "echo up > up; exec sleep 1000", 60_000, 61_000);
    line(&world.path("up"));
    for signal in
        [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::ALARM, Signal::TSTP]
    {
        guarded.running.signal(signal);
    }
    std::thread::sleep(Duration::from_millis(200));
    assert!(is_alive(guarded.running.pid()) && !guarded.running.is_over());
    guarded.order("kill\n");
    assert_eq!(guarded.reports()[1..], ["signaled 9", "overdue"]);
}

/// As when `simba` is stopped: nobody reads, and every stop of the command is a report.
#[test]
fn reports_that_nobody_reads_do_not_delay_the_end() {
    let world = World::new();
    let script = "trap '' TERM; n=0; while [ $n -lt 600 ]; do n=$((n+1)); \
                  (kill -STOP $$; sleep 0.002; kill -CONT $$); done; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 120_000, 121_000);
    line(&world.path("up"));
    guarded.order(&until_line(0, 0));
    until_true("end of the command", || guarded.running.work().is_empty());
    assert_eq!(guarded.reports().last().unwrap(), "overdue");
}

#[test]
fn a_command_that_is_killed_leaves_its_children_to_the_guard_and_not_to_init() {
    let world = World::new();
    let running = world.spawn(&[
        "run",
        "m",
        "--",
        "sh",
        "-c",
        "(sleep 1000 & echo $! > orphan); echo up > up; exec sleep 1000",
    ]);
    line(&world.path("up"));
    let orphan: i32 = line(&world.path("orphan")).parse().unwrap();
    let guard = running.guard();
    until("orphan of the guard", || children(guard).contains(&orphan).then_some(()));
    running.signal(Signal::TERM);
    let mut running = running;
    assert_eq!(running.status().code(), Some(143));
    assert!(!is_alive(orphan));
}

/// Those that become another user.
mod as_root {
    use super::*;

    /// A program of root below a `simba` that is not: it cannot be killed, and so the mutex is not freed.
    #[test]
    fn what_cannot_be_ended_keeps_the_mutex_until_its_lease_is_over() {
        const USER: u32 = 61_235;
        let world = World::new();
        std::os::unix::fs::chown(world.dir.path(), Some(USER), None).unwrap();
        fs::copy(env!("CARGO_BIN_EXE_simba"), world.path("simba")).unwrap();
        let found = common::output(tool("sh").args(["-c", "command -v setpriv"])).unwrap().stdout;
        fs::copy(String::from_utf8(found).unwrap().trim(), world.path("become")).unwrap();
        let rights = std::os::unix::fs::PermissionsExt::from_mode(0o4755);
        fs::set_permissions(world.path("become"), rights).unwrap();
        let script = "./become --reuid=0 --regid=0 --clear-groups sh -c 'echo $$ > root; exec sleep 60' & \
                      while [ ! -s root ]; do sleep 0.01; done; exit 0";
        fs::write(world.path("root"), "").unwrap();
        let mut command = tool("setpriv");
        command.args([&format!("--reuid={USER}"), "--clear-groups", "--"]).arg(world.path("simba"));
        command.args([
            "--on",
            &world.url,
            "run",
            "--ttl",
            "4s",
            "--transition",
            "2s",
            "m",
            "--",
            "sh",
            "-c",
            script,
        ]);
        command.current_dir(world.dir.path()).env("HOME", world.dir.path());
        let mut running = world.start(command);
        assert_eq!(running.status().code(), Some(75), "{}", running.err());
        assert!(running.err().contains("left"), "{}", running.err());
        let root: i32 = line(&world.path("root")).parse().unwrap();
        assert!(is_alive(root));
        world.run(&["run", "-n", "m", "--", "true"]).expect(1);
        send(root, Signal::KILL);
        until_true("end of the lease", || world.run(&["run", "-n", "m", "--", "true"]).code() == 0);
    }
}
