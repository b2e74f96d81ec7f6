//! The settings: endpoints, chroot, login, TLS.

use std::fmt;

use simba_core::spi::{ConnectUrl, Password};
use simba_core::{Error, ErrorKind, Result};
use simba_net::{Endpoint, Tls};

use crate::NAME;
use crate::client::Access;
use crate::layout::{Paths, is_node};

/// The keys of a URL.
const KEYS: &[&str] = &["acl", "auth", "tls", "tls-ca", "tls-cert", "tls-key", "tls-name"];

const PORT: u16 = 2181;
/// The usual port of servers with TLS.
const TLS_PORT: u16 = 2281;

/// The settings of a [`ZookeeperBackend`](crate::ZookeeperBackend).
///
/// `Debug` does not show the password.
///
/// # Examples
///
/// ```
/// use simba_core::spi::ConnectUrl;
/// use simba_zookeeper::ZookeeperConfig;
///
/// let url: ConnectUrl = "zookeeper://simba:hunter2@zk1,zk2,zk3/teams/orders".parse()?;
/// let config = ZookeeperConfig::from_url(&url)?;
/// assert!(!format!("{config:?}").contains("hunter2"));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct ZookeeperConfig {
    pub(crate) endpoints: Vec<Endpoint>,
    /// Empty, or a path with a leading slash and no trailing one.
    pub(crate) chroot: String,
    pub(crate) login: Option<Login>,
    pub(crate) tls: Option<Tls>,
    pub(crate) access: Access,
}

/// The authentication scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scheme {
    Digest,
    Sasl,
}

#[derive(Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: Password,
    pub(crate) scheme: Scheme,
}

impl ZookeeperConfig {
    /// Creates settings for the servers of an ensemble, each as host and port, without credentials and TLS.
    pub fn new<H: Into<String>>(servers: impl IntoIterator<Item = (H, u16)>) -> Self {
        let endpoint = |(host, port): (H, u16)| Endpoint { host: host.into(), port };
        let endpoints = servers.into_iter().map(endpoint).collect();
        Self { endpoints, chroot: String::new(), login: None, tls: None, access: Access::Open }
    }

    /// Reads `zookeeper://[user:password@]host[:port],…[/chroot]`; `zookeepers://` for TLS.
    ///
    /// | key | means |
    /// |---|---|
    /// | `auth` | `digest` (default) or `sasl`: the authentication scheme |
    /// | `acl` | `open` (default, as JVM contenders do) or `creator`: the access list of new nodes |
    /// | `tls` | `full`, `ca` or `nothing`: how the server's certificate is verified; turns TLS on |
    /// | `tls-ca` | PEM file of the authorities to trust; default: the well-known public ones |
    /// | `tls-cert`, `tls-key` | PEM files of the client's certificate and its key |
    /// | `tls-name` | the name in the server's certificate, if it is not the host's |
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown key or an invalid value.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        Self::read(url).map_err(|error| error.with_backend(NAME))
    }

    fn read(url: &ConnectUrl) -> Result<Self> {
        url.only_keys(KEYS)?;
        let tls = tls(url)?;
        let port = if tls.is_some() { TLS_PORT } else { PORT };
        let endpoints = Endpoint::all(url, port);
        if endpoints.is_empty() {
            return Err(invalid("the URL names no server: write zookeeper://host1,host2,host3"));
        }
        let access = match url.query("acl") {
            None | Some("open") => Access::Open,
            Some("creator") => Access::Creator,
            Some(_) => return Err(invalid("`acl` in the URL is neither `open` nor `creator`")),
        };
        let login = login(url)?;
        if access == Access::Creator && login.is_none() {
            return Err(invalid("`acl=creator` needs a user and a password in the URL"));
        }
        Ok(Self { endpoints, chroot: chroot(url.path())?, login, tls, access })
    }

    /// Creates all nodes below this path, which must exist.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it is not a valid path of a node.
    pub fn with_chroot(self, path: &str) -> Result<Self> {
        Ok(Self { chroot: chroot(path)?, ..self })
    }

    /// Authenticates with ZooKeeper's own scheme `digest`.
    pub fn with_digest(self, user: impl Into<String>, password: impl Into<Password>) -> Self {
        self.with_login(user.into(), password.into(), Scheme::Digest)
    }

    /// Authenticates with SASL DIGEST-MD5.
    pub fn with_sasl(self, user: impl Into<String>, password: impl Into<Password>) -> Self {
        self.with_login(user.into(), password.into(), Scheme::Sasl)
    }

    /// Returns the chroot, or `/` without one.
    pub(crate) fn chroot_or_root(&self) -> &str {
        if self.chroot.is_empty() { "/" } else { &self.chroot }
    }

    pub(crate) fn paths(&self) -> Paths<'_> {
        Paths::under(&self.chroot)
    }

    fn with_login(self, user: String, password: Password, scheme: Scheme) -> Self {
        Self { login: Some(Login { user, password, scheme }), ..self }
    }

    /// Encrypts the connections with TLS.
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    /// Restricts new nodes to clients with the same credentials. JVM contenders need them as well.
    pub fn with_creator_acl(self) -> Self {
        Self { access: Access::Creator, ..self }
    }
}

impl fmt::Debug for ZookeeperConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let login = self.login.as_ref();
        f.debug_struct("ZookeeperConfig")
            .field("endpoints", &self.endpoints)
            .field("chroot", &self.chroot)
            .field("user", &login.map(|login| &login.user))
            .field("scheme", &login.map(|login| login.scheme))
            .field("tls", &self.tls.as_ref().map(Tls::verify))
            .finish_non_exhaustive()
    }
}

fn chroot(path: &str) -> Result<String> {
    let path = path.trim_end_matches('/');
    let parts_are_names = path.split('/').skip(1).all(is_node);
    match path {
        "" => Ok(String::new()),
        _ if path.starts_with('/') && parts_are_names => Ok(path.to_owned()),
        _ => Err(invalid("the path in the URL is not a valid path of a node: write /teams/orders")),
    }
}

fn login(url: &ConnectUrl) -> Result<Option<Login>> {
    let scheme = match url.query("auth") {
        None | Some("digest") => Scheme::Digest,
        Some("sasl") => Scheme::Sasl,
        Some(_) => return Err(invalid("`auth` in the URL is neither `digest` nor `sasl`")),
    };
    match (url.user(), url.password()) {
        (Some(user), Some(password)) => {
            Ok(Some(Login { user: user.to_owned(), password: password.clone(), scheme }))
        }
        (None, None) if url.query("auth").is_none() => Ok(None),
        _ => Err(invalid("credentials are a user and a password: write zookeeper://user:password@host")),
    }
}

/// Returns the TLS settings, or `None` if the URL does not ask for TLS.
fn tls(url: &ConnectUrl) -> Result<Option<Tls>> {
    let always = match url.scheme() {
        "zookeeper" => false,
        "zookeepers" => true,
        _ => return Err(invalid("the URL of a ZooKeeper begins with `zookeeper:` or `zookeepers:`")),
    };
    Tls::from_url(url, always)
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use simba_net::Verify;

    use super::*;

    fn read(url: &str) -> Result<ZookeeperConfig> {
        ZookeeperConfig::from_url(&url.parse()?)
    }

    fn refusal(url: &str) -> String {
        read(url).unwrap_err().to_string()
    }

    #[test]
    fn a_url_names_servers_chroot_and_credentials() {
        let config = read("zookeeper://u:p@a,b:2182/teams/orders/?auth=sasl&acl=creator").unwrap();
        let endpoints: Vec<_> = config.endpoints.iter().map(ToString::to_string).collect();
        assert_eq!(endpoints, ["a:2181", "b:2182"]);
        assert_eq!(config.chroot, "/teams/orders");
        assert_eq!(config.access, Access::Creator);
        let login = config.login.unwrap();
        assert_eq!((&*login.user, login.password, login.scheme), ("u", "p".into(), Scheme::Sasl));
    }

    #[test]
    fn tls_is_on_if_the_url_says_so() {
        assert!(read("zookeeper://a").unwrap().tls.is_none());
        let verify = |url| read(url).unwrap().tls.map(|tls| tls.verify());
        assert_eq!(verify("zookeepers://a"), Some(Verify::Full));
        assert_eq!(verify("zookeeper://a?tls=ca"), Some(Verify::Ca));
        assert_eq!(read("zookeepers://a").unwrap().endpoints[0].port, 2281);
    }

    #[test]
    fn an_invalid_url_is_rejected_with_the_fix() {
        assert!(refusal("zookeeper:///x").contains("no server"));
        assert!(refusal("zookeeper://a?timeout=1s").contains("acl, auth, tls"));
        assert!(refusal("zookeeper://a/x//y").contains("not a valid path"));
        assert!(refusal("zookeeper://a/x/../y").contains("not a valid path"));
        assert!(refusal("zookeeper://u@a").contains("user:password"));
        assert!(refusal("zookeeper://a?auth=sasl").contains("user:password"));
        assert!(refusal("zookeeper://a?acl=creator").contains("needs a user"));
        assert!(refusal("zookeeper://a?tls-ca=x").contains("zookeepers"));
        assert!(refusal("zookeepers://a?tls-cert=x").contains("together"));
        assert!(refusal("redis://a").contains("zookeeper:"));
    }

    #[test]
    fn no_text_shows_the_password() {
        let config = read("zookeeper://u:canary@a").unwrap();
        assert!(!format!("{config:?}").contains("canary"));
    }
}
