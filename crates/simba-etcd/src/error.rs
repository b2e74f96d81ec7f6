//! Translates failures of the client into errors of Simba that say how to fix the problem.

use std::borrow::Cow;

use simba_core::{Error, ErrorKind};
use simba_net::{Endpoint, closed};
use tonic::{Code, Status};

use crate::client::Failure;

/// Returns the error of a call with this purpose, an infinitive: `delete a key`.
pub(crate) fn failed(action: &str, failure: Failure) -> Error {
    match failure {
        Failure::Refused(status) => refused(action, status),
        Failure::Lost(status) => {
            unavailable(format!("the connection broke during the request to {action}")).with_source(status)
        }
        Failure::Unsent(error) => error,
        Failure::Closed => closed(),
    }
}

fn refused(action: &str, status: Status) -> Error {
    let detail = status.message();
    let (kind, message) = match status.code() {
        Code::PermissionDenied => (
            ErrorKind::Denied,
            format!(
                "no permission to {action}: grant the user's role readwrite on `simba/`, below the URL's prefix if any"
            ),
        ),
        Code::Unauthenticated => {
            (ErrorKind::Denied, format!("not logged in to {action}: check the user and its password"))
        }
        Code::InvalidArgument if detail.contains("user name is empty") => (
            ErrorKind::Denied,
            format!("cannot {action}: the servers require a user and a password; put them into the URL"),
        ),
        Code::InvalidArgument if detail.contains("invalid user ID or password") => {
            (ErrorKind::Denied, format!("cannot {action}: check the user and its password"))
        }
        Code::ResourceExhausted if detail.contains("space") => (
            ErrorKind::Unavailable,
            format!(
                "cannot {action}: the store is full; compact and defragment it, then `etcdctl alarm disarm`"
            ),
        ),
        Code::Unimplemented => {
            (ErrorKind::Config, format!("the server cannot {action}: etcd 3.4 or later is required"))
        }
        Code::InvalidArgument | Code::OutOfRange | Code::FailedPrecondition => {
            (ErrorKind::Config, format!("the server refused to {action}: {detail}"))
        }
        _ => (ErrorKind::Unavailable, format!("the server did not {action}: {detail}")),
    };
    Error::new(kind, message).with_source(status)
}

pub(crate) fn unexpected_answer() -> Error {
    Error::new(ErrorKind::Protocol, "the server returned an unexpected answer to a transaction")
}

pub(crate) fn unavailable(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn disconnected(endpoint: &Endpoint) -> Error {
    let message = format!(
        "{endpoint} ended the connection before it answered: check the port, and whether it wants TLS or a certificate"
    );
    unavailable(message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_a_kind_and_names_the_fix() {
        let cases = [
            (Status::permission_denied("etcdserver: permission denied"), ErrorKind::Denied, "readwrite"),
            (Status::invalid_argument("etcdserver: user name is empty"), ErrorKind::Denied, "into the URL"),
            (
                Status::invalid_argument("etcdserver: authentication failed, invalid user ID or password"),
                ErrorKind::Denied,
                "password",
            ),
            (
                Status::resource_exhausted("etcdserver: mvcc: database space exceeded"),
                ErrorKind::Unavailable,
                "defragment",
            ),
            (Status::unavailable("etcdserver: no leader"), ErrorKind::Unavailable, "did not"),
            (Status::unimplemented("unknown service"), ErrorKind::Config, "3.4"),
        ];
        for (status, kind, fix) in cases {
            let error = failed("take the mutex", Failure::Refused(status));
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(fix), "{error}");
        }
    }
}
