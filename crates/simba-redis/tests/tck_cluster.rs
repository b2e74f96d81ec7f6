//! The whole kit on a cluster of six.

mod common;

simba_tck::suite!(common::Group::shared("SIMBA_TCK_REDIS_CLUSTER"));
