//! Simba on PostgreSQL: a table, a queue and NOTIFY.

mod backend;
mod config;
mod desk;
mod errands;
mod error;
mod gate;
mod handle;
mod hints;
mod line;
mod operate;
mod rows;
mod schema;
mod session;
mod statements;
mod supervisor;
mod wire;

pub use backend::PostgresBackend;
pub use config::{Pooler, PostgresConfig};

/// The name of the backend in errors and logs.
const NAME: &str = "postgres";
