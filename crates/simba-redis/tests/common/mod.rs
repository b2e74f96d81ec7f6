//! Store under test: a real server, a user with the documented minimum rights, and a proxy.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses a part of it")]

pub mod jvm;
#[path = "../../src/resp.rs"]
pub mod resp;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use simba_core::spi::ConnectUrl;
use simba_core::{Contention, Lease, MutexName, Simba, SystemClock, Tenure};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, FaultProxy, FaultyBackend, Fixture, Profile, Shared, Switch, async_trait};
use simba_test_support::behind_proxy;
pub use simba_test_support::{long, name, until_within, within};

use resp::Reply;

pub const USER: &str = "simba-app";
pub const PASSWORD: &str = "simba-app-secret";

/// Blocking connection of a user with all rights.
pub struct Admin {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Admin {
    pub fn at(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server accepts a connection");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        Self { stream, buffer: Vec::new() }
    }

    pub fn call(&mut self, command: &[&str]) -> Reply {
        self.send(command);
        self.reply()
    }

    pub fn send(&mut self, command: &[&str]) {
        self.stream.write_all(&resp::command(command)).expect("the command is sent");
    }

    pub fn reply(&mut self) -> Reply {
        loop {
            if let Some((reply, length)) = resp::parse(&self.buffer).expect("a reply") {
                self.buffer.drain(..length);
                return reply;
            }
            let mut chunk = [0; 4096];
            let read = self.stream.read(&mut chunk).expect("the server replies");
            assert!(read > 0, "the server closed the connection");
            self.buffer.extend_from_slice(&chunk[..read]);
        }
    }

    /// Returns the next reply, or `None` if the connection ends before it.
    pub fn try_reply(&mut self) -> Option<Reply> {
        loop {
            if let Ok(Some((reply, length))) = resp::parse(&self.buffer) {
                self.buffer.drain(..length);
                return Some(reply);
            }
            let mut chunk = [0; 4096];
            match self.stream.read(&mut chunk) {
                Ok(read) if read > 0 => self.buffer.extend_from_slice(&chunk[..read]),
                _ => return None,
            }
        }
    }

    pub fn int(&mut self, command: &[&str]) -> i64 {
        let reply = self.call(command);
        reply.int().unwrap_or_else(|| panic!("{command:?} returns a number, not {reply:?}"))
    }

    pub fn text(&mut self, command: &[&str]) -> Option<String> {
        match self.call(command) {
            Reply::Nil => None,
            reply => {
                Some(reply.text().unwrap_or_else(|| panic!("{command:?} returns text, not {reply:?}")).into())
            }
        }
    }

    /// Creates the user with the documented minimum rights.
    pub fn create_user(&mut self) {
        self.create_user_as(USER);
    }

    /// Creates a user with these rights and another name.
    pub fn create_user_as(&mut self, user: &str) {
        let rules = format!("ACL SETUSER {user} >{PASSWORD} {}", simba_redis::ACL);
        let command: Vec<&str> = rules.split(' ').collect();
        assert_eq!(self.call(&command), Reply::Status("OK".into()), "the documented rights are valid");
    }
}

/// Configures the user with the minimum rights, so that it exists from the start and after a restart.
pub fn with_user(setup: Setup) -> Setup {
    let rules = format!("--user {USER} >{PASSWORD} {}", simba_redis::ACL);
    rules.split(' ').fold(setup, Setup::with_arg)
}

/// A standalone server.
#[derive(Clone, Debug)]
pub struct Store {
    pub address: SocketAddr,
    /// Additional keys of the URL.
    pub keys: String,
    /// The server, if it is private to the test.
    pub server: Option<Arc<Mutex<Server>>>,
}

impl Store {
    /// Returns the server that all tests share.
    pub fn shared() -> Self {
        Self::at(&simba_servers::shared("SIMBA_TCK_REDIS"))
    }

    pub fn valkey() -> Self {
        Self::at(&simba_servers::shared("SIMBA_TCK_VALKEY"))
    }

    pub fn at(url: &str) -> Self {
        let url: ConnectUrl = url.parse().expect("the server's URL is valid");
        let host = &url.hosts()[0];
        let address = format!("{}:{}", host.name, host.port.expect("a test server has a port"));
        Self { address: address.parse().expect("an address"), keys: String::new(), server: None }
    }

    /// Starts a server that is private to the test.
    pub fn private(setup: Setup) -> Self {
        let server = setup.start().expect("a server starts");
        let mut store = Self::at(&format!("redis://{}", server.address()));
        store.server = Some(Arc::new(Mutex::new(server)));
        store
    }

    pub fn with_keys(self, keys: &str) -> Self {
        Self { keys: keys.into(), ..self }
    }

    /// Returns the same store with a longer timeout: a login succeeds on a machine that pauses for two seconds.
    pub fn with_long_timeout(self) -> Self {
        self.with_keys("timeout=3s")
    }

    pub fn server(&self) -> std::sync::MutexGuard<'_, Server> {
        self.server.as_ref().expect("a private server").lock().expect("a server")
    }

    pub fn admin(&self) -> Admin {
        Admin::at(self.address)
    }

    pub fn config(&self, address: SocketAddr) -> RedisConfig {
        let url = format!("redis://{USER}:{PASSWORD}@{address}?{}", self.keys);
        RedisConfig::from_url(&url.parse().expect("a URL")).expect("a configuration")
    }

    /// Connects a backend directly to the server, with the current rights of the user.
    pub async fn backend_as_is(&self) -> RedisBackend {
        let config = self.config(self.address).with_timeout(SILENCE);
        RedisBackend::connect(config).await.expect("a connection")
    }

    /// Connects a backend directly to the server, with the minimum rights.
    pub async fn backend(&self) -> RedisBackend {
        self.admin().create_user();
        self.backend_as_is().await
    }

    /// Connects a backend through a proxy, and returns both.
    pub async fn proxied(&self) -> (RedisBackend, Arc<FaultProxy>) {
        self.admin().create_user();
        behind_proxy(self.address, |address| RedisBackend::connect(self.config(address))).await
    }
}

#[async_trait]
impl Fixture for Store {
    async fn connect(&self) -> Connection {
        let (backend, proxy) = self.proxied().await;
        Connection::new(backend, proxy)
    }

    fn profile(&self) -> Profile {
        Profile::default().with_survives_restart(false)
    }
}

impl Shared for Store {
    fn start() -> Self {
        Self::shared().with_long_timeout()
    }

    fn address(&self) -> String {
        format!("redis://{}", self.address)
    }

    fn attach(address: &str) -> Self {
        Self::at(address).with_long_timeout()
    }
}

/// The same server with TLS and full verification.
pub struct Encrypted(pub Store);

impl Encrypted {
    pub fn shared() -> Self {
        Self(Store::shared())
    }

    /// Returns the address of the TLS port.
    pub fn address(&self) -> SocketAddr {
        tls_address(self.0.address)
    }

    /// Returns a URL for this address. The certificate is for `localhost`, whatever the address.
    pub fn url(address: SocketAddr, keys: &str) -> ConnectUrl {
        let tls = simba_servers::shared("SIMBA_TCK_TLS");
        let url = format!("rediss://{USER}:{PASSWORD}@{address}?tls_ca={tls}/ca.pem{keys}");
        url.parse().expect("a URL")
    }
}

#[async_trait]
impl Fixture for Encrypted {
    async fn connect(&self) -> Connection {
        self.0.admin().create_user();
        let proxy = Arc::new(FaultProxy::start(self.address()).await.expect("a proxy"));
        let keys = "&tls_server_name=localhost&connect_timeout=10s&timeout=3s";
        let config = RedisConfig::from_url(&Self::url(proxy.address(), keys)).expect("a configuration");
        let backend = RedisBackend::connect(config).await.expect("a connection");
        Connection::new(backend, proxy)
    }

    fn profile(&self) -> Profile {
        Profile::default().with_survives_restart(false)
    }
}

/// Returns the address of the TLS port of the server at this address.
fn tls_address(plain: SocketAddr) -> SocketAddr {
    let reply = Admin::at(plain).call(&["CONFIG", "GET", "tls-port"]);
    let port = reply.array().and_then(|parts| parts[1].text()?.parse().ok()).expect("a port for TLS");
    SocketAddr::new(plain.ip(), port)
}

/// Several servers that form one store. They name each other by their real addresses and not by those of a proxy, so
/// network faults are simulated in front of the backend.
pub struct Group {
    pub url: ConnectUrl,
    pub server: Option<Arc<Mutex<Server>>>,
}

impl Group {
    pub fn shared(variable: &str) -> Self {
        let group = Self::at(&simba_servers::shared(variable));
        group.create_user();
        group
    }

    pub fn private(setup: Setup) -> Self {
        let server = setup.start().expect("the servers start");
        let group = Self { server: None, ..Self::at(&server.url()) };
        group.create_user();
        Self { server: Some(Arc::new(Mutex::new(server))), ..group }
    }

    fn at(url: &str) -> Self {
        Self { url: url.parse().expect("the servers' URL is valid"), server: None }
    }

    /// Returns the same cluster with TLS and full verification. Its nodes then name each other by their TLS ports.
    pub fn encrypted(&self) -> Self {
        let hosts: Vec<String> =
            self.servers().into_iter().map(|node| tls_address(node).to_string()).collect();
        let tls = simba_servers::shared("SIMBA_TCK_TLS");
        let keys = format!("tls_ca={tls}/ca.pem&tls_server_name=localhost&connect_timeout=10s");
        Self {
            server: self.server.clone(),
            ..Self::at(&format!("rediss+cluster://{}?{keys}", hosts.join(",")))
        }
    }

    /// Returns every server that has data.
    pub fn servers(&self) -> Vec<SocketAddr> {
        let hosts = self.url.hosts().iter();
        let hosts: Vec<SocketAddr> =
            hosts.map(|host| host.to_string().parse().expect("an address")).collect();
        if self.url.scheme() == "redis+cluster" {
            return hosts;
        }
        let mut sentinel = Admin::at(hosts[0]);
        let mut servers = vec![self.master()];
        let replicas = sentinel.call(&["SENTINEL", "replicas", "mymaster"]);
        for replica in replicas.array().expect("replicas") {
            let name = replica.array().and_then(|fields| fields[1].text()).expect("a name");
            servers.push(name.parse().expect("an address"));
        }
        servers
    }

    /// Returns the master that the sentinels name.
    pub fn master(&self) -> SocketAddr {
        let address: SocketAddr = self.url.hosts()[0].to_string().parse().expect("an address");
        let reply = Admin::at(address).call(&["SENTINEL", "get-master-addr-by-name", "mymaster"]);
        let parts: Vec<&str> = reply.array().expect("an address").iter().filter_map(Reply::text).collect();
        format!("{}:{}", parts[0], parts[1]).parse().expect("an address")
    }

    fn create_user(&self) {
        self.servers().into_iter().for_each(|server| Admin::at(server).create_user());
    }

    pub fn config(&self, keys: &str) -> RedisConfig {
        let url = self.url.to_string().replacen("://", &format!("://{USER}:{PASSWORD}@"), 1);
        RedisConfig::from_url(&format!("{url}{keys}").parse().expect("a URL")).expect("a configuration")
    }

    pub async fn backend(&self) -> RedisBackend {
        let config = self.config("").with_timeout(SILENCE);
        RedisBackend::connect(config).await.expect("a connection")
    }
}

#[async_trait]
impl Fixture for Group {
    async fn connect(&self) -> Connection {
        let network = Switch::new();
        let backend = FaultyBackend::new(self.backend().await, SystemClock, Arc::<Switch>::clone(&network));
        Connection::new(backend, network)
    }

    fn profile(&self) -> Profile {
        Profile::default().with_survives_restart(false)
    }
}

// ===== helpers of the fault tests =====

/// Limit for anything that needs no waiting, on a busy machine.
pub const SOON: Duration = Duration::from_secs(30);

/// Limit for the election of a new master. A sentinel that paused for two seconds does nothing for the next thirty.
pub const ELECTION: Duration = Duration::from_secs(90);

/// Timeout of connections in tests that are not about silent servers.
pub const SILENCE: Duration = Duration::from_secs(10);

/// The lease of the fault matrix. A machine that pauses for two seconds loses no lease.
pub fn lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).expect("a lease")
}

pub fn simba(backend: RedisBackend, lease: Lease) -> Simba {
    Simba::builder(Arc::new(backend)).with_lease(lease).build()
}

/// Awaits the future. Panics with `expectation` if it takes longer than [`SOON`].
pub async fn soon<F: Future>(expectation: &str, future: F) -> F::Output {
    within(SOON, expectation, Box::pin(future)).await
}

/// Polls the condition until it is true. Panics with `expectation` after [`SOON`].
pub async fn until(expectation: &str, reached: impl FnMut() -> bool) {
    until_within(SOON, expectation, reached).await;
}

/// Starts a contention and waits until it leads.
pub async fn lead(simba: &Simba, mutex: &MutexName) -> (Contention, Tenure) {
    simba_tck::explain_failures();
    let contention = simba.contend(mutex.clone());
    contention.start().expect("a start");
    let tenure = soon("a free mutex is acquired", contention.acquired()).await.expect("a tenure");
    (contention, tenure)
}

/// Starts a contention and waits until it is queued and subscribed.
pub async fn wait(simba: &Simba, mutex: &MutexName, admin: &mut Admin) -> Contention {
    let contention = simba.contend(mutex.clone());
    contention.start().expect("a start");
    until("a contender has an id", || contention.id().is_some()).await;
    let id = contention.id().expect("an id");
    let key = format!("simba:{{{mutex}}}");
    // A score that ends in .5 means that the subscription is confirmed.
    let alive = format!("{key}:alive");
    let command = ["ZSCORE", &alive, id.as_str()];
    let subscribed = || admin.text(&command).is_some_and(|score| score.ends_with(".5"));
    until("a waiter is queued and subscribed", subscribed).await;
    contention
}

/// Runs one case of the conformance suite.
pub async fn case(fixture: &dyn Fixture, group: &str, name: &str) {
    let case = simba_tck::cases().iter().find(|case| (case.group, case.name) == (group, name));
    within(simba_tck::CASE_LIMIT, name, case.expect("a case of the suite").run(fixture)).await;
}
