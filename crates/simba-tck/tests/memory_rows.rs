//! The rows about the network on the reference backend, through a network of switches.

mod common;

simba_tck::rows!(common::Memory::new());
