//! Errors that several stores report alike.

use std::time::Duration;

use simba_core::{Error, ErrorKind};

/// Returns the error of a call on a closed backend.
#[must_use]
pub fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the backend is closed")
}

/// Returns the error of a request without an answer within this limit.
pub(crate) fn timed_out(limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the server did not answer within {limit:?}"))
}
