//! The rows about the network, on the shared MariaDB.

mod common;

simba_tck::rows!(common::MySql::shared());
