//! The whole kit on a master with a replica, found through its sentinels.

mod common;

simba_tck::suite!(common::Group::shared("SIMBA_TCK_REDIS_SENTINEL"));
