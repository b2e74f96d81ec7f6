//! The whole suite on the reference backend, through a network of switches.

mod common;

simba_tck::suite!(common::Memory::new());
