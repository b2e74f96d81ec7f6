//! Checks that follow the question for a session before it is answered.
//!
//! A server reads what comes behind the question once the session has its connection, and never if it refuses the
//! session. So a holder whose connection broke need not wait for two answers, one after the other.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use simba_core::Clock;
use simba_core::clock::Sleep;
use tokio::sync::mpsc;

use super::jute::Writer;
use super::link::{Cargo, FIRST, Flight, over, set};
use super::message;
use super::work::Work;

/// The way out of checks while a session that there was before is asked for.
pub(super) struct Early {
    /// Nothing where each request has to wait for what comes before it.
    to: Option<mpsc::UnboundedSender<Writer>>,
    flights: VecDeque<Flight>,
    gathering: Duration,
    timer: Option<Sleep>,
    clock: Arc<dyn Clock>,
}

/// What is to be written behind the question.
pub(super) type Behind = mpsc::UnboundedReceiver<Writer>;

impl Early {
    /// A way that is open or not, on which a check waits that long for others to go with it.
    pub(super) fn new(open: bool, gathering: Duration, clock: Arc<dyn Clock>) -> (Self, Behind) {
        let (to, behind) = mpsc::unbounded_channel();
        let to = open.then_some(to);
        (Self { to, flights: VecDeque::new(), gathering, timer: None, clock }, behind)
    }

    /// Waits until it is time to send the checks that wait.
    ///
    /// # Cancel safety
    ///
    /// The next call goes on with the wait.
    pub(super) async fn gathered(&mut self, work: &Work) {
        set(&mut self.timer, self.to.is_some() && !work.checks.is_empty(), self.gathering, &*self.clock);
        over(&mut self.timer).await;
    }

    /// Sends all checks that wait.
    pub(super) fn send(&mut self, work: &mut Work) {
        let Some(to) = &self.to else { return };
        let (mut out, now) = (Writer::default(), self.clock.now());
        while !work.checks.is_empty() {
            let checks = work.next_checks();
            if checks.is_empty() {
                continue;
            }
            let xid = self.flights.back().map_or(FIRST, |flight| flight.xid) + 1;
            message::checks(xid, checks.iter().map(|check| &*check.path), &mut out);
            self.flights.push_back(Flight { xid, sent: now, what: Cargo::Checks(checks) });
        }
        work.urgent = false;
        // A connection that failed meanwhile needs them no more.
        let _ = to.send(out);
    }

    /// Gives what will be answered on the connection if the session has it now. If not, nothing of it is, and the
    /// checks wait again.
    pub(super) fn end(self, granted: bool, work: &mut Work) -> VecDeque<Flight> {
        if granted {
            return self.flights;
        }
        for flight in self.flights {
            if let Cargo::Checks(checks) = flight.what {
                work.urgent = true;
                work.checks.extend(checks);
            }
        }
        VecDeque::new()
    }
}
