//! The whole kit on an ensemble of three.

mod common;

simba_tck::suite!(common::Zookeeper::ensemble());
