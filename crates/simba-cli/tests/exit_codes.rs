//! Every exit code of the interface.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use common::{World, hang, is_alive, line, tool, until, until_true};
use rustix::process::Signal;

const HOLD: [&str; 6] = ["run", "m", "--", "sh", "-c", "echo held > held; exec sleep 1000"];

#[test]
fn the_command_s_own_code_is_given() {
    let world = World::new();
    for code in [0, 1, 2, 42, 75, 124, 255] {
        world.run(&["run", "m", "--", "sh", "-c", &format!("exit {code}")]).expect(code);
    }
}

#[test]
fn a_signal_that_ends_the_command_is_told_as_a_shell_tells_it() {
    let world = World::new();
    for signal in [1, 2, 6, 9, 14, 15] {
        world.run(&["run", "m", "--", "sh", "-c", &format!("kill -{signal} $$")]).expect(128 + signal);
    }
}

#[test]
fn a_held_mutex_is_refused_with_one_and_names_holder_and_store() {
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
    // The names that flock has.
    for words in [&["--nb"][..], &["--nonblock"], &["-w", "0"], &["--timeout", "0.05"], &["-w", "50ms"]] {
        let args = [&["run"], words, &["m", "--", "touch", "started"]].concat();
        world.run(&args).expect(1);
    }
    world.run(&["run", "-n", "-E", "99", "m", "--", "true"]).expect(99);
    world.run(&["run", "-w", "0.05", "-E", "0", "m", "--", "touch", "started"]).expect(0);
    assert!(!world.path("started").exists());
    drop(holder);
}

#[test]
fn a_number_counts_seconds_and_a_wait_is_as_long_as_it_says() {
    let world = World::new();
    let holder = world.spawn(&HOLD);
    line(&world.path("held"));
    let begun = Instant::now();
    world.run(&["run", "-w", "1", "m", "--", "true"]).expect(1);
    let waited = begun.elapsed();
    assert!(waited >= Duration::from_secs(1) && waited < Duration::from_secs(20), "{waited:?}");
    // Long enough: it is served once the holder is gone.
    let waiter = world.spawn(&["run", "-w", "60s", "m", "--", "true"]);
    holder.signal(Signal::TERM);
    holder.wait().expect(143);
    waiter.wait().expect(0);
}

#[test]
fn wrong_usage_is_two() {
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
fn an_unknown_scheme_lists_the_known_ones() {
    let world = World::new();
    let mut command = world.bare();
    command.args(["--on", "gopher://a", "status"]);
    let refused = world.start(command).wait().expect(2);
    assert!(refused.err.contains("gopher") && refused.err.contains("sqlite"), "{refused:?}");
}

#[test]
fn a_store_that_does_not_answer_is_sixty_nine() {
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
fn a_mutex_that_is_lost_is_seventy_five_also_if_the_command_then_exits_with_zero() {
    let world = World::new();
    let script = "trap 'echo told > told; exit 0' TERM; echo held > held; while :; do sleep 0.01; done";
    let running = world.holder("m", script);
    line(&world.path("held"));
    let hung = hang(&world);
    let finished = running.wait().expect(75);
    assert_eq!(world.read("told"), "told\n", "it is told before it is killed: {finished:?}");
    assert!(finished.err.contains("lost"), "{finished:?}");
    drop(hung);
}

#[test]
fn a_file_that_is_not_ours_is_seventy_six() {
    let world = World::new();
    fs::write(world.path("store.db"), "not a database, but long enough to look like a file of its own")
        .unwrap();
    let refused = world.run(&["run", "m", "--", "touch", "started"]).expect(76);
    assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    assert!(!world.path("started").exists());
}

#[test]
fn a_wrong_set_up_is_seventy_eight() {
    let world = World::new();
    let mut command = world.bare();
    command.env_remove("HOME").env_remove("XDG_STATE_HOME").args(["run", "m", "--", "true"]);
    let refused = world.start(command).wait().expect(78);
    assert!(refused.err.contains("XDG_STATE_HOME"), "{refused:?}");
}

#[test]
fn misspelt_variable_is_refused_with_78_and_names_the_one_that_is_meant() {
    let world = World::new();
    for args in [&["run", "m", "--", "touch", "started"][..], &["status", "m"], &["lead", "m", "--", "true"]]
    {
        let mut command = world.simba(args);
        command.env("SIMBA_URI", "redis://user:c4n4ry@127.0.0.1:1");
        let refused = world.start(command).wait().expect(78);
        assert!(refused.err.contains("SIMBA_URI") && refused.err.contains("SIMBA_URL"), "{refused:?}");
        assert!(!refused.said().contains("c4n4ry") && refused.err.lines().count() == 1, "{refused:?}");
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
        // A Service of Kubernetes that is called `simba` sets these.
        command.env("SIMBA_PORT", "tcp://10.0.0.1:80").env("SIMBA_SERVICE_HOST", "10.0.0.1");
        world.start(command).wait().expect(0)
    };
    assert_eq!(with(&["run", "m", "--", "true"]).err, "");
    assert!(with(&["-v", "run", "m", "--", "true"]).err.contains("SIMBA_SERVICE_HOST"));
    assert!(with(&["doctor"]).out.contains("SIMBA_PORT"));
    let told: serde_json::Value = serde_json::from_str(&with(&["doctor", "--json"]).out).unwrap();
    assert_eq!(told["unknown_variables"], serde_json::json!(["SIMBA_PORT", "SIMBA_SERVICE_HOST"]));
}

#[test]
fn memory_is_refused_with_78_for_what_runs_a_command() {
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
fn file_in_a_directory_that_does_not_exist_is_refused_with_78() {
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
    // The directory of the default is made.
    let mut command = world.bare();
    command.args(["run", "m", "--", "true"]);
    world.start(command).wait().expect(0);
    assert!(world.path("state/simba").is_dir());
}

#[test]
fn a_command_that_takes_too_long_is_one_hundred_and_twenty_four() {
    let world = World::new();
    let begun = Instant::now();
    let script = "trap 'echo told > told; exit 0' TERM; while :; do sleep 0.01; done";
    let finished = world.run(&["run", "--max-hold", "1s", "m", "--", "sh", "-c", script]).expect(124);
    assert_eq!(world.read("told"), "told\n");
    assert!(finished.err.contains("1s"), "{finished:?}");
    assert!(begun.elapsed() >= Duration::from_millis(700), "most of it is the command's");
    // One that does not listen is killed.
    let deaf = "trap '' TERM; while :; do sleep 0.01; done";
    world.run(&["run", "--max-hold", "1s", "m", "--", "sh", "-c", deaf]).expect(124);
    // One that is done by then is not.
    world.run(&["run", "--max-hold", "20s", "m", "--", "sh", "-c", "exit 3"]).expect(3);
}

#[test]
fn a_mutex_is_kept_at_least_as_long_as_it_should() {
    let world = World::new();
    let begun = Instant::now();
    let holder = world.spawn(&["run", "--min-hold", "2s", "m", "--", "touch", "done"]);
    until_true("end of the command", || world.path("done").exists());
    world.run(&["run", "-n", "m", "--", "true"]).expect(1);
    holder.wait().expect(0);
    assert!(begun.elapsed() >= Duration::from_secs(2));
    world.run(&["run", "-n", "m", "--", "true"]).expect(0);
}

#[test]
fn who_waits_for_the_least_hold_can_be_sent_away_and_the_lease_runs_out() {
    let world = World::new();
    let holder = world.spawn(&["run", "--min-hold", "1h", "m", "--", "touch", "done"]);
    until_true("end of the command", || world.path("done").exists());
    until_true("end of all below", || common::children(holder.pid()).is_empty());
    holder.signal(Signal::INT);
    holder.wait().expect(130);
    world.run(&["run", "-n", "m", "--", "true"]).expect(1);
}

#[test]
fn what_cannot_be_executed_is_126_and_what_is_not_there_127() {
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
fn who_is_asked_to_end_while_it_waits_starts_nothing() {
    let world = World::new();
    let holder = world.spawn(&HOLD);
    line(&world.path("held"));
    for (signal, code) in [(Signal::INT, 130), (Signal::TERM, 143), (Signal::HUP, 129), (Signal::QUIT, 131)] {
        let waiter = world.spawn(&["run", "m", "--", "touch", "started"]);
        until("waiter", || (waiters(&world) == Some(1)).then_some(()));
        waiter.signal(signal);
        waiter.wait().expect(code);
        assert_eq!(waiters(&world), Some(0), "it leaves no place in the queue behind");
    }
    // The free mutex and the order to end come at once.
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

/// Runs the command as another user, which only root may: the system refuses root nothing.
mod as_root {
    use super::*;

    #[test]
    fn a_store_that_refuses_is_seventy_seven() {
        let world = World::new();
        fs::create_dir(world.path("closed")).unwrap();
        fs::set_permissions(world.path("closed"), fs::Permissions::from_mode(0o700)).unwrap();
        fs::set_permissions(world.dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        // The program is not where other users may read it.
        let program = world.path("simba");
        fs::copy(env!("CARGO_BIN_EXE_simba"), &program).unwrap();
        let url = format!("sqlite:{}", world.path("closed/store.db").display());
        let mut command = tool("setpriv");
        command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(program);
        command.args(["--on", &url, "run", "m", "--", "true"]).current_dir("/");
        let refused = world.start(command).wait().expect(77);
        assert_eq!(refused.err.lines().count(), 1, "{refused:?}");
    }
}
