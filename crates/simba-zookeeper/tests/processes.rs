//! Rows of the fault matrix about processes.

mod common;

simba_tck::processes!(common::Zookeeper);
