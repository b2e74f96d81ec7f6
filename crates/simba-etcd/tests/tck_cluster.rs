//! The conformance suite on a cluster of three.

mod common;

simba_tck::suite!(common::cluster());
