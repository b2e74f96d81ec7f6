//! The servers and users that the tests of this crate share.

#![allow(
    dead_code,
    clippy::unwrap_used,
    reason = "every test file uses a part of it, and fails by panicking"
)]

pub(crate) mod injector;

use std::net::SocketAddr;
use std::sync::Arc;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};
use simba_core::{Backend, ConnectUrl, async_trait};
use simba_mysql::{MySqlBackend, MySqlConfig};
use simba_tck::{Connection, FaultProxy, Fixture, Profile};
use tokio::sync::OnceCell;

/// The user with the documented rights and no other.
pub(crate) const USER: &str = "simba_least";
pub(crate) const PASSWORD: &str = "least-of-all";

/// The URL of the shared server, with the right to do everything.
pub(crate) fn admin_url() -> String {
    simba_servers::shared("SIMBA_TCK_MYSQL")
}

/// A connection with the right to do everything.
pub(crate) async fn admin(url: &str) -> Conn {
    let opts = Opts::from_url(url).unwrap();
    let opts = mysql_async::OptsBuilder::from_opts(opts).prefer_socket(false);
    Conn::new(opts).await.unwrap()
}

/// Makes the table and the user with the least rights, as the documents say.
pub(crate) async fn furnish(url: &str) {
    let config = MySqlConfig::from_url(&url.parse().unwrap()).unwrap().with_connections(1).unwrap();
    let backend = MySqlBackend::connect(config).await.unwrap();
    backend.operate().unwrap().apply_schema().await.unwrap();
    let mut admin = admin(url).await;
    for grant in grants("simba_mutex") {
        admin.query_drop(grant).await.unwrap();
    }
    admin.disconnect().await.unwrap();
}

/// What the documents say to type.
pub(crate) fn grants(table: &str) -> [String; 2] {
    [
        format!("CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}'"),
        format!("GRANT SELECT, INSERT, UPDATE ON simba.{table} TO '{USER}'@'%'"),
    ]
}

/// The URL of the least-privilege user at this address.
pub(crate) fn least_url(address: impl std::fmt::Display) -> String {
    format!("mysql://{USER}:{PASSWORD}@{address}/simba")
}

/// Where a URL leads.
pub(crate) fn address_of(url: &str) -> SocketAddr {
    let url: ConnectUrl = url.parse().unwrap();
    format!("{}:{}", url.hosts()[0].name, url.hosts()[0].port.unwrap()).parse().unwrap()
}

pub(crate) async fn connect(url: &str) -> MySqlBackend {
    MySqlBackend::connect(MySqlConfig::from_url(&url.parse().unwrap()).unwrap()).await.unwrap()
}

/// The shared server, as the least-privilege user, through a network that can be broken.
pub(crate) struct MySql {
    address: SocketAddr,
    /// What stands after the `?` of the URL.
    keys: String,
}

impl MySql {
    pub(crate) fn shared() -> Self {
        Self { address: address_of(&admin_url()), keys: String::new() }
    }

    pub(crate) fn at(address: SocketAddr) -> Self {
        Self { address, keys: String::new() }
    }

    pub(crate) fn with_keys(self, keys: impl Into<String>) -> Self {
        Self { keys: keys.into(), ..self }
    }
}

static FURNISHED: OnceCell<()> = OnceCell::const_new();

#[async_trait]
impl Fixture for MySql {
    async fn connect(&self) -> Connection {
        if self.address == address_of(&admin_url()) {
            FURNISHED.get_or_init(|| async { furnish(&admin_url()).await }).await;
        }
        let proxy = Arc::new(FaultProxy::start(self.address).await.unwrap());
        let url = format!("{}?{}", least_url(proxy.address()), self.keys);
        let url = url.trim_end_matches('?');
        Connection::new(connect(url).await, proxy)
    }

    /// Every renewal waits for a disk that all tests of a small machine share.
    fn lease(&self) -> simba_core::Lease {
        let ms = std::time::Duration::from_millis;
        simba_core::Lease::new(ms(900), ms(600)).unwrap()
    }

    fn profile(&self) -> Profile {
        profile()
    }
}

impl simba_tck::Shared for MySql {
    fn start() -> Self {
        Self::shared()
    }

    fn address(&self) -> String {
        self.address.to_string()
    }

    fn attach(address: &str) -> Self {
        Self::at(address.parse().unwrap())
    }
}

/// Waiters are woken by one poll for all, in no order across processes; the table tells no token.
pub(crate) fn profile() -> Profile {
    Profile::default().with_fifo(false).with_token_visible_to_observers(false)
}

/// A name that no other test has.
pub(crate) fn name(kind: &str) -> simba_core::MutexName {
    let id = simba_core::ContenderId::generate();
    simba_core::MutexName::new(format!("{kind}-{}", &id.as_str()[..12])).unwrap()
}

/// The lease of the fault matrix.
pub(crate) fn lease() -> simba_core::Lease {
    simba_core::Lease::new(std::time::Duration::from_millis(600), std::time::Duration::from_millis(400))
        .unwrap()
}

/// The shared server is furnished; its address.
pub(crate) async fn shared() -> SocketAddr {
    FURNISHED.get_or_init(|| async { furnish(&admin_url()).await }).await;
    address_of(&admin_url())
}

/// Waits for a state that gives no signal.
pub(crate) async fn until(what: &str, reached: impl Fn() -> bool + Send + Sync) {
    let look = async {
        while !reached() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), look)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}

/// A server of this test's own, furnished.
pub(crate) async fn private(setup: simba_servers::Setup) -> simba_servers::Server {
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    furnish(&server.url()).await;
    server
}
