//! The program on a terminal, below a shell with job control.
//!
//! Commands that are stopped wait at a fifo: a shell that is stopped in the middle of a fork blocks in the kernel, and
//! is not reported as stopped.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::thread;
use std::time::Duration;

use common::pty::Pty;
use common::{World, children, line, stat, until_true};

/// The options of a lease that lasts while the command is suspended.
const LONG: &str = "--ttl 60s --transition 40s";

/// Starts an interactive shell.
fn shell(world: &World) -> Pty {
    let pty = Pty::start(
        world,
        &["bash", "--norc", "--noprofile", "-i"],
        200,
        &[("PS1", "ready> "), ("LONG", LONG)],
    );
    pty.shows("ready> ");
    pty
}

fn number(world: &World, name: &str) -> i32 {
    line(&world.path(name)).parse().unwrap()
}

/// Returns whether the group of a process is in the foreground.
fn has_terminal(pty: &Pty, pid: i32) -> bool {
    let group = stat(pid, 2).unwrap_or_else(|| panic!("{pid} is gone:\n{}", pty.seen()));
    group == pty.foreground().to_string()
}

fn is_stopped(pid: i32) -> bool {
    stat(pid, 0).is_some_and(|state| state == "T")
}

#[test]
fn interrupt_reaches_only_the_command() {
    let world = World::new();
    let mut pty = shell(&world);
    // The command handles the signal itself.
    pty.types("$SIMBA --on $ON run m -- sh -c 'trap \"echo interrupted; sleep 0.2; exit 17\" INT; echo $$ > pid; while :; do sleep 0.01; done'; echo code=$?\n");
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x03");
    pty.shows("interrupted");
    pty.shows("code=17");
    // The shell has the terminal again: it reads.
    pty.types("echo still $((40 + 2))\n");
    pty.shows("still 42");
}

#[test]
fn command_ended_by_an_interrupt_exits_with_130() {
    let world = World::new();
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run m -- sh -c 'echo $$ > pid; exec sleep 1000'; echo code=$?\n");
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x03");
    pty.shows("code=130");
}

#[test]
fn suspended_command_suspends_simba_and_both_resume() {
    let world = World::new();
    world.fifo("go");
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run $LONG m -- sh -c 'echo $$ > pid; read go < go; exit 19'\n");
    let command = number(&world, "pid");
    let guard: i32 = stat(command, 1).unwrap().parse().unwrap();
    let simba: i32 = stat(guard, 1).unwrap().parse().unwrap();
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x1a");
    pty.shows("Stopped");
    assert!(is_stopped(simba) && is_stopped(command));
    // The shell works meanwhile.
    pty.types("echo still $((40 + 2))\n");
    pty.shows("still 42");
    pty.types("fg\n");
    until_true("command in the foreground again", || has_terminal(&pty, command) && !is_stopped(command));
    fs::write(world.path("go"), "\n").unwrap();
    pty.types("echo code=$?\n");
    pty.shows("code=19");
}

#[test]
fn background_command_does_not_get_the_terminal() {
    let world = World::new();
    world.fifo("go");
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run m -- sh -c 'echo $$ > pid; read go < go; echo done > done' &\n");
    let command = number(&world, "pid");
    assert!(!has_terminal(&pty, command));
    pty.types("echo still $((40 + 2))\n");
    pty.shows("still 42");
    let shell_group = pty.foreground();
    fs::write(world.path("go"), "\n").unwrap();
    line(&world.path("done"));
    pty.types("wait; echo over=$?\n");
    pty.shows("over=0");
    assert_eq!(pty.foreground(), shell_group);
}

/// `simba` must not resume the command while it is in the background: it would stop again at once, in a busy loop.
#[test]
fn background_command_that_reads_stays_stopped_until_foregrounded() {
    let world = World::new();
    let mut pty = shell(&world);
    // `set -b`: the shell reports a job at once. It would not resume one that it does not know to be stopped.
    pty.types(
        "set -b; $SIMBA --on $ON run $LONG m -- sh -c 'echo $$ > pid; read answer; echo got=$answer' &\n",
    );
    let command = number(&world, "pid");
    pty.shows("Stopped");
    let guard: i32 = stat(command, 1).unwrap().parse().unwrap();
    let simba: i32 = stat(guard, 1).unwrap().parse().unwrap();
    assert!(is_stopped(simba) && is_stopped(command));
    pty.types("fg\n");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("forty-two\n");
    pty.shows("got=forty-two");
}

#[test]
fn pipeline_is_suspended_as_a_whole() {
    let world = World::new();
    world.fifo("go");
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run $LONG m -- sh -c 'echo $$ > pid; read go < go; echo through' | cat\n");
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x1a");
    pty.shows("Stopped");
    pty.types("fg\n");
    until_true("running command", || !is_stopped(command));
    fs::write(world.path("go"), "\n").unwrap();
    pty.shows("\nthrough");
}

#[test]
fn command_with_redirected_input_still_has_the_terminal() {
    let world = World::new();
    let mut pty = shell(&world);
    let script = "echo $$ > pid; read input; read key < /dev/tty; echo $input $key";
    pty.types(&format!("echo input | $SIMBA --on $ON run m -- sh -c '{script}'\n"));
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("key\n");
    pty.shows("input key");
}

/// A `simba` that is paused does not give the terminal at once. The shell represents it here: it has the terminal until
/// `fg`.
#[test]
fn command_is_not_started_before_it_gets_the_terminal() {
    let world = World::new();
    let mut pty = shell(&world);
    pty.types("$SIMBA __exec $$ $$ sh -c 'echo up > up; read key < /dev/tty; echo got=$key' &\n");
    pty.types("echo still $((40 + 2))\n");
    pty.shows("still 42");
    thread::sleep(Duration::from_millis(1500));
    assert!(!world.path("up").exists());
    pty.types("fg\n");
    line(&world.path("up"));
    pty.types("key\n");
    pty.shows("got=key");
}

#[test]
fn script_gets_the_terminal_back_after_every_end() {
    let world = World::new();
    let mut pty = Pty::start(&world, &["sh"], 200, &[("PS1", "ready> ")]);
    // No job control: the script and `simba` are in one group.
    let ends = [
        ("true", "0"),
        ("no-such-command", "127"),
        ("sh -c 'kill -9 $$'", "137"),
        // The guard.
        ("sh -c 'kill -9 $PPID; sleep 5'", "75"),
        // `simba` itself.
        ("sh -c 'kill -9 $(ps -o ppid= $PPID); sleep 5'", "137"),
    ];
    fs::write(world.path("script"), script(&ends)).unwrap();
    pty.types("sh ./script; exit 3\n");
    for (at, (_, code)) in ends.iter().enumerate() {
        pty.shows(&format!("end{at}={code}"));
        pty.types(&format!("answer{at}\n"));
        pty.shows(&format!("read{at}=answer{at}"));
    }
    assert_eq!(pty.wait(), 3);
}

/// Returns a script that reads from the terminal after each command; a background group could not.
fn script(ends: &[(&str, &str)]) -> String {
    let one = |(at, (command, _)): (usize, &(&str, &str))| {
        format!(
            "$SIMBA --on $ON run m{at} -- {command}; echo end{at}=$?; \
             while [ \"$(ps -o tpgid= $$)\" -ne \"$(ps -o pgid= $$)\" ]; do sleep 0.01; done; \
             read a; echo read{at}=$a\n"
        )
    };
    ends.iter().enumerate().map(one).collect()
}

#[test]
fn closed_terminal_ends_the_command() {
    let world = World::new();
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run m -- sh -c 'echo $$ > pid; exec sleep 1000'\n");
    let command = number(&world, "pid");
    let guard: i32 = stat(command, 1).unwrap().parse().unwrap();
    until_true("command in the foreground", || has_terminal(&pty, command));
    drop(pty);
    until_true("end of the command", || !common::is_alive(command) && !common::is_alive(guard));
    until_true("free mutex", || world.run(&["run", "-n", "m", "--", "true"]).code() == 0);
}

/// Without a shell, nothing could resume a stopped command.
#[test]
fn suspend_key_has_no_effect_without_a_shell() {
    let world = World::new();
    world.fifo("go");
    let script = "echo $$ > pid; read go < go; exit 23";
    let simba = env!("CARGO_BIN_EXE_simba");
    let mut pty =
        Pty::start(&world, &[simba, "--on", &world.url, "run", "m", "--", "sh", "-c", script], 80, &[]);
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x1a");
    // The terminal echoes the key after it has sent the signal.
    pty.shows("^Z");
    until_true("resumed command", || !is_stopped(command));
    assert!(!children(1).contains(&command));
    fs::write(world.path("go"), "\n").unwrap();
    assert_eq!(pty.wait(), 23);
}
