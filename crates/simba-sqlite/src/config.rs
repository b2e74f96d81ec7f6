use std::env;
use std::path::{Path, PathBuf};

use simba_core::spi::ConnectUrl;
use simba_core::{Error, ErrorKind, Result};

use crate::error::NAME;

/// The file that holds the mutexes.
///
/// The URL is `sqlite:PATH`. A path without a leading slash is relative to the current folder. `sqlite:` alone is the
/// file of this user: `$XDG_STATE_HOME/simba/simba.db`, or `~/.local/state/simba/simba.db`. There are no keys.
///
/// # Examples
///
/// ```
/// use simba_core::spi::ConnectUrl;
/// use simba_sqlite::SqliteConfig;
///
/// let url: ConnectUrl = "sqlite:/var/lib/orders/simba.db".parse()?;
/// assert_eq!(SqliteConfig::from_url(&url)?, SqliteConfig::new("/var/lib/orders/simba.db"));
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[must_use]
pub struct SqliteConfig {
    path: PathBuf,
}

impl SqliteConfig {
    /// Returns the configuration of the file at this path. Connecting creates the file and its folder if needed.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Returns the configuration of this user's file.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if neither `XDG_STATE_HOME` nor `HOME` is set to an absolute path.
    pub fn of_this_user() -> Result<Self> {
        state_folder(|name| env::var_os(name).map(PathBuf::from))
            .map(|state| Self::new(state.join("simba").join("simba.db")))
            .ok_or_else(|| {
                let message = "no path is given, and neither XDG_STATE_HOME nor HOME is set: set one of them to an \
                               absolute path, or give a path as sqlite:PATH";
                Error::new(ErrorKind::Config, message).with_backend(NAME)
            })
    }

    /// Parses a URL.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if it is not of the form `sqlite:PATH`, or names a database in memory, which no other
    /// process could see; [`ErrorKind::Config`] if it has no path and there is no default.
    pub fn from_url(url: &ConnectUrl) -> Result<Self> {
        let invalid = |message: String| Error::new(ErrorKind::Invalid, message).with_backend(NAME);
        if url.scheme() != "sqlite" {
            return Err(invalid(format!("the URL is for `{}`: write sqlite:PATH", url.scheme())));
        }
        if !url.hosts().is_empty() || url.user().is_some() || url.password().is_some() {
            let message = "the URL names a host, and SQLite has none: write sqlite:PATH, or sqlite:///PATH";
            return Err(invalid(message.into()));
        }
        url.only_keys(&[])?;
        match url.path() {
            "" => Self::of_this_user(),
            ":memory:" => Err(invalid(
                "no other process can see a database in memory: name a file, or use `memory:`".into(),
            )),
            path => Ok(Self::new(path)),
        }
    }

    /// Returns the path as given.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }
}

/// Returns the folder for a user's state by the XDG base directory specification. A variable that is empty or not
/// absolute counts as not set.
fn state_folder(variable: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let absolute = |name| variable(name).filter(|path| path.is_absolute());
    absolute("XDG_STATE_HOME").or_else(|| Some(absolute("HOME")?.join(".local/state")))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(url: &str) -> Result<SqliteConfig> {
        SqliteConfig::from_url(&url.parse().unwrap())
    }

    #[test]
    fn paths_are_used_unchanged() {
        for (url, path) in [
            ("sqlite:a.db", "a.db"),
            ("sqlite:../b/a.db", "../b/a.db"),
            ("sqlite:/a%20b/c%3F.db", "/a b/c?.db"),
            ("sqlite:///a/b.db", "/a/b.db"),
        ] {
            assert_eq!(parsed(url).unwrap().path(), Path::new(path), "{url}");
        }
    }

    #[test]
    fn url_without_a_file_is_refused_with_the_fix() {
        for (url, fix) in [
            ("sqlite::memory:", "name a file"),
            ("sqlite://host/a.db", "sqlite:PATH"),
            ("sqlite:a.db?mode=ro", "leave it out"),
            ("redis://a", "sqlite:PATH"),
        ] {
            let error = parsed(url).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{url}");
            assert!(error.to_string().contains(fix), "{error}");
        }
    }

    #[test]
    fn row_64_password_in_the_url_is_not_repeated() {
        let url: ConnectUrl = "sqlite://canary-user:canary-secret@host/a.db".parse().unwrap();
        let error = SqliteConfig::from_url(&url).unwrap_err();
        assert!(!format!("{error} {error:?}").contains("canary"), "{error:?}");
    }

    #[test]
    fn default_file_is_in_the_user_s_state_folder() {
        let of = |xdg: &str, home: &str| {
            let (xdg, home) = (PathBuf::from(xdg), PathBuf::from(home));
            state_folder(|name| Some(if name == "HOME" { home.clone() } else { xdg.clone() }))
        };
        assert_eq!(of("/state", "/home/a"), Some("/state".into()));
        assert_eq!(of("", "/home/a"), Some("/home/a/.local/state".into()));
        assert_eq!(of("relative", "/home/a"), Some("/home/a/.local/state".into()));
        assert_eq!(of("", ""), None);
    }
}
