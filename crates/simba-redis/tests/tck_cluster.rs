//! Conformance suite on a cluster of six nodes.

mod common;

simba_tck::suite!(common::Group::shared("SIMBA_TCK_REDIS_CLUSTER"));
