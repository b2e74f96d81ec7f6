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
    let running = world.spawn(&["run", "m", "--ttl", "2s", "--transition", "1s", "--", "sh", "-c", script]);
    line(&world.path("held"));
    running
}

/// Token and id of the holder.
fn held(world: &World) -> (String, String) {
    let held = line(&world.path("held"));
    let (token, id) = held.split_once(' ').unwrap();
    (token.into(), id.into())
}

#[test]
fn each_condition_frees_the_right_holder_and_no_other() {
    let world = World::new();
    for condition in ["--if-token", "--if-owner", "--force"] {
        let holder = hold(&world);
        let (token, id) = held(&world);
        let wrong = [["--if-token", "1"], ["--if-owner", "aaaaaaaaaaaa.1@other"]];
        for words in wrong {
            let refused = world.run(&[&["release", "m", "--yes"], &words[..]].concat()).expect(1);
            assert!(refused.err.contains(&id), "it names the holder: {refused:?}");
        }
        assert!(world.run(&["status", "m"]).out.contains(&id));
        let words = match condition {
            "--if-token" => vec![condition, &token],
            "--if-owner" => vec![condition, &id],
            _ => vec![condition],
        };
        let freed = world.run(&[&["release", "m", "--yes"], &words[..]].concat()).expect(0);
        assert!(freed.out.contains("freed") && freed.out.contains(&id), "{freed:?}");
        world.run(&["run", "-n", "m", "--", "true"]).expect(0);
        // The old holder learns it with its next renewal, and ends the command at once.
        let lost = holder.wait().expect(75);
        assert!(lost.err.contains("lost"), "{lost:?}");
    }
    assert!(world.run(&["release", "m", "--force", "--yes"]).expect(0).out.contains("free"));
}

#[test]
fn without_a_terminal_the_answer_must_be_given_before() {
    let world = World::new();
    let _holder = hold(&world);
    let refused = world.run(&["release", "m", "--force"]).expect(2);
    assert!(refused.err.contains("--yes"), "{refused:?}");
    world.run(&["run", "-n", "m", "--", "true"]).expect(1);
}

#[test]
fn on_a_terminal_it_asks_and_says_for_how_long_the_holder_may_believe() {
    let world = World::new();
    let holder = hold(&world);
    let ask = ["sh", "-c", "$SIMBA --on $ON release m --force"];
    for (answer, code) in [("n\n", 1), ("\n", 1), ("\x04", 1), ("y\n", 0)] {
        let mut asked = Pty::start(&world, &ask, 120, &[]);
        asked.shows("[y/N]");
        asked.shows("in good faith for");
        asked.types(answer);
        assert_eq!(asked.wait(), code, "{answer:?}: {}", asked.seen());
    }
    holder.wait().expect(75);
}

#[test]
fn the_schema_is_printed_and_applied() {
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
fn the_doctor_finds_nothing_where_there_is_nothing() {
    let world = World::new();
    let told = world.run(&["doctor"]).expect(0);
    assert!(told.out.contains("sqlite") && told.out.contains("--ttl"), "{told:?}");
    let told: Value = serde_json::from_str(&world.run(&["doctor", "--json"]).expect(0).out).unwrap();
    assert!(
        told["round_trip_us"].is_u64() && told["recommended_ttl_ms"].is_u64() && told["server"].is_string()
    );
    assert_eq!(told["findings"], Value::Array(Vec::new()));
}

#[test]
fn the_doctor_names_a_finding_with_its_cure_and_exits_with_one() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    // Everybody may write to it.
    let path = world.path("store.db");
    let mut rights = fs::metadata(&path).unwrap().permissions();
    std::os::unix::fs::PermissionsExt::set_mode(&mut rights, 0o666);
    fs::set_permissions(&path, rights).unwrap();
    let told = world.run(&["doctor"]);
    let json: Value = serde_json::from_str(&world.run(&["doctor", "--json"]).out).unwrap();
    let findings = json["findings"].as_array().unwrap();
    assert_eq!(told.code(), i32::from(!findings.is_empty()), "{told:?}");
    for finding in findings {
        let (problem, cure) = (finding["problem"].as_str().unwrap(), finding["cure"].as_str().unwrap());
        assert!(told.out.contains(problem) && told.out.contains(cure), "{told:?}");
    }
    assert!(!findings.is_empty(), "{told:?}");
}

#[test]
fn the_doctor_finds_that_no_other_process_sees_a_store_in_memory() {
    let world = World::new();
    let mut memory = world.bare();
    memory.args(["--on", "memory:", "doctor"]);
    let told = world.start(memory).wait().expect(1);
    assert!(told.out.contains("only this process") && told.out.contains("sqlite:PATH"), "{told:?}");
}

#[test]
fn a_doctor_without_a_store_says_what_is_missing() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    let hung = common::hang(&world);
    let told = world.run(&["doctor"]).expect(69);
    assert_eq!(told.err.lines().count(), 1, "{told:?}");
    drop(hung);
    until_true("store", || world.run(&["doctor"]).code() == 0);
}
