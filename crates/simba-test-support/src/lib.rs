//! Helpers that the tests of several crates share. Not published: a backend outside this project uses `simba-tck`.
//!
//! | module | contents |
//! |---|---|
//! | [`soon`], [`within`], [`until`] | waits that fail a test after a limit |
//! | [`name`], [`name_for`], [`long`] | names that no other test uses, a lease whose end cannot explain a hand-over |
//! | [`Logs`], [`error_text`] | everything that the process logs, and everything that an error shows |
//! | [`with_server_clock`], [`set_server_clock`] | servers whose clock a test sets |
//! | [`behind_proxy`], [`http_server`] | connections with faults, a server of another kind |
//! | [`follows_password_file`] | passwords that change at the server and in a file |
//! | [`queue`] | the rows of the fault matrix for stores whose mutexes are queues: ZooKeeper and etcd |

#![allow(clippy::unwrap_used, clippy::missing_panics_doc, reason = "a test fails by panicking")]

mod logs;
mod network;
mod password;
pub mod queue;
mod server_clock;
mod wait;

pub use logs::{Logs, error_text};
pub use network::{behind_proxy, http_server};
pub use password::follows_password_file;
pub use queue::{Peer, QueueServer, QueueStore};
pub use server_clock::{set_server_clock, with_server_clock};
pub use wait::{SOON, soon, until, until_within, within};

use std::time::Duration;

use simba_core::{Contention, Lease, MutexName, Simba, Tenure};

/// Returns a name that no other test uses.
#[must_use]
pub fn name() -> MutexName {
    name_for("row")
}

/// Returns a name that no other test uses and that begins with `what`. From the first call on, failing tests of the
/// process [explain themselves](simba_tck::explain_failures).
#[must_use]
pub fn name_for(what: &str) -> MutexName {
    simba_tck::explain_failures();
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("{what}-{}", nonce.to_lowercase())).unwrap()
}

/// Returns a lease that does not end within a test. Polls and renewals come later than [`SOON`], also on a store that
/// grants two thirds of it: a change within [`SOON`] is due to a wake-up.
pub fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(70), Duration::from_secs(40)).unwrap();
    lease.with_poll(Duration::from_secs(60)).unwrap()
}

/// Starts a contention.
pub fn contend(simba: &Simba, mutex: &MutexName, lease: Lease) -> Contention {
    let contention = simba.contend(mutex.clone()).with_lease(lease);
    contention.start().unwrap();
    contention
}

/// Waits until a contender reports the leader as the owner. The contender is in the queue from then on.
pub async fn sees(contention: &Contention, leader: &Tenure) {
    until("a waiter sees the leader", || contention.owner().is_owner(leader.contender())).await;
}
