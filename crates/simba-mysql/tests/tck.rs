//! The whole kit on the shared MariaDB, as the user with the least rights, through a network that breaks.

mod common;

simba_tck::suite!(common::MySql::shared());
