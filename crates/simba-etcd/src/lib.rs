//! Simba on etcd: one lease for all mutexes, first come first served, beside etcdctl and Go.
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
//! println!("ours, with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises, and what not
//!
//! - **One connection, one lease.** A handle has one connection, and one lease at the store for each length of lease,
//!   whatever the number of mutexes. It asks for `ttl + transition` in whole seconds, as etcd counts; what the servers
//!   grant counts, and they grant no less than one and a half times their election timeout (two seconds by default).
//! - **Renewal is confirmed by a quorum.** A leader that has been replaced and does not know it yet goes on renewing
//!   leases that its successor lets end. So a renewal is a keep-alive, and then a transaction that changes nothing and
//!   needs a quorum, answered by the same member in the same term; it shows that the own keys are there, too, for up to
//!   128 mutexes at a time. A lease that is kept alive but not confirmed for all of its length is given up. Servers
//!   without the fix of etcd-io/etcd#15247 (early releases of 3.4 and 3.5) may end a lease that was just renewed, after
//!   their leader hung: take a current one.
//! - **The token is the revision that the own key was created in**: it grows with everything that is written, and
//!   survives the key and the lease. A holder that lost its mutex, because it was out of reach until its deadline, deletes
//!   its key and joins the queue anew: every acquisition has a greater token than the one before. Only a store that is
//!   restored from an old snapshot, without `--bump-revision`, can give a smaller one.
//! - **First come, first served**, among all kinds of contenders. Each watches the one before it and no other, so a
//!   release wakes one. A contender that stands still keeps those behind it waiting until its lease ends.
//! - **Nothing is left behind.** A contender that is dropped deletes its key in the background; if a request to make
//!   it went unanswered, again for half a minute, since servers may still carry it out. What a killed process had ends
//!   with its lease: up to half a second late, since servers look for ended leases twice a second, and later if they
//!   elect another leader meanwhile, who gives every lease its whole length again.
//!
//! # What stands in the store
//!
//! | key | what |
//! |---|---|
//! | `simba/<mutex>/<lease in hex>-<random>` | one contender, with its lease; its value is the contender's id |
//!
//! The order of the queue is that of creation. `etcdctl lock simba/<mutex>` and Go's `concurrency.NewMutex` on that
//! prefix contend for the same mutex, since they keep the same order; a holder of theirs is known by the end of its key.
//! They do not notice a lost lease while they hold: the promise of one holder covers ours alone.
//!
//! # Rights
//!
//! A role with `readwrite` on the prefix `simba/`, or on `<prefix>/simba/` if the URL has one. See
//! [`EtcdConfig::from_url`] for all that it can say. The URL names members of the cluster: through a proxy that spreads
//! calls over several of them no renewal is confirmed, and every holder loses its mutex after one lease.

mod backend;
mod client;
mod config;
mod error;
mod keys;
mod operate;
mod place;
mod queue;
mod session;
mod tenancy;

pub use backend::EtcdBackend;
pub use config::EtcdConfig;

/// The backend's name in errors and logs.
const NAME: &str = "etcd";
