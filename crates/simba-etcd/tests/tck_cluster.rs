//! The whole kit on a cluster of three.

mod common;

simba_tck::suite!(common::Etcd::cluster());
