//! Fault matrix: killed, stopped and terminated processes.

mod common;

simba_tck::processes!(common::Store);
