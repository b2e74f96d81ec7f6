//! Settings: the members of the cluster, the prefix, credentials and TLS.

use std::fmt;

use simba_core::spi::{ConnectUrl, Password};
use simba_core::{Error, ErrorKind, Result};
use simba_net::{Endpoint, Tls};

use crate::NAME;
use crate::layout::Keys;

/// The keys that a URL may have.
const KEYS: &[&str] = &["tls", "tls-ca", "tls-cert", "tls-key", "tls-name"];

const PORT: u16 = 2379;

/// Settings to connect to an etcd cluster.
///
/// `Debug` does not show the password.
///
/// # Examples
///
/// ```
/// use simba_core::spi::ConnectUrl;
/// use simba_etcd::EtcdConfig;
///
/// let url: ConnectUrl = "etcd://simba:hunter2@etcd1,etcd2,etcd3/teams/orders".parse()?;
/// let config = EtcdConfig::from_url(&url)?;
/// assert!(!format!("{config:?}").contains("hunter2"));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone)]
#[must_use]
pub struct EtcdConfig {
    pub(crate) endpoints: Vec<Endpoint>,
    /// Empty, or ends with a slash.
    pub(crate) prefix: String,
    pub(crate) login: Option<Login>,
    pub(crate) tls: Option<Tls>,
}

#[derive(Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: Password,
}

impl EtcdConfig {
    /// Creates settings for these members, each a host and a port, without credentials and TLS.
    pub fn new<H: Into<String>>(members: impl IntoIterator<Item = (H, u16)>) -> Self {
        let endpoints =
            members.into_iter().map(|(host, port)| Endpoint { host: host.into(), port }).collect();
        Self { endpoints, prefix: String::new(), login: None, tls: None }
    }

    /// Parses `etcd://[user:password@]host[:port],…[/prefix]`; `etcds://` turns TLS on.
    ///
    /// | key | meaning |
    /// |---|---|
    /// | `tls` | `full`, `ca` or `nothing`: which part of the server's certificate is verified; turns TLS on |
    /// | `tls-ca` | PEM file of the trusted authorities; default: the public ones |
    /// | `tls-cert`, `tls-key` | PEM files of the client certificate and its key |
    /// | `tls-name` | the name in the server's certificate, if it differs from the host |
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown key or an invalid value.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        Self::read(url).map_err(|error| error.with_backend(NAME))
    }

    fn read(url: &ConnectUrl) -> Result<Self> {
        url.only_keys(KEYS)?;
        let with_tls = match url.scheme() {
            "etcd" => false,
            "etcds" => true,
            _ => return Err(invalid("the URL of etcd begins with `etcd:` or `etcds:`")),
        };
        let endpoints = Endpoint::all(url, PORT);
        if endpoints.is_empty() {
            return Err(invalid("the URL names no server: write etcd://host1,host2,host3"));
        }
        let login = match (url.user(), url.password()) {
            (Some(user), Some(password)) => Some(Login { user: user.to_owned(), password: password.clone() }),
            (None, None) => None,
            _ => {
                return Err(invalid(
                    "credentials are a user and a password: write etcd://user:password@host",
                ));
            }
        };
        Ok(Self { endpoints, prefix: prefix(url.path())?, login, tls: Tls::from_url(url, with_tls)? })
    }

    /// Sets the prefix of all keys: with `teams/orders` they begin with `teams/orders/simba/`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if a part of it is empty or has control characters.
    pub fn with_prefix(self, text: &str) -> Result<Self> {
        Ok(Self { prefix: prefix(text)?, ..self })
    }

    /// Sets the user and the password to log in with.
    pub fn with_login(self, user: impl Into<String>, password: impl Into<Password>) -> Self {
        Self { login: Some(Login { user: user.into(), password: password.into() }), ..self }
    }

    /// Turns TLS on with these settings.
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(tls), ..self }
    }

    pub(crate) fn keys(&self) -> Keys<'_> {
        Keys::under(&self.prefix)
    }
}

impl fmt::Debug for EtcdConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdConfig")
            .field("endpoints", &self.endpoints)
            .field("prefix", &self.prefix)
            .field("user", &self.login.as_ref().map(|login| &login.user))
            .field("tls", &self.tls.as_ref().map(Tls::verify))
            .finish_non_exhaustive()
    }
}

fn prefix(text: &str) -> Result<String> {
    let text = text.strip_prefix('/').unwrap_or(text);
    let text = text.strip_suffix('/').unwrap_or(text);
    match text {
        "" => Ok(String::new()),
        _ if text.split('/').any(|part| part.is_empty() || part.chars().any(char::is_control)) => {
            Err(invalid("a part of the prefix is empty or has control characters: write /teams/orders"))
        }
        _ => Ok(format!("{text}/")),
    }
}

fn invalid(message: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Invalid, message)
}

#[cfg(test)]
mod tests {
    use simba_net::Verify;

    use super::*;

    fn read(url: &str) -> Result<EtcdConfig> {
        EtcdConfig::from_url(&url.parse()?)
    }

    fn refusal(url: &str) -> String {
        read(url).unwrap_err().to_string()
    }

    #[test]
    fn a_url_names_members_prefix_and_credentials() {
        let config = read("etcd://u:p@a,[::1]:2380/teams/orders/").unwrap();
        let endpoints: Vec<_> = config.endpoints.iter().map(ToString::to_string).collect();
        assert_eq!(endpoints, ["a:2379", "[::1]:2380"]);
        assert_eq!(config.keys().root(), "teams/orders/simba/");
        let login = config.login.unwrap();
        assert_eq!((&*login.user, login.password), ("u", "p".into()));
        assert_eq!(read("etcd://a").unwrap().keys().root(), "simba/");
    }

    #[test]
    fn the_scheme_and_the_key_tls_turn_tls_on() {
        assert!(read("etcd://a").unwrap().tls.is_none());
        let verify = |url| read(url).unwrap().tls.map(|tls| tls.verify());
        assert_eq!(verify("etcds://a"), Some(Verify::Full));
        assert_eq!(verify("etcd://a?tls=ca"), Some(Verify::Ca));
    }

    #[test]
    fn an_invalid_url_is_refused_and_the_error_names_the_fix() {
        assert!(refusal("etcd:///x").contains("no server"));
        assert!(refusal("etcd://a?timeout=1s").contains("tls-ca"));
        assert!(refusal("etcd://a/x//y").contains("empty"));
        assert!(refusal("etcd://u@a").contains("user:password"));
        assert!(refusal("etcd://a?tls-ca=x").contains("etcds"));
        assert!(refusal("etcds://a?tls-cert=x").contains("together"));
        assert!(refusal("redis://a").contains("etcd:"));
    }

    #[test]
    fn debug_output_hides_the_password() {
        assert!(!format!("{:?}", read("etcd://u:canary@a").unwrap()).contains("canary"));
    }
}
