//! Fault matrix: network faults, with a proxy in front of the real server.

mod common;

simba_tck::rows!(common::Store::shared());
