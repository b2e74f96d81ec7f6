//! Error codes of the server.

use std::fmt;

/// The error of one request, as the server numbers them. Only the errors that are handled separately have a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(i32);

impl Code {
    /// A check that was not performed, since one before it failed.
    pub(crate) const NOT_REACHED: Self = Self(-2);
    pub(crate) const UNIMPLEMENTED: Self = Self(-6);
    pub(crate) const NO_NODE: Self = Self(-101);
    pub(crate) const NO_AUTH: Self = Self(-102);
    pub(crate) const NO_CHILDREN_FOR_EPHEMERALS: Self = Self(-108);
    pub(crate) const NODE_EXISTS: Self = Self(-110);
    pub(crate) const SESSION_EXPIRED: Self = Self(-112);
    pub(crate) const INVALID_ACL: Self = Self(-114);
    pub(crate) const AUTH_FAILED: Self = Self(-115);
    pub(crate) const SESSION_MOVED: Self = Self(-118);
    /// The server refuses all requests before a login.
    pub(crate) const LOGIN_REQUIRED: Self = Self(-124);

    /// Returns the error with this number, or `None` for 0, which is success.
    pub(crate) fn of(number: i32) -> Option<Self> {
        (number != 0).then_some(Self(number))
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match *self {
            Self::NOT_REACHED => "a check before this one failed",
            Self::UNIMPLEMENTED => "the server does not know this request",
            Self::NO_NODE => "no such node",
            Self::NO_AUTH => "no right to do this",
            Self::NO_CHILDREN_FOR_EPHEMERALS => "the node above is ephemeral",
            Self::NODE_EXISTS => "the node exists already",
            Self::SESSION_EXPIRED => "the session has expired",
            Self::AUTH_FAILED => "the credentials were refused",
            Self::SESSION_MOVED => "the session went to another server",
            Self::LOGIN_REQUIRED => "the server requires a login",
            Self(number) => return write!(f, "error {number}"),
        })
    }
}

impl std::error::Error for Code {}
