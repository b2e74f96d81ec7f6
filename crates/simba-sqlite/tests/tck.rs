//! The conformance suite on a file, with a new backend for every connection, as another process would have.

mod common;

simba_tck::suite!(common::Sqlite::new());
