//! Conformance suite on a master with a replica, found by sentinels.

mod common;

simba_tck::suite!(common::Group::shared("SIMBA_TCK_REDIS_SENTINEL"));
