use std::borrow::Borrow;
use std::sync::Arc;

use super::text::{check, text};
use crate::error::{Error, Result};

/// The name of a mutex, with the same rules on every backend.
///
/// 1 to 66 characters of `A-Z a-z 0-9 . _ : -`, and neither `.` nor `..`. A MySQL key, a Redis
/// hash tag and a ZooKeeper path all accept these names unchanged, so one name means one mutex on every backend.
///
/// # Examples
///
/// ```
/// use simba_core::MutexName;
///
/// assert!(MutexName::new("billing:nightly-run").is_ok());
/// let error = MutexName::new("billing/run").unwrap_err();
/// assert!(error.to_string().contains("`/` at position 7"));
/// ```
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MutexName(Arc<str>);

impl MutexName {
    /// The maximum length of a name: the width of JVM Simba's key column.
    pub const MAX_LEN: usize = 66;

    /// Creates a name from text.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), with the violated rule and the position.
    pub fn new(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        check_length(name)?;
        check(
            "mutex name",
            name,
            "A-Z a-z 0-9 . _ : -",
            is_plain,
            " (an existing odd name: MutexName::legacy)",
        )?;
        if matches!(name, "." | "..") {
            return Err(Error::invalid(format!("`{name}` is no mutex name: it means a folder in a path")));
        }
        Ok(Self(name.into()))
    }

    /// Creates a name that peers use already, by weaker rules: 1 to 66 characters without control characters.
    ///
    /// Such a name may mean another mutex on another backend: a `/` nests in ZooKeeper, braces move the
    /// Redis hash tag, letters beyond ASCII depend on a collation.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`](crate::ErrorKind::Invalid), with the violated rule and the position.
    pub fn legacy(name: impl AsRef<str>) -> Result<Self> {
        let name = name.as_ref();
        check_length(name)?;
        match name.chars().position(char::is_control) {
            Some(at) => {
                Err(Error::invalid(format!("a mutex name has no control characters, there is one at {at}")))
            }
            None => Ok(Self(name.into())),
        }
    }

    /// Returns the name as text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

fn is_plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | ':' | '-')
}

fn check_length(name: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::invalid("a mutex name needs at least one character"));
    }
    // Counting stops after the maximum length, so a megabyte costs no more than a long name.
    match name.chars().nth(MutexName::MAX_LEN) {
        Some(_) => Err(Error::invalid(format!("a mutex name has at most {} characters", MutexName::MAX_LEN))),
        None => Ok(()),
    }
}

text!(MutexName);

impl Borrow<str> for MutexName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl TryFrom<&str> for MutexName {
    type Error = Error;

    fn try_from(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<String> for MutexName {
    type Error = Error;

    fn try_from(name: String) -> Result<Self> {
        Self::new(name)
    }
}

impl TryFrom<&String> for MutexName {
    type Error = Error;

    fn try_from(name: &String) -> Result<Self> {
        Self::new(name)
    }
}

impl From<&Self> for MutexName {
    fn from(name: &Self) -> Self {
        name.clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn valid_names_keep_their_text() {
        for name in ["a", "orders", "a.b_c:d-E9", &"x".repeat(66), "...", "0"] {
            assert_eq!(MutexName::new(name).unwrap().as_str(), name);
        }
    }

    #[test]
    fn rejection_names_the_rule_and_the_position() {
        let refusal = |name: &str| MutexName::new(name).unwrap_err().to_string();
        assert!(refusal("").contains("at least one character"));
        assert!(refusal(&"x".repeat(67)).contains("at most 66"));
        assert!(refusal("ab/c").contains("`/` at position 2"));
        assert!(refusal("äb").contains("`ä` at position 0"));
        assert!(refusal("a\0").contains(r"`\0` at position 1"));
        assert!(refusal("..").contains("folder"));
    }

    #[test]
    fn legacy_names_follow_the_weaker_rules() {
        for name in ["app/job", "näme", "{x}", " padded "] {
            assert_eq!(MutexName::legacy(name).unwrap().as_str(), name);
        }
        for name in ["", "a\nb", &"é".repeat(67)] {
            assert!(MutexName::legacy(name).is_err());
        }
    }
}
