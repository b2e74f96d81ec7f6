//! What the command inherits: environment, input, files, signals.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, File};
use std::io::{Read as _, Seek as _, Write as _};
use std::process::{Command, Stdio};

use common::{World, line, send, tool, until};
use rustix::process::Signal;

#[test]
fn environment_names_mutex_contender_and_token() {
    let world = World::new();
    let script =
        "echo \"$SIMBA_MUTEX $SIMBA_CONTENDER_ID $SIMBA_FENCING_TOKEN\"; exec cat /proc/self/environ";
    let mut command = world.simba(&["run", "orders", "--", "sh", "-c", script]);
    command.env("KEPT", "as it is");
    let finished = world.start(command).wait().expect(0);
    let (first, environment) = finished.out.split_once('\n').unwrap();
    let words: Vec<&str> = first.split(' ').collect();
    assert_eq!(words[0], "orders");
    assert!(words[1].contains('.') && words[1].contains('@'), "{first}");
    assert!(words[2].parse::<u64>().unwrap() > 0, "{first}");
    let ours: Vec<&str> = environment.split('\0').filter(|pair| pair.starts_with("SIMBA_")).collect();
    assert_eq!(ours.len(), 3, "{ours:?}");
    assert!(environment.split('\0').any(|pair| pair == "KEPT=as it is"));
    let next = world.run(&["run", "orders", "--", "sh", "-c", "echo $SIMBA_FENCING_TOKEN"]).out;
    assert!(next.trim().parse::<u64>().unwrap() > words[2].parse().unwrap(), "the token grows");
}

#[test]
fn command_reads_input_from_a_pipe_a_file_and_null() {
    let world = World::new();
    // A pipe.
    let mut command = world.simba(&["run", "m", "--", "cat"]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"through a pipe").unwrap();
    assert_eq!(child.wait_with_output().unwrap().stdout, b"through a pipe");
    // A file, from its current position, which is shared with the command.
    fs::write(world.path("input"), "0123456789").unwrap();
    let mut file = File::open(world.path("input")).unwrap();
    file.read_exact(&mut [0; 4]).unwrap();
    let mut command = world.simba(&["run", "m", "--", "head", "-c", "3"]);
    command.stdin(file.try_clone().unwrap());
    assert_eq!(world.start(command).wait().expect(0).out, "456");
    assert!(file.stream_position().unwrap() > 4, "the position is not shared");
    // No input.
    assert_eq!(world.run(&["run", "m", "--", "cat"]).expect(0).out, "");
}

#[test]
fn closed_standard_streams_are_supported() {
    let world = World::new();
    for closed in ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"] {
        let script = format!("\"$0\" --on \"$1\" run m -- sh -c 'exit 5' {closed}");
        let mut shell = tool("sh");
        shell.args(["-c", &script, env!("CARGO_BIN_EXE_simba"), &world.url]);
        world.start(shell).wait().expect(5);
    }
}

#[test]
fn no_file_of_simba_is_open_in_the_command() {
    let world = World::new();
    // The shell closes all but the three standard streams.
    let script = "for fd in /proc/self/fd/*; do fd=${fd##*/}; [ $fd -gt 2 ] && eval \"exec $fd>&-\"; done; \
                  exec \"$0\" --on \"$1\" run m -- ls -l /proc/self/fd";
    let mut shell = tool("bash");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_simba"), &world.url]).stdin(Stdio::null());
    let finished = world.start(shell).wait().expect(0);
    let open: Vec<&str> = finished.out.lines().filter(|line| line.contains("->")).collect();
    // The fourth is the directory that `ls` lists.
    assert_eq!(open.len(), 4, "{finished:?}");
    assert!(open.iter().any(|line| line.contains("/fd")), "{finished:?}");
}

#[test]
fn open_file_of_the_shell_is_passed_on() {
    let world = World::new();
    let mut shell = tool("bash");
    let script = "\"$0\" --on \"$1\" run m -- cat <(echo from a file of the shell)";
    shell.args(["-c", script, env!("CARGO_BIN_EXE_simba"), &world.url]);
    assert_eq!(world.start(shell).wait().expect(0).out, "from a file of the shell\n");
}

#[test]
fn command_inherits_the_signal_masks_of_the_caller() {
    let world = World::new();
    let masks = |command: Command| {
        let status = world.start(command).wait().expect(0).out;
        let wanted = |line: &&str| line.starts_with("SigBlk") || line.starts_with("SigIgn");
        status.lines().filter(wanted).map(str::to_owned).collect::<Vec<_>>()
    };
    let mut plain = Command::new("env");
    plain.args(["--default-signal", "cat", "/proc/self/status"]);
    assert_eq!(masks(world.simba(&["run", "m", "--", "cat", "/proc/self/status"])), masks(plain));
    // Ignored signals stay ignored, for both of them.
    let script = "trap '' HUP INT; \"$0\" --on \"$1\" run m -- cat /proc/self/status";
    let mut shell = tool("sh");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_simba"), &world.url]);
    let status = masks(shell);
    let ignored = u64::from_str_radix(status[1].split_whitespace().nth(1).unwrap(), 16).unwrap();
    assert_eq!(ignored & 0b11, 0b11, "{status:?}");
}

#[test]
fn command_under_nohup_survives_a_hang_up() {
    let world = World::new();
    let mut nohup = tool("nohup");
    nohup.arg(env!("CARGO_BIN_EXE_simba")).args(["--on", &world.url]);
    nohup.args([
        "run",
        "m",
        "--",
        "sh",
        "-c",
        "trap 'echo usr1 > usr1' USR1; echo up > up; while [ ! -e go ]; do sleep 0.01; done; exit 6",
    ]);
    nohup.current_dir(world.dir.path());
    let running = world.start(nohup);
    line(&world.path("up"));
    running.signal(Signal::HUP);
    // If the hang-up were passed on, it would reach the command before this signal.
    running.signal(Signal::USR1);
    line(&world.path("usr1"));
    fs::write(world.path("go"), "").unwrap();
    running.wait().expect(6);
}

#[test]
fn every_signal_is_passed_on() {
    let world = World::new();
    let signals = [
        ("TERM", Signal::TERM),
        ("INT", Signal::INT),
        ("HUP", Signal::HUP),
        ("QUIT", Signal::QUIT),
        ("USR1", Signal::USR1),
        ("USR2", Signal::USR2),
        ("ALRM", Signal::ALARM),
        ("WINCH", Signal::WINCH),
        ("IO", Signal::IO),
        ("PWR", Signal::POWER),
    ];
    for (name, signal) in signals {
        let ready = world.path(&format!("ready-{name}"));
        let script =
            format!("trap 'exit 33' {name}; echo ready > {}; while :; do sleep 0.01; done", ready.display());
        let running = world.spawn(&["run", "m", "--", "bash", "-c", &script]);
        line(&ready);
        running.signal(signal);
        assert_eq!(running.wait().code(), 33, "{name}");
    }
}

#[test]
fn waiters_acquire_in_fifo_order() {
    let world = World::new();
    let holder = world.spawn_script("echo held > held; while [ ! -e go ]; do sleep 0.01; done");
    line(&world.path("held"));
    let mut waiters = Vec::new();
    for number in 1..=3 {
        waiters.push(world.spawn_script(&format!("echo {number} >> order")));
        world.until_waiting("m", number);
    }
    fs::write(world.path("go"), "").unwrap();
    holder.wait().expect(0);
    for waiter in waiters {
        waiter.wait().expect(0);
    }
    assert_eq!(world.read("order"), "1\n2\n3\n");
}

#[test]
fn default_store_is_a_file_of_the_user() {
    let world = World::new();
    let mut command = world.bare();
    command.args(["-v", "run", "m", "--", "true"]);
    let finished = world.start(command).wait().expect(0);
    assert!(world.path("state/simba/simba.db").exists());
    assert!(finished.err.contains("state/simba/simba.db"), "-v prints the store: {finished:?}");
    // `SIMBA_URL` selects another.
    let mut command = world.bare();
    command.env("SIMBA_URL", &world.url).args(["run", "other", "--", "true"]);
    world.start(command).wait().expect(0);
    assert!(world.run(&["ls"]).out.contains("other"));
}

#[test]
fn nested_run_of_the_same_mutex_is_refused() {
    let world = World::new();
    let simba = env!("CARGO_BIN_EXE_simba");
    let inner = ["--", simba, "--on", &world.url];
    let run = |outer: &[&str], rest: &[&str]| world.run(&[outer, &inner, rest].concat());
    let refused = run(&["run", "m"], &["run", "m", "--", "true"]).expect(1);
    assert!(refused.err.contains("wait for itself") && refused.err.contains(&world.url), "{refused:?}");
    run(&["run", "m"], &["run", "-E", "44", "m", "--", "true"]).expect(44);
    run(&["run", "m"], &["lead", "m", "--", "true"]).expect(1);
    run(&["run", "m"], &["schedule", "m", "--every", "1s", "--", "true"]).expect(1);
    // An outer command other than the nearest, and not in the environment of the inner one.
    let deep = ["run", "b", "--", "env", "-i", simba, "--on", &world.url, "run", "m", "--", "true"];
    run(&["run", "m"], &deep).expect(1);
    // Another name, another store, a tenure that has ended.
    run(&["run", "m"], &["run", "other", "--", "sh", "-c", "exit 9"]).expect(9);
    let other = format!("sqlite:{}", world.path("other.db").display());
    world.run(&["run", "m", "--", simba, "--on", &other, "run", "m", "--", "sh", "-c", "exit 8"]).expect(8);
    let mut stale = world.simba(&["run", "m", "--", "sh", "-c", "exit 7"]);
    stale.env("SIMBA_MUTEX", "m").env("SIMBA_CONTENDER_ID", "aaaaaaaaaaaa.1@gone");
    world.start(stale).wait().expect(7);
}

#[test]
fn processes_left_behind_are_killed_before_the_mutex_is_released() {
    let world = World::new();
    let script = "setsid sh -c 'trap \"\" TERM HUP; while :; do echo $SIMBA_FENCING_TOKEN >> beats; sleep 0.005; done' & \
                  while [ ! -e go ]; do sleep 0.01; done; exit 4";
    let mut first = world.spawn_script(script);
    world.beat_after(0);
    let next = world.spawn_script("echo $SIMBA_FENCING_TOKEN >> beats");
    world.until_waiting("m", 1);
    fs::write(world.path("go"), "").unwrap();
    assert_eq!(first.status().code(), Some(4));
    first.assert_nothing_left();
    next.wait().expect(0);
    world.assert_no_overlap();
}

#[test]
fn term_to_all_processes_lets_the_command_end_gracefully() {
    let world = World::new();
    let script =
        "trap 'sleep 0.3; echo orderly > end; exit 0' TERM; echo up > up; while :; do sleep 0.01; done";
    let running = world.spawn_script(script);
    line(&world.path("up"));
    for pid in running.processes() {
        send(pid, Signal::TERM);
    }
    running.wait().expect(0);
    assert_eq!(world.read("end"), "orderly\n");
}

#[test]
fn ignored_sigchld_changes_nothing() {
    let world = World::new();
    let script = "trap '' CHLD; exec \"$0\" --on \"$1\" run m -- sh -c '(exit 3); exit $(( $? + 4 ))'";
    let mut shell = tool("bash");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_simba"), &world.url]);
    world.start(shell).wait().expect(7);
}

/// A shell that is replaced by `simba` leaves its children to it.
#[test]
fn children_from_before_the_exec_are_not_killed_with_the_guard() {
    let world = World::new();
    let script =
        "sleep 1000 & echo $! > sleeper; exec \"$0\" --on \"$1\" run m -- sh -c 'echo up > up; sleep 1000'";
    let mut shell = tool("bash");
    shell.args(["-c", script, env!("CARGO_BIN_EXE_simba"), &world.url]).current_dir(world.dir.path());
    let running = world.start(shell);
    line(&world.path("up"));
    let sleeper: i32 = line(&world.path("sleeper")).parse().unwrap();
    let guard =
        until("guard", || common::children(running.pid()).into_iter().find(|child| *child != sleeper));
    send(guard, Signal::KILL);
    let mut running = running;
    assert_eq!(running.status().code(), Some(75));
    assert!(common::is_alive(sleeper));
    assert_eq!(running.processes(), [sleeper]);
}

/// Tests that create namespaces.
mod as_root {
    use super::*;

    #[test]
    fn init_process_of_a_container_reaps_and_returns_the_exit_code() {
        let world = World::new();
        let _ = tool("unshare");
        // A zombie is still in `/proc`.
        let script = "(sleep 0.1 & echo $! > one); sh -c 'sleep 0.2 & echo $! > two'; \
                      while [ -e /proc/$(cat one) ] || [ -e /proc/$(cat two) ]; do sleep 0.01; done; exit 21";
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child", env!("CARGO_BIN_EXE_simba")]);
        command.args(["--on", &world.url, "run", "m", "--", "sh", "-c", script]);
        command.current_dir(world.dir.path());
        world.start(command).wait().expect(21);
        // Signals work there too.
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child", env!("CARGO_BIN_EXE_simba")]);
        command.args(["--on", &world.url, "run", "m", "--", "sh", "-c"]).current_dir(world.dir.path());
        command.arg("trap 'exit 22' TERM; echo up > up; while :; do sleep 0.01; done");
        let running = world.start(command);
        line(&world.path("up"));
        let inside = until("simba", || common::children(running.pid()).first().copied());
        send(inside, Signal::TERM);
        running.wait().expect(22);
    }

    #[test]
    fn command_is_not_started_without_a_usable_proc() {
        let world = World::new();
        let mut command = tool("unshare");
        command.args(["--pid", "--fork", "--kill-child", env!("CARGO_BIN_EXE_simba")]);
        command.args(["--on", &world.url, "run", "m", "--", "touch", "started"]);
        let refused = world.start(command).wait().expect(126);
        assert!(refused.err.contains("/proc"), "{refused:?}");
        assert!(!world.path("started").exists());
        world.run(&["run", "-n", "m", "--", "true"]).expect(0);
    }
}
