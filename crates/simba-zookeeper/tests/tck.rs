//! The whole kit on one ZooKeeper, as a user with no more rights than it takes (row 65), below a chroot.

mod common;

simba_tck::suite!(common::Zookeeper::as_least());
