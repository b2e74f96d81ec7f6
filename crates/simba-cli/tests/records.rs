//! `simba status`, `ls` and `watch`: as text and as JSON.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::Stdio;
use std::time::{Duration, Instant};

use common::pty::Pty;
use common::{Running, World, line, until, until_true};
use rustix::process::Signal;
use serde_json::Value;

fn hold(world: &World, mutex: &str) -> Running {
    let script = format!("echo $SIMBA_FENCING_TOKEN > held-{mutex}; exec sleep 1000");
    let running = world.spawn(&["run", mutex, "--", "sh", "-c", &script]);
    line(&world.path(&format!("held-{mutex}")));
    running
}

/// The type of a field.
#[derive(Clone, Copy)]
enum Kind {
    Text,
    TextOrNull,
    CountOrNull,
    FlagOrNull,
    TimeOrNull,
    OneOf(&'static [&'static str]),
}

const STATES: Kind = Kind::OneOf(&["held", "free", "unknown"]);

/// A field of a record: its name and its type. The fields are a part of the interface.
type Field = (&'static str, Kind);

/// The fields of every record.
const ALL: [Field; 6] = [
    ("mutex", Kind::Text),
    ("state", STATES),
    ("owner", Kind::TextOrNull),
    ("host", Kind::TextOrNull),
    ("pid", Kind::CountOrNull),
    ("token", Kind::CountOrNull),
];

/// The additional fields of `status --json` and `ls --json`.
const STATUS: [Field; 4] = [
    ("acquired_at", Kind::TimeOrNull),
    ("expires_in_ms", Kind::CountOrNull),
    ("in_transition", Kind::FlagOrNull),
    ("waiters", Kind::CountOrNull),
];

/// The additional field of a line of `watch --json`.
const WATCH: [Field; 1] = [("at", Kind::TimeOrNull)];

/// Checks that an object has exactly the fields of every record and these.
#[track_caller]
fn conform(object: &Value, others: &[Field]) {
    let fields = || ALL.iter().chain(others);
    let object = object.as_object().unwrap_or_else(|| panic!("no object: {object}"));
    let mut names: Vec<&str> = object.keys().map(String::as_str).collect();
    let mut wanted: Vec<&str> = fields().map(|(name, _)| *name).collect();
    names.sort_unstable();
    wanted.sort_unstable();
    assert_eq!(names, wanted);
    for (name, kind) in fields() {
        let value = &object[*name];
        let fits = match kind {
            Kind::Text => value.is_string(),
            Kind::TextOrNull => value.is_string() || value.is_null(),
            Kind::CountOrNull => value.is_u64() || value.is_null(),
            Kind::FlagOrNull => value.is_boolean() || value.is_null(),
            Kind::TimeOrNull => value.is_null() || value.as_str().is_some_and(is_time),
            Kind::OneOf(words) => value.as_str().is_some_and(|word| words.contains(&word)),
        };
        assert!(fits, "{name}: {value}");
    }
}

/// Returns whether the text has the form `2026-01-31T12:34:56.789Z`.
fn is_time(text: &str) -> bool {
    let shape: String = text.chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect();
    shape == "0000-00-00T00:00:00.000Z"
}

#[test]
fn json_status_has_the_documented_fields() {
    let world = World::new();
    let holder = hold(&world, "orders");
    let waiter = world.spawn(&["run", "orders", "--", "true"]);
    let status = until("waiter", || {
        let out = world.run(&["status", "orders", "free-one", "--json"]).expect(0).out;
        let status: Value = serde_json::from_str(&out).unwrap();
        (status[0]["waiters"] == 1).then_some(status)
    });
    assert_eq!(status.as_array().unwrap().len(), 2);
    status.as_array().unwrap().iter().for_each(|record| conform(record, &STATUS));
    let held = &status[0];
    assert_eq!((held["mutex"].as_str(), held["state"].as_str()), (Some("orders"), Some("held")));
    assert_eq!(held["pid"], holder.pid());
    assert_eq!(held["token"].to_string(), line(&world.path("held-orders")));
    assert!(held["owner"].as_str().unwrap().ends_with(held["host"].as_str().unwrap()));
    let left = held["expires_in_ms"].as_u64().unwrap();
    assert!(left > 0 && left <= 16_000, "{left}");
    assert_eq!(held["in_transition"], false);
    let free = &status[1];
    assert_eq!((free["mutex"].as_str(), free["state"].as_str()), (Some("free-one"), Some("free")));
    assert!(["owner", "host", "pid", "expires_in_ms"].iter().all(|field| free[*field].is_null()));
    drop(waiter);
    let listed: Value = serde_json::from_str(&world.run(&["ls", "--json"]).expect(0).out).unwrap();
    listed.as_array().unwrap().iter().for_each(|record| conform(record, &STATUS));
    assert_eq!(listed[0]["mutex"], "orders");
    let empty = World::new();
    assert_eq!(empty.run(&["ls", "--json"]).expect(0).out.trim(), "[]");
    assert_eq!(empty.run(&["status", "--json"]).expect(0).out.trim(), "[]");
}

#[test]
fn text_status_is_aligned_and_has_no_colour_in_a_file() {
    let world = World::new();
    let _holder = hold(&world, "a-rather-long-name");
    let _other = hold(&world, "b");
    let out = world.run(&["ls"]).expect(0).out;
    assert!(!out.contains('\x1b'), "{out:?}");
    let lines: Vec<&str> = out.lines().collect();
    assert_eq!(lines.len(), 3, "{out}");
    let column = lines[0].find("state").unwrap();
    assert!(lines[1..].iter().all(|line| line[column..].starts_with("held ")), "{out}");
    assert!(lines[0].contains("waiters") && !out.lines().any(|line| line.ends_with(' ')), "{out:?}");
}

#[test]
fn colours_need_a_terminal_and_no_color_unset() {
    let world = World::new();
    let _holder = hold(&world, "orders");
    let show = ["sh", "-c", "$SIMBA --on $ON ls"];
    let mut coloured = Pty::start(&world, &show, 120, &[]);
    assert_eq!(coloured.wait(), 0);
    coloured.shows("\x1b[31mheld\x1b[0m");
    let mut plain = Pty::start(&world, &show, 120, &[("NO_COLOR", "1")]);
    assert_eq!(plain.wait(), 0);
    plain.shows("held");
    assert!(!plain.seen().contains('\x1b'), "{:?}", plain.seen());
    // An empty NO_COLOR counts as unset.
    let mut coloured = Pty::start(&world, &show, 120, &[("NO_COLOR", "")]);
    assert_eq!(coloured.wait(), 0);
    coloured.shows("\x1b[31mheld");
}

#[test]
fn lines_fit_a_narrow_terminal() {
    let world = World::new();
    let _holder = hold(&world, "orders");
    let mut narrow = Pty::start(&world, &["sh", "-c", "$SIMBA --on $ON ls"], 50, &[("NO_COLOR", "1")]);
    assert_eq!(narrow.wait(), 0);
    narrow.shows("waiters");
    let seen = narrow.seen();
    assert!(seen.lines().all(|line| line.trim_end().chars().count() <= 50), "{seen}");
    assert!(seen.lines().any(|line| line.starts_with("owner ")), "{seen}");
}

#[test]
fn watch_prints_every_change() {
    let world = World::new();
    let watch = world.spawn(&["watch", "orders", "--json"]);
    let text = world.spawn(&["watch", "orders"]);
    until_true("first line", || watch.out().contains("free") && text.out().contains("free"));
    let holder = hold(&world, "orders");
    until_true("line", || watch.out().contains("\"held\"") && text.out().contains("held by"));
    holder.signal(Signal::TERM);
    holder.wait().expect(143);
    until_true("line", || watch.out().lines().count() >= 3 && text.out().lines().count() >= 3);
    for signal in [&watch, &text] {
        signal.signal(Signal::TERM);
    }
    let lines: Vec<Value> =
        watch.wait().expect(0).out.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    lines.iter().for_each(|line| conform(line, &WATCH));
    let states: Vec<&str> = lines.iter().map(|line| line["state"].as_str().unwrap()).collect();
    assert_eq!(states, ["free", "held", "free"]);
    assert_eq!(lines[1]["token"].to_string(), line(&world.path("held-orders")));
    assert!(text.wait().expect(0).out.lines().all(|line| line.contains("  orders  ")));
}

#[test]
fn closed_output_ends_a_command_without_an_error() {
    let world = World::new();
    let _holder = hold(&world, "orders");
    for args in
        [&["ls"][..], &["status", "--json"], &["--help"], &["man"], &["completions", "bash"], &["schema"]]
    {
        let mut command = world.simba(args);
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut child = command.stdout(writer).stderr(Stdio::piped()).spawn().unwrap();
        let mut err = String::new();
        child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        assert_eq!((child.wait().unwrap().code(), err.as_str()), (Some(0), ""), "{args:?}");
    }
}

/// The reader closes the output, and no change of the mutex follows.
#[test]
fn watch_ends_when_its_reader_closes_the_output() {
    let world = World::new();
    let mut command = world.simba(&["watch", "orders"]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("free"));
    let begun = Instant::now();
    until_true("end of the watch", || child.try_wait().unwrap().is_some());
    assert!(begun.elapsed() < Duration::from_secs(20));
    assert_eq!(child.wait().unwrap().code(), Some(0));
}
