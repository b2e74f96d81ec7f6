//! Simba on ZooKeeper: the layout of Curator's `LeaderLatch`, one session for all mutexes.
//!
//! Contenders of this crate and JVM contenders on Curator's `LeaderLatch`, such as those of JVM Simba, contend on
//! the same path, `/simba/<mutex>`, in the same queue.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use simba_core::Simba;
//! use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};
//!
//! let url = "zookeeper://simba:secret@zk1,zk2,zk3/teams/orders".parse()?;
//! let simba = Simba::new(ZookeeperBackend::connect(ZookeeperConfig::from_url(&url)?).await?);
//! let guard = simba.locker("invoices").lock().await?;
//! println!("acquired with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees
//!
//! - **The session is the lease.** A handle has one session for each length of lease, for any number of mutexes,
//!   since a session has one timeout. It requests a timeout of `ttl + transition`; the timeout that the servers grant
//!   counts. A holder relies on at most two thirds of it: if the servers cannot be reached, the holder has lost the
//!   mutex by then, and the next contender acquires it after the whole timeout at the earliest. A shorter grant after a
//!   reconnect shortens the tenure immediately.
//! - **Renewal is a quorum call.** A follower that is cut off from the others keeps answering reads and pings, so
//!   they prove nothing. A renewal is a request that changes nothing and needs a quorum: a `multi` of version checks
//!   on the own nodes, of all mutexes whose renewals are due together. Every other answered quorum call proves the
//!   session as well: a waiter whose turn comes is granted the rest of the last proof. None of them restarts the
//!   session's timeout at the leader of the ensemble; pings do, and after a late ping less is granted.
//! - **The token is the `czxid`** of the own node: it grows with every node that is created, and survives the node,
//!   its parents and the session. After a loss the node is deleted and the contender joins the queue again, so every
//!   tenure has a greater token. Only a store that is restored from an old snapshot can give a smaller one.
//! - **FIFO order** among all kinds of contenders. Each watches only the one before it, so a release wakes one
//!   contender. A paused contender at the head of the queue blocks the others until its session ends.
//! - **Nothing is left behind.** A dropped contender deletes its node in the background, even if the creation was
//!   still in flight. A node whose creation had no answer is found by the random part of its name. The nodes of a
//!   killed process end with its session.
//! - A JVM holder that pauses may continue to work after its session has ended. Mutual exclusion covers contenders of
//!   this crate only.
//!
//! # Nodes
//!
//! | node | content |
//! |---|---|
//! | `/simba`, `/simba/<mutex>` | containers, created when missing, deleted by the servers once they are empty |
//! | `/simba/<mutex>/_c_<uuid>-latch-<number>` | one contender: ephemeral, sequential; its data is the contender's id |
//!
//! All children of a mutex's node count, including those of other programs, ordered by the text after the last
//! `latch-`, as in Curator. A foreign child that sorts before the digits holds the mutex until it is deleted.
//!
//! # Rights
//!
//! Create and read on the chroot, or on `/` without one. The nodes below are open to every client, as those of JVM
//! contenders are, unless the URL has `acl=creator`. See [`ZookeeperConfig::from_url`] for all settings.

mod backend;
mod client;
mod config;
mod entry;
mod error;
mod latch;
mod layout;
mod operate;
mod parents;
mod probe;
mod queue;
mod session;

pub use backend::ZookeeperBackend;
pub use config::ZookeeperConfig;

/// The backend's name in errors and logs.
const NAME: &str = "zookeeper";
