//! The whole kit against the shared server: as the user with the fewest rights, through a proxy.

mod common;

use common::Store;

simba_tck::suite!(Store::shared());
