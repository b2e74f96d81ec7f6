//! A fixture with one file. Every connection opens it anew, as another process would.

#![allow(
    dead_code,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "each test program uses only a part"
)]

pub mod process;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Lease, Simba, SystemClock};
use simba_sqlite::{SqliteBackend, SqliteConfig};
use simba_tck::{Connection, FaultyBackend, Fixture, Shared, Switch, async_trait};
use tempfile::TempDir;

/// Returns a lease and a poll that outlast every test, so that neither explains a hand-over.
pub fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(60), Duration::from_secs(60)).unwrap();
    lease.with_poll(Duration::from_secs(600)).unwrap()
}

/// A limit far above what anything takes, and far below the lease [`long`].
pub const SOON: Duration = Duration::from_secs(30);

/// A file. Its folder is removed with the value that created it.
pub struct Sqlite {
    path: PathBuf,
    _folder: Option<TempDir>,
}

impl Sqlite {
    pub fn new() -> Self {
        let folder = TempDir::new().expect("a folder can be created");
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
    /// Returns a new handle with the lease [`long`].
    pub async fn simba(&self) -> Simba {
        Simba::builder(Arc::new(self.backend().await)).with_lease(long()).build()
    }

    /// Returns a connection without the backend.
    pub fn raw(&self) -> rusqlite::Connection {
        rusqlite::Connection::open(&self.path).unwrap()
    }

    pub fn wakeup_file(&self) -> PathBuf {
        self.path.with_file_name("simba.db-bell")
    }

    /// Waits until a handle of this process watches the wakeup file.
    pub async fn until_watched(&self) {
        let watched = async {
            while !is_watched(&self.wakeup_file()) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(SOON, watched).await.expect("the wakeup file is watched");
    }
}

/// Returns whether this process watches the file. The kernel lists watches by the inode, in hexadecimal.
fn is_watched(path: &Path) -> bool {
    let Ok(file) = std::fs::metadata(path) else { return false };
    let inode = format!(" ino:{:x} ", file.ino());
    let watches = |entry: std::fs::DirEntry| {
        let shown = std::fs::read_to_string(entry.path()).unwrap_or_default();
        shown.lines().any(|line| line.starts_with("inotify ") && line.contains(&inode))
    };
    std::fs::read_dir("/proc/self/fdinfo").unwrap().flatten().any(watches)
}

#[async_trait]
impl Fixture for Sqlite {
    async fn connect(&self) -> Connection {
        let network = Switch::new();
        let faults = Arc::<Switch>::clone(&network);
        Connection::new(FaultyBackend::new(self.backend().await, SystemClock, faults), network)
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
