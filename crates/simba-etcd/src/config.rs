//! Where the store is and how to log in.

use std::fmt;

use simba_core::{ConnectUrl, Error, ErrorKind, Result};
use simba_net::{Place, Tls};

use crate::NAME;
use crate::keys::Keys;

/// The keys of a URL.
const KEYS: &[&str] = &["tls", "tls-ca", "tls-cert", "tls-key", "tls-name"];

const PORT: u16 = 2379;

/// How to reach an etcd.
///
/// `Debug` does not show the password.
///
/// # Examples
///
/// ```
/// use simba_core::ConnectUrl;
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
    pub(crate) places: Vec<Place>,
    /// Empty, or with a slash at its end.
    pub(crate) prefix: String,
    pub(crate) login: Option<Login>,
    pub(crate) tls: Option<Tls>,
}

#[derive(Clone)]
pub(crate) struct Login {
    pub(crate) user: String,
    pub(crate) password: String,
}

impl EtcdConfig {
    /// The members of a cluster, each as host and port, without credentials and TLS.
    pub fn new<H: Into<String>>(members: impl IntoIterator<Item = (H, u16)>) -> Self {
        let places = members.into_iter().map(|(host, port)| Place { host: host.into(), port }).collect();
        Self { places, prefix: String::new(), login: None, tls: None }
    }

    /// Reads `etcd://[user:password@]host[:port],…[/prefix]`; `etcds://` for TLS.
    ///
    /// | key | means |
    /// |---|---|
    /// | `tls` | `full`, `ca` or `nothing`: how much of the server's certificate is checked; turns TLS on |
    /// | `tls-ca` | PEM file of the authorities to trust; default: the well-known public ones |
    /// | `tls-cert`, `tls-key` | PEM files of our own certificate and its key |
    /// | `tls-name` | the name in the server's certificate, if it is not the host's |
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] for an unknown key or a value that makes no sense.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        Self::read(url).map_err(|error| error.with_backend(NAME))
    }

    fn read(url: &ConnectUrl) -> Result<Self> {
        url.only_keys(KEYS)?;
        let always = match url.scheme() {
            "etcd" => false,
            "etcds" => true,
            _ => return Err(invalid("the URL of an etcd begins with `etcd:` or `etcds:`")),
        };
        let places = Place::all(url, PORT);
        if places.is_empty() {
            return Err(invalid("the URL names no server: write etcd://host1,host2,host3"));
        }
        let login = match (url.user(), url.password()) {
            (Some(user), Some(password)) => {
                Some(Login { user: user.to_owned(), password: password.to_owned() })
            }
            (None, None) => None,
            _ => {
                return Err(invalid(
                    "credentials are a user and a password: write etcd://user:password@host",
                ));
            }
        };
        Ok(Self { places, prefix: prefix(url.path())?, login, tls: Tls::from_url(url, always)? })
    }

    /// Keeps everything under this prefix: `teams/orders` for keys that begin with `teams/orders/simba/`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if a part of it is empty.
    pub fn with_prefix(self, text: &str) -> Result<Self> {
        Ok(Self { prefix: prefix(text)?, ..self })
    }

    /// Logs in as this user.
    pub fn with_login(self, user: impl Into<String>, password: impl Into<String>) -> Self {
        Self { login: Some(Login { user: user.into(), password: password.into() }), ..self }
    }

    /// Speaks TLS.
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
            .field("places", &self.places)
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
        let places: Vec<_> = config.places.iter().map(ToString::to_string).collect();
        assert_eq!(places, ["a:2379", "[::1]:2380"]);
        assert_eq!(config.keys().root(), "teams/orders/simba/");
        let login = config.login.unwrap();
        assert_eq!((&*login.user, &*login.password), ("u", "p"));
        assert_eq!(read("etcd://a").unwrap().keys().root(), "simba/");
    }

    #[test]
    fn tls_is_on_if_the_url_says_so() {
        assert!(read("etcd://a").unwrap().tls.is_none());
        let verify = |url| read(url).unwrap().tls.map(|tls| tls.verify());
        assert_eq!(verify("etcds://a"), Some(Verify::Full));
        assert_eq!(verify("etcd://a?tls=ca"), Some(Verify::Ca));
    }

    #[test]
    fn what_makes_no_sense_is_refused_with_the_cure() {
        assert!(refusal("etcd:///x").contains("no server"));
        assert!(refusal("etcd://a?timeout=1s").contains("tls-ca"));
        assert!(refusal("etcd://a/x//y").contains("empty"));
        assert!(refusal("etcd://u@a").contains("user:password"));
        assert!(refusal("etcd://a?tls-ca=x").contains("etcds"));
        assert!(refusal("etcds://a?tls-cert=x").contains("together"));
        assert!(refusal("redis://a").contains("etcd:"));
    }

    #[test]
    fn no_text_shows_the_password() {
        assert!(!format!("{:?}", read("etcd://u:canary@a").unwrap()).contains("canary"));
    }
}
