//! Simba on SQLite: mutexes among the processes of one host, without any server.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use simba_core::Simba;
//! use simba_sqlite::{SqliteBackend, SqliteConfig};
//!
//! # let folder = tempfile::tempdir()?;
//! # let path = folder.path().join("simba.db");
//! let simba = Simba::new(SqliteBackend::connect(SqliteConfig::new(path)).await?);
//! let guard = simba.locker("nightly-backup").lock().await?;
//! println!("ours, with token {}", guard.token());
//! guard.release().await?;
//! simba.shutdown().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - Exclusion among all processes of one kernel, containers included, as long as they open the same file in the
//!   same folder.
//! - Waiters acquire in FIFO order. A release wakes exactly the next one: directly within a process, and through a
//!   wakeup file beside the database (`-bell`) in another process.
//! - Leases run on the machine's boot clock, corrected for time namespaces: neither the wall clock nor a suspend
//!   changes a lease, and a reboot ends all leases.
//! - Fencing tokens grow across releases, restarts and reboots, and after a power cut that lost the last commits.
//! - A killed process leaves only its leases behind, even if it was killed within a transaction. A killed waiter keeps
//!   a free mutex from the next waiter for at most a second, or, in another pid namespace, until its queue entry
//!   expires.
//! - One thread and one connection for any number of mutexes, and a second thread while sessions wait.
//!
//! # Limits
//!
//! - No exclusion across hosts. A file system that is not known to belong to one machine is refused.
//! - A token may repeat if the wall clock is set back *and* a power cut loses the last commits.
//! - A process that is stopped within a transaction, which takes microseconds, locks all other processes out of the
//!   file until it continues: leases expire, and no mutex is acquired meanwhile.
//! - A mutex can have two owners, until the lease of the old one ends, if the file is removed or replaced while it is
//!   in use. The next call of every program that has the old file open fails. The same call fails if the journal
//!   (`-wal`, `-shm`) is removed, but then no other program of this version opens the file, and no mutex gets a second
//!   owner. A program of an earlier version creates a new journal, so during a rolling upgrade a mutex can get a second
//!   owner.
//! - A virtual machine that is restored from a snapshot resumes with leases that may have ended since.
//!
//! # URL
//!
//! `sqlite:PATH`, or `sqlite:` for the file of this user; see [`SqliteConfig`]. There are no keys.
//!
//! # Rights
//!
//! Read and write on the file and on its folder, and nothing else. The folder is created with mode 0700 and the files
//! with 0600. To share a file among users, create the folder and an empty file with the rights that you want before
//! the first use: companion files inherit its mode and group.
//!
//! # Platforms
//!
//! Linux. On other systems connecting fails with [`ErrorKind::Config`](simba_core::ErrorKind::Config): the backend has
//! no way yet to distinguish one boot from the next there.

mod backend;
mod busy_timeout;
mod config;
mod connection;
mod database;
mod error;
mod file;
mod file_system;
mod machine;
mod names;
mod operate;
mod probe;
mod schema;
mod session;
mod statements;
mod tables;
mod wakeups;
mod worker;

pub use backend::SqliteBackend;
pub use config::SqliteConfig;
