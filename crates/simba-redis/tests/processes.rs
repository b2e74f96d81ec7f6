//! The rows about processes: killed, stopped, told to end.

mod common;

simba_tck::processes!(common::Store);
