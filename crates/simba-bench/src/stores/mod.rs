//! The stores that are measured, one file each.

mod curator;
mod etcd;
mod handover_timer;
mod memory;
mod mysql;
mod postgres;
mod redis;
mod sqlite;
mod zookeeper;

use anyhow::{Context, Result};
use simba_core::spi::ConnectUrl;

use simba_measure::Target;

/// All stores, in the order of the report.
pub(crate) const STORES: &[&dyn Target] = &[
    &memory::Memory,
    &sqlite::Sqlite,
    &postgres::Postgres,
    &mysql::MySql,
    &redis::Redis,
    &zookeeper::Zookeeper,
    &etcd::Etcd,
];

/// Returns the store with this name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Target> {
    STORES.iter().copied().find(|store| store.name() == name)
}

/// Returns all names, for error messages.
pub(crate) fn names() -> String {
    STORES.iter().map(|store| store.name()).collect::<Vec<_>>().join(", ")
}

/// Returns the URL of a server from the variable that the tests use as well.
pub(crate) fn url(variable: &str) -> Result<ConnectUrl> {
    let url = std::env::var(variable)
        .with_context(|| format!("{variable} is not set: start with `cargo xtask bench`"))?;
    Ok(url.parse()?)
}
