//! Every exit code of the interface.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use common::rows::ROOMY_LEASE;
use common::{World, hang, is_alive, line, tool, until, until_true};
use rustix::process::Signal;

const HOLD: [&str; 6] = ["run", "m", "--", "sh", "-c", "echo held > held; exec sleep 1000"];

#[test]
fn exit_code_of_the_command_is_returned() {
    let world = World::new();
    for code in [0, 1, 2, 42, 75, 124, 255] {
        world.run(&["run", "m", "--", "sh", "-c", &format!("exit {code}")]).expect(code);
    }
}

#[test]
fn signal_that_ends_the_command_adds_128() {
    let world = World::new();
    for signal in [1, 2, 6, 9, 14, 15] {
        world.run(&["run", "m", "--", "sh", "-c", &format!("kill -{signal} $$")]).expect(128 + signal);
    }
}

#[test]
fn held_mutex_exits_with_1_and_names_holder_and_store() {
    let world = World::new();
    let holder = world.spawn(&HOLD);
    line(&world.path("held"));
    let refused = world.run(&["run", "-n", "m", "--", "touch", "started"]).expect(1);
    let id = world.run(&["status", "m", "--json"]).out;
    let id: serde_json::Value = serde_json::from_str(&id).unwrap();
    let id = id[0]["owner"].as_str().unwrap();
    assert!(refused.err.contains(id) && refused.err.contains(&world.url), "{refused:?}");
    assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    assert!(!world.path("started").exists());
    // The options of flock(1).
    for words in [&["--nb"][..], &["--nonblock"], &["-w", "0"]] {
        let args = [&["run"], words, &["m", "--", "touch", "started"]].concat();
        world.run(&args).expect(1);
    }
    world.run(&["run", "-n", "-E", "99", "m", "--", "true"]).expect(99);
    // Long enough for an answer of the store: without one the exit code is 69.
    let waits = [(&["--timeout", "8.5"][..], 1), (&["-w", "8500ms"], 1), (&["-w", "8.5", "-E", "0"], 0)];
    let waits = waits.map(|(words, code)| {
        (world.spawn(&[&["run"], words, &["m", "--", "touch", "started"]].concat()), code)
    });
    for (waiter, code) in waits {
        waiter.wait().expect(code);
    }
    assert!(!world.path("started").exists());
    drop(holder);
}

#[test]
fn wait_without_a_unit_counts_seconds() {
    let world = World::new();
    let holder = world.spawn(&HOLD);
    line(&world.path("held"));
    let begun = Instant::now();
    world.run(&["run", "-w", "8", "m", "--", "true"]).expect(1);
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_secs(8) && waited < Duration::from_secs(30), "{waited:?}");
    // Long enough: it acquires once the holder is gone.
    let waiter = world.spawn(&["run", "-w", "60s", "m", "--", "true"]);
    world.until_waiting("m", 1);
    holder.signal(Signal::TERM);
    holder.wait().expect(143);
    waiter.wait().expect(0);
}

#[test]
fn wrong_usage_exits_with_2() {
    let world = World::new();
    for args in [
        &["run", "m"][..],
        &["run", "m", "--"],
        &["run", "", "--", "true"],
        &["run", "a name with blanks", "--", "true"],
        &["run", "-w", "soon", "m", "--", "true"],
        &["run", "-w", "-1", "m", "--", "true"],
        &["run", "-w", "nan", "m", "--", "true"],
        &["run", "-w", "1e300", "m", "--", "true"],
        &["run", "-n", "-w", "1", "m", "--", "true"],
        &["run", "-E", "256", "m", "--", "true"],
        &["run", "--ttl", "1ms", "m", "--", "true"],
        &["run", "--ttl", "ten", "m", "--", "true"],
        &["run", "--ttl", "10s", "--transition", "1ms", "m", "--", "true"],
        &["run", "--grace", "1h", "m", "--", "true"],
        &["run", "--max-hold", "1s", "--min-hold", "2s", "m", "--", "true"],
        &["run", "--max-hold", "0s", "m", "--", "true"],
        &["run", "--nonsense", "m", "--", "true"],
        &["nonsense"],
        &["lead", "m"],
        &["schedule", "m", "--", "true"],
        &["schedule", "m", "--every", "1s", "--delay", "1s", "--", "true"],
        &["schedule", "m", "--every", "0s", "--", "true"],
        &["schedule", "m", "--cron", "nonsense", "--", "true"],
        &["schedule", "m", "--cron", "* * * * *", "--tz", "Nowhere/City", "--", "true"],
        &["schedule", "m", "--every", "1s", "--tz", "UTC", "--", "true"],
        &["release", "m"],
        &["release", "m", "--if-token", "many"],
        &["status", "a name with blanks"],
        &["watch"],
        &["man", "nonsense"],
        &["completions", "nonsense"],
    ] {
        let refused = world.run(args).expect(2);
        assert!(refused.err.starts_with("simba: ") && refused.out.is_empty(), "{args:?}: {refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{args:?}: {refused:?}");
    }
    for url in
        ["nonsense", "gopher://a", "sqlite://host/a", "sqlite::memory:", "sqlite:a?b=c", "redis://[", ""]
    {
        let mut command = world.bare();
        command.args(["--on", url, "status"]);
        let refused = world.start(command).wait();
        assert_eq!(refused.code(), 2, "{url}: {refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{url}: {refused:?}");
    }
    assert!(!world.path("store.db").exists() || world.run(&["ls", "--json"]).out.trim() == "[]");
}

#[test]
fn command_without_separator_exits_with_2_and_the_error_shows_it() {
    let world = World::new();
    for args in [&["run", "m", "true"][..], &["lead", "m", "true", "--quiet"], &["run", "m", "--quiet"]] {
        let refused = world.run(args).expect(2);
        assert!(refused.err.contains("put `--` before the command"), "{refused:?}");
    }
    let refused = world.run(&["run", "--nonsense", "m", "--", "true"]).expect(2);
    assert!(refused.err.contains("'--nonsense'") && refused.err.contains("see --help"), "{refused:?}");
}

#[test]
fn unknown_scheme_lists_the_known_ones() {
    let world = World::new();
    let mut command = world.bare();
    command.args(["--on", "gopher://a", "status"]);
    let refused = world.start(command).wait().expect(2);
    assert!(refused.err.contains("gopher") && refused.err.contains("sqlite"), "{refused:?}");
}

#[test]
fn store_that_does_not_answer_exits_with_69() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    let hung = hang(&world);
    let lease = ["--ttl", "1s", "--transition", "500ms"];
    for words in [&["-n"][..], &["-w", "1"], &[]] {
        let args = [&["run", "m"], words, &lease, &["--", "touch", "started"]].concat();
        let refused = world.run(&args).expect(69);
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    }
    assert!(!world.path("started").exists());
    drop(hung);
    world.run(&["run", "m", "--", "touch", "started"]).expect(0);
}

#[test]
fn lost_mutex_exits_with_75_even_if_the_command_exits_with_0() {
    let world = World::new();
    let script = "trap 'echo term > term; exit 0' TERM; echo held > held; while :; do sleep 0.01; done";
    let running = world.holder_under(&ROOMY_LEASE, "m", script);
    line(&world.path("held"));
    let hung = hang(&world);
    let finished = running.wait().expect(75);
    assert_eq!(world.read("term"), "term\n", "killed without TERM: {finished:?}");
    assert!(finished.err.contains("lost"), "{finished:?}");
    drop(hung);
}

#[test]
fn foreign_file_exits_with_76() {
    let world = World::new();
    fs::write(world.path("store.db"), "not a database, but long enough to look like a file of its own")
        .unwrap();
    let refused = world.run(&["run", "m", "--", "touch", "started"]).expect(76);
    assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    assert!(!world.path("started").exists());
}

#[test]
fn missing_home_exits_with_78() {
    let world = World::new();
    let mut command = world.bare();
    command.env_remove("HOME").env_remove("XDG_STATE_HOME").args(["run", "m", "--", "true"]);
    let refused = world.start(command).wait().expect(78);
    assert!(refused.err.contains("XDG_STATE_HOME"), "{refused:?}");
}

#[test]
fn configuration_in_a_relative_directory_is_not_read() {
    let world = World::new();
    for folder in ["simba", ".config/simba"] {
        fs::create_dir_all(world.path(folder)).unwrap();
        // Refused with 78.
        fs::write(world.path(folder).join("config.toml"), "url = 'memory:'\n").unwrap();
    }
    for (config, home) in [("", ""), (".", "."), (".config", "")] {
        let mut command = world.bare();
        command.env("XDG_CONFIG_HOME", config).env("HOME", home).args(["run", "m", "--", "true"]);
        world.start(command).wait().expect(0);
    }
    // The directory below an absolute home is read.
    let mut command = world.bare();
    command.env("XDG_CONFIG_HOME", ".").args(["run", "m", "--", "true"]);
    world.start(command).wait().expect(78);
}

#[test]
fn misspelt_variable_exits_with_78_and_suggests_the_right_one() {
    let world = World::new();
    for args in [&["run", "m", "--", "touch", "started"][..], &["status", "m"], &["lead", "m", "--", "true"]]
    {
        let mut command = world.simba(args);
        command.env("SIMBA_URI", "redis://user:c4n4ry@127.0.0.1:1");
        let refused = world.start(command).wait().expect(78);
        assert!(refused.err.contains("SIMBA_URI") && refused.err.contains("SIMBA_URL"), "{refused:?}");
        assert!(!refused.output_text().contains("c4n4ry") && refused.err.lines().count() == 1, "{refused:?}");
    }
    let mut command = world.simba(&["run", "m", "--", "touch", "started"]);
    command.env("SIMBA_URL", std::ffi::OsStr::from_bytes(b"redis://\xff"));
    assert!(world.start(command).wait().expect(78).err.contains("SIMBA_URL"));
    let mut command = world.simba(&["run", "m", "--", "touch", "started"]);
    command.env("SIMBA_URI", std::ffi::OsStr::from_bytes(b"redis://\xff"));
    let refused = world.start(command).wait().expect(78);
    assert!(refused.err.contains("SIMBA_URI") && refused.err.contains("SIMBA_URL"), "{refused:?}");
    assert!(!world.path("started").exists());
}

#[test]
fn unknown_variable_is_ignored_and_reported_by_doctor_and_verbose() {
    let world = World::new();
    let with = |args: &[&str]| {
        let mut command = world.simba(args);
        // Kubernetes sets these for a Service that is called `simba`.
        command.env("SIMBA_PORT", "tcp://10.0.0.1:80").env("SIMBA_SERVICE_HOST", "10.0.0.1");
        world.start(command).wait().expect(0)
    };
    assert_eq!(with(&["run", "m", "--", "true"]).err, "");
    assert!(with(&["-v", "run", "m", "--", "true"]).err.contains("SIMBA_SERVICE_HOST"));
    assert!(with(&["doctor"]).out.contains("SIMBA_PORT"));
    let report: serde_json::Value = serde_json::from_str(&with(&["doctor", "--json"]).out).unwrap();
    assert_eq!(report["unknown_variables"], serde_json::json!(["SIMBA_PORT", "SIMBA_SERVICE_HOST"]));
}

#[test]
fn memory_exits_with_78_for_commands_that_run_one() {
    let world = World::new();
    for args in [
        &["run", "m", "--", "touch", "started"][..],
        &["lead", "m", "--", "touch", "started"],
        &["schedule", "m", "--every", "1s", "--", "touch", "started"],
    ] {
        let mut typed = world.bare();
        typed.args(["--on", "memory:"]).args(args);
        let mut set = world.bare();
        set.args(args).env("SIMBA_URL", "memory:");
        for command in [typed, set] {
            let refused = world.start(command).wait().expect(78);
            assert!(refused.err.contains("memory:") && refused.err.contains("sqlite:PATH"), "{refused:?}");
            assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
        }
    }
    assert!(!world.path("started").exists());
}

#[test]
fn file_in_a_missing_directory_exits_with_78() {
    let world = World::new();
    let missing = world.path("no/such");
    for file in [missing.join("store.db").display().to_string(), "no/such/store.db".into()] {
        let url = format!("sqlite:{file}");
        for args in
            [&["run", "m", "--", "touch", "started"][..], &["status"], &["tck", "they_grow"], &["bench"]]
        {
            let mut command = world.bare();
            command.args(["--on", &url]).args(args);
            let refused = world.start(command).wait().expect(78);
            assert!(refused.err.contains("no/such` ") && refused.err.lines().count() == 1, "{refused:?}");
        }
    }
    assert!(!world.path("no").exists() && !world.path("started").exists());
    // The directory of the default file is created.
    let mut command = world.bare();
    command.args(["run", "m", "--", "true"]);
    world.start(command).wait().expect(0);
    assert!(world.path("state/simba").is_dir());
}

#[test]
fn command_that_exceeds_max_hold_exits_with_124() {
    let world = World::new();
    let begun = Instant::now();
    // Gets TERM after 18 s and KILL after 21 s.
    let script = "trap 'echo term > term; exit 0' TERM; while :; do sleep 0.01; done";
    let handles_term =
        world.spawn(&["run", "--max-hold", "24s", "--grace", "6s", "m", "--", "sh", "-c", script]);
    // One that ignores TERM is killed.
    let ignores_term = "trap '' TERM; while :; do sleep 0.01; done";
    world.run(&["run", "--max-hold", "8s", "n", "--", "sh", "-c", ignores_term]).expect(124);
    let finished = handles_term.wait().expect(124);
    assert_eq!(world.read("term"), "term\n");
    assert!(finished.err.contains("24s"), "{finished:?}");
    assert!(begun.elapsed() >= Duration::from_secs(17), "TERM came too soon");
    // One that ends in time is not affected.
    world.run(&["run", "--max-hold", "60s", "m", "--", "sh", "-c", "exit 3"]).expect(3);
}

#[test]
fn mutex_is_kept_for_min_hold() {
    let world = World::new();
    let begun = Instant::now();
    let holder = world.spawn(&["run", "--min-hold", "8s", "m", "--", "touch", "done"]);
    until_true("end of the command", || world.path("done").exists());
    world.run(&["run", "-n", "m", "--", "true"]).expect(1);
    holder.wait().expect(0);
    assert!(begun.elapsed() >= Duration::from_secs(8));
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

#[test]
fn signal_during_min_hold_exits_and_leaves_the_mutex_to_its_lease() {
    let world = World::new();
    let holder = world.spawn(&["run", "--min-hold", "1h", "m", "--", "touch", "done"]);
    until_true("end of the command", || world.path("done").exists());
    until_true("end of its children", || common::children(holder.pid()).is_empty());
    holder.signal(Signal::INT);
    holder.wait().expect(130);
    world.run(&["run", "-n", "m", "--", "true"]).expect(1);
}

/// As when a service manager sends TERM to all processes of a service, and the command ends before `simba` runs.
#[test]
fn signal_that_arrives_before_the_end_of_the_command_does_not_change_the_exit_code() {
    let world = World::new();
    world.fifo("go");
    let script = "echo held > held; read go < go; exit 0";
    let holder = world.holder_under(&["--ttl", "60s", "--transition", "40s"], "m", script);
    line(&world.path("held"));
    let guard = holder.guard();
    holder.signal(Signal::STOP);
    holder.signal(Signal::TERM);
    fs::write(world.path("go"), "\n").unwrap();
    until_true("end of the guard", || !is_alive(guard));
    holder.signal(Signal::CONT);
    holder.wait().expect(0);
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

#[test]
fn not_executable_exits_with_126_and_not_found_with_127() {
    let world = World::new();
    let missing = world.run(&["run", "m", "--", "./missing"]).expect(127);
    assert!(missing.err.contains("./missing"), "{missing:?}");
    world.run(&["run", "m", "--", "no-such-command-anywhere"]).expect(127);
    fs::write(world.path("plain"), "text").unwrap();
    let plain = world.run(&["run", "m", "--", "./plain"]).expect(126);
    assert_eq!(plain.err.lines().count(), 1, "{plain:?}");
    // Nothing is held after it.
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

#[test]
fn signal_while_waiting_starts_nothing() {
    let world = World::new();
    let holder = world.spawn(&HOLD);
    line(&world.path("held"));
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129), (Signal::QUIT, 131)] {
        let waiter = world.spawn(&["run", "m", "--", "touch", "started"]);
        until("waiter", || (waiters(&world) == Some(1)).then_some(()));
        waiter.signal(signal);
        waiter.wait().expect(code);
        until_true("end of its entry in the queue", || waiters(&world) == Some(0));
    }
    // The release and the signal arrive at once.
    let waiter = world.spawn(&["run", "m", "--", "touch", "started"]);
    until("waiter", || (waiters(&world) == Some(1)).then_some(()));
    waiter.signal(Signal::STOP);
    let pid = holder.pid();
    drop(holder);
    assert!(!is_alive(pid));
    waiter.signal(Signal::TERM);
    std::thread::sleep(Duration::from_millis(100));
    waiter.signal(Signal::CONT);
    waiter.wait().expect(143);
    assert!(!world.path("started").exists());
}

fn waiters(world: &World) -> Option<u64> {
    let status = world.run(&["status", "m", "--json"]).expect(0).out;
    let status: serde_json::Value = serde_json::from_str(&status).unwrap();
    status[0]["waiters"].as_u64()
}

/// Runs the command as another user, because root is refused nothing. Only root can switch the user.
mod as_root {
    use super::*;

    #[test]
    fn denied_access_exits_with_77_and_with_78_for_the_configuration() {
        let world = World::new();
        fs::create_dir(world.path("closed")).unwrap();
        fs::set_permissions(world.path("closed"), fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(world.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // A copy, because other users may not read the original.
        let program = world.path("simba");
        fs::copy(env!("CARGO_BIN_EXE_simba"), &program).unwrap();
        let url = format!("sqlite:{}", world.path("closed/store.db").display());
        let mut command = tool("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program);
        command.args(["--on", &url, "run", "m", "--", "true"]).current_dir("/");
        command.env("HOME", world.dir.path()).env("XDG_CONFIG_HOME", world.path("config"));
        let refused = world.start(command).wait().expect(77);
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
        // If the configuration were ignored, the command would run under a mutex of the default store.
        let mut command = tool("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(world.path("simba"));
        command.args(["run", "m", "--", "touch", "started"]).current_dir("/");
        command.env("HOME", world.dir.path()).env("XDG_CONFIG_HOME", world.path("closed"));
        let refused = world.start(command).wait().expect(78);
        assert!(refused.err.contains("closed/simba/config.toml"), "{refused:?}");
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    }
}
