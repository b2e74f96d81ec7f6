//! The whole kit on a cluster of six through TLS, verified in full.

mod common;

simba_tck::suite!(common::Group::shared("SIMBA_TCK_REDIS_CLUSTER").encrypted());
