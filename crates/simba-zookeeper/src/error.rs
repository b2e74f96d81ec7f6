//! Converts failures of requests to errors.

use simba_core::{Error, ErrorKind};
use simba_net::closed;

use crate::client::{Code, Failure};

/// Returns the error of a failed request. `doing` is its purpose, such as `delete a node`.
pub(crate) fn failed(doing: &str, failure: Failure) -> Error {
    match failure {
        Failure::Refused(code) => refused(doing, code),
        Failure::Lost => {
            Error::new(ErrorKind::Unavailable, format!("the connection broke on the way to {doing}"))
        }
        Failure::Unsent(error) => error,
        Failure::Closed => closed(),
    }
}

/// Returns the reply to a request, or `None` if the node does not exist.
pub(crate) fn found<T>(doing: &str, outcome: Result<T, Failure>) -> Result<Option<T>, Error> {
    match outcome {
        Ok(reply) => Ok(Some(reply)),
        Err(failure) if failure.is_no_node() => Ok(None),
        Err(failure) => Err(failed(doing, failure)),
    }
}

fn refused(doing: &str, code: Code) -> Error {
    let (kind, message) = match code {
        Code::NO_AUTH | Code::AUTH_FAILED => (
            ErrorKind::Denied,
            format!("no right to {doing}: check the credentials, and the access control list of the path"),
        ),
        Code::LOGIN_REQUIRED => (
            ErrorKind::Denied,
            format!(
                "no right to {doing}: the server requires a login; set user and password, and the scheme with \
                 `auth=`"
            ),
        ),
        Code::SESSION_EXPIRED | Code::SESSION_MOVED => {
            (ErrorKind::Unavailable, format!("the session ended on the way to {doing}"))
        }
        Code::UNIMPLEMENTED => {
            (ErrorKind::Config, format!("the server cannot {doing}: ZooKeeper 3.5 or later is required"))
        }
        Code::NO_CHILDREN_FOR_EPHEMERALS => (
            ErrorKind::Protocol,
            format!("cannot {doing}: an ephemeral node of another program is in the way"),
        ),
        Code::INVALID_ACL => (
            ErrorKind::Config,
            format!("cannot {doing}: `acl=creator` needs a login, and the connection has none"),
        ),
        _ => (ErrorKind::Unavailable, format!("the server did not {doing}")),
    };
    Error::new(kind, message).with_source(code)
}

pub(crate) fn no_chroot(chroot: &str) -> Error {
    let message = format!("there is no node `{chroot}`: create it first, or take another path in the URL");
    Error::new(ErrorKind::Config, message)
}

pub(crate) fn unexpected_reply() -> Error {
    Error::new(ErrorKind::Protocol, "the server answered a request with a reply of another kind")
}

/// Returns the error for a system without random numbers, which the name of a node needs.
pub(crate) fn no_randomness() -> Error {
    Error::new(ErrorKind::Unavailable, "the system provides no random numbers")
}
