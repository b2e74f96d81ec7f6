//! The keys of settings, and the origin of their values.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// The names of the stores' tables, with the store of each.
pub(super) const STORES: [(&str, &str); 8] = [
    ("sqlite", "sqlite"),
    ("mysql", "mysql"),
    ("mariadb", "mysql"),
    ("jdbc", "mysql"),
    ("postgres", "postgres"),
    ("redis", "redis"),
    ("zookeeper", "zookeeper"),
    ("etcd", "etcd"),
];

/// The keys, for all stores and for each store.
pub(super) const KEYS: [&str; 9] =
    ["enabled", "url", "password", "password-file", "ttl", "transition", "grace", "poll", "initial-delay"];

/// A key for all stores, or of one store.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) store: Option<&'static str>,
    pub(super) name: &'static str,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.store {
            Some(store) => write!(f, "{store}.{}", self.name),
            None => f.write_str(self.name),
        }
    }
}

/// The origin of a setting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    File(Arc<PathBuf>, usize),
    Environment(String),
    Code,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path, line) => write!(f, "{}, line {line}", path.display()),
            Self::Environment(name) => write!(f, "the variable {name}"),
            Self::Code => f.write_str("the code"),
        }
    }
}

/// Returns the key with this name.
pub(super) fn key(name: &str) -> Option<&'static str> {
    // `_` and `-` are equivalent, as in Spring.
    let name = name.replace('_', "-");
    KEYS.iter().copied().find(|known| *known == name)
}

/// Returns the store whose table has this name.
pub(super) fn store(name: &str) -> Option<&'static str> {
    STORES.iter().find(|(known, _)| *known == name).map(|(_, store)| *store)
}
