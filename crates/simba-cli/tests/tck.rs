//! `simba tck`.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::World;

#[test]
fn every_promise_is_told_and_all_are_counted() {
    let told = World::new().run(&["tck", "tokens::they_grow_"]).expect(0);
    let kept = told.out.lines().filter(|line| line.starts_with("kept  tokens::they_grow_")).count();
    assert_eq!((kept, told.out.lines().last()), (3, Some("3 of 3 kept, 0 skipped, 0 broken")), "{told:?}");
    World::new().run(&["tck", "nonsense"]).expect(2);
}

/// A program that is given a URL cannot restart the store.
#[test]
fn skipped_cases_are_not_counted_as_kept() {
    const RESTART: &str = "faults::a_restart_of_the_store_is_survived";
    let world = World::new();
    let told = world.run(&["tck", RESTART]).expect(0);
    assert!(told.out.starts_with(&format!("skipped  {RESTART}: ")), "{told:?}");
    assert_eq!(told.out.lines().last(), Some("0 of 1 kept, 1 skipped, 0 broken"), "{told:?}");
    let mut command = world.simba(&["tck", "--json", RESTART]);
    command.env("SIMBA_TCK_SKIPS", world.path("skips")).env("CARGO_MANIFEST_DIR", "/somewhere/some-package");
    let told = world.start(command).wait().expect(0);
    let told: serde_json::Value = serde_json::from_str(&told.out).unwrap();
    assert_eq!((&told["kept"], &told["skipped"], &told["broken"]), (&0.into(), &1.into(), &0.into()));
    assert_eq!(
        (&told["cases"][0]["case"], &told["cases"][0]["outcome"]),
        (&RESTART.into(), &"skipped".into())
    );
    let reason = told["cases"][0]["reason"].as_str().unwrap();
    assert_eq!(world.read("skips"), format!("some-package/simba {RESTART}: {reason}\n"));
}

/// Where a client keeps its session alive by itself.
mod on_servers {
    use super::*;

    /// Whoever is dead shows no sign of life, not even those that a client gives unasked.
    #[track_caller]
    fn outlives_the_dead(variable: &str) {
        let told = World::on(&simba_servers::shared(variable)).run(&["tck", "_dead_"]).expect(0);
        assert_eq!(told.out.lines().last(), Some("3 of 3 kept, 0 skipped, 0 broken"), "{told:?}");
    }

    #[test]
    fn zookeeper_outlives_the_dead() {
        outlives_the_dead("SIMBA_TCK_ZOOKEEPER");
    }

    #[test]
    fn etcd_outlives_the_dead() {
        outlives_the_dead("SIMBA_TCK_ETCD");
    }
}
