//! The servers and users that the tests of this crate share.

#![allow(
    dead_code,
    unused_imports,
    clippy::unwrap_used,
    reason = "every test file uses a part of it, and fails by panicking"
)]

pub(crate) mod calls;
pub(crate) mod injector;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts};
use simba_core::spi::{Backend, ConnectUrl, async_trait};
use simba_core::{Contention, Lease, MutexName, Simba, Tenure};
use simba_mysql::{MySqlBackend, MySqlConfig};
use simba_servers::Setup;
use simba_tck::{Connection, Fixture, Profile};
use simba_test_support::behind_proxy;
pub(crate) use simba_test_support::name_for as name;
use tokio::sync::OnceCell;
use tokio::time::timeout;

/// The user with only the documented rights.
pub(crate) const USER: &str = "simba_least";
pub(crate) const PASSWORD: &str = "least-of-all";

/// The servers that the tests run on. Both are shared; a test can start a private one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Product {
    MariaDb,
    MySql,
}

static PREPARED: [OnceCell<()>; 2] = [OnceCell::const_new(), OnceCell::const_new()];

impl Product {
    const fn variable(self) -> &'static str {
        match self {
            Self::MariaDb => "SIMBA_TCK_MARIADB",
            Self::MySql => "SIMBA_TCK_MYSQL",
        }
    }

    /// Returns the URL of the shared server, with all rights.
    pub(crate) fn admin_url(self) -> String {
        simba_servers::shared(self.variable())
    }

    /// Returns the address of the shared server, with the table and the least-privilege user created.
    pub(crate) async fn shared(self) -> SocketAddr {
        let url = self.admin_url();
        PREPARED[self as usize].get_or_init(|| prepare(&url)).await;
        address_of(&url)
    }

    /// Returns the shared server as a fixture of the conformance suite.
    pub(crate) fn fixture(self) -> MySql {
        MySql { shared: Some(self), address: address_of(&self.admin_url()), keys: String::new() }
    }

    /// Returns the setup of a private server.
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

/// Returns the URL of the shared MariaDB, with all rights.
pub(crate) fn admin_url() -> String {
    Product::MariaDb.admin_url()
}

/// Opens a connection with all rights.
pub(crate) async fn admin(url: &str) -> Conn {
    let opts = Opts::from_url(url).unwrap();
    let opts = mysql_async::OptsBuilder::from_opts(opts).prefer_socket(false);
    Conn::new(opts).await.unwrap()
}

/// Creates the table and the least-privilege user, as documented.
pub(crate) async fn prepare(url: &str) {
    let backend = MySqlBackend::connect(config(url).with_connections(1).unwrap()).await.unwrap();
    backend.operate().unwrap().apply_schema().await.unwrap();
    let mut admin = admin(url).await;
    for grant in grants("simba_mutex") {
        admin.query_drop(grant).await.unwrap();
    }
    admin.disconnect().await.unwrap();
}

/// Returns the documented statements.
pub(crate) fn grants(table: &str) -> [String; 2] {
    [
        format!("CREATE USER IF NOT EXISTS '{USER}'@'%' IDENTIFIED BY '{PASSWORD}'"),
        format!("GRANT SELECT, INSERT, UPDATE ON simba.{table} TO '{USER}'@'%'"),
    ]
}

/// Returns the URL of the least-privilege user at this address.
pub(crate) fn least_url(address: impl std::fmt::Display) -> String {
    format!("mysql://{USER}:{PASSWORD}@{address}/simba")
}

/// Returns the address in a URL.
pub(crate) fn address_of(url: &str) -> SocketAddr {
    let url: ConnectUrl = url.parse().unwrap();
    format!("{}:{}", url.hosts()[0].name, url.hosts()[0].port.unwrap()).parse().unwrap()
}

/// Returns an address at which no server listens, and the socket that keeps its port from others.
pub(crate) fn refusing_address() -> (SocketAddr, tokio::net::TcpSocket) {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    (socket.local_addr().unwrap(), socket)
}

/// Returns the configuration of this URL. The default connect timeout is longer here: a login takes long on a
/// busy machine.
pub(crate) fn config(url: &str) -> MySqlConfig {
    let url: ConnectUrl = url.parse().unwrap();
    let config = MySqlConfig::from_url(&url).unwrap();
    match url.query("connect-timeout") {
        Some(_) => config,
        None => config.with_connect_timeout(30 * SECOND).unwrap(),
    }
}

pub(crate) async fn connect(url: &str) -> MySqlBackend {
    MySqlBackend::connect(config(url)).await.unwrap()
}

pub(crate) const SECOND: Duration = Duration::from_secs(1);

pub(crate) fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

/// Connects, with the lease of the tests.
pub(crate) async fn simba(url: &str) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(connect(url).await)).with_lease(lease()).build()
}

/// Starts a contention and waits until it leads.
pub(crate) async fn lead(simba: &Simba, mutex: &MutexName) -> (Contention, Tenure) {
    let contention = simba.contend(mutex.clone());
    contention.start().unwrap();
    let tenure = timeout(30 * SECOND, contention.acquired()).await.unwrap().unwrap();
    (contention, tenure)
}

/// A server, as the least-privilege user, behind a fault proxy.
pub(crate) struct MySql {
    shared: Option<Product>,
    address: SocketAddr,
    /// The query string of the URL.
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
        let url = |address| format!("{}?{}", least_url(address), self.keys);
        let connect = |address| MySqlBackend::connect(config(url(address).trim_end_matches('?')));
        let (backend, proxy) = behind_proxy(self.address, connect).await;
        Connection::new(backend, proxy)
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

    /// The parent process has prepared the server.
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

    fn lease(&self) -> Lease {
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

/// Returns what the tests expect: waiters are notified by polls, in no order across processes; the table
/// shows no token.
pub(crate) fn profile() -> Profile {
    Profile::default().with_fifo(false).with_token_visible_to_observers(false)
}

/// Returns a lease that survives a pause of the machine of two seconds.
pub(crate) fn lease() -> Lease {
    Lease::new(3 * SECOND, 3 * SECOND).unwrap()
}

/// Returns the address of the shared MariaDB, with the table and the least-privilege user created.
pub(crate) async fn shared() -> SocketAddr {
    Product::MariaDb.shared().await
}

/// Polls for a state that sends no signal.
pub(crate) async fn until(what: &str, reached: impl Fn() -> bool + Send + Sync) {
    simba_test_support::until_within(30 * SECOND, what, reached).await;
}

/// Starts a private server for one test, with the table and the least-privilege user.
pub(crate) async fn private(setup: Setup) -> simba_servers::Server {
    let server = tokio::task::spawn_blocking(|| setup.start().unwrap()).await.unwrap();
    prepare(&server.url()).await;
    server
}
