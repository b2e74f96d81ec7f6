//! The whole kit on a Valkey.

mod common;

simba_tck::suite!(common::Store::valkey());
