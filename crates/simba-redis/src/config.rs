//! Settings of the backend: servers, login, TLS, limits.

use std::fmt;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use simba_core::spi::{ConnectUrl, Host, Password};
use simba_core::{Error, ErrorKind, Result};
use simba_net::{Tls, Verify};

use crate::error;

const KEYS: &[&str] = &[
    "connect_timeout",
    "db",
    "fence_retention",
    "ping",
    "sentinel_password",
    "sentinel_password_file",
    "sentinel_user",
    "timeout",
    "tls_ca",
    "tls_cert",
    "tls_key",
    "tls_server_name",
    "tls_verify",
    "wait_replicas",
    "wait_timeout",
];

/// Longer than the error of a clock that was set in the wrong time zone, which is the most common large step.
const DEFAULT_FENCE_RETENTION: Duration = Duration::from_secs(24 * 60 * 60);
/// Allowed range: from a minute to ten years.
const FENCE_RETENTION: RangeInclusive<Duration> =
    Duration::from_secs(60)..=Duration::from_secs(3650 * 24 * 60 * 60);

/// Allowed range of the time limits: from a millisecond to ten minutes.
const LIMIT: RangeInclusive<Duration> = Duration::from_millis(1)..=Duration::from_secs(600);

const PORT: u16 = 6379;
const SENTINEL_PORT: u16 = 26379;

/// Address and settings of a Redis or Valkey.
///
/// `Debug` shows no password.
///
/// # Examples
///
/// ```
/// use simba_redis::RedisConfig;
///
/// let config = RedisConfig::from_url(&"redis+sentinel://:hunter2@a,b,c/mymaster".parse()?)?;
/// assert!(!format!("{config:?}").contains("hunter2"));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct RedisConfig {
    pub(crate) topology: Topology,
    pub(crate) settings: Settings,
}

/// Topology of the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Topology {
    Standalone(Address),
    Sentinel { sentinels: Vec<Address>, master: String },
    Cluster(Vec<Address>),
}

/// Address of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Address {
    Tcp { host: String, port: u16 },
    Unix(PathBuf),
}

impl Address {
    pub(crate) fn tcp(host: impl Into<String>, port: u16) -> Self {
        Self::Tcp { host: host.into(), port }
    }

    fn of(host: &Host, port: u16) -> Self {
        Self::tcp(host.name.clone(), host.port.unwrap_or(port))
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Self::Tcp { host, port } => write!(f, "{host}:{port}"),
            Self::Unix(path) => write!(f, "{}", path.display()),
        }
    }
}

/// Login and database at a server.
#[derive(Clone, Default)]
pub(crate) struct Login {
    pub(crate) user: Option<String>,
    pub(crate) password: Option<Password>,
    pub(crate) database: u32,
}

impl Login {
    fn new(user: Option<&str>, password: Option<Password>, database: u32) -> Self {
        Self { user: user.map(Into::into), password, database }
    }
}

/// Settings of every connection.
#[derive(Clone)]
pub(crate) struct Settings {
    pub(crate) login: Login,
    pub(crate) sentinel_login: Login,
    pub(crate) tls: Option<Tls>,
    pub(crate) connect_timeout: Duration,
    /// Time without a reply, while one is outstanding, after which a connection counts as broken.
    pub(crate) timeout: Duration,
    pub(crate) ping: Duration,
    pub(crate) wait: Option<WaitReplicas>,
    /// Time for which the last token of a mutex is kept after its last use.
    pub(crate) fence_retention: Duration,
}

/// Number of replicas that must have an acquisition, and the time limit for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WaitReplicas {
    pub(crate) count: u32,
    pub(crate) timeout: Duration,
}

impl RedisConfig {
    /// Parses a URL with the scheme `redis:`, `rediss:`, `redis+unix:`, `redis+sentinel:`, `rediss+sentinel:`,
    /// `redis+cluster:` or `rediss+cluster:`. The [crate's documentation](crate) lists the keys.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown scheme or key, or an invalid value.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        Self::read(url).map_err(|error| error.with_backend(crate::NAME))
    }

    fn read(url: &ConnectUrl) -> Result<Self> {
        url.only_keys(KEYS)?;
        let (topology, database) = topology(url)?;
        let database = url.parsed("db", "the number of a database")?.unwrap_or(database);
        let login = Login::new(url.user(), url.password().cloned(), database);
        if login.user.is_some() && login.password.is_none() {
            return Err(invalid("the URL names a user without a password: redis://USER:PASSWORD@host"));
        }
        let settings = Settings {
            login,
            sentinel_login: sentinel_login(url)?,
            tls: tls(url)?,
            connect_timeout: limit(url, "connect_timeout", Duration::from_secs(2))?,
            timeout: limit(url, "timeout", Duration::from_secs(1))?,
            ping: limit(url, "ping", Duration::from_secs(5))?,
            wait: wait(url)?,
            fence_retention: time(
                url,
                "fence_retention",
                DEFAULT_FENCE_RETENTION,
                FENCE_RETENTION,
                "1min to 3650 days",
            )?,
        };
        Ok(Self { topology, settings })
    }

    /// Sets the password of the login at the servers, instead of the one in the URL.
    pub fn with_password(mut self, password: impl Into<Password>) -> Self {
        self.settings.login.password = Some(password.into());
        self
    }

    /// Sets the TLS settings. `None` means plain text.
    pub fn with_tls(mut self, tls: Option<Tls>) -> Self {
        self.settings.tls = tls;
        self
    }

    /// Sets the time without a reply after which a connection counts as broken; default 1 s. Choose it well below the
    /// lease: otherwise a holder cannot reconnect before its deadline.
    pub fn with_timeout(mut self, timeout: Duration) -> Self {
        self.settings.timeout = timeout;
        self
    }

    /// Sets how long the last token of a mutex is kept after its last use; default 1 day. Values are clamped to 1 min
    /// to 10 years.
    ///
    /// After that time, the next token is the server's time in microseconds. It is smaller than the last one only if
    /// the server's clock was set back by more than the time since the last use, which is more than the retention. All
    /// handles should have the same value: the last use of a mutex decides.
    pub fn with_fence_retention(mut self, retention: Duration) -> Self {
        self.settings.fence_retention = retention.clamp(*FENCE_RETENTION.start(), *FENCE_RETENTION.end());
        self
    }

    /// Waits after each acquisition until `count` replicas have it. If they do not within `timeout`, the mutex is
    /// released and the acquisition fails. Acquisitions have a connection of their own then, so renewals never wait for
    /// replicas, and acquire nothing.
    ///
    /// The `timeout` is clamped to 1 ms to 10 min. One of more than a seventh of the ttl, or of more than 2.25 s, is
    /// refused when a mutex is opened: an acquisition waits for at most two `WAIT`, and a call has a third of the ttl, at
    /// most 5 s.
    pub fn with_wait_replicas(mut self, count: u32, timeout: Duration) -> Self {
        let timeout = timeout.clamp(*LIMIT.start(), *LIMIT.end());
        self.settings.wait = (count > 0).then_some(WaitReplicas { count, timeout });
        self
    }
}

impl fmt::Debug for RedisConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let settings = &self.settings;
        f.debug_struct("RedisConfig")
            .field("topology", &self.topology)
            .field("user", &settings.login.user)
            .field("database", &settings.login.database)
            .field("tls", &settings.tls)
            .field("timeout", &settings.timeout)
            .field("wait", &settings.wait)
            .finish_non_exhaustive()
    }
}

fn topology(url: &ConnectUrl) -> Result<(Topology, u32)> {
    let path = url.path().trim_start_matches('/');
    match url.scheme() {
        "redis" | "rediss" => {
            let [host] = url.hosts() else {
                return Err(invalid(
                    "the URL needs one host: redis://host:port; for several use redis+sentinel: or redis+cluster:",
                ));
            };
            Ok((Topology::Standalone(Address::of(host, PORT)), database(path)?))
        }
        "redis+unix" => match url.path() {
            "" => Err(invalid("the URL names no socket: redis+unix:/path/to/redis.sock")),
            path => Ok((Topology::Standalone(Address::Unix(path.into())), 0)),
        },
        "redis+sentinel" | "rediss+sentinel" => sentinel(url, path),
        "redis+cluster" | "rediss+cluster" => match database(path)? {
            0 => Ok((Topology::Cluster(addresses(url, PORT)?), 0)),
            _ => Err(invalid("a cluster has only database 0: omit the number")),
        },
        other => Err(invalid(format!("`{other}:` is not the scheme of a Redis server"))),
    }
}

fn sentinel(url: &ConnectUrl, path: &str) -> Result<(Topology, u32)> {
    let (master, number) = path.split_once('/').unwrap_or((path, ""));
    if master.is_empty() {
        return Err(invalid("the URL names no master: redis+sentinel://h1,h2,h3/MASTER"));
    }
    let sentinels = addresses(url, SENTINEL_PORT)?;
    Ok((Topology::Sentinel { sentinels, master: master.into() }, database(number)?))
}

fn addresses(url: &ConnectUrl, port: u16) -> Result<Vec<Address>> {
    match url.hosts() {
        [] => Err(invalid("the URL names no host")),
        hosts => Ok(hosts.iter().map(|host| Address::of(host, port)).collect()),
    }
}

fn database(path: &str) -> Result<u32> {
    match path {
        "" => Ok(0),
        path => path
            .parse()
            .map_err(|_| invalid("the path of the URL is the number of a database: redis://host/1")),
    }
}

fn tls(url: &ConnectUrl) -> Result<Option<Tls>> {
    let given = KEYS.iter().find(|key| key.starts_with("tls_") && url.query(key).is_some());
    if !url.scheme().starts_with("rediss") {
        return match given {
            // Without this error, the connection would silently use plain text.
            Some(key) => Err(invalid(format!("`{key}` needs TLS: write `rediss` instead of `redis`"))),
            None => Ok(None),
        };
    }
    let mut tls = Tls::new(match url.query("tls_verify") {
        None | Some("full") => Verify::Full,
        Some("ca") => Verify::Ca,
        Some("none") => Verify::Nothing,
        Some(_) => return Err(invalid("`tls_verify` in the URL is not one of full, ca, none")),
    });
    if let Some(path) = url.query("tls_ca") {
        tls = tls.with_ca(path);
    }
    tls = match (url.query("tls_cert"), url.query("tls_key")) {
        (Some(certificate), Some(key)) => tls.with_identity(certificate, key),
        (None, None) => tls,
        _ => return Err(invalid("the URL needs both `tls_cert` and `tls_key`, or neither")),
    };
    Ok(Some(match url.query("tls_server_name") {
        Some(name) => tls.with_server_name(name),
        None => tls,
    }))
}

fn limit(url: &ConnectUrl, key: &str, default: Duration) -> Result<Duration> {
    time(url, key, default, LIMIT, "1ms to 10min")
}

/// Returns the login at the sentinels.
fn sentinel_login(url: &ConnectUrl) -> Result<Login> {
    let file = url.query("sentinel_password_file").map(Password::in_file);
    let password = match (url.query("sentinel_password"), file) {
        (Some(_), Some(_)) => {
            return Err(invalid(
                "the URL has `sentinel_password` and `sentinel_password_file`: keep one of them",
            ));
        }
        (text, file) => file.or(text.map(Password::from)),
    };
    Ok(Login::new(url.query("sentinel_user"), password, 0))
}

fn time(
    url: &ConnectUrl,
    key: &str,
    default: Duration,
    range: RangeInclusive<Duration>,
    words: &str,
) -> Result<Duration> {
    let time = url.duration(key)?.unwrap_or(default);
    match range.contains(&time) {
        true => Ok(time),
        false => Err(invalid(format!("`{key}` is out of range: take {words}"))),
    }
}

fn wait(url: &ConnectUrl) -> Result<Option<WaitReplicas>> {
    let count = url.parsed("wait_replicas", "a number of replicas")?.unwrap_or(0);
    let timeout = limit(url, "wait_timeout", Duration::from_millis(500))?;
    Ok((count > 0).then_some(WaitReplicas { count, timeout }))
}

fn invalid(message: impl Into<String>) -> Error {
    error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(url: &str) -> Result<RedisConfig> {
        RedisConfig::from_url(&url.parse()?)
    }

    #[test]
    fn every_topology_is_parsed_from_its_url() {
        let one = read("redis://:x@cache:7000/3").unwrap();
        assert_eq!(one.topology, Topology::Standalone(Address::tcp("cache", 7000)));
        assert_eq!(one.settings.login.database, 3);
        let unix = read("redis+unix:/run/redis.sock?db=2").unwrap();
        assert_eq!(unix.topology, Topology::Standalone(Address::Unix("/run/redis.sock".into())));
        assert_eq!(unix.settings.login.database, 2);
        let sentinels = vec![Address::tcp("a", 26379), Address::tcp("b", 1)];
        let sentinel = read("redis+sentinel://a,b:1/mymaster/4").unwrap();
        assert_eq!(sentinel.topology, Topology::Sentinel { sentinels, master: "mymaster".into() });
        assert_eq!(sentinel.settings.login.database, 4);
        let cluster = read("rediss+cluster://a,b").unwrap();
        assert_eq!(
            cluster.topology,
            Topology::Cluster(vec![Address::tcp("a", 6379), Address::tcp("b", 6379)])
        );
        assert!(cluster.settings.tls.is_some());
    }

    #[test]
    fn invalid_urls_are_refused_with_the_fix() {
        let refusal = |url: &str| {
            let error = read(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url}");
            error.to_string()
        };
        assert!(refusal("redis://h?timeuot=1s").contains("connect_timeout"));
        assert!(refusal("redis://a,b").contains("redis+cluster"));
        assert!(refusal("redis://h/x").contains("number of a database"));
        assert!(refusal("redis://h?tls_ca=/x").contains("rediss"));
        assert!(refusal("rediss://h?tls_cert=/x").contains("tls_key"));
        assert!(refusal("rediss://h?tls_verify=maybe").contains("full, ca, none"));
        assert!(refusal("redis+sentinel://a").contains("MASTER"));
        assert!(refusal("redis+cluster://a/1").contains("database 0"));
        assert!(refusal("redis://user@h").contains("PASSWORD"));
        assert!(refusal("redis://h?timeout=0s").contains("out of range"));
        assert!(refusal("redis://h?fence_retention=5s").contains("3650 days"));
        assert!(refusal("mysql://h").contains("scheme"));
    }

    #[test]
    fn time_limit_for_replicas_is_clamped_to_the_range_of_the_url() {
        let clamped = |timeout| {
            let config = read("redis://h").unwrap().with_wait_replicas(1, timeout);
            config.settings.wait.unwrap().timeout
        };
        // `WAIT 1 0` never ends.
        assert_eq!(clamped(Duration::from_micros(500)), Duration::from_millis(1));
        assert_eq!(clamped(Duration::MAX), Duration::from_secs(600));
        assert_eq!(clamped(Duration::from_secs(1)), Duration::from_secs(1));
    }

    #[test]
    fn debug_output_contains_no_password() {
        let config = read("redis+sentinel://u:canary@a/m?sentinel_password=canary").unwrap();
        assert!(!format!("{config:?} {config:#?}").contains("canary"));
    }
}
