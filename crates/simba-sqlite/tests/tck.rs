//! The whole kit on a file, with a backend of its own for every connection, as another process would have.

mod common;

simba_tck::suite!(common::Sqlite::new());
