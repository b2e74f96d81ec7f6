//! Passwords, as text or in a file.

use std::fmt;
use std::path::{Path, PathBuf};

use super::MASK;
use crate::error::{Error, ErrorKind, Result};

/// The password for a store: a text, or a file that is read for every connection.
///
/// A file allows a password to change while a program runs: the next connection uses the new one. `Debug` shows no
/// text, only the path of a file.
///
/// # Examples
///
/// ```
/// use simba_core::spi::Password;
///
/// assert_eq!(Password::from("hunter2").read()?, "hunter2");
/// assert_eq!(format!("{:?}", Password::from("hunter2")), "Password(***)");
/// assert_eq!(format!("{:?}", Password::in_file("/run/secret")), r#"Password("/run/secret")"#);
/// # Ok::<(), simba_core::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Password(Source);

#[derive(Clone, PartialEq, Eq)]
enum Source {
    Text(String),
    File(PathBuf),
}

impl Password {
    /// Creates a password that is the content of a file, without line breaks at its end.
    #[must_use]
    pub fn in_file(path: impl Into<PathBuf>) -> Self {
        Self(Source::File(path.into()))
    }

    /// Returns the file with the password, if it is in one.
    #[must_use]
    pub fn file(&self) -> Option<&Path> {
        match &self.0 {
            Source::Text(_) => None,
            Source::File(path) => Some(path),
        }
    }

    /// Returns the current password in plain text. Do not log it.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Config`] if the file cannot be read. The message names the file.
    pub fn read(&self) -> Result<String> {
        match &self.0 {
            Source::Text(text) => Ok(text.clone()),
            Source::File(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| {
                    let message = format!("cannot read the password in `{}`: {error}", path.display());
                    Error::new(ErrorKind::Config, message).with_source(error)
                })?;
                Ok(text.trim_end_matches(['\r', '\n']).to_owned())
            }
        }
    }
}

impl<T: Into<String>> From<T> for Password {
    fn from(text: T) -> Self {
        Self(Source::Text(text.into()))
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Source::Text(_) => write!(f, "Password({MASK})"),
            Source::File(path) => write!(f, "Password({path:?})"),
        }
    }
}
