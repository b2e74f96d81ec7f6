//! Why a request was not carried out, or why nobody knows.

use std::fmt;

use simba_core::Error;

use super::code::Code;

/// What came of a request that got no reply of its kind.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The server refused it.
    Refused(Code),
    /// The connection broke first: it may have been carried out.
    Lost,
    /// It was never sent, for this reason.
    Unsent(Error),
    /// The client is closed.
    Closed,
}

impl Failure {
    /// Whether the server said that there is no such node.
    pub(crate) const fn is_no_node(&self) -> bool {
        matches!(self, Self::Refused(Code::NoNode))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(code) => code.fmt(f),
            Self::Lost => f.write_str("the connection broke before the answer came"),
            Self::Unsent(error) => error.fmt(f),
            Self::Closed => f.write_str("the backend is closed"),
        }
    }
}
