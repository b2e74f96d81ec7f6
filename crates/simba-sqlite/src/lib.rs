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
//! # What it promises
//!
//! - Exclusion among all processes of one kernel, containers included, as long as they open the same file in the
//!   same folder.
//! - Waiters get a mutex in the order in which they came. A release wakes exactly the next one: directly within a
//!   process, and by a bell file beside the database in another one.
//! - Leases run on the machine's boot clock, corrected for time namespaces: neither the wall clock nor a suspend
//!   changes one, and a reboot ends all.
//! - Fencing tokens grow over releases, restarts and reboots, and past commits that a power cut took back.
//! - A process that is killed, also in the middle of a transaction, leaves nothing behind but its leases. If it
//!   waited, it keeps a free mutex from the next waiter for at most a second; from another pid namespace until the
//!   entry of the killed waiter ends.
//! - One thread and one connection for any number of mutexes, and a second thread while somebody waits.
//!
//! # What it does not promise
//!
//! - Anything across hosts. A file system that is not known to belong to one machine is refused.
//! - A token that grows if the wall clock is set back *and* a power cut takes the last commits.
//! - A process that is stopped in the middle of a transaction, which takes microseconds, keeps everybody out of the
//!   file until it goes on: leases run out, and nobody gains anything meanwhile.
//! - A file that is removed or replaced while it is in use has two owners until the old one's lease ends. The next
//!   call of every program that has it open fails. The same call fails if the journal (`-wal`, `-shm`) is removed, but
//!   then no other program of this version opens the file, and no mutex gets a second owner. A program of an earlier
//!   version makes a new journal, so during a rolling upgrade a mutex can get a second owner.
//! - A virtual machine that is set back to a snapshot comes back with what it believed then.
//!
//! # URL
//!
//! `sqlite:PATH`, or `sqlite:` for the file of this user; see [`SqliteConfig`]. There are no keys.
//!
//! # Rights
//!
//! Read and write on the file and on its folder, and nothing else. The folder is made with mode 0700 and the files
//! with 0600. To share a file among users, make the folder and an empty file with the rights that you want before
//! the first use: the files beside it take after it.
//!
//! # Platforms
//!
//! Linux. Elsewhere connecting fails with [`ErrorKind::Config`](simba_core::ErrorKind::Config): nothing there tells
//! one boot from the next yet.

mod backend;
mod bell;
mod config;
mod error;
mod file;
mod findings;
mod handle;
mod job;
mod local;
mod machine;
mod operate;
mod patience;
mod schema;
mod session;
mod statements;
mod table;
mod worker;

pub use backend::SqliteBackend;
pub use config::SqliteConfig;
