//! Conformance suite on a standalone server, with the minimum rights, through a proxy.

mod common;

simba_tck::suite!(common::Store::shared().with_long_timeout());
