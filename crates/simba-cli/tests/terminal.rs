//! The program on a terminal, below a shell that knows of jobs.
//!
//! Commands that are stopped wait at a fifo: a shell that is stopped in the middle of a fork stands still in the
//! kernel, and is not told of as stopped.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::time::Duration;

use common::pty::Pty;
use common::{World, children, line, stat, until, until_true, within};

/// An interactive shell, as a person has it.
fn shell(world: &World) -> Pty {
    let pty = Pty::start(world, &["bash", "--norc", "--noprofile", "-i"], 200, &[("PS1", "ready> ")]);
    pty.shows("ready> ");
    pty
}

fn number(world: &World, name: &str) -> i32 {
    line(&world.path(name)).parse().unwrap()
}

/// Whether the group of a process has the terminal.
fn has_terminal(pty: &Pty, pid: i32) -> bool {
    let group = stat(pid, 2).unwrap_or_else(|| panic!("{pid} is gone:\n{}", pty.seen()));
    group == pty.foreground().to_string()
}

fn is_stopped(pid: i32) -> bool {
    stat(pid, 0).is_some_and(|state| state == "T")
}

#[test]
fn an_interrupt_reaches_the_command_and_only_the_command() {
    let world = World::new();
    let mut pty = shell(&world);
    // The command makes up its own mind.
    pty.types("$SIMBA --on $ON run m -- sh -c 'trap \"echo heard; sleep 0.2; exit 17\" INT; echo $$ > pid; while :; do sleep 0.01; done'; echo code=$?\n");
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x03");
    pty.shows("heard");
    pty.shows("code=17");
    // The terminal is the shell's again: it reads.
    pty.types("echo still $((40 + 2))\n");
    pty.shows("still 42");
}

#[test]
fn a_command_that_an_interrupt_ends_is_told_as_such() {
    let world = World::new();
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run m -- sh -c 'echo $$ > pid; exec sleep 1000'; echo code=$?\n");
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x03");
    pty.shows("code=130");
}

#[test]
fn a_suspended_command_suspends_simba_and_both_go_on() {
    let world = World::new();
    world.fifo("go");
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run m -- sh -c 'echo $$ > pid; read go < go; exit 19'\n");
    let command = number(&world, "pid");
    let guard: i32 = stat(command, 1).unwrap().parse().unwrap();
    let simba: i32 = stat(guard, 1).unwrap().parse().unwrap();
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x1a");
    pty.shows("Stopped");
    assert!(is_stopped(simba) && is_stopped(command));
    // The shell is there meanwhile.
    pty.types("echo still $((40 + 2))\n");
    pty.shows("still 42");
    pty.types("fg\n");
    until_true("command in the foreground again", || has_terminal(&pty, command) && !is_stopped(command));
    fs::write(world.path("go"), "\n").unwrap();
    pty.types("echo code=$?\n");
    pty.shows("code=19");
}

#[test]
fn a_command_in_the_background_does_not_get_the_terminal() {
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

/// It would be stopped again and again otherwise, at full speed.
#[test]
fn a_command_in_the_background_that_reads_waits_to_be_brought_to_the_front() {
    let world = World::new();
    let mut pty = shell(&world);
    // The shell tells of a job at once. Asked for one that it does not know to be stopped, it lets nobody go on.
    pty.types("set -b; $SIMBA --on $ON run m -- sh -c 'echo $$ > pid; read answer; echo got=$answer' &\n");
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
fn a_pipeline_is_suspended_as_a_whole() {
    let world = World::new();
    world.fifo("go");
    let mut pty = shell(&world);
    pty.types("$SIMBA --on $ON run m -- sh -c 'echo $$ > pid; read go < go; echo through' | cat\n");
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
fn a_command_whose_input_is_a_file_still_has_the_terminal() {
    let world = World::new();
    let mut pty = shell(&world);
    pty.types(
        "echo input | $SIMBA --on $ON run m -- sh -c 'read input; read key < /dev/tty; echo $input $key'\n",
    );
    until("command", || {
        let groups = common::pids().filter(|pid| stat(*pid, 2) == Some(pty.foreground().to_string()));
        groups.into_iter().next()
    });
    std::thread::sleep(Duration::from_millis(300));
    pty.types("key\n");
    pty.shows("input key");
}

#[test]
fn a_script_has_the_terminal_back_after_every_end() {
    let world = World::new();
    let mut pty = Pty::start(&world, &["sh"], 200, &[("PS1", "ready> ")]);
    // No job control: the script and `simba` are of one group.
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

/// Reads from the terminal after each of them; a background group could not.
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
fn a_terminal_that_goes_away_ends_the_command() {
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

/// Nobody could bring it back: there is no shell above.
#[test]
fn without_a_shell_above_the_keys_that_suspend_do_nothing() {
    let world = World::new();
    world.fifo("go");
    let script = "echo $$ > pid; read go < go; exit 23";
    let simba = env!("CARGO_BIN_EXE_simba");
    let mut pty =
        Pty::start(&world, &[simba, "--on", &world.url, "run", "m", "--", "sh", "-c", script], 80, &[]);
    let command = number(&world, "pid");
    until_true("command in the foreground", || has_terminal(&pty, command));
    pty.types("\x1a");
    let stuck = within(Duration::from_millis(500), || None::<()>);
    assert!(stuck.is_none() && !is_stopped(command));
    assert!(!children(1).contains(&command));
    fs::write(world.path("go"), "\n").unwrap();
    assert_eq!(pty.wait(), 23);
}
