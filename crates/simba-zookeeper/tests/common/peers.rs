//! Contenders behind separate fault proxies, and raw connections to the store.

use std::net::SocketAddr;
use std::time::Duration;

use simba_core::{Contention, Lease, MutexName, Tenure};
use simba_servers::shared;
use simba_test_support::{QueueStore as _, queue};
pub(crate) use simba_test_support::{long, name, sees as observes, soon as in_time, within};

use super::ZookeeperStore;
use super::raw::Raw;

/// More than the end of a [`short`] lease takes, and less than the poll interval of a [`long`] lease.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_secs(40);

/// The connection of one process.
pub(crate) type Peer = queue::Peer<ZookeeperStore>;

/// Returns a lease that ends within a test, and survives a machine that pauses for two seconds.
pub(crate) fn short() -> Lease {
    Lease::new(Duration::from_secs(6), Duration::from_secs(4)).unwrap()
}

pub(crate) fn address() -> SocketAddr {
    shared(ZookeeperStore::SHARED).strip_prefix("zookeeper://").unwrap().parse().unwrap()
}

pub(crate) async fn acquired(contention: &Contention) -> Tenure {
    queue::leads::<ZookeeperStore>(contention).await
}

/// Returns the names of the nodes of a mutex, in any order.
pub(crate) async fn nodes(mutex: &MutexName) -> Vec<String> {
    let path = format!("/simba/{mutex}");
    with_raw(move |raw| raw.children(&path)).await
}

/// Runs a closure with a raw connection to the shared server.
pub(crate) async fn with_raw<T: Send + 'static>(act: impl FnOnce(&mut Raw) -> T + Send + 'static) -> T {
    with_raw_at(address(), act).await
}

/// Runs a closure with a raw connection to a server.
pub(crate) async fn with_raw_at<T: Send + 'static>(
    address: SocketAddr,
    act: impl FnOnce(&mut Raw) -> T + Send + 'static,
) -> T {
    let run = move || {
        let mut raw = Raw::connect(address);
        let result = act(&mut raw);
        raw.close();
        result
    };
    tokio::task::spawn_blocking(run).await.unwrap()
}
