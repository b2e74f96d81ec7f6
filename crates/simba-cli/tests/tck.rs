//! `simba tck`.

mod common;

use common::World;

#[test]
fn every_promise_is_told_and_all_are_counted() {
    let told = World::new().run(&["tck", "tokens::they_grow_"]).expect(0);
    let kept = told.out.lines().filter(|line| line.starts_with("kept  tokens::they_grow_")).count();
    assert_eq!((kept, told.out.lines().last()), (3, Some("3 of 3 kept")), "{told:?}");
    World::new().run(&["tck", "nonsense"]).expect(2);
}

/// Where a client keeps its session alive by itself.
mod on_servers {
    use super::*;

    /// Whoever is dead shows no sign of life, not even those that a client gives unasked.
    #[track_caller]
    fn outlives_the_dead(variable: &str) {
        let told = World::on(&simba_servers::shared(variable)).run(&["tck", "_dead_"]).expect(0);
        assert_eq!(told.out.lines().last(), Some("3 of 3 kept"), "{told:?}");
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
