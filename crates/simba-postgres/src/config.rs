//! The configuration: endpoints, login, TLS, tables and timeouts.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use simba_core::spi::{ConnectUrl, Password};
use simba_core::{Error, ErrorKind, Result};
use simba_net::{Tls, Verify};

use crate::schema::{Identifier, Tables};

const KEYS: &[&str] = &[
    "application_name",
    "connect_timeout",
    "host",
    "lock_timeout",
    "ping",
    "pooler",
    "port",
    "prefix",
    "schema",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "statement_timeout",
    "user",
];

const PORT: u16 = 5432;

/// The configuration of a PostgreSQL store.
///
/// `Debug` shows no password.
///
/// # Examples
///
/// ```
/// use simba_postgres::PostgresConfig;
///
/// let config = PostgresConfig::from_url(&"postgres://app:hunter2@db1,db2:6000/app".parse()?)?;
/// assert!(!format!("{config:?}").contains("hunter2"));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct PostgresConfig {
    pub(crate) endpoints: Vec<Endpoint>,
    pub(crate) user: String,
    pub(crate) password: Option<Password>,
    pub(crate) database: String,
    pub(crate) tls: Option<Tls>,
    pub(crate) tables: Tables,
    pub(crate) pooler: Pooler,
    pub(crate) application_name: String,
    pub(crate) connect_timeout: Duration,
    pub(crate) lock_timeout: Duration,
    pub(crate) statement_timeout: Duration,
    pub(crate) ping: Duration,
}

/// The address of one server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Tcp(simba_net::Endpoint),
    Unix { directory: PathBuf, port: u16 },
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(endpoint) => endpoint.fmt(f),
            Self::Unix { directory, port } => write!(f, "{}/.s.PGSQL.{port}", directory.display()),
        }
    }
}

/// Whether a pooler in front of the server assigns a server process per transaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pooler {
    /// Detect it. A direct connection needs no test; any other one is tested with a notification to the handle itself.
    #[default]
    Auto,
    /// There is one: no session state is used, and waiters poll.
    Yes,
    /// There is none: do not test.
    No,
}

impl PostgresConfig {
    /// Parses `postgres://user:password@host:port,host/database?key=value`. The [crate's documentation](crate) lists
    /// the keys.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown key or scheme, or an invalid value; [`ErrorKind::Config`] for a `sslmode`
    /// that can silently fall back to plain text.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(invalid(format!("`{}:` is not a PostgreSQL scheme: use `postgres:`", url.scheme())));
        }
        url.only_keys(KEYS).map_err(|error| error.with_backend(crate::NAME))?;
        let endpoints = endpoints(url)?;
        let user = url.user().or_else(|| url.query("user"));
        let user = user.ok_or_else(|| invalid("the URL has no user: postgres://USER@host/database"))?;
        let database = match url.path().trim_start_matches('/') {
            "" => user,
            database => database,
        };
        let mut config = Self {
            tls: tls(url, &endpoints)?,
            endpoints,
            user: user.into(),
            password: url.password().cloned(),
            database: database.into(),
            tables: Tables::default(),
            pooler: pooler(url)?,
            application_name: url.query("application_name").unwrap_or("simba").into(),
            connect_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_millis(100),
            statement_timeout: Duration::from_secs(2),
            ping: Duration::from_secs(2),
        };
        config.read_times(url)?;
        if let Some(schema) = url.query("schema") {
            config = config.with_schema(schema)?;
        }
        match url.query("prefix") {
            Some(prefix) => config.with_prefix(prefix),
            None => Ok(config),
        }
    }

    fn read_times(&mut self, url: &ConnectUrl) -> Result<()> {
        let times = [
            ("connect_timeout", &mut self.connect_timeout),
            ("lock_timeout", &mut self.lock_timeout),
            ("statement_timeout", &mut self.statement_timeout),
            ("ping", &mut self.ping),
        ];
        for (key, time) in times {
            if let Some(given) = url.duration(key).map_err(|error| error.with_backend(crate::NAME))? {
                if !(Duration::from_millis(1)..=Duration::from_secs(600)).contains(&given) {
                    return Err(invalid(format!("`{key}` is out of range: use 1ms to 10min")));
                }
                *time = given;
            }
        }
        Ok(())
    }

    /// Sets the schema of the tables; default: the first one of the search path.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] unless it is 1 to 40 of `a-z 0-9 _`, not starting with a digit.
    pub fn with_schema(mut self, schema: &str) -> Result<Self> {
        self.tables.schema = Some(Identifier::new("schema", schema)?);
        Ok(self)
    }

    /// Names the tables `<prefix>_mutex` and `<prefix>_waiter`; default `simba`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] unless it is 1 to 40 of `a-z 0-9 _`, not starting with a digit.
    pub fn with_prefix(mut self, prefix: &str) -> Result<Self> {
        self.tables.prefix = Identifier::new("prefix", prefix)?;
        Ok(self)
    }

    /// Sets the password, instead of the one in the URL.
    pub fn with_password(self, password: impl Into<Password>) -> Self {
        Self { password: Some(password.into()), ..self }
    }

    /// Sets the TLS settings; `None` means plain text.
    pub fn with_tls(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }

    /// Sets whether a transaction pooler is in front of the server.
    pub fn with_pooler(self, pooler: Pooler) -> Self {
        Self { pooler, ..self }
    }

    /// Sets how long a call is repeated while another transaction has locked its mutex's row; default 100 ms. Then it
    /// fails. The calls for other mutexes do not wait for it.
    pub fn with_lock_timeout(self, lock_timeout: Duration) -> Self {
        Self { lock_timeout, ..self }
    }

    /// Sets the time limit of a statement; default 2 s.
    pub fn with_statement_timeout(self, statement_timeout: Duration) -> Self {
        Self { statement_timeout, ..self }
    }

    /// Sets the time limit for opening a connection; default 5 s.
    pub fn with_connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self }
    }

    /// Sets how often each connection is checked with a ping; default 2 s.
    pub fn with_ping(self, ping: Duration) -> Self {
        Self { ping, ..self }
    }

    /// Returns the statements that grant the user the privileges that contending needs, and no more.
    #[must_use]
    pub fn grants(&self) -> String {
        self.tables.grants(&self.user)
    }

    /// Returns how long the server may take to answer before its connection counts as broken. Longer than any
    /// statement.
    pub(crate) fn call_timeout(&self) -> Duration {
        self.statement_timeout + Duration::from_secs(1)
    }

    /// Returns the login settings for the driver, with the current password.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the file with the password cannot be read.
    pub(crate) fn login(&self) -> Result<tokio_postgres::Config> {
        let mut login = tokio_postgres::Config::new();
        login.user(&self.user).dbname(&self.database).application_name(&self.application_name);
        if let Some(password) = &self.password {
            login.password(password.read()?);
        }
        login.ssl_mode(match self.tls {
            Some(_) => tokio_postgres::config::SslMode::Require,
            None => tokio_postgres::config::SslMode::Disable,
        });
        Ok(login)
    }
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("endpoints", &self.endpoints)
            .field("user", &self.user)
            .field("database", &self.database)
            .field("tls", &self.tls.as_ref().map(Tls::verify))
            .field("tables", &self.tables)
            .field("pooler", &self.pooler)
            .finish_non_exhaustive()
    }
}

fn endpoints(url: &ConnectUrl) -> Result<Vec<Endpoint>> {
    let parsed = url.parsed("port", "a port").map_err(|error| error.with_backend(crate::NAME))?;
    let port = parsed.unwrap_or(PORT);
    if let Some(directory) = url.query("host") {
        if !url.hosts().is_empty() || !Path::new(directory).is_absolute() {
            return Err(invalid(
                "`host` in the URL must be the directory of a local socket, such as \
                 postgres:///database?host=/run/postgresql&user=app",
            ));
        }
        return Ok(vec![Endpoint::Unix { directory: directory.into(), port }]);
    }
    if url.hosts().is_empty() {
        return Err(invalid("the URL has no host: postgres://user@HOST/database"));
    }
    Ok(simba_net::Endpoint::all(url, port).into_iter().map(Endpoint::Tcp).collect())
}

fn pooler(url: &ConnectUrl) -> Result<Pooler> {
    match url.query("pooler") {
        None | Some("auto") => Ok(Pooler::Auto),
        Some("true") => Ok(Pooler::Yes),
        Some("false") => Ok(Pooler::No),
        Some(_) => Err(invalid("`pooler` in the URL must be true, false or auto")),
    }
}

/// Reads the TLS settings. Refuses a mode that can silently fall back to plain text.
fn tls(url: &ConnectUrl, endpoints: &[Endpoint]) -> Result<Option<Tls>> {
    let mode = match url.query("sslmode") {
        Some(mode) => mode,
        None if endpoints.iter().all(is_local) => "disable",
        None => "verify-full",
    };
    let files = ["sslrootcert", "sslcert", "sslkey"];
    let verify = match mode {
        "disable" => {
            return match files.iter().find(|key| url.query(key).is_some()) {
                Some(key) => {
                    Err(invalid(format!("`{key}` needs TLS, which is off: add sslmode=verify-full")))
                }
                None => Ok(None),
            };
        }
        // As in libpq: a given CA is verified.
        "require" if url.query("sslrootcert").is_some() => Verify::Ca,
        "require" => Verify::Nothing,
        "verify-ca" => Verify::Ca,
        "verify-full" => Verify::Full,
        "prefer" | "allow" => {
            let message = format!(
                "sslmode={mode} can silently fall back to plain text: use verify-full, or disable for plain text"
            );
            return Err(Error::new(ErrorKind::Config, message).with_backend(crate::NAME));
        }
        _ => return Err(invalid("`sslmode` in the URL must be disable, require, verify-ca or verify-full")),
    };
    let mut tls = Tls::new(verify);
    if let Some(ca) = url.query("sslrootcert") {
        tls = tls.with_ca(ca);
    }
    match (url.query("sslcert"), url.query("sslkey")) {
        (Some(certificate), Some(key)) => Ok(Some(tls.with_identity(certificate, key))),
        (None, None) => Ok(Some(tls)),
        _ => Err(invalid("`sslcert` and `sslkey` must be given together")),
    }
}

/// Returns whether the connection stays on this machine.
fn is_local(endpoint: &Endpoint) -> bool {
    match endpoint {
        Endpoint::Unix { .. } => true,
        Endpoint::Tcp(simba_net::Endpoint { host, .. }) => {
            host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        }
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message).with_backend(crate::NAME)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<PostgresConfig> {
        PostgresConfig::from_url(&url.parse().unwrap())
    }

    fn refusal(url: &str) -> String {
        read(url).unwrap_err().to_string()
    }

    #[test]
    fn url_sets_endpoints_user_and_database() {
        let config = read("postgres://app:pw@a,b:6000/db?port=7000").unwrap();
        let endpoints: Vec<_> = config.endpoints.iter().map(ToString::to_string).collect();
        assert_eq!(endpoints, ["a:7000", "b:6000"]);
        assert_eq!((config.user.as_str(), config.database.as_str()), ("app", "db"));
        assert_eq!(read("postgresql://app@localhost").unwrap().database, "app", "as libpq does");
    }

    #[test]
    fn a_local_socket_is_given_by_its_directory() {
        let config = read("postgres:///db?host=/run/postgresql&port=5433&user=app").unwrap();
        assert_eq!(config.endpoints[0].to_string(), "/run/postgresql/.s.PGSQL.5433");
        assert!(refusal("postgres://app@h/db?host=/run").contains("directory"));
    }

    #[test]
    fn tls_is_on_unless_all_endpoints_are_local() {
        let verify = |url| read(url).unwrap().tls.map(|tls| tls.verify());
        assert_eq!(verify("postgres://app@127.0.0.1/db"), None);
        assert_eq!(verify("postgres://app@[::1],localhost/db"), None);
        assert_eq!(verify("postgres://app@localhost,db2/db"), Some(Verify::Full));
        assert_eq!(verify("postgres://app@db/db?sslmode=disable"), None);
        assert_eq!(verify("postgres://app@db/db?sslmode=require"), Some(Verify::Nothing));
        assert_eq!(verify("postgres://app@db/db?sslmode=require&sslrootcert=/ca"), Some(Verify::Ca));
        assert_eq!(verify("postgres://app@localhost/db?sslmode=verify-ca"), Some(Verify::Ca));
    }

    #[test]
    fn a_mode_that_can_fall_back_to_plain_text_is_refused() {
        for mode in ["prefer", "allow"] {
            let refused = read(&format!("postgres://app@db/db?sslmode={mode}")).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Config);
            assert!(refused.to_string().contains("plain text"));
        }
        assert!(refusal("postgres://app@127.0.0.1/db?sslrootcert=/ca").contains("TLS, which is off"));
        assert!(refusal("postgres://app@db/db?sslcert=/a").contains("given together"));
    }

    #[test]
    fn invalid_keys_and_values_are_refused() {
        assert!(refusal("postgres://app@h/db?sslmod=disable").contains("`sslmod`"));
        assert!(refusal("postgres://app@h/db?pooler=maybe").contains("true, false or auto"));
        assert!(refusal("postgres://app@h/db?prefix=a;drop").contains("prefix"));
        assert!(refusal("postgres://app@h/db?ping=0s").contains("out of range"));
        assert!(refusal("postgres://h/db").contains("no user"));
        assert!(refusal("mysql://app@h/db").contains("`mysql:`"));
    }

    #[test]
    fn debug_output_has_no_password() {
        let config = read("postgres://app:canary@h/db").unwrap().with_password("canary-too");
        assert!(!format!("{config:?}").contains("canary"));
    }
}
