//! Error codes of the server.

use std::fmt;

/// The error of one request. Only the errors that are handled separately have a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Code {
    NoNode,
    NoAuth,
    NodeExists,
    NoChildrenForEphemerals,
    SessionExpired,
    SessionMoved,
    AuthFailed,
    /// The server refuses all requests before a login.
    LoginRequired,
    Unimplemented,
    /// A check that was not performed, since one before it failed.
    NotReached,
    Other(i32),
}

impl Code {
    /// Returns the error with this number, or `None` for 0, which is success.
    pub(crate) const fn of(number: i32) -> Option<Self> {
        Some(match number {
            0 => return None,
            -2 => Self::NotReached,
            -6 => Self::Unimplemented,
            -101 => Self::NoNode,
            -102 => Self::NoAuth,
            -108 => Self::NoChildrenForEphemerals,
            -110 => Self::NodeExists,
            -112 => Self::SessionExpired,
            -115 => Self::AuthFailed,
            -118 => Self::SessionMoved,
            -124 => Self::LoginRequired,
            other => Self::Other(other),
        })
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoNode => f.write_str("no such node"),
            Self::NoAuth => f.write_str("no right to do this"),
            Self::NodeExists => f.write_str("the node exists already"),
            Self::NoChildrenForEphemerals => f.write_str("the node above is ephemeral"),
            Self::SessionExpired => f.write_str("the session has expired"),
            Self::SessionMoved => f.write_str("the session went to another server"),
            Self::AuthFailed => f.write_str("the credentials were refused"),
            Self::LoginRequired => f.write_str("the server requires a login"),
            Self::Unimplemented => f.write_str("the server does not know this request"),
            Self::NotReached => f.write_str("a check before this one failed"),
            Self::Other(number) => write!(f, "error {number}"),
        }
    }
}

impl std::error::Error for Code {}
