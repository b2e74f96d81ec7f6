//! The settings of a backend: server, login, TLS, table and connections.

use std::path::{Path, PathBuf};
use std::time::Duration;

use mysql_async::{ClientIdentity, Opts, OptsBuilder, SslOpts};
use simba_core::spi::{ConnectUrl, Password};
use simba_core::{Error, ErrorKind, Result};
use simba_net::rustls::crypto::ring;

use crate::error::NAME;
use crate::schema::TableName;

const KEYS: &[&str] = &[
    "table",
    "connections",
    "poll",
    "connect-timeout",
    "socket",
    "ssl-mode",
    "ssl-ca",
    "ssl-cert",
    "ssl-key",
];
const PORT: u16 = 3306;
const MAX_CONNECTIONS: usize = 64;
/// The idle time after which TCP keepalive probes start.
const KEEPALIVE: Duration = Duration::from_secs(5);

/// The settings of a [`MySqlBackend`](crate::MySqlBackend).
///
/// # Examples
///
/// ```
/// use simba_core::spi::ConnectUrl;
/// use simba_mysql::MySqlConfig;
///
/// let url: ConnectUrl = "mysql://app:hunter2@db.example/app?ssl-mode=VERIFY_IDENTITY&poll=100ms".parse()?;
/// let config = MySqlConfig::from_url(&url)?;
/// assert!(!format!("{config:?}").contains("hunter2"));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct MySqlConfig {
    host: String,
    port: u16,
    user: Option<String>,
    password: Option<Password>,
    database: String,
    socket: Option<String>,
    pub(crate) table: TableName,
    pub(crate) connections: usize,
    pub(crate) poll: Duration,
    pub(crate) connect_timeout: Duration,
    tls: Tls,
}

/// Whether the connection is encrypted, and which checks the server's certificate must pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum SslMode {
    /// Plain text.
    Disabled,
    /// Encrypted, without a check of the certificate.
    Required,
    /// Encrypted; the certificate must be signed by a known authority.
    VerifyCa,
    /// Encrypted; the certificate must also match the host name.
    VerifyIdentity,
}

#[derive(Clone, Debug)]
struct Tls {
    mode: SslMode,
    ca: Option<PathBuf>,
    identity: Option<(PathBuf, PathBuf)>,
}

impl MySqlConfig {
    /// Creates settings for a database on this host, on the default port, without TLS.
    #[must_use]
    pub fn new(host: impl Into<String>, database: impl Into<String>) -> Self {
        Self {
            host: host.into(),
            port: PORT,
            user: None,
            password: None,
            database: database.into(),
            socket: None,
            table: TableName::default(),
            connections: 4,
            poll: Duration::from_millis(250),
            connect_timeout: Duration::from_secs(2),
            tls: Tls { mode: SslMode::Disabled, ca: None, identity: None },
        }
    }

    /// Reads `mysql://user:password@host:port/database?key=value` or the same with `mariadb://`. The keys are
    /// in the [crate's documentation](crate).
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown key, a value out of range, no database, or several hosts.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        url.only_keys(KEYS)?;
        let host = match url.hosts() {
            [] => None,
            [host] => Some(host),
            _ => {
                return Err(invalid(
                    "the URL names several hosts: only one server can arbitrate, name the primary",
                ));
            }
        };
        let database = url.path().trim_start_matches('/');
        if database.is_empty() || database.contains('/') {
            return Err(invalid("the URL names no database: write it as mysql://host/database"));
        }
        let mut config = Self::new(host.map_or("localhost", |host| &host.name), database);
        config.port = host.and_then(|host| host.port).unwrap_or(PORT);
        config.user = url.user().map(str::to_owned);
        config.password = url.password().cloned();
        config.socket = url.query("socket").map(str::to_owned);
        config.with_keys(url)?.checked()
    }

    fn with_keys(mut self, url: &ConnectUrl) -> Result<Self> {
        if let Some(table) = url.query("table") {
            self.table = table.parse()?;
        }
        if let Some(connections) = url.parsed("connections", "a number of connections")? {
            self.connections = connections;
        }
        self.poll = url.duration("poll")?.unwrap_or(self.poll);
        self.connect_timeout = url.duration("connect-timeout")?.unwrap_or(self.connect_timeout);
        if let Some(mode) = url.query("ssl-mode") {
            self.tls.mode = mode.parse()?;
        }
        self.tls.ca = url.query("ssl-ca").map(PathBuf::from);
        self.tls.identity = match (url.query("ssl-cert"), url.query("ssl-key")) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((cert.into(), key.into())),
            _ => return Err(invalid("`ssl-cert` and `ssl-key` belong together: give both or none")),
        };
        Ok(self)
    }

    /// Checks ranges and combinations of values.
    fn checked(self) -> Result<Self> {
        if !(1..=MAX_CONNECTIONS).contains(&self.connections) {
            return Err(invalid(format!("`connections` must be a number from 1 to {MAX_CONNECTIONS}")));
        }
        if self.poll < Duration::from_millis(10) || self.poll > Duration::from_secs(60) {
            return Err(invalid("`poll` must be from 10ms to 60s"));
        }
        if self.connect_timeout < Duration::from_millis(100) || self.connect_timeout > Duration::from_secs(60)
        {
            return Err(invalid("`connect-timeout` must be from 100ms to 60s"));
        }
        self.tls.checked(self.socket.is_some())?;
        Ok(self)
    }

    /// Sets the port; default 3306.
    #[must_use]
    pub fn with_port(self, port: u16) -> Self {
        Self { port, ..self }
    }

    /// Sets the user.
    #[must_use]
    pub fn with_user(self, user: impl Into<String>) -> Self {
        Self { user: Some(user.into()), ..self }
    }

    /// Sets the password, as plain text without percent-encoding.
    #[must_use]
    pub fn with_password(self, password: impl Into<Password>) -> Self {
        Self { password: Some(password.into()), ..self }
    }

    /// Sets the table; default `simba_mutex`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] unless it is a letter or `_`, then up to 63 letters, digits and `_`.
    pub fn with_table(self, table: &str) -> Result<Self> {
        Ok(Self { table: table.parse()?, ..self })
    }

    /// Sets the number of connections for calls, 1 to 64; default 4. One more connection polls for the
    /// waiters.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it is out of range.
    pub fn with_connections(self, connections: usize) -> Result<Self> {
        Self { connections, ..self }.checked()
    }

    /// Sets the interval of polls for a release while there are waiters, 10 ms to 60 s; default 250 ms.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it is out of range.
    pub fn with_poll(self, poll: Duration) -> Result<Self> {
        Self { poll, ..self }.checked()
    }

    /// Sets the timeout of one try to connect, 100 ms to 60 s; default 2 s.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it is out of range.
    pub fn with_connect_timeout(self, connect_timeout: Duration) -> Result<Self> {
        Self { connect_timeout, ..self }.checked()
    }

    /// Sets the TLS mode. The certificates in `ca` replace the public authorities.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if the settings contradict each other.
    pub fn with_tls(mut self, mode: SslMode, ca: Option<&Path>) -> Result<Self> {
        (self.tls.mode, self.tls.ca) = (mode, ca.map(Path::to_owned));
        self.checked()
    }

    /// Sets the client certificate and its private key.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] without TLS.
    pub fn with_identity(mut self, certificate: &Path, key: &Path) -> Result<Self> {
        self.tls.identity = Some((certificate.to_owned(), key.to_owned()));
        self.checked()
    }

    /// Checks that the certificate files can be read. The driver would notice during a connect, and its error
    /// names no file.
    pub(crate) fn check_files(&self) -> Result<()> {
        let (cert, key) =
            self.tls.identity.as_ref().map_or((None, None), |(cert, key)| (Some(cert), Some(key)));
        for (name, path) in [("ssl-ca", self.tls.ca.as_ref()), ("ssl-cert", cert), ("ssl-key", key)] {
            let Some(path) = path else { continue };
            std::fs::File::open(path).map_err(|error| {
                let message =
                    format!("cannot read `{name}`, {}: check the path and its permissions", path.display());
                Error::new(ErrorKind::Config, message).with_backend(NAME).with_source(error)
            })?;
        }
        Ok(())
    }

    /// Returns whether traffic leaves this machine unencrypted.
    pub(crate) fn is_exposed(&self) -> bool {
        let local = self.socket.is_some()
            || self.host == "localhost"
            || self.host.parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback());
        self.tls.mode == SslMode::Disabled && !local
    }

    /// Makes ring the default provider of rustls in this process, unless there is one. The driver uses the default with
    /// TLS, and without it panics in a program that enables another provider besides ring.
    pub(crate) fn install_tls_provider(&self) {
        if self.tls.mode != SslMode::Disabled {
            // Fails if there is one.
            let _ = ring::default_provider().install_default();
        }
    }

    /// Returns the settings of the driver, with the current password. `prefer_socket` is off: the driver would
    /// reconnect through a Unix socket and bypass the configured host.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the file with the password cannot be read.
    pub(crate) fn opts(&self) -> Result<Opts> {
        let password = self.password.as_ref().map(Password::read).transpose()?;
        let builder = OptsBuilder::default()
            .ip_or_hostname(&*self.host)
            .tcp_port(self.port)
            .user(self.user.as_deref())
            .pass(password)
            .db_name(Some(&*self.database))
            .socket(self.socket.as_deref())
            .prefer_socket(false)
            .tcp_keepalive(Some(KEEPALIVE))
            .tcp_nodelay(true)
            .secure_auth(true)
            // The driver would spend a round trip on each of these.
            .max_allowed_packet(Some(16 << 20))
            .wait_timeout(Some(28_800))
            .ssl_opts(self.tls.opts());
        Ok(builder.into())
    }
}

impl Tls {
    fn checked(&self, socket: bool) -> Result<()> {
        let plain = self.mode == SslMode::Disabled;
        if plain && (self.ca.is_some() || self.identity.is_some()) {
            return Err(invalid("certificates are given but TLS is off: add ssl-mode=VERIFY_IDENTITY"));
        }
        if self.mode == SslMode::Required && self.ca.is_some() {
            return Err(invalid(
                "`ssl-mode=REQUIRED` checks no certificate, so `ssl-ca` has no effect: use VERIFY_CA or VERIFY_IDENTITY",
            ));
        }
        if !plain && socket {
            return Err(invalid("a Unix socket is not encrypted: leave out `ssl-mode`, or `socket`"));
        }
        Ok(())
    }

    fn opts(&self) -> Option<SslOpts> {
        let opts = SslOpts::default()
            .with_root_certs(self.ca.iter().cloned().map(Into::into).collect())
            .with_disable_built_in_roots(self.ca.is_some())
            .with_client_identity(
                self.identity
                    .as_ref()
                    .map(|(cert, key)| ClientIdentity::new(cert.clone().into(), key.clone().into())),
            );
        match self.mode {
            SslMode::Disabled => None,
            SslMode::Required => Some(opts.with_danger_accept_invalid_certs(true)),
            // The driver ignores a wrong name only if the text of the error contains `NotValidForName`. The
            // text quotes the expected name, so that is the name that we set. If the text changes, the
            // connection is refused, not accepted.
            SslMode::VerifyCa => Some(
                opts.with_danger_skip_domain_validation(true)
                    .with_danger_tls_hostname_override(Some("NotValidForName")),
            ),
            SslMode::VerifyIdentity => Some(opts),
        }
    }
}

impl std::str::FromStr for SslMode {
    type Err = Error;

    fn from_str(mode: &str) -> Result<Self> {
        match mode.to_ascii_uppercase().as_str() {
            "DISABLED" => Ok(Self::Disabled),
            "REQUIRED" => Ok(Self::Required),
            "VERIFY_CA" => Ok(Self::VerifyCa),
            "VERIFY_IDENTITY" => Ok(Self::VerifyIdentity),
            "PREFERRED" => Err(invalid(
                "`ssl-mode=PREFERRED` falls back to plain text if an attacker on the network forces it to: \
                 use REQUIRED, VERIFY_CA or VERIFY_IDENTITY, or DISABLED explicitly",
            )),
            _ => Err(invalid("`ssl-mode` is DISABLED, REQUIRED, VERIFY_CA or VERIFY_IDENTITY")),
        }
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(url: &str) -> Result<MySqlConfig> {
        MySqlConfig::from_url(&url.parse()?)
    }

    fn refusal(query: &str) -> String {
        let error = config(&format!("mysql://h/db?{query}")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{query}");
        error.to_string()
    }

    #[test]
    fn both_schemes_and_every_key_are_read() {
        let url = "mariadb://u:p@h:3307/db?table=locks&connections=2&poll=1s&connect-timeout=5s\
                   &ssl-mode=verify_ca&ssl-ca=/ca&ssl-cert=/c&ssl-key=/k";
        let config = config(url).unwrap();
        assert_eq!((config.port, config.connections, config.poll), (3307, 2, Duration::from_secs(1)));
        assert_eq!((config.table.as_str(), config.tls.mode), ("locks", SslMode::VerifyCa));
    }

    #[test]
    fn an_invalid_url_is_refused_with_the_reason() {
        assert!(refusal("tabel=x").contains("takes table, connections"));
        assert!(refusal("ssl-mode=PREFERRED").contains("falls back to plain text"));
        assert!(refusal("ssl-mode=on").contains("VERIFY_IDENTITY"));
        assert!(refusal("ssl-ca=/ca").contains("TLS is off"));
        assert!(refusal("ssl-mode=REQUIRED&ssl-ca=/ca").contains("no effect"));
        assert!(refusal("ssl-mode=REQUIRED&ssl-cert=/c").contains("belong together"));
        assert!(refusal("ssl-mode=REQUIRED&socket=/s").contains("not encrypted"));
        assert!(refusal("connections=0").contains("1 to 64"));
        assert!(refusal("connections=many").contains("number"));
        assert!(refusal("poll=1ms").contains("10ms"));
        assert!(refusal("table=a%60b").contains("table name"));
        assert!(config("mysql://h").unwrap_err().to_string().contains("database"));
        assert!(config("mysql://a,b/db").unwrap_err().to_string().contains("primary"));
    }

    #[test]
    fn no_secret_is_shown() {
        let config = config("mysql://u:canary@h/db").unwrap();
        assert!(!format!("{config:?} {config:#?}").contains("canary"));
    }
}
