//! The rows of the fault matrix that etcd shares with other stores: about the network, and about queues.

mod common;

simba_tck::rows!(common::Etcd::single());

simba_test_support::queue_rows!(common::EtcdStore);
