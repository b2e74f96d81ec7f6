//! The guard alone: its behaviour when `simba` sends nothing, too little, or too late.

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
use rustix::net::sockopt::set_socket_send_buffer_size;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use rustix::process::Signal;
use rustix::time::{ClockId, clock_gettime};

/// A guard that gets its orders from the test instead of `simba`.
struct Guarded {
    running: Running,
    socket: UnixStream,
}

impl Guarded {
    /// Starts a guard that may run the script until this many milliseconds from now.
    fn start(world: &World, script: &str, end: i64, kill: i64) -> Self {
        let guarded = Self::start_without_orders(world, script);
        guarded.send_first_order(end, kill);
        guarded
    }

    /// Starts a guard that waits for its first order.
    fn start_without_orders(world: &World, script: &str) -> Self {
        let (socket, theirs) = UnixStream::pair().unwrap();
        // As small as possible: a few unread reports fill it.
        set_socket_send_buffer_size(&theirs, 0).unwrap();
        let mut command = world.bare();
        command.args(["__guard", "0", "sh", "-c", script]).stdin(Stdio::from(OwnedFd::from(theirs)));
        Self { running: world.start(command), socket }
    }

    fn send_first_order(&self, end: i64, kill: i64) {
        let input = fs::File::open("/dev/null").unwrap();
        let fds = [input.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut rights = SendAncillaryBuffer::new(&mut space);
        rights.push(SendAncillaryMessage::ScmRights(&fds));
        let text = until_line(end, kill);
        sendmsg(&self.socket, &[IoSlice::new(text.as_bytes())], &mut rights, SendFlags::empty()).unwrap();
    }

    fn order(&mut self, order: &str) {
        self.socket.write_all(order.as_bytes()).unwrap();
    }

    /// Returns all its reports until it is gone.
    fn reports(self) -> Vec<String> {
        self.socket.set_read_timeout(Some(common::SOON)).unwrap();
        let reports = BufReader::new(&self.socket).lines().map_while(Result::ok).collect();
        let mut running = self.running;
        running.status();
        assert_eq!(running.processes(), Vec::<i32>::new(), "processes are left");
        reports
    }
}

/// Returns an order with deadlines, on the clock of the leases.
fn until_line(end: i64, kill: i64) -> String {
    let now = clock_gettime(ClockId::Boottime);
    let at = |ms: i64| now.tv_sec * 1_000_000_000 + now.tv_nsec + ms * 1_000_000;
    format!("until {} {}\n", at(end), at(kill))
}

#[test]
fn command_past_its_deadline_is_not_started() {
    let world = World::new();
    let guarded = Guarded::start(&world, "touch started", -1, 1000);
    assert_eq!(guarded.reports(), ["overdue"]);
    assert!(!world.path("started").exists());
}

/// The mutex is acquired and the guard has its deadlines, but it is stopped before it starts the command.
#[test]
fn guard_that_is_stopped_until_the_deadline_starts_nothing() {
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
fn command_without_renewals_gets_term_and_then_kill() {
    let world = World::new();
    let script = "trap 'echo term > term' TERM; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 60_000, 61_000);
    line(&world.path("up"));
    guarded.order(&until_line(500, 8500));
    let reports = guarded.reports();
    assert_eq!(world.read("term"), "term\n");
    assert!(reports[0].starts_with("started ") && reports.last().unwrap() == "overdue", "{reports:?}");
    assert!(reports.contains(&"signaled 9".to_owned()), "{reports:?}");
}

#[test]
fn renewal_moves_the_deadlines() {
    let world = World::new();
    let script = "trap 'echo term > term; exit 0' TERM; sleep 4; sleep 4; exit 3";
    let mut guarded = Guarded::start(&world, script, 6000, 6500);
    guarded.order(&until_line(60_000, 61_000));
    let reports = guarded.reports();
    assert_eq!(reports[1..], ["exited 3", "clean"], "{reports:?}");
    assert_eq!(world.read("term"), "");
}

#[test]
fn renewal_after_an_end_order_is_ignored() {
    let world = World::new();
    let script = "trap '' TERM; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 60_000, 61_000);
    line(&world.path("up"));
    guarded.order(&until_line(60_000, 6000));
    guarded.order("end\n");
    guarded.order(&until_line(60_000, 61_000));
    assert_eq!(guarded.reports().last().unwrap(), "overdue");
}

#[test]
fn broken_socket_ends_the_command() {
    let world = World::new();
    let guarded =
        Guarded::start(&world, "trap '' TERM; echo up > up; while :; do sleep 0.01; done", 600_000, 601_000);
    line(&world.path("up"));
    let Guarded { mut running, socket } = guarded;
    drop(socket);
    running.status();
    assert_eq!(running.processes(), Vec::<i32>::new());
}

#[test]
fn partial_and_invalid_orders_are_tolerated() {
    let world = World::new();
    let script =
        "trap 'echo usr2 > usr2' USR2; trap 'exit 5' USR1; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 60_000, 61_000);
    line(&world.path("up"));
    for piece in ["nonsense\n", "until\n", "signal x\n", "signal 64000\n", "\n\n"] {
        guarded.order(piece);
    }
    // One write: when the command gets the signal, the guard has read the partial order, too.
    guarded.order("signal 12\nsig");
    line(&world.path("usr2"));
    guarded.order("nal 10\n");
    assert_eq!(guarded.reports()[1..], ["exited 5", "clean"]);
}

#[test]
fn guard_ignores_signals() {
    let world = World::new();
    let mut guarded = Guarded::start(&world, "echo up > up; exec sleep 1000", 60_000, 61_000);
    line(&world.path("up"));
    for signal in
        [Signal::TERM, Signal::INT, Signal::HUP, Signal::QUIT, Signal::USR1, Signal::ALARM, Signal::TSTP]
    {
        guarded.running.signal(signal);
    }
    // Signals are delivered before orders: a guard that one of them ends or stops would execute no order.
    guarded.order("kill\n");
    assert_eq!(guarded.reports()[1..], ["signaled 9", "overdue"]);
}

/// As when `simba` is stopped: the reports are not read, and every stop of the command is a report.
#[test]
fn unread_reports_do_not_delay_the_kill() {
    let world = World::new();
    let script = "trap '' TERM; n=0; while [ $n -lt 60 ]; do n=$((n+1)); \
                  (kill -STOP $$; sleep 0.01; kill -CONT $$); done; echo up > up; while :; do sleep 0.01; done";
    let mut guarded = Guarded::start(&world, script, 120_000, 121_000);
    line(&world.path("up"));
    guarded.order(&until_line(0, 0));
    until_true("end of the command", || guarded.running.work().is_empty());
    assert_eq!(guarded.reports().last().unwrap(), "overdue");
}

#[test]
fn orphans_of_the_command_become_children_of_the_guard() {
    let world = World::new();
    let running = world.spawn_script("(sleep 1000 & echo $! > orphan); echo up > up; exec sleep 1000");
    line(&world.path("up"));
    let orphan: i32 = line(&world.path("orphan")).parse().unwrap();
    let guard = running.guard();
    until("orphan of the guard", || children(guard).contains(&orphan).then_some(()));
    running.signal(Signal::TERM);
    let mut running = running;
    assert_eq!(running.status().code(), Some(143));
    assert!(!is_alive(orphan));
}

/// Tests that switch to another user.
mod as_root {
    use super::*;

    /// A program of root below a `simba` of another user: it cannot be killed, so the mutex is not freed.
    #[test]
    fn unkillable_process_keeps_the_mutex_until_the_lease_ends() {
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
            "3s",
            "--transition",
            "5s",
            "--grace",
            "4500ms",
            "m",
            "--",
            "sh",
            "-c",
            script,
        ]);
        command.current_dir(world.dir.path()).env("HOME", world.dir.path()).env_remove("XDG_CONFIG_HOME");
        let mut running = world.start(command);
        assert_eq!(running.status().code(), Some(75), "{}", running.err());
        assert!(running.err().contains("left"), "{}", running.err());
        let root: i32 = line(&world.path("root")).parse().unwrap();
        assert!(is_alive(root));
        // The lease has six more seconds.
        world.run(&["run", "-n", "m", "--", "true"]).expect(1);
        send(root, Signal::KILL);
        until_true("end of the lease", || world.run(&["run", "-n", "m", "--", "true"]).code() == 0);
    }
}
