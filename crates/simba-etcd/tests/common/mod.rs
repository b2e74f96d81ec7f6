//! etcds behind bad networks.

#![allow(dead_code, clippy::unwrap_used)]

pub(crate) mod login;
pub(crate) mod peer;

use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Lease, Result};
use simba_etcd::{EtcdBackend, EtcdConfig};
use simba_servers::shared;
use simba_tck::{Connection, Fixture, Profile, Proxies, Shared, async_trait};

/// Connects without any proxy.
pub(crate) async fn connect(url: &str) -> Result<EtcdBackend> {
    EtcdBackend::connect(EtcdConfig::from_url(&url.parse()?)?).await
}

/// What `etcdctl` says at a server of this URL.
pub(crate) async fn ctl(url: &str, words: &[&str]) -> String {
    let mut command = etcdctl(url);
    command.args(words);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn etcdctl(url: &str) -> Command {
    let mut command = Command::new("etcdctl");
    command.args(["--endpoints", &url.replacen("etcd", "http", 1)]);
    command
}

/// A store that was started elsewhere.
pub(crate) struct Etcd {
    url: String,
    lease: Lease,
}

impl Etcd {
    /// The one that all tests share.
    pub(crate) fn single() -> Self {
        Self::at(shared("SIMBA_TCK_ETCD"))
    }

    /// The cluster that all tests share.
    pub(crate) fn cluster() -> Self {
        // Three servers on one small machine need longer for a call.
        let lease = Lease::new(Duration::from_millis(1_800), Duration::from_millis(1_200)).unwrap();
        Self { lease, ..Self::at(shared("SIMBA_TCK_ETCD_CLUSTER")) }
    }

    pub(crate) fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), lease: lease() }
    }

    /// A connection whose network is at hand.
    pub(crate) async fn proxied(&self) -> (EtcdBackend, Arc<Proxies>) {
        let proxies = Proxies::start(&self.url.parse().unwrap()).await.unwrap().for_http2();
        let config = EtcdConfig::from_url(&proxies.url().unwrap()).unwrap();
        let backend = EtcdBackend::connect(config).await.unwrap_or_else(|error| panic!("{error:?}"));
        (backend, Arc::new(proxies))
    }
}

/// Two seconds: leases are of whole ones.
pub(crate) fn lease() -> Lease {
    Lease::new(Duration::from_millis(1_200), Duration::from_millis(800)).unwrap()
}

#[async_trait]
impl Fixture for Etcd {
    async fn connect(&self) -> Connection {
        let (backend, network) = self.proxied().await;
        Connection::new(backend, network)
    }

    fn lease(&self) -> Lease {
        self.lease
    }

    fn profile(&self) -> Profile {
        Profile::default().with_keeps_token_on_resume(true).with_dead_waiter(None)
    }
}

impl Shared for Etcd {
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
