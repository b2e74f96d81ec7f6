//! Conformance suite on a cluster of six nodes with TLS and full verification.

mod common;

simba_tck::suite!(common::Group::shared("SIMBA_TCK_REDIS_CLUSTER").encrypted());
