//! A file that every connection opens for itself, as another process would.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "for tests, of which each uses a part"
)]

pub mod player;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Lease, Simba, SystemClock};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use simba_tck::{Connection, FaultyBackend, Fixture, Shared, Switch, async_trait};
use tempfile::TempDir;

/// A lease and a poll that outlast every test: what is passed on under it was passed on on purpose.
pub fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(30), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(30)).unwrap()
}

/// Far more than anything takes, and far less than [`long`].
pub const SOON: Duration = Duration::from_secs(10);

/// A file in a folder, which is removed in the end by whoever made it.
pub struct Sqlite {
    path: PathBuf,
    _folder: Option<TempDir>,
}

impl Sqlite {
    pub fn new() -> Self {
        let folder = TempDir::new().expect("there is room for a folder");
        Self { path: folder.path().join("simba.db"), _folder: Some(folder) }
    }

    pub fn at(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), _folder: None }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub async fn backend(&self) -> SqliteBackend {
        let opened = SqliteBackend::connect(SqliteConfig::new(&self.path)).await;
        opened.unwrap_or_else(|error| panic!("the file can be opened: {error:?}"))
    }
}

impl Sqlite {
    /// A handle of its own, by the [`long`] lease.
    pub async fn simba(&self) -> Simba {
        Simba::builder(Arc::new(self.backend().await)).lease(long()).build()
    }

    /// A plain connection past all that is ours.
    pub fn raw(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(&self.path).unwrap()
    }
}

#[async_trait]
impl Fixture for Sqlite {
    async fn connect(&self) -> Connection {
        let network = Switch::new();
        let weather = Arc::<Switch>::clone(&network);
        Connection::new(FaultyBackend::new(self.backend().await, SystemClock, weather), network)
    }
}

impl Shared for Sqlite {
    fn start() -> Self {
        Self::new()
    }

    fn address(&self) -> String {
        self.path.display().to_string()
    }

    fn attach(address: &str) -> Self {
        Self::at(address)
    }
}
