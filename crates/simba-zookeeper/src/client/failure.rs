//! Failures of requests, including those with an unknown outcome.

use simba_core::Error;

use super::protocol::Code;

/// The failure of a request.
#[derive(Clone, Debug)]
pub(crate) enum Failure {
    /// The server refused it.
    Refused(Code),
    /// The connection broke before the answer arrived. The server may have executed the request.
    Lost,
    /// It was not sent, for this reason.
    Unsent(Error),
    /// The client is closed.
    Closed,
}

impl Failure {
    /// Returns whether the node does not exist.
    pub(crate) const fn is_no_node(&self) -> bool {
        matches!(self, Self::Refused(Code::NO_NODE))
    }
}
