//! The URL of a store: its address and login. No text shows its secrets.

mod parse;
mod password;
mod percent;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::Path;
use std::str::FromStr;
use std::time::Duration;

use crate::error::{Error, Result};
pub use password::Password;
use percent::encode;

const MASK: &str = "***";

/// The key of every scheme for a file with the password.
const PASSWORD_FILE: &str = "password_file";

/// The URL of a store: `scheme:path` or `scheme://user:password@host:port,host:port/path?key=value`.
///
/// Unlike a web address it may name several hosts. User, password, path and query are percent-decoded; a
/// `+` stays a plus. An `@` elsewhere than before the hosts is written `%40`. `scheme:///path` and
/// `scheme:/path` are equal. The backends define the schemes and keys. One key has the same meaning on all of
/// them: `password_file` names a file with the password, instead of a password in the URL.
///
/// `Display` and `Debug` show `***` for the password and for the value of every key that has `pass`,
/// `secret`, `token` or `key` in its name and does not end in `_file`. No error contains them. The `Display` of a URL without such
/// secrets parses to an equal URL, unless escapes make it longer than [`MAX_LEN`](Self::MAX_LEN).
///
/// # Examples
///
/// ```
/// use simba_core::spi::ConnectUrl;
///
/// let url: ConnectUrl = "redis+sentinel://:hunter2@a,b:26380/mymaster/0?timeout=2s".parse()?;
/// assert_eq!(url.scheme(), "redis+sentinel");
/// assert_eq!(url.hosts()[1].port, Some(26380));
/// assert_eq!(url.query("timeout"), Some("2s"));
/// assert_eq!(url.to_string(), "redis+sentinel://:***@a,b:26380/mymaster/0?timeout=2s");
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct ConnectUrl {
    scheme: String,
    user: Option<String>,
    password: Option<Password>,
    hosts: Vec<Host>,
    path: String,
    query: BTreeMap<String, String>,
}

impl ConnectUrl {
    /// The maximum length of a URL, in bytes.
    pub const MAX_LEN: usize = 4096;

    /// Returns the scheme in lower case, such as `redis`.
    #[must_use]
    pub fn scheme(&self) -> &str {
        &self.scheme
    }

    /// Returns the hosts in the order of the URL; none for a URL without an authority, such as `sqlite:a.db`.
    #[must_use]
    pub fn hosts(&self) -> &[Host] {
        &self.hosts
    }

    /// Returns the user, unless it is absent or empty.
    #[must_use]
    pub fn user(&self) -> Option<&str> {
        self.user.as_deref()
    }

    /// Returns the password: from the URL itself, or in the file that `password_file` names.
    ///
    /// `user:@host` has an empty password, `user@host` has none.
    #[must_use]
    pub const fn password(&self) -> Option<&Password> {
        self.password.as_ref()
    }

    /// Sets the password, for a secret from the environment or a file. It is not percent-decoded.
    #[must_use]
    pub fn with_password(self, password: impl Into<Password>) -> Self {
        Self { password: Some(password.into()), ..self }
    }

    /// Sets the hosts.
    #[must_use]
    pub fn with_hosts(self, hosts: impl IntoIterator<Item = Host>) -> Self {
        Self { hosts: hosts.into_iter().collect(), ..self }
    }

    /// Sets a key of the query. It is not percent-decoded.
    #[must_use]
    pub fn with_query(mut self, key: impl Into<String>, value: impl Into<String>) -> Self {
        self.query.insert(key.into(), value.into());
        self
    }

    /// Returns the path with its leading slash, if it has one; empty if there is no path.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Returns the value of a key in the query; empty for a key without a value.
    ///
    /// It may be a secret, which only `Display` and `Debug` hide.
    #[must_use]
    pub fn query(&self, key: &str) -> Option<&str> {
        self.query.get(key).map(String::as_str)
    }

    /// Returns all keys and values of the query, ordered by key. `password_file` is not one of them.
    pub fn queries(&self) -> impl Iterator<Item = (&str, &str)> {
        self.query.iter().map(|(key, value)| (key.as_str(), value.as_str()))
    }

    /// Rejects a query with other keys than these: an unknown key is a typing error.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), with the unknown key and the known ones.
    pub fn only_keys(&self, known: &[&str]) -> Result<()> {
        match self.query.keys().find(|key| !known.contains(&key.as_str())) {
            Some(unknown) if known.is_empty() => Err(Error::invalid(format!(
                "the URL has the key `{unknown}`, but `{}` takes none: leave it out",
                self.scheme
            ))),
            Some(unknown) => Err(Error::invalid(format!(
                "the URL has the unknown key `{unknown}`: `{}` takes {}",
                self.scheme,
                known.join(", ")
            ))),
            None => Ok(()),
        }
    }

    /// Returns the value of a key as a duration, such as `250ms` or `2s`.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it is not a duration.
    pub fn duration(&self, key: &str) -> Result<Option<Duration>> {
        let parse = |value| {
            humantime::parse_duration(value).map_err(|_| {
                Error::invalid(format!("`{key}` in the URL is not a duration: write it as `250ms` or `2s`"))
            })
        };
        self.query(key).map(parse).transpose()
    }

    /// Returns the value of a key, parsed as a `T`. `what` describes the expected value in the error.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid) if it cannot be parsed.
    pub fn parsed<T: FromStr>(&self, key: &str, what: &str) -> Result<Option<T>> {
        let parse = |value: &str| {
            value.parse().map_err(|_| Error::invalid(format!("`{key}` in the URL is not {what}")))
        };
        self.query(key).map(parse).transpose()
    }

    fn fmt_authority(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let has_password = self.password.as_ref().is_some_and(|password| password.file().is_none());
        let absent = self.hosts.is_empty() && self.user.is_none() && !has_password;
        // Before a path that starts with two slashes, an empty authority is written: the path would be parsed as one.
        if absent && !self.path.starts_with("//") {
            return Ok(());
        }
        f.write_str("//")?;
        self.fmt_login(f)?;
        for (at, host) in self.hosts.iter().enumerate() {
            write!(f, "{}{host}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }

    fn fmt_login(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = encode(self.user().unwrap_or_default(), "");
        match (&self.user, self.password.as_ref().filter(|password| password.file().is_none())) {
            (None, None) => Ok(()),
            (Some(_), None) => write!(f, "{user}@"),
            (_, Some(_)) => write!(f, "{user}:{MASK}@"),
        }
    }

    fn fmt_query(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let file = self.password.as_ref().and_then(Password::file).map(Path::to_string_lossy);
        let file = file.as_deref().map(|path| (PASSWORD_FILE, path));
        for (at, (key, value)) in self.queries().chain(file).enumerate() {
            write!(f, "{}{}", if at == 0 { '?' } else { '&' }, encode(key, "/:,+"))?;
            match value {
                _ if is_secret(key) => write!(f, "={MASK}")?,
                "" => {}
                value => write!(f, "={}", encode(value, "/:,+"))?,
            }
        }
        Ok(())
    }
}

fn is_secret(key: &str) -> bool {
    let key = key.to_lowercase();
    // The path of a file is no secret.
    !key.ends_with("_file") && ["pass", "secret", "token", "key"].iter().any(|word| key.contains(word))
}

impl fmt::Display for ConnectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:", self.scheme)?;
        self.fmt_authority(f)?;
        f.write_str(&encode(&self.path, "/:,+="))?;
        self.fmt_query(f)
    }
}

impl fmt::Debug for ConnectUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectUrl({self})")
    }
}

impl FromStr for ConnectUrl {
    type Err = Error;

    fn from_str(url: &str) -> Result<Self> {
        parse::parse(url)
    }
}

impl TryFrom<&str> for ConnectUrl {
    type Error = Error;

    fn try_from(url: &str) -> Result<Self> {
        parse::parse(url)
    }
}

/// One host of a [`ConnectUrl`]. `Display` is its form in a URL: an IPv6 address has brackets.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Host {
    /// The name or address; an IPv6 address in its shortest form, without brackets.
    pub name: String,
    /// The port, if the URL has one; never 0 in a parsed URL.
    pub port: Option<u16>,
}

impl From<SocketAddr> for Host {
    fn from(address: SocketAddr) -> Self {
        Self { name: address.ip().to_string(), port: Some(address.port()) }
    }
}

impl fmt::Display for Host {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name.contains(':') {
            true => write!(f, "[{}]", self.name)?,
            false => f.write_str(&self.name)?,
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
