//! `simba bench`: figures as text and as JSON, and nothing left behind.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::fs;
use std::sync::{Mutex, PoisonError};

use common::pty::Pty;
use common::{World, until_true};
use rustix::process::Signal;
use serde_json::Value;

/// The smallest benchmark.
const SMALL: [&str; 8] = ["bench", "--quick", "--tasks", "2", "--waiters", "2", "--held", "10"];

/// The measures of every store.
const MEASURES: [&str; 9] = [
    "10 held: memory each",
    "pairs, 1 task",
    "one pair, 1 task",
    "pairs, 2 tasks",
    "hand-over p50, 1 waiter",
    "hand-over p99, 1 waiter",
    "hand-over p50, 2 waiters",
    "hand-over p99, 2 waiters",
    "hand-over p50, 2 waiters to 1",
];

/// Returns the names of the figures of a run, and checks their documented form.
#[track_caller]
fn figures(text: &str, store: &str, target: &str) -> Vec<String> {
    let report: Value = serde_json::from_str(text).unwrap();
    let fields = |object: &Value| object.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(fields(&report), ["quick", "rows", "store"]);
    assert_eq!((report["quick"].as_bool(), report["store"].as_str()), (Some(true), Some(store)));
    let rows = report["rows"].as_array().unwrap();
    for row in rows {
        assert_eq!(fields(row), ["floor", "measure", "ours", "ratio", "target", "unit"]);
        assert_eq!(row["target"], target, "{row}");
        assert!(["/s", "µs", "ms", "B"].contains(&row["unit"].as_str().unwrap()), "{row}");
        assert!(row["ours"].as_f64().unwrap() >= 0.0, "{row}");
        let (floor, ratio) = (row["floor"].as_f64(), row["ratio"].as_f64());
        assert!(floor.is_some() || row["floor"].is_null(), "{row}");
        let ratio_of = |floor: f64| row["ours"].as_f64().unwrap() / floor;
        let fits = |floor| ratio.is_some_and(|ratio| (ratio / ratio_of(floor) - 1.0).abs() < 1e-9);
        assert!(floor.map_or(row["ratio"].is_null(), fits), "{row}");
    }
    let names = rows.iter().map(|row| row["measure"].as_str().unwrap().to_owned()).collect::<Vec<_>>();
    for measure in MEASURES {
        assert!(names.iter().any(|name| name == measure), "{measure}: {names:?}");
    }
    names
}

/// Returns the files in the directory, apart from the outputs of the test.
fn files(world: &World) -> Vec<String> {
    let names = fs::read_dir(world.dir.path()).unwrap().map(|entry| entry.unwrap().file_name());
    let mut names: Vec<String> = names.map(|name| name.to_string_lossy().into_owned()).collect();
    names.retain(|name| !name.ends_with(".out") && !name.ends_with(".err"));
    names.sort_unstable();
    names
}

#[test]
fn json_has_the_documented_figures_and_the_store_keeps_no_entries() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    let before = files(&world);
    let finished = world.run(&[&SMALL[..], &["--json"]].concat()).expect(0);
    assert_eq!(finished.err, "", "progress needs a terminal");
    let names = figures(&finished.out, &world.url, "sqlite");
    for measure in
        ["start of `simba run`, p50, beside flock(1)", "start of `simba run`, p99, beside flock(1)"]
    {
        assert!(names.iter().any(|name| name == measure), "{names:?}");
    }
    assert!(!world.run(&["ls"]).expect(0).out.contains("simba-bench"));
    assert_eq!(files(&world), before);
}

#[test]
fn text_is_a_table_and_a_terminal_shows_the_progress() {
    let world = World::new();
    let script = format!("$SIMBA --on $ON {}", SMALL.join(" "));
    let mut pty = Pty::start(&world, &["sh", "-c", &script], 120, &[]);
    for step in ["2/5 measuring many held", "3/5 measuring", "4/5 measuring", "5/5 measuring"] {
        pty.shows(step);
    }
    assert_eq!(pty.wait(), 0, "{}", pty.seen());
    // The end of the text below the table: all of it is read.
    pty.shows("return of the next waiter's lock");
    let seen = pty.seen();
    let head = seen.lines().find(|line| line.contains("ratio")).unwrap();
    let row = seen.lines().find(|line| line.contains("pairs, 2 tasks")).unwrap();
    // The progress line is cleared before the first line of the table.
    let value = row.find("tasks").and_then(|at| Some(at + row[at..].find(|c: char| c.is_ascii_digit())?));
    assert_eq!(head.find("ours"), value, "{head}\n{row}");
}

#[test]
fn unreachable_store_is_one_line_and_an_exit_code() {
    let world = World::new();
    for (url, code) in [
        ("redis://127.0.0.1:1", 69),
        ("postgres://user@127.0.0.1:1/db", 69),
        ("mysql://user@127.0.0.1:1/db", 69),
        ("zookeeper://127.0.0.1:1", 69),
        ("etcd://127.0.0.1:1", 69),
        ("sqlite:/proc/simba.db", 78),
        ("gopher://host", 2),
    ] {
        let mut command = world.bare();
        command.args(["--on", url, "bench", "--quick"]);
        let finished = world.start(command).wait();
        assert_eq!(finished.err.lines().count(), 1, "{url}: {finished:?}");
        assert_eq!((finished.code(), finished.out.as_str()), (code, ""), "{url}: {finished:?}");
    }
}

#[test]
fn invalid_numbers_exit_with_2() {
    let world = World::new();
    for words in [["--held", "0"], ["--tasks", "-1"], ["--waiters", "many"]] {
        world.run(&[&["bench"], &words[..]].concat()).expect(2);
    }
}

#[test]
fn terminated_benchmark_leaves_nothing_behind() {
    let world = World::new();
    world.run(&["run", "m", "--", "true"]).expect(0);
    let before = files(&world);
    let mut bench = world.spawn(&["bench", "--held", "100"]);
    let measured = world.path(&format!("store.bench-{}/simba.db", bench.pid()));
    let url = format!("sqlite:{}", measured.display());
    until_true("mutexes of the benchmark", || {
        let mut ls = world.bare();
        ls.args(["--on", &url, "ls"]);
        measured.exists() && world.start(ls).wait().out.contains("simba-bench:held:")
    });
    bench.signal(Signal::TERM);
    assert_eq!(bench.status().code(), Some(143), "{}", bench.err());
    assert_eq!(files(&world), before);
    assert_eq!(bench.processes(), Vec::<i32>::new());
}

/// Checks a server, on which nothing may be held afterwards. One at a time: each benchmark keeps all cores busy.
fn server(variable: &str, target: &str) {
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let world = World::on(&simba_servers::shared(variable));
    let shown = world.url.parse::<simba_mutex::spi::ConnectUrl>().unwrap().to_string();
    let finished = world.run(&[&SMALL[..], &["--json"]].concat()).expect(0);
    figures(&finished.out, &shown, target);
    let records: Value = serde_json::from_str(&world.run(&["ls", "--json"]).expect(0).out).unwrap();
    let ours = |record: &&Value| record["mutex"].as_str().unwrap().starts_with("simba-bench:");
    let held = |record: &&Value| record["state"] == "held";
    let held: Vec<_> = records.as_array().unwrap().iter().filter(ours).filter(held).collect();
    assert!(held.is_empty(), "{held:?}");
}

mod on_servers {
    use super::*;

    #[test]
    fn redis_is_measured_and_everything_is_free_afterwards() {
        server("SIMBA_TCK_REDIS", "redis");
    }

    #[test]
    fn postgres_is_measured_and_everything_is_free_afterwards() {
        server("SIMBA_TCK_POSTGRES", "postgres");
    }

    #[test]
    fn mysql_is_measured_and_everything_is_free_afterwards() {
        server("SIMBA_TCK_MARIADB", "mysql");
    }

    #[test]
    fn zookeeper_is_measured_and_everything_is_free_afterwards() {
        server("SIMBA_TCK_ZOOKEEPER", "zookeeper");
    }

    #[test]
    fn etcd_is_measured_and_everything_is_free_afterwards() {
        server("SIMBA_TCK_ETCD", "etcd");
    }

    #[test]
    fn second_benchmark_on_a_server_is_refused() {
        let world = World::on(&simba_servers::shared("SIMBA_TCK_VALKEY"));
        // No other test measures this server.
        let script = "echo up > up; exec sleep 1000";
        let one = world.spawn(&["run", "simba-bench:alone:0", "--", "sh", "-c", script]);
        until_true("holder", || world.path("up").exists());
        let refused = world.run(&SMALL).expect(1);
        // The line before it may warn about the store.
        assert!(refused.err.lines().last().unwrap().contains("already"), "{refused:?}");
        one.signal(Signal::TERM);
        one.wait();
    }
}
