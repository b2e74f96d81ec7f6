//! The name of the table, which stands in the text of statements and is therefore checked.

use std::fmt;
use std::str::FromStr;

use simba_core::{Error, ErrorKind};

/// A table's name: a letter or `_`, then up to 63 letters, digits and `_`. `Display` quotes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TableName(String);

const DEFAULT: &str = "simba_mutex";
const MAX_LEN: usize = 64;

impl TableName {
    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }
}

impl Default for TableName {
    fn default() -> Self {
        Self(DEFAULT.to_owned())
    }
}

impl FromStr for TableName {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let fits = name.len() <= MAX_LEN && name.chars().all(plain);
        if fits && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
            return Ok(Self(name.to_owned()));
        }
        let message = "a table name is a letter or `_`, then up to 63 of A-Z a-z 0-9 _";
        Err(Error::new(ErrorKind::Invalid, message))
    }
}

impl fmt::Display for TableName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "`{}`", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plain_names_are_quoted_and_others_refused() {
        assert_eq!("locks_2".parse::<TableName>().unwrap().to_string(), "`locks_2`");
        for wrong in ["", "2x", "a b", "a`b", "a;b", "db.t", "ä", &"x".repeat(65)] {
            let error = wrong.parse::<TableName>().unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Invalid, "{wrong}");
        }
    }
}
