//! One process at the store, and what tests wait for.

use std::sync::Arc;
use std::time::Duration;

use simba_core::{Contention, Lease, MutexName, Simba, Tenure};
use simba_tck::Proxies;
use tokio::time::{sleep, timeout};

use super::{Etcd, lease};

/// Far more than anything takes that takes no time, and far less than a [`long`] lease.
pub(crate) const SOON: Duration = Duration::from_secs(10);

pub(crate) fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(30), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(30)).unwrap()
}

pub(crate) fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("row-{}", nonce.to_lowercase())).unwrap()
}

pub(crate) struct Peer {
    pub(crate) simba: Simba,
    pub(crate) network: Arc<Proxies>,
}

impl Peer {
    pub(crate) async fn connect() -> Self {
        Self::at(&Etcd::single()).await
    }

    pub(crate) async fn at(store: &Etcd) -> Self {
        simba_tck::explain_failures();
        let (backend, network) = store.proxied().await;
        Self { simba: Simba::builder(Arc::new(backend)).lease(lease()).build(), network }
    }

    pub(crate) fn contend(&self, mutex: &MutexName, lease: Lease) -> Contention {
        contend(&self.simba, mutex, lease)
    }
}

pub(crate) fn contend(simba: &Simba, mutex: &MutexName, lease: Lease) -> Contention {
    let contention = simba.contend(mutex.clone()).with_lease(lease);
    contention.start().unwrap();
    contention
}

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    timeout(SOON, future).await.unwrap_or_else(|_| panic!("broken: {what} (not within {SOON:?})"))
}

pub(crate) async fn leads(contention: &Contention) -> Tenure {
    soon("somebody leads", contention.acquired()).await.unwrap()
}

pub(crate) async fn sees(contention: &Contention, leader: &Tenure) {
    soon("a waiter sees the leader", async {
        while !contention.owner().is_owner(leader.contender()) {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}
