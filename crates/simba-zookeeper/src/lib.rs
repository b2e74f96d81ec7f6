//! Simba on ZooKeeper: the layout of Curator's `LeaderLatch`, one session for all mutexes.
//!
//! Contenders of this crate and JVM contenders on Curator's `LeaderLatch`, such as those of JVM Simba, elect on
//! the same path, `/simba/<mutex>`, and see each other as their own kind.
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
//! println!("ours, with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises, and what not
//!
//! - **The session is the lease.** A handle has one session for each length of lease, whatever the number of
//!   mutexes: a session cannot carry two lengths. It asks for a timeout of `ttl + transition`; what the servers
//!   grant counts. Of that, a holder counts on two thirds at most: if the servers cannot be reached it has lost by
//!   then, and another can hold after the whole at the earliest. A grant that is shorter after a reconnect shortens
//!   the tenure at once.
//! - **Renewal is a quorum call.** A follower that is cut off from the others goes on answering reads and pings, so
//!   they prove nothing. A renewal is a request that changes nothing and needs a quorum: a `multi` of version checks
//!   on the own nodes, of all mutexes whose renewals are due together. Every other quorum call that is answered proves
//!   the session as well: a waiter whose turn comes is granted what the last one left of the lease. None of them
//!   restarts the session's timeout at the leader of the ensemble; pings do, and after a late one less is granted.
//! - **The token is the `czxid`** of the own node: it grows with every node that is made, and survives the node, its
//!   parents and the session. After a loss the node is deleted and the contender joins the queue again, so every tenure
//!   has a greater token. Only a store that is restored from an old snapshot can give a smaller one.
//! - **First come, first served**, among all kinds of contenders. Each watches the one before it and no other, so a
//!   release wakes one. A contender that stands still at the head of the queue keeps the others waiting until its
//!   session ends.
//! - **Nothing is left behind.** A contender that is dropped deletes its node in the background, also one whose
//!   creation was still under way; a creation whose answer was lost is found again by the random part of its name.
//!   What a killed process had ends with its session.
//! - A JVM holder that hangs may work on past its session; the promise of one holder covers ours alone.
//!
//! # What stands in the store
//!
//! | node | what |
//! |---|---|
//! | `/simba`, `/simba/<mutex>` | containers, made when they are missed, swept by the servers once they are empty |
//! | `/simba/<mutex>/_c_<uuid>-latch-<number>` | one contender: ephemeral, sequential; its data is the contender's id |
//!
//! All children of a mutex's node count, whoever made them, in the order of the text after the last `latch-`: that is
//! how every peer sees it. So a foreign child that sorts before the digits holds the mutex until it is deleted.
//!
//! # Rights
//!
//! Create and read on the chroot, or on `/` without one; the nodes below are open to everybody, as those of the
//! JVM peers are, unless the URL says `acl=creator`. See [`ZookeeperConfig::from_url`] for all that it can say.

mod backend;
mod client;
mod config;
mod error;
mod latch;
mod node;
mod operate;
mod parents;
mod paths;
mod queue;
mod session;

pub use backend::ZookeeperBackend;
pub use config::ZookeeperConfig;

/// The backend's name in errors and logs.
const NAME: &str = "zookeeper";
