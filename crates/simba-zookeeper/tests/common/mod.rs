//! ZooKeeper servers behind fault proxies.

#![allow(dead_code, unused_imports, clippy::unwrap_used, reason = "each test file uses a part of it")]

pub(crate) mod peers;
pub(crate) mod raw;
pub(crate) mod sasl;

use std::time::Duration;

use raw::Raw;
use simba_core::spi::ConnectUrl;
use simba_core::{FencingToken, Lease, MutexName, Result};
use simba_servers::{Server, Setup, shared};
use simba_test_support::{QueueServer, QueueStore, queue};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};

use peers::{WAIT_LIMIT, nodes, with_raw};

/// A server or an ensemble behind proxies.
pub(crate) type Zookeeper = QueueServer<ZookeeperStore>;

/// Connects without a proxy.
pub(crate) async fn connect(url: &str) -> Result<ZookeeperBackend> {
    queue::connect::<ZookeeperStore>(url).await
}

/// Returns the shared server for a user with the least rights, below a path that only this user may access.
pub(crate) fn as_least() -> Zookeeper {
    const USER: &str = "tck";
    // SHA-1 of `tck:tck-password`, in the format of the server.
    const DIGEST: &str = "tck:NeYC2AEPv3Qs/GK5qYX3nKJN/ps=";
    let url = shared(ZookeeperStore::SHARED);
    let address = url.strip_prefix("zookeeper://").unwrap();
    let mut raw = Raw::connect(address);
    raw.create_for("/least-rights", raw::READ_AND_CREATE, "digest", DIGEST);
    raw.close();
    Zookeeper::at(format!("zookeeper://{USER}:tck-password@{address}/least-rights?acl=creator"))
}

/// Returns the ensemble that all tests share.
pub(crate) fn ensemble() -> Zookeeper {
    Zookeeper::at(shared("SIMBA_TCK_ZOOKEEPER_ENSEMBLE"))
}

pub(crate) fn lease() -> Lease {
    Lease::new(Duration::from_millis(900), Duration::from_millis(600)).unwrap()
}

/// ZooKeeper, as the rows for stores with queues need it.
pub(crate) struct ZookeeperStore;

impl QueueStore for ZookeeperStore {
    type Backend = ZookeeperBackend;

    const SCHEME: &'static str = "zookeeper";
    const SHARED: &'static str = "SIMBA_TCK_ZOOKEEPER";
    const ACQUISITION: Duration = WAIT_LIMIT;

    fn setup() -> Setup {
        Setup::zookeeper()
    }

    async fn connect(url: &ConnectUrl) -> Result<ZookeeperBackend> {
        ZookeeperBackend::connect(ZookeeperConfig::from_url(url)?).await
    }

    fn short() -> Lease {
        peers::short()
    }

    /// Two thirds: the leader may end the session a third early.
    fn granted(lease: &Lease) -> Duration {
        lease.total() / 3 * 2
    }

    async fn entries(mutex: &MutexName) -> Vec<String> {
        nodes(mutex).await
    }

    async fn delete_entry(mutex: &MutexName) {
        let path = format!("/simba/{mutex}");
        with_raw(move |raw| {
            let [node] = &raw.children(&path)[..] else { panic!("one node") };
            assert_eq!(raw.delete(&format!("{path}/{node}")), 0);
        })
        .await;
    }

    async fn last_token(mutex: &MutexName) -> FencingToken {
        let path = format!("/simba/{mutex}");
        with_raw(move |raw| {
            let nodes = raw.children(&path);
            let created = nodes.iter().filter_map(|node| raw.created(&format!("{path}/{node}")));
            FencingToken::new(created.max().unwrap().try_into().unwrap())
        })
        .await
    }

    fn received(server: &Server) -> usize {
        let reply = raw::four_letters(server.address(), "srvr");
        let count = reply.lines().find_map(|line| line.strip_prefix("Received: "));
        count.unwrap().parse().unwrap()
    }
}
