//! The whole kit on a standalone server, as the user with the fewest rights, through a proxy.

mod common;

simba_tck::suite!(common::Store::shared());
