//! The store under test: a real server, as the user with the fewest rights, through a proxy.

#![allow(dead_code, unreachable_pub, reason = "each test file takes what it needs")]

pub mod jvm;
#[path = "../../src/resp.rs"]
pub mod resp;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use simba_core::{ConnectUrl, Contention, Lease, MutexName, Simba, SystemClock, Tenure};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, FaultProxy, FaultyBackend, Fixture, Profile, Shared, Switch, async_trait};

use resp::Reply;

pub const USER: &str = "simba-app";
pub const PASSWORD: &str = "simba-app-secret";

/// A login by hand, with the right to do everything.
pub struct Admin {
    stream: TcpStream,
    buffer: Vec<u8>,
}

impl Admin {
    pub fn at(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).expect("the server is there");
        stream.set_read_timeout(Some(Duration::from_secs(20))).expect("a timeout");
        Self { stream, buffer: Vec::new() }
    }

    pub fn ask(&mut self, words: &[&str]) -> Reply {
        self.send(words);
        self.reply()
    }

    pub fn send(&mut self, words: &[&str]) {
        self.stream.write_all(&resp::command(words)).expect("the server listens");
    }

    pub fn reply(&mut self) -> Reply {
        loop {
            if let Some((reply, length)) = resp::parse(&self.buffer).expect("a reply") {
                self.buffer.drain(..length);
                return reply;
            }
            let mut chunk = [0; 4096];
            let read = self.stream.read(&mut chunk).expect("the server answers");
            assert!(read > 0, "the server hung up");
            self.buffer.extend_from_slice(&chunk[..read]);
        }
    }

    /// The next reply, if the connection lasts that long.
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

    pub fn int(&mut self, words: &[&str]) -> i64 {
        let reply = self.ask(words);
        reply.int().unwrap_or_else(|| panic!("{words:?} gives a number, not {reply:?}"))
    }

    pub fn text(&mut self, words: &[&str]) -> Option<String> {
        match self.ask(words) {
            Reply::Nil => None,
            reply => {
                Some(reply.text().unwrap_or_else(|| panic!("{words:?} gives text, not {reply:?}")).into())
            }
        }
    }

    /// Lets in the user with the fewest rights.
    pub fn admit(&mut self) {
        let rules = format!("ACL SETUSER {USER} >{PASSWORD} {}", simba_redis::ACL);
        let words: Vec<&str> = rules.split(' ').collect();
        assert_eq!(self.ask(&words), Reply::Status("OK".into()), "the documented rights are rights");
    }
}

/// Lets in the user with the fewest rights from the first moment on, also after a restart.
pub fn admitting(setup: Setup) -> Setup {
    let rules = format!("--user {USER} >{PASSWORD} {}", simba_redis::ACL);
    rules.split(' ').fold(setup, Setup::with_arg)
}

/// A standalone server, and how to reach it.
#[derive(Clone, Debug)]
pub struct Store {
    pub address: SocketAddr,
    /// More keys for the URLs of the tests.
    pub keys: String,
    /// A server of its own, if the test breaks it.
    pub server: Option<Arc<Mutex<Server>>>,
}

impl Store {
    /// The server that all tests share.
    pub fn shared() -> Self {
        Self::at(&simba_servers::shared("SIMBA_TCK_REDIS"))
    }

    pub fn valkey() -> Self {
        Self::at(&simba_servers::shared("SIMBA_TCK_VALKEY"))
    }

    pub fn at(url: &str) -> Self {
        let url: ConnectUrl = url.parse().expect("the server's URL is one");
        let host = &url.hosts()[0];
        let address = format!("{}:{}", host.name, host.port.expect("a test server has a port"));
        Self { address: address.parse().expect("an address"), keys: String::new(), server: None }
    }

    /// A server that nobody else uses.
    pub fn private(setup: Setup) -> Self {
        let server = setup.start().expect("a server starts");
        let mut store = Self::at(&format!("redis://{}", server.address()));
        store.server = Some(Arc::new(Mutex::new(server)));
        store
    }

    pub fn with_keys(self, keys: &str) -> Self {
        Self { keys: keys.into(), ..self }
    }

    pub fn server(&self) -> std::sync::MutexGuard<'_, Server> {
        self.server.as_ref().expect("a server of its own").lock().expect("a server")
    }

    pub fn admin(&self) -> Admin {
        Admin::at(self.address)
    }

    pub fn config(&self, address: SocketAddr) -> RedisConfig {
        let url = format!("redis://{USER}:{PASSWORD}@{address}?{}", self.keys);
        RedisConfig::from_url(&url.parse().expect("a URL")).expect("a configuration")
    }

    /// A backend straight at the server, as the user with whatever rights it has.
    pub async fn backend_as_is(&self) -> RedisBackend {
        RedisBackend::connect(self.config(self.address)).await.expect("a connection")
    }

    /// A backend straight at the server, as the user with the fewest rights.
    pub async fn backend(&self) -> RedisBackend {
        self.admin().admit();
        RedisBackend::connect(self.config(self.address)).await.expect("a connection")
    }

    /// A backend behind a proxy, and the proxy.
    pub async fn proxied(&self) -> (RedisBackend, Arc<FaultProxy>) {
        self.admin().admit();
        let proxy = Arc::new(FaultProxy::start(self.address).await.expect("a proxy"));
        let backend = RedisBackend::connect(self.config(proxy.address())).await.expect("a connection");
        (backend, proxy)
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
        Self::shared()
    }

    fn address(&self) -> String {
        format!("redis://{}", self.address)
    }

    fn attach(address: &str) -> Self {
        Self::at(address)
    }
}

/// The same server through TLS, verified in full.
pub struct Encrypted(pub Store);

impl Encrypted {
    pub fn shared() -> Self {
        Self(Store::shared())
    }

    /// Where it listens for TLS.
    pub fn address(&self) -> SocketAddr {
        tls_address(self.0.address)
    }

    /// The certificate is for `localhost` alone, whatever the address.
    pub fn url(address: SocketAddr, keys: &str) -> ConnectUrl {
        let tls = simba_servers::shared("SIMBA_TCK_TLS");
        let url = format!("rediss://{USER}:{PASSWORD}@{address}?tls_ca={tls}/ca.pem{keys}");
        url.parse().expect("a URL")
    }
}

#[async_trait]
impl Fixture for Encrypted {
    async fn connect(&self) -> Connection {
        self.0.admin().admit();
        let proxy = Arc::new(FaultProxy::start(self.address()).await.expect("a proxy"));
        let url = Self::url(proxy.address(), "&tls_server_name=localhost");
        let config = RedisConfig::from_url(&url).expect("a configuration");
        let backend = RedisBackend::connect(config).await.expect("a connection");
        Connection::new(backend, proxy)
    }

    fn profile(&self) -> Profile {
        Profile::default().with_survives_restart(false)
    }
}

/// Where the server at this address listens for TLS.
fn tls_address(plain: SocketAddr) -> SocketAddr {
    let reply = Admin::at(plain).ask(&["CONFIG", "GET", "tls-port"]);
    let port = reply.array().and_then(|parts| parts[1].text()?.parse().ok()).expect("a port for TLS");
    SocketAddr::new(plain.ip(), port)
}

/// Several servers that belong together. They name each other by addresses that no proxy stands at, so the bad
/// network is in front of the backend.
pub struct Group {
    pub url: ConnectUrl,
    pub server: Option<Arc<Mutex<Server>>>,
}

impl Group {
    pub fn shared(variable: &str) -> Self {
        let group = Self::at(&simba_servers::shared(variable));
        group.admit();
        group
    }

    pub fn private(setup: Setup) -> Self {
        let server = setup.start().expect("the servers start");
        let group = Self { server: None, ..Self::at(&server.url()) };
        group.admit();
        Self { server: Some(Arc::new(Mutex::new(server))), ..group }
    }

    fn at(url: &str) -> Self {
        Self { url: url.parse().expect("the servers' URL is one"), server: None }
    }

    /// The same cluster through TLS, verified in full: its nodes name each other by their ports for TLS then.
    pub fn encrypted(&self) -> Self {
        let hosts: Vec<String> =
            self.servers().into_iter().map(|node| tls_address(node).to_string()).collect();
        let tls = simba_servers::shared("SIMBA_TCK_TLS");
        let keys = format!("tls_ca={tls}/ca.pem&tls_server_name=localhost");
        Self {
            server: self.server.clone(),
            ..Self::at(&format!("rediss+cluster://{}?{keys}", hosts.join(",")))
        }
    }

    /// Every server that has data.
    pub fn servers(&self) -> Vec<SocketAddr> {
        let hosts = self.url.hosts().iter();
        let hosts: Vec<SocketAddr> =
            hosts.map(|host| host.to_string().parse().expect("an address")).collect();
        if self.url.scheme() == "redis+cluster" {
            return hosts;
        }
        let mut sentinel = Admin::at(hosts[0]);
        let mut servers = vec![self.master()];
        let replicas = sentinel.ask(&["SENTINEL", "replicas", "mymaster"]);
        for replica in replicas.array().expect("replicas") {
            let name = replica.array().and_then(|fields| fields[1].text()).expect("a name");
            servers.push(name.parse().expect("an address"));
        }
        servers
    }

    /// The master that the sentinels name.
    pub fn master(&self) -> SocketAddr {
        let address: SocketAddr = self.url.hosts()[0].to_string().parse().expect("an address");
        let reply = Admin::at(address).ask(&["SENTINEL", "get-master-addr-by-name", "mymaster"]);
        let parts: Vec<&str> = reply.array().expect("an address").iter().filter_map(Reply::text).collect();
        format!("{}:{}", parts[0], parts[1]).parse().expect("an address")
    }

    fn admit(&self) {
        self.servers().into_iter().for_each(|server| Admin::at(server).admit());
    }

    pub fn config(&self, keys: &str) -> RedisConfig {
        let url = self.url.to_string().replacen("://", &format!("://{USER}:{PASSWORD}@"), 1);
        RedisConfig::from_url(&format!("{url}{keys}").parse().expect("a URL")).expect("a configuration")
    }

    pub async fn backend(&self) -> RedisBackend {
        RedisBackend::connect(self.config("")).await.expect("a connection")
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

// ===== what the rows need =====

/// How long anything may take that takes no time, on a noisy machine.
pub const SOON: Duration = Duration::from_secs(10);

/// The lease of the fault matrix.
pub fn lease() -> Lease {
    Lease::new(Duration::from_millis(600), Duration::from_millis(400)).expect("a lease")
}

/// A lease and a poll that outlast every test: what is passed on under it was passed on on purpose.
pub fn long() -> Lease {
    let seconds = Duration::from_secs;
    Lease::new(seconds(30), seconds(20)).and_then(|lease| lease.with_poll(seconds(30))).expect("a lease")
}

pub fn name() -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(12).collect();
    MutexName::new(format!("row-{}", nonce.to_lowercase())).expect("a name")
}

pub fn simba(backend: RedisBackend, lease: Lease) -> Simba {
    Simba::builder(Arc::new(backend)).lease(lease).build()
}

pub async fn soon<F: Future>(promise: &str, future: F) -> F::Output {
    within(SOON, promise, future).await
}

pub async fn within<F: Future>(limit: Duration, promise: &str, future: F) -> F::Output {
    tokio::time::timeout(limit, future)
        .await
        .unwrap_or_else(|_| panic!("broken: {promise} (not within {limit:?})"))
}

pub async fn until(promise: &str, mut reached: impl FnMut() -> bool) {
    let look = async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(promise, look).await;
}

/// Starts to lead, and leads.
pub async fn lead(simba: &Simba, mutex: &MutexName) -> (Contention, Tenure) {
    simba_tck::explain_failures();
    let contention = simba.contend(mutex.clone());
    contention.start().expect("a start");
    let tenure = soon("a free mutex is acquired", contention.acquired()).await.expect("a tenure");
    (contention, tenure)
}

/// Waits for the mutex, is queued, and hears.
pub async fn wait(simba: &Simba, mutex: &MutexName, admin: &mut Admin) -> Contention {
    let contention = simba.contend(mutex.clone());
    contention.start().expect("a start");
    until("a contender has an id", || contention.id().is_some()).await;
    let id = contention.id().expect("an id");
    let key = format!("simba:{{{mutex}}}");
    // A half in its score says that it has been confirmed.
    let listens = ["ZSCORE", &format!("{key}:alive"), id.as_str()].map(String::from);
    let words: Vec<&str> = listens.iter().map(String::as_str).collect();
    until("a waiter is queued and hears", || admin.text(&words).is_some_and(|score| score.ends_with(".5")))
        .await;
    contention
}

/// Runs one case of the kit.
pub async fn case(fixture: &dyn Fixture, group: &str, name: &str) {
    let case = simba_tck::cases().iter().find(|case| (case.group, case.name) == (group, name));
    within(simba_tck::CASE_LIMIT, name, case.expect("a case of the kit").run(fixture)).await;
}
