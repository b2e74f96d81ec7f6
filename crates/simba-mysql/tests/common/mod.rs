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
use simba_servers::Setup;
use simba_tck::{Connection, FaultProxy, Fixture, Profile};
use tokio::sync::OnceCell;

/// The user with the documented rights and no other.
pub(crate) const USER: &str = "simba_least";
pub(crate) const PASSWORD: &str = "least-of-all";

/// The servers that the tests run on. Both are shared; a test can start one of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    MariaDb,
    MySql,
}

static FURNISHED: [OnceCell<()>; 2] = [OnceCell::const_new(), OnceCell::const_new()];

impl Product {
    const fn variable(self) -> &'static str {
        match self {
            Self::MariaDb => "SIMBA_TCK_MARIADB",
            Self::MySql => "SIMBA_TCK_MYSQL",
        }
    }

    /// Returns the URL of the shared server, with the right to do everything.
    pub(crate) fn admin_url(self) -> String {
        simba_servers::shared(self.variable())
    }

    /// Returns the address of the shared server, which has the table and the user with the least rights.
    pub(crate) async fn shared(self) -> SocketAddr {
        let url = self.admin_url();
        FURNISHED[self as usize].get_or_init(|| furnish(&url)).await;
        address_of(&url)
    }

    /// Returns the shared server as the kit wants it.
    pub(crate) fn fixture(self) -> MySql {
        MySql { shared: Some(self), address: address_of(&self.admin_url()), keys: String::new() }
    }

    /// Returns a server of one's own, to be started.
    pub(crate) const fn setup(self) -> Setup {
        match self {
            Self::MariaDb => Setup::mariadb(),
            Self::MySql => Setup::mysql(),
        }
    }
}

/// Makes two tests of each function that takes a [`Product`].
#[macro_export]
macro_rules! on_both_servers {
    ($($(#[$attribute:meta])* $test:ident)*) => {
        mod on_mariadb {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(super::common::Product::MariaDb).await;
            })*
        }

        mod on_mysql {
            $(#[tokio::test(flavor = "multi_thread")]
            async fn $test() {
                super::$test(super::common::Product::MySql).await;
            })*
        }
    };
}

/// The URL of the shared MariaDB, with the right to do everything.
pub(crate) fn admin_url() -> String {
    Product::MariaDb.admin_url()
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
    // A server that has just started on a busy machine takes its time.
    let config = config.with_connect_timeout(std::time::Duration::from_secs(30)).unwrap();
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

/// A server, as the least-privilege user, through a network that can be broken.
pub(crate) struct MySql {
    shared: Option<Product>,
    address: SocketAddr,
    /// What stands after the `?` of the URL.
    keys: String,
}

impl MySql {
    pub(crate) fn shared() -> Self {
        Product::MariaDb.fixture()
    }

    pub(crate) const fn at(address: SocketAddr) -> Self {
        Self { shared: None, address, keys: String::new() }
    }

    pub(crate) fn with_keys(self, keys: impl Into<String>) -> Self {
        Self { keys: keys.into(), ..self }
    }
}

#[async_trait]
impl Fixture for MySql {
    async fn connect(&self) -> Connection {
        if let Some(product) = self.shared {
            product.shared().await;
        }
        let proxy = Arc::new(FaultProxy::start(self.address).await.unwrap());
        let url = format!("{}?{}", least_url(proxy.address()), self.keys);
        let url = url.trim_end_matches('?');
        Connection::new(connect(url).await, proxy)
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

    /// The process that started this one has furnished the server.
    fn attach(address: &str) -> Self {
        Self::at(address.parse().unwrap())
    }
}

/// The same on the shared MySQL.
pub(crate) struct OnMySql(MySql);

#[async_trait]
impl Fixture for OnMySql {
    async fn connect(&self) -> Connection {
        self.0.connect().await
    }

    fn lease(&self) -> simba_core::Lease {
        self.0.lease()
    }

    fn profile(&self) -> Profile {
        profile()
    }
}

impl simba_tck::Shared for OnMySql {
    fn start() -> Self {
        Self(Product::MySql.fixture())
    }

    fn address(&self) -> String {
        self.0.address.to_string()
    }

    fn attach(address: &str) -> Self {
        Self(MySql::attach(address))
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

/// A lease that survives a machine that stands still for two seconds.
pub(crate) fn lease() -> simba_core::Lease {
    let three = std::time::Duration::from_secs(3);
    simba_core::Lease::new(three, three).unwrap()
}

/// Returns the address of the shared MariaDB, which has the table and the user with the least rights.
pub(crate) async fn shared() -> SocketAddr {
    Product::MariaDb.shared().await
}

/// Waits for a state that gives no signal.
pub(crate) async fn until(what: &str, reached: impl Fn() -> bool + Send + Sync) {
    let look = async {
        while !reached() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(30), look)
        .await
        .unwrap_or_else(|_| panic!("never: {what}"));
}

/// A server of this test's own, furnished.
pub(crate) async fn private(setup: Setup) -> simba_servers::Server {
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    furnish(&server.url()).await;
    server
}
