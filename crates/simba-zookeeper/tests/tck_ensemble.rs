//! The whole kit on an ensemble of three servers.

mod common;

simba_tck::suite!(common::ensemble());
