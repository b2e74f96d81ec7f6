//! `simba tck`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::World;

#[test]
fn every_case_is_printed_and_counted() {
    let finished = World::new().run(&["tck", "tokens::they_grow_"]).expect(0);
    let kept = finished.out.lines().filter(|line| line.starts_with("kept  tokens::they_grow_")).count();
    assert_eq!(
        (kept, finished.out.lines().last()),
        (3, Some("3 of 3 kept, 0 skipped, 0 broken")),
        "{finished:?}"
    );
    World::new().run(&["tck", "nonsense"]).expect(2);
}

/// The case needs a restart of the store, which the command cannot do.
#[test]
fn skipped_cases_are_not_counted_as_kept() {
    const RESTART: &str = "faults::a_restart_of_the_store_is_survived";
    let world = World::new();
    let finished = world.run(&["tck", RESTART]).expect(0);
    assert!(finished.out.starts_with(&format!("skipped  {RESTART}: ")), "{finished:?}");
    assert_eq!(finished.out.lines().last(), Some("0 of 1 kept, 1 skipped, 0 broken"), "{finished:?}");
    let mut command = world.simba(&["tck", "--json", RESTART]);
    command.env("SIMBA_TCK_SKIPS", world.path("skips")).env("CARGO_MANIFEST_DIR", "/somewhere/some-package");
    let finished = world.start(command).wait().expect(0);
    let report: serde_json::Value = serde_json::from_str(&finished.out).unwrap();
    assert_eq!((&report["kept"], &report["skipped"], &report["broken"]), (&0.into(), &1.into(), &0.into()));
    assert_eq!(
        (&report["cases"][0]["case"], &report["cases"][0]["outcome"]),
        (&RESTART.into(), &"skipped".into())
    );
    let reason = report["cases"][0]["reason"].as_str().unwrap();
    assert_eq!(world.read("skips"), format!("some-package/simba {RESTART}: {reason}\n"));
}

/// Stores whose client keeps its session alive in the background.
mod on_servers {
    use super::*;

    /// A contender counts as dead only if its client sends no heartbeats either.
    #[track_caller]
    fn cases_of_dead_contenders_pass(variable: &str) {
        let finished = World::on(&simba_servers::shared(variable)).run(&["tck", "_dead_"]).expect(0);
        assert_eq!(finished.out.lines().last(), Some("3 of 3 kept, 0 skipped, 0 broken"), "{finished:?}");
    }

    #[test]
    fn zookeeper_passes_cases_of_dead_contenders() {
        cases_of_dead_contenders_pass("SIMBA_TCK_ZOOKEEPER");
    }

    #[test]
    fn etcd_passes_cases_of_dead_contenders() {
        cases_of_dead_contenders_pass("SIMBA_TCK_ETCD");
    }
}
