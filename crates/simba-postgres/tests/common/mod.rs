//! The store under test: the shared PostgreSQL server, as the user with the fewest rights, through a proxy.

#![allow(dead_code, unreachable_pub, reason = "each test file takes what it needs")]

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{
    Answer, Backend as _, Claim, ConnectUrl, ContenderId, FencingToken, Intent, Lease, MutexName, Operate,
    Prior, Session,
};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, FaultProxy, Fixture, async_trait};
use tokio_postgres::{Client, NoTls, Transaction};

pub const USER: &str = "simba_app";
pub const PASSWORD: &str = "simba-app";
pub const SCHEMA: &str = "simba_tck";
/// Two test programs that set the server up at once wait for each other.
const SETUP: i64 = 0x51_3b_a0;

/// A server, and how to reach it.
#[derive(Clone, Debug)]
pub struct Store {
    /// The right to do everything.
    pub admin: ConnectUrl,
    /// More keys for the URLs of the tests.
    pub keys: String,
}

impl Store {
    /// The server that all tests share.
    pub fn shared() -> Self {
        Self::at(&simba_servers::shared("SIMBA_TCK_POSTGRES"))
    }

    pub fn at(admin: &str) -> Self {
        Self { admin: admin.parse().expect("the server's URL is one"), keys: String::new() }
    }

    pub fn with_keys(self, keys: &str) -> Self {
        Self { keys: format!("{}&{keys}", self.keys), ..self }
    }

    pub fn address(&self) -> SocketAddr {
        let host = &self.admin.hosts()[0];
        format!("{}:{}", host.name, host.port.expect("a test server has a port")).parse().expect("an address")
    }

    /// A login with the right to do everything, for what a test does by hand.
    pub async fn admin(&self) -> Client {
        let mut login = tokio_postgres::Config::new();
        login.host(self.address().ip().to_string()).port(self.address().port());
        login.user(self.admin.user().expect("a user")).dbname("postgres");
        login.password(self.admin.password().unwrap_or_default());
        let (client, connection) = login.connect(NoTls).await.expect("the server lets its owner in");
        tokio::spawn(connection);
        client.batch_execute(&format!("SET search_path = {SCHEMA}, public")).await.expect("a setting");
        client
    }

    /// Where the tables are, for the user with the fewest rights.
    pub fn config(&self, address: SocketAddr) -> PostgresConfig {
        let url = format!("postgres://{USER}:{PASSWORD}@{address}/postgres?schema={SCHEMA}{}", self.keys);
        PostgresConfig::from_url(&url.parse().expect("a URL")).expect("a configuration")
    }

    /// The same for the owner of the tables.
    pub fn owner_config(&self) -> PostgresConfig {
        let (user, password) =
            (self.admin.user().expect("a user"), self.admin.password().unwrap_or_default());
        let url = format!("postgres://{user}:{password}@{}/postgres?schema={SCHEMA}", self.address());
        PostgresConfig::from_url(&url.parse().expect("a URL")).expect("a configuration")
    }

    /// Makes the tables and the user, once.
    pub async fn set_up(&self) {
        let admin = self.admin().await;
        admin.execute("SELECT pg_advisory_lock($1)", &[&SETUP]).await.expect("a lock");
        let done: bool = admin
            .query_one("SELECT EXISTS (SELECT FROM pg_roles WHERE rolname = $1)", &[&USER])
            .await
            .expect("an answer")
            .get(0);
        if !done {
            admin.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {SCHEMA}")).await.expect("a schema");
            let owner = PostgresBackend::connect(self.owner_config()).await.expect("a connection");
            owner.apply_schema().await.expect("the schema is applied");
            // The documented grants are all that it gets.
            let role = format!(
                "BEGIN; CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'; {}; COMMIT;",
                self.config(self.address()).grants()
            );
            admin.batch_execute(&role).await.expect("a user");
        }
        admin.execute("SELECT pg_advisory_unlock($1)", &[&SETUP]).await.expect("a lock");
    }

    /// A backend straight at the server, as the user with the fewest rights.
    pub async fn backend(&self) -> PostgresBackend {
        self.set_up().await;
        PostgresBackend::connect(self.config(self.address())).await.expect("a connection")
    }

    /// A backend behind a proxy, and the proxy.
    pub async fn proxied(&self) -> (PostgresBackend, Arc<FaultProxy>) {
        self.set_up().await;
        let proxy = Arc::new(FaultProxy::start(self.address()).await.expect("a proxy"));
        let backend = PostgresBackend::connect(self.config(proxy.address())).await.expect("a connection");
        (backend, proxy)
    }
}

#[async_trait]
impl Fixture for Store {
    async fn connect(&self) -> Connection {
        let (backend, proxy) = self.proxied().await;
        Connection::new(backend, proxy)
    }
}

/// A server of its own, for what cannot be done to the shared one.
pub struct Private {
    pub server: std::sync::Mutex<Server>,
    pub store: Store,
}

impl Private {
    /// Starts a server with these settings, and makes the tables and the user.
    pub async fn start(setup: Setup) -> Self {
        let server = tokio::task::spawn_blocking(move || setup.start().expect("a server"));
        let server = server.await.expect("the start does not panic");
        let store = Store::at(&server.url());
        store.set_up().await;
        Self { server: server.into(), store }
    }

    pub fn server(&self) -> std::sync::MutexGuard<'_, Server> {
        self.server.lock().expect("nobody panicked with it")
    }
}

#[async_trait]
impl Fixture for Private {
    async fn connect(&self) -> Connection {
        self.store.connect().await
    }

    async fn restart(&self) -> bool {
        tokio::task::block_in_place(|| self.server().restart().expect("the server comes back"));
        true
    }
}

/// A name that no other test has.
pub fn name(what: &str) -> MutexName {
    let nonce: String = std::iter::repeat_with(fastrand::alphanumeric).take(10).collect();
    MutexName::new(format!("{what}-{}", nonce.to_lowercase())).expect("a name")
}

/// A session that waits its turn.
pub async fn open(backend: &PostgresBackend, mutex: &MutexName) -> Box<dyn Session> {
    open_as(backend, mutex, Intent::Queue).await
}

pub async fn open_as(backend: &PostgresBackend, mutex: &MutexName, intent: Intent) -> Box<dyn Session> {
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default()).with_intent(intent);
    backend.open(claim).await.expect("an answer")
}

pub async fn take(session: &mut dyn Session) -> FencingToken {
    match session.contend(Prior::Nothing).await.expect("an answer") {
        Answer::Ours(ours) => ours.token.expect("a token"),
        other => panic!("a free mutex is not given: {other:?}"),
    }
}

/// A transaction that stands still with a row of ours locked.
pub async fn freeze<'a>(admin: &'a mut Client, mutex: &MutexName) -> Transaction<'a> {
    let transaction = admin.transaction().await.expect("an answer");
    let lock = "SELECT FROM simba_mutex WHERE mutex = $1 FOR UPDATE";
    assert_eq!(transaction.execute(lock, &[&mutex.as_str()]).await.expect("an answer"), 1);
    transaction
}

/// The lease of the fault matrix.
pub fn lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).expect("a lease")
}

/// Explains no hand-over within a limit of [`soon`].
pub fn long() -> Lease {
    Lease::new(Duration::from_secs(30), Duration::from_secs(20)).expect("a lease")
}

/// Waits for what must come soon, however noisy the machine.
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    let limit = Duration::from_secs(15);
    tokio::time::timeout(limit, future).await.unwrap_or_else(|_| panic!("not within {limit:?}: {what}"))
}

/// Waits for a state that gives no signal.
pub async fn until(what: &str, reached: impl Fn() -> bool + Send + Sync) {
    let look = async {
        while !reached() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon(what, look).await;
}

/// Everything that is logged in this process from the first call on, by the driver too.
pub fn hear() -> &'static Heard {
    static HEARD: std::sync::OnceLock<Heard> = std::sync::OnceLock::new();
    HEARD.get_or_init(|| {
        let heard = Heard::default();
        let writer = heard.clone();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(tracing::Level::TRACE)
            .with_ansi(false)
            .with_writer(move || writer.clone())
            .finish();
        tracing::subscriber::set_global_default(subscriber).expect("nobody else listens");
        log::set_boxed_logger(Box::new(heard.clone())).expect("nobody else listens");
        log::set_max_level(log::LevelFilter::Trace);
        heard
    })
}

/// Everything that is logged on this thread, until the guard is dropped: all that goes on in a runtime of one
/// thread.
pub fn hear_here() -> (Heard, tracing::subscriber::DefaultGuard) {
    let heard = Heard::default();
    let writer = heard.clone();
    let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || writer.clone()).finish();
    (heard, tracing::subscriber::set_default(subscriber))
}

/// What was logged.
#[derive(Clone, Debug, Default)]
pub struct Heard(Arc<std::sync::Mutex<Vec<u8>>>);

impl Heard {
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.0.lock().expect("nobody panicked with it")).into_owned()
    }

    pub fn count(&self, words: &str) -> usize {
        self.text().matches(words).count()
    }
}

impl std::io::Write for Heard {
    fn write(&mut self, text: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("nobody panicked with it").extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl log::Log for Heard {
    fn enabled(&self, _: &log::Metadata<'_>) -> bool {
        true
    }

    fn log(&self, record: &log::Record<'_>) {
        let line = format!("{} {} {}\n", record.level(), record.target(), record.args());
        self.0.lock().expect("nobody panicked with it").extend_from_slice(line.as_bytes());
    }

    fn flush(&self) {}
}
