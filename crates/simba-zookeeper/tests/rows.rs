//! The rows of the fault matrix that ZooKeeper shares with other stores: about the network, and about queues.

mod common;

simba_tck::rows!(common::Zookeeper::single());

simba_test_support::queue_rows!(common::ZookeeperStore);
