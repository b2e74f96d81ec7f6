//! The stores that are measured, one file each.

mod curator;
mod etcd;
mod lap;
mod memory;
mod mysql;
mod postgres;
mod redis;
mod sqlite;
mod zookeeper;

use anyhow::{Context, Result};
use simba_core::ConnectUrl;

use simba_measure::Target;

/// All of them, in the order of the report.
pub(crate) const STORES: &[&dyn Target] = &[
    &memory::Memory,
    &sqlite::Sqlite,
    &postgres::Postgres,
    &mysql::MySql,
    &redis::Redis,
    &zookeeper::Zookeeper,
    &etcd::Etcd,
];

/// The store of this name.
pub(crate) fn find(name: &str) -> Option<&'static dyn Target> {
    STORES.iter().copied().find(|store| store.name() == name)
}

/// All names, for a person.
pub(crate) fn names() -> String {
    STORES.iter().map(|store| store.name()).collect::<Vec<_>>().join(", ")
}

/// Where a server is, by the variable that the tests know it by too.
pub(crate) fn url(variable: &str) -> Result<ConnectUrl> {
    let url = std::env::var(variable)
        .with_context(|| format!("{variable} is not set: start with `cargo xtask bench`"))?;
    Ok(url.parse()?)
}
