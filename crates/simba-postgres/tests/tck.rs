//! The whole conformance suite against the shared server: as the least privileged user, through a proxy.

mod common;

use common::Store;

simba_tck::suite!(Store::shared());
