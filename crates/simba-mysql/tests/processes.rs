//! The rows about processes, on the shared MariaDB.

mod common;

simba_tck::processes!(common::MySql);
