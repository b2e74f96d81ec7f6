//! Conformance suite with TLS and full verification, with the minimum rights.

mod common;

simba_tck::suite!(common::Encrypted::shared());
