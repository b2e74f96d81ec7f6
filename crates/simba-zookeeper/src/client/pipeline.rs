//! Pipelines checks behind the connect request, before the server has answered it.
//!
//! A server reads the pipelined requests after it has attached the session to the connection, and never if it refuses
//! the session. So a holder that reconnects waits for one round trip instead of two.

use std::collections::VecDeque;

use simba_core::Moment;
use tokio::sync::mpsc;

use super::connection::{FIRST_XID, InFlight};
use super::outbox::Outbox;
use super::protocol::Writer;

/// The checks that are sent during a handshake that resumes a session.
pub(super) struct Pipeline {
    /// `None` if nothing may be sent before the handshake is over.
    to: Option<mpsc::UnboundedSender<Writer>>,
    in_flight: VecDeque<InFlight>,
}

/// The messages to write behind the connect request.
pub(super) type PipelinedWrites = mpsc::UnboundedReceiver<Writer>;

impl Pipeline {
    /// Creates a pipeline that sends only if `enabled`.
    pub(super) fn new(enabled: bool) -> (Self, PipelinedWrites) {
        let (to, writes) = mpsc::unbounded_channel();
        (Self { to: enabled.then_some(to), in_flight: VecDeque::new() }, writes)
    }

    /// Sends all pending checks.
    pub(super) fn send(&mut self, outbox: &mut Outbox, now: Moment) {
        let Some(to) = &self.to else { return };
        let mut out = Writer::default();
        for call in outbox.take_checks() {
            let xid = self.in_flight.back().map_or(FIRST_XID, |request| request.xid) + 1;
            call.request.write(xid, &mut out);
            self.in_flight.push_back(InFlight { xid, sent: now, call });
        }
        if !out.bytes().is_empty() {
            // If the handshake has failed meanwhile, `end` puts the checks back.
            let _ = to.send(out);
        }
    }

    /// Ends the handshake. If the session was `granted`, returns the requests that the server will answer on this
    /// connection. If not, it answers none of them, and the checks return to the outbox.
    pub(super) fn end(self, granted: bool, outbox: &mut Outbox) -> VecDeque<InFlight> {
        if granted {
            return self.in_flight;
        }
        outbox.calls.extend(self.in_flight.into_iter().map(|request| request.call));
        VecDeque::new()
    }
}
