//! What all types that are a checked text have in common.

use crate::error::{Error, Result};

/// Implements the conversions from and to text for a type that wraps a text, with the check of its `new`.
macro_rules! text {
    ($type:ident) => {
        impl std::fmt::Display for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::fmt::Debug for $type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Debug::fmt(&*self.0, f)
            }
        }

        impl AsRef<str> for $type {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $type {
            type Err = crate::error::Error;

            fn from_str(text: &str) -> crate::error::Result<Self> {
                Self::new(text)
            }
        }
    };
}

pub(super) use text;

/// Checks that `text`, which is a `what`, has at least one character, and only those that `allowed` describes.
pub(super) fn check(
    what: &str,
    text: &str,
    allowed: &str,
    is_allowed: fn(char) -> bool,
    hint: &str,
) -> Result<()> {
    if text.is_empty() {
        return Err(Error::invalid(format!("a {what} needs at least one character")));
    }
    match text.chars().enumerate().find(|(_, c)| !is_allowed(*c)) {
        None => Ok(()),
        Some((at, bad)) => Err(Error::invalid(format!(
            "a {what} takes the characters {allowed} only, not `{}` at position {at}{hint}",
            bad.escape_debug()
        ))),
    }
}
