//! Simba on etcd: one lease for all mutexes, FIFO order, compatible with `etcdctl lock` and Go's `concurrency.Mutex`.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use simba_core::Simba;
//! use simba_etcd::{EtcdBackend, EtcdConfig};
//!
//! let url = "etcd://simba:secret@etcd1,etcd2,etcd3/teams/orders".parse()?;
//! let simba = Simba::new(EtcdBackend::connect(EtcdConfig::from_url(&url)?).await?);
//! let guard = simba.locker("invoices").lock().await?;
//! println!("acquired with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees and limits
//!
//! - **One connection, one lease.** A handle has one connection, and one lease at the store for each length of lease,
//!   for any number of mutexes. It requests `ttl + transition`, rounded up to whole seconds, the unit of etcd. The
//!   granted length counts. Servers grant at least one and a half times their election timeout (two seconds by
//!   default).
//! - **Renewals are confirmed by a quorum.** A leader that was replaced and does not know it yet still renews leases
//!   that its successor lets expire. So a renewal is a keep-alive followed by a transaction that changes nothing and
//!   needs a quorum, answered by the same member in the same term. The transaction also checks that the own keys exist,
//!   for up to 128 mutexes at a time. A lease that is kept alive but not confirmed for its whole length is given up.
//!   The releases before 3.4.42, 3.5.28 and 3.6.9 have defects that break this, after their leader was paused or hung:
//!   they may answer a read that needs a quorum with an old state (etcd-io/etcd#20418, since 3.4.20 and 3.5.0), and
//!   those before 3.4.31 and 3.5.13 may end a lease that was just renewed (etcd-io/etcd#15247). There may be two holders
//!   then. `simba doctor` reports such a server.
//! - **The token is the revision that created the own key.** It grows with every write and survives the key and the
//!   lease. A holder that lost its mutex, because the store was unreachable until its deadline, deletes its key and
//!   joins the queue again: every acquisition has a greater token than the one before. Only a store that is restored
//!   from an old snapshot without `--bump-revision` can return a smaller one.
//! - **FIFO order** among all kinds of contenders. Each watches only the entry ahead of it, so a release wakes one
//!   waiter. A paused contender blocks those behind it until its lease ends.
//! - **No keys are left behind.** A dropped contender deletes its key in the background. If a request to create the key
//!   was not answered, the deletion is repeated for half a minute, because servers may still execute that request. The
//!   keys of a killed process are deleted when its lease ends: up to half a second late, since servers check for
//!   expired leases twice a second, and later after an election, because a new leader gives every lease its whole
//!   length again.
//!
//! # Keys in the store
//!
//! | key | content |
//! |---|---|
//! | `simba/<mutex>/<lease in hex>-<random>` | one contender, with its lease; the value is the contender's id |
//!
//! The queue is in the order of creation. `etcdctl lock simba/<mutex>` and Go's `concurrency.NewMutex` on that prefix
//! contend for the same mutex, since they use the same order. Such a holder is identified by the end of its key. It
//! does not notice a lost lease while it holds: mutual exclusion is guaranteed among Simba's contenders only.
//!
//! # Permissions
//!
//! A role with `readwrite` on the prefix `simba/`, or on `<prefix>/simba/` if the URL has one. See
//! [`EtcdConfig::from_url`] for all settings. The URL names members of the cluster: through a proxy that spreads calls
//! over several members no renewal is confirmed, and every holder loses its mutex after one lease.

mod backend;
mod client;
mod config;
mod entry;
mod error;
mod layout;
mod lease;
mod operate;
mod probe;
mod queue;
mod session;

pub use backend::EtcdBackend;
pub use config::EtcdConfig;

/// The backend's name in errors and logs.
const NAME: &str = "etcd";
