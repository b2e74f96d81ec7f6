//! ZooKeepers behind bad networks.

#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod peers;
pub(crate) mod raw;

use std::sync::Arc;
use std::time::Duration;

use raw::Raw;
use simba_core::Lease;
use simba_servers::shared;
use simba_tck::{Connection, Fixture, Profile, Proxies, Shared, async_trait};
use simba_zookeeper::{ZookeeperBackend, ZookeeperConfig};

/// A store that was started elsewhere.
pub(crate) struct Zookeeper {
    url: String,
    lease: Lease,
}

impl Zookeeper {
    /// The one that all tests share.
    pub(crate) fn single() -> Self {
        Self::at(shared("SIMBA_TCK_ZOOKEEPER"))
    }

    /// The same for a user with no more rights than it takes, below a path that is closed to everybody else.
    pub(crate) fn as_least() -> Self {
        const USER: &str = "tck";
        // sha1 of `tck:tck-password`, as the server keeps it.
        const DIGEST: &str = "tck:NeYC2AEPv3Qs/GK5qYX3nKJN/ps=";
        let url = shared("SIMBA_TCK_ZOOKEEPER");
        let address = url.strip_prefix("zookeeper://").unwrap();
        let mut raw = Raw::connect(address);
        raw.create_for("/least-rights", raw::READ_AND_CREATE, "digest", DIGEST);
        raw.close();
        Self::at(format!("zookeeper://{USER}:tck-password@{address}/least-rights?acl=creator"))
    }

    /// The ensemble that all tests share.
    pub(crate) fn ensemble() -> Self {
        // Three servers on one small machine need longer for a call.
        let lease = Lease::new(Duration::from_millis(2_100), Duration::from_millis(1_400)).unwrap();
        Self { lease, ..Self::at(shared("SIMBA_TCK_ZOOKEEPER_ENSEMBLE")) }
    }

    pub(crate) fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), lease: lease() }
    }

    /// A connection whose network is at hand.
    pub(crate) async fn proxied(&self) -> (ZookeeperBackend, Arc<Proxies>) {
        let proxies = Proxies::start(&self.url.parse().unwrap()).await.unwrap();
        let config = ZookeeperConfig::from_url(&proxies.url().unwrap()).unwrap();
        let backend = ZookeeperBackend::connect(config).await.unwrap_or_else(|error| panic!("{error:?}"));
        (backend, Arc::new(proxies))
    }
}

pub(crate) fn lease() -> Lease {
    Lease::new(Duration::from_millis(900), Duration::from_millis(600)).unwrap()
}

#[async_trait]
impl Fixture for Zookeeper {
    async fn connect(&self) -> Connection {
        let (backend, network) = self.proxied().await;
        Connection::new(backend, network)
    }

    fn lease(&self) -> Lease {
        self.lease
    }

    fn profile(&self) -> Profile {
        Profile::default().with_dead_waiter(None)
    }
}

impl Shared for Zookeeper {
    fn start() -> Self {
        Self::single()
    }

    fn address(&self) -> String {
        self.url.clone()
    }

    fn attach(address: &str) -> Self {
        Self::at(address)
    }
}
