//! The rows of the fault matrix about the network.

mod common;

simba_tck::rows!(common::Etcd::single());
