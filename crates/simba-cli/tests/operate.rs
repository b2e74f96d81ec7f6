//! `simba release`, `schema` and `doctor`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;

use common::pty::Pty;
use common::{Running, World, line, until_true};
use serde_json::Value;

fn hold(world: &World) -> Running {
    let script = "echo $SIMBA_FENCING_TOKEN $SIMBA_CONTENDER_ID > held; exec sleep 1000";
    let _ = fs::remove_file(world.path("held"));
    let running = world.spawn(&["run", "m", "--ttl", "3s", "--transition", "6s", "--", "sh", "-c", script]);
    line(&world.path("held"));
    running
}

/// Returns token and id of the holder.
fn held(world: &World) -> (String, String) {
    let held = line(&world.path("held"));
    let (token, id) = held.split_once(' ').unwrap();
    (token.into(), id.into())
}

#[test]
fn each_condition_frees_only_the_matching_holder() {
    let world = World::new();
    for condition in ["--if-token", "--if-owner", "--force"] {
        let holder = hold(&world);
        let (token, id) = held(&world);
        let wrong = [["--if-token", "1"], ["--if-owner", "aaaaaaaaaaaa.1@other"]];
        for words in wrong {
            let refused = world.run(&[&["release", "m", "--yes"], &words[..]].concat()).expect(1);
            assert!(refused.err.contains(&id), "{refused:?}");
        }
        assert!(world.run(&["status", "m"]).out.contains(&id));
        let words = match condition {
            "--if-token" => vec![condition, &token],
            "--if-owner" => vec![condition, &id],
            _ => vec![condition],
        };
        let freed = world.run(&[&["release", "m", "--yes"], &words[..]].concat()).expect(0);
        assert!(freed.out.contains("freed") && freed.out.contains(&id), "{freed:?}");
        // Not at once: a renewal of the old holder may still be in progress.
        world.run(&["run", "-w", "30", "m", "--", "true"]).expect(0);
        // The old holder notices with its next renewal, and ends the command at once.
        let lost = holder.wait().expect(75);
        assert!(lost.err.contains("lost"), "{lost:?}");
    }
    assert!(world.run(&["release", "m", "--force", "--yes"]).expect(0).out.contains("free"));
}

#[test]
fn release_without_a_terminal_requires_yes() {
    let world = World::new();
    let _holder = hold(&world);
    let refused = world.run(&["release", "m", "--force"]).expect(2);
    assert!(refused.err.contains("--yes"), "{refused:?}");
    world.run(&["run", "-n", "m", "--", "true"]).expect(1);
}

#[test]
fn release_on_a_terminal_asks_and_shows_how_long_the_holder_may_run() {
    let world = World::new();
    let holder = hold(&world);
    let ask = ["sh", "-c", "$SIMBA --on $ON release m --force"];
    for (answer, code) in [("n\n", 1), ("\n", 1), ("\x04", 1), ("y\n", 0)] {
        let mut asked = Pty::start(&world, &ask, 120, &[]);
        asked.shows("[y/N]");
        asked.shows("may keep running for up to");
        asked.types(answer);
        assert_eq!(asked.wait(), code, "{answer:?}: {}", asked.seen());
    }
    holder.wait().expect(75);
}

#[test]
fn schema_is_printed_and_applied() {
    let world = World::new();
    let printed = world.run(&["schema"]).expect(0).out;
    assert!(printed.to_lowercase().contains("create table"), "{printed}");
    world.run(&["schema", "--apply"]).expect(0);
    world.run(&["schema", "--apply"]).expect(0);
    let mut memory = world.bare();
    memory.args(["--on", "memory:", "schema"]);
    assert!(world.start(memory).wait().expect(0).out.starts_with("-- "));
}

#[test]
fn doctor_has_no_findings_on_a_new_file() {
    let world = World::new();
    let finished = world.run(&["doctor"]).expect(0);
    assert!(finished.out.contains("sqlite") && finished.out.contains("--ttl"), "{finished:?}");
    let finished: Value = serde_json::from_str(&world.run(&["doctor", "--json"]).expect(0).out).unwrap();
    assert!(
        finished["round_trip_us"].is_u64()
            && finished["recommended_ttl_ms"].is_u64()
            && finished["server"].is_string()
    );
    assert_eq!(finished["findings"], Value::Array(Vec::new()));
}

#[test]
fn doctor_prints_a_finding_with_its_fix_and_exits_with_1() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    // Writable by all users.
    let path = world.path("store.db");
    let mut rights = fs::metadata(&path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut rights, 0o666);
    fs::set_permissions(&path, rights).unwrap();
    let finished = world.run(&["doctor"]);
    let json: Value = serde_json::from_str(&world.run(&["doctor", "--json"]).out).unwrap();
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(finished.code(), i32::from(!findings.is_empty()), "{finished:?}");
    for finding in findings {
        let (problem, fix) = (finding["problem"].as_str().unwrap(), finding["fix"].as_str().unwrap());
        assert!(finished.out.contains(problem) && finished.out.contains(fix), "{finished:?}");
    }
    assert!(!findings.is_empty(), "{finished:?}");
}

#[test]
fn doctor_warns_that_memory_is_visible_to_one_process() {
    let world = World::new();
    let mut memory = world.bare();
    memory.args(["--on", "memory:", "doctor"]);
    let finished = world.start(memory).wait().expect(1);
    assert!(
        finished.out.contains("only this process") && finished.out.contains("sqlite:PATH"),
        "{finished:?}"
    );
}

#[test]
fn doctor_without_a_reachable_store_exits_with_69() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    let hung = common::hang(&world);
    let finished = world.run(&["doctor"]).expect(69);
    assert_eq!(finished.err.lines().count(), 1, "{finished:?}");
    drop(hung);
    until_true("store", || world.run(&["doctor"]).code() == 0);
}
