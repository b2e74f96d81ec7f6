//! Failures of calls: what the server refused, and what was never answered.

use std::error::Error as _;

use simba_core::Error;
use tonic::{Code, Status};

/// The reason why a call failed.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The server answered with this status.
    Refused(Status),
    /// The connection broke before the answer: the outcome is unknown.
    Lost(Status),
    /// There was no connection to send the call on, or a renewal was not confirmed: the error to report.
    Unsent(Error),
    Closed,
}

impl Failure {
    /// Classifies a status: one that tonic made of a local error has a source, one of the server has none.
    pub(super) fn of(status: Status) -> Self {
        if status.source().is_some() { Self::Lost(status) } else { Self::Refused(status) }
    }

    /// Returns whether the servers may have executed the call, or may execute it later: the connection broke, the member
    /// timed out on the rest of the cluster, or the store is full. Servers execute the transaction that fills the store,
    /// and answer it like those that they refuse after it.
    pub(crate) fn is_ambiguous(&self) -> bool {
        match self {
            Self::Lost(_) => true,
            Self::Refused(status) if status.code() == Code::ResourceExhausted => {
                status.message().contains("space")
            }
            Self::Refused(status) => matches!(
                status.code(),
                Code::Unavailable
                    | Code::DeadlineExceeded
                    | Code::Cancelled
                    | Code::Aborted
                    | Code::Internal
                    | Code::Unknown
            ),
            Self::Unsent(_) | Self::Closed => false,
        }
    }

    fn has_status(&self, code: Code, text: &str) -> bool {
        matches!(self, Self::Refused(status) if status.code() == code && status.message().contains(text))
    }

    /// Returns whether the lease of the request does not exist any more.
    pub(crate) fn is_lease_gone(&self) -> bool {
        self.has_status(Code::NotFound, "lease not found")
    }

    /// Returns whether another login helps: the token has expired, is older than the last change of permissions, or was
    /// not required when the connection was made. The server did not execute the call.
    pub(super) fn is_logged_out(&self) -> bool {
        self.has_status(Code::Unauthenticated, "")
            || self.has_status(Code::InvalidArgument, "revision of auth store is old")
            || self.has_status(Code::InvalidArgument, "user name is empty")
    }

    /// Returns whether the member has no connection to a quorum. Another member may have one.
    pub(super) fn lacks_quorum(&self) -> bool {
        self.has_status(Code::Unavailable, "no leader") || self.has_status(Code::Unavailable, "timed out")
    }

    /// Returns whether the transaction has more operations than the server accepts.
    pub(crate) fn is_too_many_operations(&self) -> bool {
        self.has_status(Code::InvalidArgument, "too many operations")
    }

    /// Returns whether the server does not require a login.
    pub(super) fn is_auth_disabled(&self) -> bool {
        self.has_status(Code::FailedPrecondition, "authentication is not enabled")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_of_the_server_differs_from_a_broken_connection() {
        let refused = Failure::of(Status::not_found("etcdserver: requested lease not found"));
        assert!(refused.is_lease_gone() && !refused.is_logged_out());
        let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(matches!(Failure::of(Status::from_error(Box::new(broken))), Failure::Lost(_)));
        assert!(Failure::of(Status::unauthenticated("etcdserver: invalid auth token")).is_logged_out());
        assert!(!Failure::Closed.is_lease_gone());
    }

    #[test]
    fn the_outcome_of_a_request_that_timed_out_or_filled_the_store_is_unknown() {
        assert!(Failure::of(Status::unavailable("etcdserver: request timed out")).is_ambiguous());
        assert!(Failure::of(Status::unavailable("etcdserver: leader changed")).is_ambiguous());
        // A transaction that crosses the quota is executed.
        let full = Status::resource_exhausted("etcdserver: mvcc: database space exceeded");
        assert!(Failure::of(full).is_ambiguous());
        assert!(!Failure::of(Status::resource_exhausted("etcdserver: too many requests")).is_ambiguous());
        assert!(!Failure::of(Status::permission_denied("etcdserver: permission denied")).is_ambiguous());
        assert!(!Failure::of(Status::not_found("etcdserver: requested lease not found")).is_ambiguous());
    }
}
