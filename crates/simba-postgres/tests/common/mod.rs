//! The store under test: the shared PostgreSQL server, as the least privileged user, through a proxy.

#![allow(dead_code, unreachable_pub, unused_imports, reason = "each test file uses a part of it")]

use std::future::Future;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::{Answer, Backend, Claim, ConnectUrl, Intent, Operate, Prior, Session};
use simba_core::{ContenderId, Contention, FencingToken, Lease, MutexName, Result, Simba, Tenure};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, FaultProxy, Fixture, async_trait};
use simba_test_support::behind_proxy;
pub use simba_test_support::name_for as name;
use tokio_postgres::{Client, NoTls, Transaction};

pub const USER: &str = "simba_app";
pub const PASSWORD: &str = "simba-app";
pub const SCHEMA: &str = "simba_tck";
/// The key of the advisory lock that serialises the set-up of the server.
const SETUP: i64 = 0x51_3b_a0;
/// The timeout for logins and statements on a busy machine, where a test does not depend on it.
pub const LONG_TIMEOUT: Duration = Duration::from_secs(20);

/// A server and its URL.
#[derive(Clone, Debug)]
pub struct Store {
    /// The URL of the superuser.
    pub admin: ConnectUrl,
    /// Additional keys for the URLs of the tests.
    pub keys: String,
}

impl Store {
    /// Returns the server that all tests share.
    pub fn shared() -> Self {
        Self::at(&simba_servers::shared("SIMBA_TCK_POSTGRES"))
    }

    pub fn at(admin: &str) -> Self {
        Self { admin: admin.parse().expect("the server's URL is valid"), keys: String::new() }
    }

    pub fn with_keys(self, keys: &str) -> Self {
        Self { keys: format!("{}&{keys}", self.keys), ..self }
    }

    /// Adds a key unless the test has set it.
    fn with_default(self, key: &str, value: &str) -> Self {
        let key = format!("&{key}=");
        if self.keys.contains(&key) {
            self
        } else {
            Self { keys: format!("{}{key}{value}", self.keys), ..self }
        }
    }

    pub fn address(&self) -> SocketAddr {
        let host = &self.admin.hosts()[0];
        format!("{}:{}", host.name, host.port.expect("a test server has a port")).parse().expect("an address")
    }

    /// Returns the superuser's password; empty if it has none.
    pub fn admin_password(&self) -> String {
        self.admin.password().map(|password| password.read().expect("a password")).unwrap_or_default()
    }

    /// Logs in as the superuser.
    pub async fn admin(&self) -> Client {
        let mut login = tokio_postgres::Config::new();
        login.host(self.address().ip().to_string()).port(self.address().port());
        login.user(self.admin.user().expect("a user")).dbname("postgres");
        login.password(self.admin_password());
        let (client, connection) = login.connect(NoTls).await.expect("the superuser can log in");
        tokio::spawn(connection);
        client.batch_execute(&format!("SET search_path = {SCHEMA}, public")).await.expect("a setting");
        client
    }

    /// Returns the configuration for the least privileged user.
    pub fn config(&self, address: SocketAddr) -> PostgresConfig {
        let url = format!("postgres://{USER}:{PASSWORD}@{address}/postgres?schema={SCHEMA}{}", self.keys);
        let config = PostgresConfig::from_url(&url.parse().expect("a URL")).expect("a configuration");
        config.with_connect_timeout(LONG_TIMEOUT)
    }

    /// Returns the configuration for the owner of the tables.
    pub fn owner_config(&self) -> PostgresConfig {
        let (user, password) = (self.admin.user().expect("a user"), self.admin_password());
        let url = format!("postgres://{user}:{password}@{}/postgres?schema={SCHEMA}", self.address());
        let config = PostgresConfig::from_url(&url.parse().expect("a URL")).expect("a configuration");
        config.with_connect_timeout(LONG_TIMEOUT).with_statement_timeout(LONG_TIMEOUT)
    }

    /// Creates the tables and the user, once.
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
            // The user gets the documented grants only.
            let role = format!(
                "BEGIN; CREATE ROLE {USER} LOGIN PASSWORD '{PASSWORD}'; {}; COMMIT;",
                self.config(self.address()).grants()
            );
            admin.batch_execute(&role).await.expect("a user");
        }
        admin.execute("SELECT pg_advisory_unlock($1)", &[&SETUP]).await.expect("a lock");
    }

    /// Connects directly, as the least privileged user. No network fault is injected, so a statement may take long, and
    /// so may the disk while another statement has locked a row.
    pub async fn backend(&self) -> PostgresBackend {
        self.set_up().await;
        let store = self.clone().with_default("statement_timeout", "20s").with_default("lock_timeout", "20s");
        PostgresBackend::connect(store.config(store.address())).await.expect("a connection")
    }

    /// Connects through a proxy, and returns both. The test for a pooler can fail on a busy machine.
    pub async fn proxied(&self) -> (PostgresBackend, Arc<FaultProxy>) {
        self.set_up().await;
        let store = self.clone().with_default("pooler", "false");
        behind_proxy(store.address(), |address| PostgresBackend::connect(store.config(address))).await
    }
}

#[async_trait]
impl Fixture for Store {
    async fn connect(&self) -> Connection {
        let (backend, proxy) = self.proxied().await;
        Connection::new(backend, proxy)
    }
}

/// A private server, for tests that cannot use the shared one.
pub struct Private {
    pub server: std::sync::Mutex<Server>,
    pub store: Store,
}

impl Private {
    /// Starts a server with these settings, and creates the tables and the user.
    pub async fn start(setup: Setup) -> Self {
        let server = tokio::task::spawn_blocking(move || setup.start().expect("a server"));
        let server = server.await.expect("the start does not panic");
        let store = Store::at(&server.url());
        store.set_up().await;
        Self { server: server.into(), store }
    }

    pub fn server(&self) -> std::sync::MutexGuard<'_, Server> {
        self.server.lock().expect("not poisoned")
    }
}

#[async_trait]
impl Fixture for Private {
    async fn connect(&self) -> Connection {
        self.store.connect().await
    }

    async fn restart(&self) -> bool {
        tokio::task::block_in_place(|| self.server().restart().expect("the server restarts"));
        true
    }
}

/// Connects directly, with the lease of the fault matrix.
pub async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).with_lease(lease()).build()
}

/// Starts a contention.
pub fn contend(simba: &Simba, mutex: &MutexName) -> Contention {
    let contention = simba.contend(mutex.clone());
    contention.start().expect("a start");
    contention
}

/// Waits until the contention leads.
pub async fn leads(contention: &Contention) -> Tenure {
    soon("a leader", contention.acquired()).await.expect("a tenure")
}

/// Returns a lease that is renewed as often, and is not lost while the machine pauses.
pub fn unpaused() -> Lease {
    Lease::new(lease().ttl(), Duration::from_secs(30)).expect("a lease")
}

/// Checks for a duration that leaders keep their mutexes.
pub async fn stays(tenures: &[Tenure], length: Duration) {
    let end = tokio::time::Instant::now() + length;
    while tokio::time::Instant::now() < end {
        for tenure in tenures {
            assert_eq!(tenure.loss(), None, "broken: {} keeps its leader", tenure.mutex());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Opens a session that queues.
pub async fn open(backend: &PostgresBackend, mutex: &MutexName) -> Box<dyn Session> {
    open_as(backend, mutex, Intent::Queue).await
}

pub async fn open_as(backend: &PostgresBackend, mutex: &MutexName, intent: Intent) -> Box<dyn Session> {
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), long()).with_intent(intent);
    backend.open(claim).await.expect("an answer")
}

pub async fn take(session: &mut dyn Session) -> FencingToken {
    match session.contend(Prior::Nothing).await.expect("an answer") {
        Answer::Ours(ours) => ours.token.expect("a token"),
        other => panic!("a free mutex is not acquired: {other:?}"),
    }
}

/// Begins a transaction that changes the row of a mutex, and so keeps it locked.
pub async fn lock_row<'a>(admin: &'a mut Client, mutex: &MutexName) -> Transaction<'a> {
    let transaction = admin.transaction().await.expect("an answer");
    let lock = "UPDATE simba_mutex SET watched = watched WHERE mutex = $1";
    assert_eq!(transaction.execute(lock, &[&mutex.as_str()]).await.expect("an answer"), 1);
    transaction
}

/// Changes a setting, and waits until the server has read it. New connections use it from then on.
pub async fn alter_system(admin: &Client, setting: &str, value: &str) {
    let alter = format!("ALTER SYSTEM SET {setting} = {value}");
    admin.batch_execute(&alter).await.expect("a setting");
    admin.batch_execute("SELECT pg_reload_conf()").await.expect("an answer");
    let seen = format!("SELECT current_setting('{setting}')");
    let reloaded = async {
        while admin.query_one(&seen, &[]).await.expect("an answer").get::<_, &str>(0) != value {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the server reads its configuration", reloaded).await;
}

/// Returns how many statements of this application wait for a row.
pub async fn lock_waits(admin: &Client, application: &str) -> i64 {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock' \
         AND wait_event IN ('transactionid', 'tuple')";
    admin.query_one(count, &[&application]).await.expect("an answer").get(0)
}

/// Waits until this application begins another statement about mutexes.
pub async fn sends_statement(admin: &Client, application: &str) {
    let now: std::time::SystemTime =
        admin.query_one("SELECT clock_timestamp()", &[]).await.expect("an answer").get(0);
    let begun = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND query_start > $2 \
                 AND query LIKE '%simba_mutex%')";
    let sent = async {
        while !admin.query_one(begun, &[&application, &now]).await.expect("an answer").get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("a statement is sent", sent).await;
}

/// Delays statements of the user on a server: they have read the row of their mutex, and not locked it yet. Dropping it
/// lets them continue.
pub struct Delay {
    admin: Client,
}

/// The key of the advisory lock that delays statements.
const DELAY: i64 = 77;

impl Delay {
    /// Prepares it for the statements of new connections that contain this text. The replacements shadow the functions
    /// of the server.
    pub async fn install(store: &Store, text: &str) -> Self {
        let admin = store.admin().await;
        let install = format!(
            "CREATE SCHEMA delay; GRANT USAGE ON SCHEMA delay TO {USER}; \
             CREATE FUNCTION delay.wait() RETURNS void LANGUAGE plpgsql AS $$ BEGIN \
                 WHILE position('{text}' IN current_query()) > 0 AND NOT pg_try_advisory_lock_shared({DELAY}) \
                 LOOP PERFORM pg_sleep(0.01); END LOOP; \
                 IF position('{text}' IN current_query()) > 0 THEN PERFORM pg_advisory_unlock_shared({DELAY}); END IF; \
             END $$; \
             CREATE FUNCTION delay.clock_timestamp() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN \
                 PERFORM delay.wait(); RETURN pg_catalog.clock_timestamp(); END $$; \
             CREATE FUNCTION delay.set_config(text, text, boolean) RETURNS text LANGUAGE plpgsql AS $$ BEGIN \
                 PERFORM delay.wait(); RETURN pg_catalog.set_config($1, $2, $3); END $$; \
             ALTER ROLE {USER} SET search_path = delay, pg_catalog"
        );
        admin.batch_execute(&install).await.expect("the functions are replaced");
        Self { admin }
    }

    /// Delays statements from now on.
    pub async fn begin(&self) {
        self.admin.execute("SELECT pg_advisory_lock($1)", &[&DELAY]).await.expect("a lock");
    }

    /// Lets the delayed statements continue.
    pub async fn end(&self) {
        self.admin.execute("SELECT pg_advisory_unlock($1)", &[&DELAY]).await.expect("a lock");
    }

    /// Waits until a statement of this application is delayed.
    pub async fn is_reached(&self, application: &str) {
        let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity \
                     WHERE application_name = $1 AND wait_event = 'PgSleep')";
        let reached = async {
            while !self.admin.query_one(waits, &[&application]).await.expect("an answer").get::<_, bool>(0) {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        soon("a statement is delayed", reached).await;
    }
}

/// Returns the lease of the fault matrix.
pub fn lease() -> Lease {
    Lease::new(Duration::from_secs(2), Duration::from_secs(3)).expect("a lease")
}

/// Returns a lease that does not end within the limit of [`soon`].
pub fn long() -> Lease {
    Lease::new(Duration::from_secs(30), Duration::from_secs(20)).expect("a lease")
}

/// The limit for anything that needs no waiting, on a busy machine.
const SOON: Duration = Duration::from_secs(25);

/// Waits for a future for at most [`SOON`].
pub async fn soon<F: Future>(what: &str, future: F) -> F::Output {
    simba_test_support::within(SOON, what, Box::pin(future)).await
}

/// Polls until a condition holds, for at most [`SOON`].
pub async fn until(what: &str, reached: impl FnMut() -> bool) {
    simba_test_support::until_within(SOON, what, reached).await;
}

/// Connects. Unless the URL has a timeout, a login or a statement may take long, as on a busy machine.
pub async fn connect(url: &str) -> Result<PostgresBackend> {
    let url: ConnectUrl = url.parse().expect("a valid URL");
    let config = PostgresConfig::from_url(&url)?;
    let config = match url.query("connect_timeout") {
        Some(_) => config,
        None => config.with_connect_timeout(LONG_TIMEOUT),
    };
    let config = match url.query("statement_timeout") {
        Some(_) => config,
        None => config.with_statement_timeout(LONG_TIMEOUT),
    };
    soon("a connect ends", PostgresBackend::connect(config)).await
}
