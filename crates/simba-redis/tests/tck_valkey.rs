//! Conformance suite on Valkey.

mod common;

simba_tck::suite!(common::Store::valkey().with_long_timeout());
