//! What becomes of a call that was not answered as hoped.

use std::error::Error as _;

use simba_core::Error;
use tonic::{Code, Status};

/// Why a call has no answer.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The server said no.
    Refused(Status),
    /// The connection broke: nobody knows what became of it.
    Lost(Status),
    /// There was no connection to send it by.
    Unsent(Error),
    Closed,
}

impl Failure {
    /// What the server itself says has no cause within this process.
    pub(super) fn of(status: Status) -> Self {
        if status.source().is_some() { Self::Lost(status) } else { Self::Refused(status) }
    }

    /// Whether it may have been carried out all the same, or may be later: the connection broke, or the server gave up
    /// waiting for the others.
    pub(crate) fn is_unsure(&self) -> bool {
        match self {
            Self::Lost(_) => true,
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

    fn says(&self, code: Code, text: &str) -> bool {
        matches!(self, Self::Refused(status) if status.code() == code && status.message().contains(text))
    }

    /// The lease that it was made with is gone.
    pub(crate) fn is_lease_gone(&self) -> bool {
        self.says(Code::NotFound, "lease not found")
    }

    /// The login has ended, or is older than the rights of the users, or was not asked for when it was made: nothing was
    /// done, and another login helps.
    pub(super) fn is_logged_out(&self) -> bool {
        self.says(Code::Unauthenticated, "")
            || self.says(Code::InvalidArgument, "revision of auth store is old")
            || self.says(Code::InvalidArgument, "user name is empty")
    }

    /// The member has no way to the others: another one may have.
    pub(super) fn is_cut_off(&self) -> bool {
        self.says(Code::Unavailable, "no leader") || self.says(Code::Unavailable, "timed out")
    }

    /// The server takes fewer operations at a time.
    pub(crate) fn is_too_many(&self) -> bool {
        self.says(Code::InvalidArgument, "too many operations")
    }

    /// The server lets everybody in.
    pub(super) fn is_open_to_all(&self) -> bool {
        self.says(Code::FailedPrecondition, "authentication is not enabled")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_server_says_is_told_from_what_happens_on_the_way() {
        let said = Failure::of(Status::not_found("etcdserver: requested lease not found"));
        assert!(said.is_lease_gone() && !said.is_logged_out());
        let broken = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        assert!(matches!(Failure::of(Status::from_error(Box::new(broken))), Failure::Lost(_)));
        assert!(Failure::of(Status::unauthenticated("etcdserver: invalid auth token")).is_logged_out());
        assert!(!Failure::Closed.is_lease_gone());
    }

    #[test]
    fn what_the_servers_gave_up_waiting_for_may_still_happen() {
        assert!(Failure::of(Status::unavailable("etcdserver: request timed out")).is_unsure());
        assert!(Failure::of(Status::unavailable("etcdserver: leader changed")).is_unsure());
        assert!(!Failure::of(Status::permission_denied("etcdserver: permission denied")).is_unsure());
        assert!(!Failure::of(Status::not_found("etcdserver: requested lease not found")).is_unsure());
    }
}
