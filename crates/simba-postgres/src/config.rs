//! Where the server is, how to log in, and how to talk to it.

use std::fmt;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use simba_core::{ConnectUrl, Error, ErrorKind, Result};
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

/// Where a PostgreSQL server is and how to talk to it.
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
    pub(crate) places: Vec<Place>,
    pub(crate) user: String,
    pub(crate) password: Option<String>,
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

/// One server that may be the one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    Tcp { host: String, port: u16 },
    Unix { directory: PathBuf, port: u16 },
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix { directory, port } => write!(f, "{}/.s.PGSQL.{port}", directory.display()),
        }
    }
}

/// Whether a pooler that gives every transaction another server process stands in front of the server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Pooler {
    /// Find out: a connection that leads straight to the server needs no test, any other one is tested by
    /// sending a message to oneself.
    #[default]
    Auto,
    /// Yes: nothing of a session is used, waiters poll.
    Yes,
    /// No: do not test.
    No,
}

impl PostgresConfig {
    /// Reads `postgres://user:password@host:port,host/database?key=value`. The [crate's
    /// documentation](crate) lists the keys.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown key or scheme, or a value that is none; [`ErrorKind::Config`] for
    /// a `sslmode` that may end as plain text.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        if !matches!(url.scheme(), "postgres" | "postgresql") {
            return Err(invalid(format!("`{}:` is not the scheme of a PostgreSQL server", url.scheme())));
        }
        url.only_keys(KEYS).map_err(|error| error.with_backend(crate::NAME))?;
        let places = places(url)?;
        let user = url.user().or_else(|| url.query("user"));
        let user = user.ok_or_else(|| invalid("the URL names no user: postgres://USER@host/database"))?;
        let database = match url.path().trim_start_matches('/') {
            "" => user,
            database => database,
        };
        let mut config = Self {
            tls: tls(url, &places)?,
            places,
            user: user.into(),
            password: url.password().map(Into::into),
            database: database.into(),
            tables: Tables::default(),
            pooler: pooler(url)?,
            application_name: url.query("application_name").unwrap_or("simba").into(),
            connect_timeout: Duration::from_secs(5),
            lock_timeout: Duration::from_millis(100),
            statement_timeout: Duration::from_secs(2),
            ping: Duration::from_secs(2),
        };
        config.read_tables(url)?;
        config.read_times(url)?;
        Ok(config)
    }

    fn read_tables(&mut self, url: &ConnectUrl) -> Result<()> {
        if let Some(schema) = url.query("schema") {
            self.tables.schema = Some(Identifier::new("schema", schema)?);
        }
        if let Some(prefix) = url.query("prefix") {
            self.tables.prefix = Identifier::new("prefix", prefix)?;
        }
        Ok(())
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
                    return Err(invalid(format!("`{key}` is out of range: take 1ms to 10min")));
                }
                *time = given;
            }
        }
        Ok(())
    }

    /// Looks for the tables in this schema instead of the first one of the search path.
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

    /// Takes the password from elsewhere than the URL.
    pub fn with_password(self, password: impl Into<String>) -> Self {
        Self { password: Some(password.into()), ..self }
    }

    /// Speaks TLS, or with `None` plain text.
    pub fn with_tls(self, tls: Option<Tls>) -> Self {
        Self { tls, ..self }
    }

    /// Says whether a transaction pooler stands in front of the server.
    pub fn with_pooler(self, pooler: Pooler) -> Self {
        Self { pooler, ..self }
    }

    /// Waits at most this long for a row that another transaction has locked; default 100 ms. Everything
    /// else on the handle waits with it.
    pub fn with_lock_timeout(self, lock_timeout: Duration) -> Self {
        Self { lock_timeout, ..self }
    }

    /// Lets no statement run for longer; default 2 s.
    pub fn with_statement_timeout(self, statement_timeout: Duration) -> Self {
        Self { statement_timeout, ..self }
    }

    /// Waits at most this long for a new connection; default 5 s.
    pub fn with_connect_timeout(self, connect_timeout: Duration) -> Self {
        Self { connect_timeout, ..self }
    }

    /// Asks each connection for a sign of life this often; default 2 s.
    pub fn with_ping(self, ping: Duration) -> Self {
        Self { ping, ..self }
    }

    /// What an owner of the tables runs so that the user of this configuration can contend, and do no more.
    #[must_use]
    pub fn grants(&self) -> String {
        self.tables.grants(&self.user)
    }

    /// How long the server may take to answer before its connection counts as broken: whatever it does, a
    /// statement ends before.
    pub(crate) fn silence(&self) -> Duration {
        self.statement_timeout + Duration::from_secs(1)
    }

    /// How the driver logs in.
    pub(crate) fn login(&self) -> tokio_postgres::Config {
        let mut login = tokio_postgres::Config::new();
        login.user(&self.user).dbname(&self.database).application_name(&self.application_name);
        if let Some(password) = &self.password {
            login.password(password);
        }
        login.ssl_mode(match self.tls {
            Some(_) => tokio_postgres::config::SslMode::Require,
            None => tokio_postgres::config::SslMode::Disable,
        });
        login
    }
}

impl fmt::Debug for PostgresConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PostgresConfig")
            .field("places", &self.places)
            .field("user", &self.user)
            .field("database", &self.database)
            .field("tls", &self.tls.as_ref().map(Tls::verify))
            .field("tables", &self.tables)
            .field("pooler", &self.pooler)
            .finish_non_exhaustive()
    }
}

fn places(url: &ConnectUrl) -> Result<Vec<Place>> {
    let parsed = url.parsed("port", "a port").map_err(|error| error.with_backend(crate::NAME))?;
    let port = parsed.unwrap_or(PORT);
    if let Some(directory) = url.query("host") {
        if !url.hosts().is_empty() || !Path::new(directory).is_absolute() {
            return Err(invalid(
                "`host` in the URL is for a directory with a socket, such as \
                 postgres:///database?host=/run/postgresql&user=app",
            ));
        }
        return Ok(vec![Place::Unix { directory: directory.into(), port }]);
    }
    if url.hosts().is_empty() {
        return Err(invalid("the URL names no host: postgres://user@HOST/database"));
    }
    let place =
        |host: &simba_core::Host| Place::Tcp { host: host.name.clone(), port: host.port.unwrap_or(port) };
    Ok(url.hosts().iter().map(place).collect())
}

fn pooler(url: &ConnectUrl) -> Result<Pooler> {
    match url.query("pooler") {
        None | Some("auto") => Ok(Pooler::Auto),
        Some("true") => Ok(Pooler::Yes),
        Some("false") => Ok(Pooler::No),
        Some(_) => Err(invalid("`pooler` in the URL is true, false or auto")),
    }
}

/// What the URL says about TLS. What may end as plain text is refused.
fn tls(url: &ConnectUrl, places: &[Place]) -> Result<Option<Tls>> {
    let mode = match url.query("sslmode") {
        Some(mode) => mode,
        None if places.iter().all(is_near) => "disable",
        None => "verify-full",
    };
    let files = ["sslrootcert", "sslcert", "sslkey"];
    let verify = match mode {
        "disable" => {
            return match files.iter().find(|key| url.query(key).is_some()) {
                Some(key) => {
                    Err(invalid(format!("`{key}` is for TLS, which is off: add sslmode=verify-full")))
                }
                None => Ok(None),
            };
        }
        // As libpq does: whoever names an authority wants it checked.
        "require" if url.query("sslrootcert").is_some() => Verify::Ca,
        "require" => Verify::Nothing,
        "verify-ca" => Verify::Ca,
        "verify-full" => Verify::Full,
        "prefer" | "allow" => {
            let message = format!(
                "sslmode={mode} may end as plain text without a word: take verify-full, or disable to say so"
            );
            return Err(Error::new(ErrorKind::Config, message).with_backend(crate::NAME));
        }
        _ => return Err(invalid("`sslmode` in the URL is disable, require, verify-ca or verify-full")),
    };
    let mut tls = Tls::new(verify);
    if let Some(ca) = url.query("sslrootcert") {
        tls = tls.with_ca(ca);
    }
    match (url.query("sslcert"), url.query("sslkey")) {
        (Some(certificate), Some(key)) => Ok(Some(tls.with_identity(certificate, key))),
        (None, None) => Ok(Some(tls)),
        _ => Err(invalid("`sslcert` and `sslkey` go together")),
    }
}

/// Whether nobody else's wire lies in between.
fn is_near(place: &Place) -> bool {
    match place {
        Place::Unix { .. } => true,
        Place::Tcp { host, .. } => {
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
    fn a_url_says_where_and_who() {
        let config = read("postgres://app:pw@a,b:6000/db?port=7000").unwrap();
        let places: Vec<_> = config.places.iter().map(ToString::to_string).collect();
        assert_eq!(places, ["a:7000", "b:6000"]);
        assert_eq!((config.user.as_str(), config.database.as_str()), ("app", "db"));
        assert_eq!(read("postgresql://app@localhost").unwrap().database, "app", "as libpq does");
    }

    #[test]
    fn a_socket_is_named_by_its_directory() {
        let config = read("postgres:///db?host=/run/postgresql&port=5433&user=app").unwrap();
        assert_eq!(config.places[0].to_string(), "/run/postgresql/.s.PGSQL.5433");
        assert!(refusal("postgres://app@h/db?host=/run").contains("directory"));
    }

    #[test]
    fn tls_is_on_unless_nobody_else_s_wire_lies_in_between() {
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
    fn what_may_end_as_plain_text_is_refused() {
        for mode in ["prefer", "allow"] {
            let refused = read(&format!("postgres://app@db/db?sslmode={mode}")).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::Config);
            assert!(refused.to_string().contains("plain text"));
        }
        assert!(refusal("postgres://app@127.0.0.1/db?sslrootcert=/ca").contains("TLS, which is off"));
        assert!(refusal("postgres://app@db/db?sslcert=/a").contains("go together"));
    }

    #[test]
    fn typing_errors_are_told() {
        assert!(refusal("postgres://app@h/db?sslmod=disable").contains("`sslmod`"));
        assert!(refusal("postgres://app@h/db?pooler=maybe").contains("true, false or auto"));
        assert!(refusal("postgres://app@h/db?prefix=a;drop").contains("prefix"));
        assert!(refusal("postgres://app@h/db?ping=0s").contains("out of range"));
        assert!(refusal("postgres://h/db").contains("no user"));
        assert!(refusal("mysql://app@h/db").contains("`mysql:`"));
    }

    #[test]
    fn no_text_shows_the_password() {
        let config = read("postgres://app:canary@h/db").unwrap().with_password("canary-too");
        assert!(!format!("{config:?}").contains("canary"));
    }
}
