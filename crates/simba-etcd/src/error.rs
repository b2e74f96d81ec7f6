//! From what the server says to what a caller can do about it.

use std::io;
use std::time::Duration;

use simba_core::{Error, ErrorKind};
use tonic::{Code, Status};

use crate::client::Failure;
use simba_net::Place;

/// The error of a call that was made to do this: `delete a key`.
pub(crate) fn failed(doing: &str, failure: Failure) -> Error {
    match failure {
        Failure::Refused(status) => refused(doing, status),
        Failure::Lost(status) => {
            Error::new(ErrorKind::Unavailable, format!("the connection broke on the way to {doing}"))
                .with_source(status)
        }
        Failure::Unsent(error) => error,
        Failure::Closed => closed(),
    }
}

fn refused(doing: &str, status: Status) -> Error {
    let said = status.message();
    let (kind, message) = match status.code() {
        Code::PermissionDenied => (
            ErrorKind::Denied,
            format!(
                "no right to {doing}: give the user's role readwrite on `simba/`, below the URL's prefix if it has one"
            ),
        ),
        Code::Unauthenticated => {
            (ErrorKind::Denied, format!("no login to {doing}: check the user and its password"))
        }
        Code::InvalidArgument if said.contains("user name is empty") => (
            ErrorKind::Denied,
            format!("cannot {doing}: the servers ask for a user and a password; put them into the URL"),
        ),
        Code::InvalidArgument if said.contains("invalid user ID or password") => {
            (ErrorKind::Denied, format!("cannot {doing}: check the user and its password"))
        }
        Code::ResourceExhausted if said.contains("space") => (
            ErrorKind::Unavailable,
            format!(
                "cannot {doing}: the store is full; compact and defragment it, then `etcdctl alarm disarm`"
            ),
        ),
        Code::Unimplemented => {
            (ErrorKind::Config, format!("the server cannot {doing}: it takes etcd 3.4 or later"))
        }
        Code::InvalidArgument | Code::OutOfRange | Code::FailedPrecondition => {
            (ErrorKind::Config, format!("the server refuses to {doing}: {said}"))
        }
        _ => (ErrorKind::Unavailable, format!("the server did not {doing}: {said}")),
    };
    Error::new(kind, message).with_source(status)
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the backend is closed")
}

/// The queue changed faster than it could be looked at.
pub(crate) fn restless() -> Error {
    Error::new(ErrorKind::Unavailable, "the queue of the mutex does not come to rest")
}

pub(crate) fn stranger() -> Error {
    Error::new(ErrorKind::Protocol, "the server answered a transaction by something else")
}

/// The system has no random numbers to name a key by.
pub(crate) fn no_chance() -> Error {
    Error::new(ErrorKind::Unavailable, "the system gives no random numbers")
}

/// The leader changed while a lease was renewed: nobody knows who has heard of it.
pub(crate) fn another_reign() -> Error {
    Error::new(ErrorKind::Unavailable, "the servers elected another leader on the way to renew")
}

/// A member did not say within so long what became of a lease.
pub(crate) fn unanswered(limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("the server did not renew the lease within {limit:?}"))
}

pub(crate) fn unreachable(place: &Place, error: io::Error) -> Error {
    Error::new(ErrorKind::Unavailable, format!("cannot reach {place}")).with_source(error)
}

pub(crate) fn disconnected(place: &Place) -> Error {
    let message = format!(
        "{place} ended the connection before it answered: check the port, and whether it wants TLS or a certificate"
    );
    Error::new(ErrorKind::Unavailable, message)
}

pub(crate) fn silent(place: &Place, limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{place} did not answer within {limit:?}"))
}

pub(crate) fn not_tls(place: &Place, error: io::Error) -> Error {
    let kind = match error.kind() {
        // What rustls does not accept: a certificate, or no TLS at all.
        io::ErrorKind::InvalidData | io::ErrorKind::InvalidInput => ErrorKind::Config,
        _ => ErrorKind::Unavailable,
    };
    let message = format!("no TLS with {place}: check its certificate, the authority and the port");
    Error::new(kind, message).with_source(error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_refusal_has_its_kind_and_its_cure() {
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
        for (status, kind, cure) in cases {
            let error = failed("take the mutex", Failure::Refused(status));
            assert_eq!(error.kind(), kind, "{error}");
            assert!(error.to_string().contains(cure), "{error}");
        }
    }
}
