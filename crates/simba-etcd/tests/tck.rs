//! The conformance suite on one etcd.

mod common;

simba_tck::suite!(common::Etcd::single());
