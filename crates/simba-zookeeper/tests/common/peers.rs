//! Contenders behind networks of their own, and a raw connection to the store.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Contention, Lease, MutexName, Simba, Tenure};
use simba_servers::shared;
use simba_tck::Proxies;
use tokio::time::{sleep, timeout};

use super::Zookeeper;
use super::raw::Raw;

/// Far more than anything takes that takes no time, and far less than a [`long`] lease.
pub(crate) const SOON: Duration = Duration::from_secs(10);
/// More than the end of a [`sturdy`] lease takes.
pub(crate) const PATIENCE: Duration = Duration::from_secs(40);

/// A lease that does not end within a test.
pub(crate) fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(30), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(30)).unwrap()
}

/// A lease that ends within a test, and survives a machine that stands still for two seconds.
pub(crate) fn sturdy() -> Lease {
    Lease::new(Duration::from_secs(6), Duration::from_secs(4)).unwrap()
}

pub(crate) fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("row-{}", nonce.to_lowercase())).unwrap()
}

pub(crate) fn address() -> SocketAddr {
    shared("SIMBA_TCK_ZOOKEEPER").strip_prefix("zookeeper://").unwrap().parse().unwrap()
}

/// One process at the store.
pub(crate) struct Peer {
    pub(crate) simba: Simba,
    pub(crate) network: Arc<Proxies>,
}

impl Peer {
    pub(crate) async fn connect() -> Self {
        Self::at(&Zookeeper::single()).await
    }

    pub(crate) async fn at(store: &Zookeeper) -> Self {
        simba_tck::explain_failures();
        let (backend, network) = store.proxied().await;
        Self { simba: Simba::builder(Arc::new(backend)).lease(long()).build(), network }
    }

    pub(crate) fn contend(&self, mutex: &MutexName, lease: Lease) -> Contention {
        let contention = self.simba.contend(mutex.clone()).with_lease(lease);
        contention.start().unwrap();
        contention
    }
}

pub(crate) async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    within(SOON, what, future).await
}

pub(crate) async fn within<F: Future>(limit: Duration, what: &str, future: F) -> F::Output {
    timeout(limit, future).await.unwrap_or_else(|_| panic!("broken: {what} (not within {limit:?})"))
}

pub(crate) async fn leads(contention: &Contention) -> Tenure {
    within(PATIENCE, "somebody leads", contention.acquired()).await.unwrap()
}

pub(crate) async fn sees(contention: &Contention, leader: &Tenure) {
    soon("a waiter sees the leader", async {
        while !contention.owner().is_owner(leader.contender()) {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

/// Returns the nodes under a mutex, in no order.
pub(crate) async fn nodes(mutex: &MutexName) -> Vec<String> {
    let path = format!("/simba/{mutex}");
    by_hand(move |raw| raw.children(&path)).await
}

/// Does something by hand at the server that all tests share.
pub(crate) async fn by_hand<T: Send + 'static>(act: impl FnOnce(&mut Raw) -> T + Send + 'static) -> T {
    by_hand_at(address(), act).await
}

/// Does something by hand at this server.
pub(crate) async fn by_hand_at<T: Send + 'static>(
    address: SocketAddr,
    act: impl FnOnce(&mut Raw) -> T + Send + 'static,
) -> T {
    let work = move || {
        let mut raw = Raw::connect(address);
        let done = act(&mut raw);
        raw.close();
        done
    };
    tokio::task::spawn_blocking(work).await.unwrap()
}
