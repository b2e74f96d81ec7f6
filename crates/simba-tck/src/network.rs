//! A network that can be broken, whatever it is made of.

use std::time::Duration;

use simba_core::ErrorKind;

use crate::{Call, FaultProxy, Held, Passage, Switch};

/// What lies between one connection and its store.
///
/// Implemented for [`FaultProxy`], in front of a real server, and for [`Switch`], in front of a backend
/// without a network of its own.
pub trait Network: Send + Sync {
    /// Lets nothing through in either direction, without an error.
    fn stall(&self);

    /// Lets requests reach the store, and no reply come back, without an error.
    fn stall_replies(&self);

    /// Lets every message arrive later by `each` and a random part of `jitter`.
    fn delay(&self, each: Duration, jitter: Duration);

    /// Breaks what is connected now and refuses to connect again, as a store that is down does.
    fn refuse(&self);

    /// How many requests came so far, whatever became of them.
    fn requests(&self) -> usize;

    /// Lets everything through again.
    fn heal(&self);

    /// Breaks what is connected now; it can connect again at once.
    fn cut(&self);

    /// Lets the next request reach the store and loses its reply.
    fn lose_next_reply(&self);

    /// Keeps back the next request, to deliver it when nobody waits for it any more; `None` if this network
    /// cannot.
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
