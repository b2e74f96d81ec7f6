//! A network with fault injection, for a proxy or a switch.

use std::time::Duration;

use simba_core::ErrorKind;

use crate::{Call, FaultProxy, Held, Passage, Switch};

/// The network between one connection and its store.
///
/// Implemented for [`FaultProxy`], in front of a real server, and for [`Switch`], in front of a backend
/// without its own network.
pub trait Network: Send + Sync {
    /// Blocks both directions, without an error.
    fn stall(&self);

    /// Forwards requests to the store and blocks replies, without an error.
    fn stall_replies(&self);

    /// Delays every message by `each` and a random part of `jitter`.
    fn delay(&self, each: Duration, jitter: Duration);

    /// Resets open connections and refuses new ones, like a store that is down.
    fn refuse(&self);

    /// Returns how many requests were sent so far, including those that a fault affected.
    fn requests(&self) -> usize;

    /// Removes all faults.
    fn heal(&self);

    /// Resets open connections; new ones are accepted.
    fn cut(&self);

    /// Forwards the next request to the store and loses its reply.
    fn lose_next_reply(&self);

    /// Holds the next request, to deliver it after its caller has given up; `None` if this network cannot.
    fn hold_next_request(&self) -> Option<Held> {
        None
    }
}

impl Network for FaultProxy {
    fn stall(&self) {
        Self::stall(self);
    }

    fn stall_replies(&self) {
        Self::stall_replies(self);
    }

    fn delay(&self, each: Duration, jitter: Duration) {
        Self::delay(self, each, jitter);
    }

    fn refuse(&self) {
        Self::refuse(self);
        Self::cut(self);
    }

    fn requests(&self) -> usize {
        Self::requests(self)
    }

    fn heal(&self) {
        self.pass();
    }

    fn cut(&self) {
        Self::cut(self);
    }

    fn lose_next_reply(&self) {
        self.drop_next_reply();
    }

    fn hold_next_request(&self) -> Option<Held> {
        Some(Self::hold_next_request(self))
    }
}

impl Network for Switch {
    fn stall(&self) {
        self.set(Passage::HANG);
    }

    fn stall_replies(&self) {
        self.set(Passage::REPLY_LOST);
    }

    fn delay(&self, each: Duration, jitter: Duration) {
        self.lag(each, jitter);
    }

    fn refuse(&self) {
        self.set(Passage::fail(ErrorKind::Unavailable));
    }

    fn requests(&self) -> usize {
        self.calls()
    }

    fn heal(&self) {
        self.clear();
    }

    fn cut(&self) {
        Self::cut(self);
    }

    fn lose_next_reply(&self) {
        self.lose_reply();
    }

    fn hold_next_request(&self) -> Option<Held> {
        Some(self.hold_next(Call::Contend))
    }
}
