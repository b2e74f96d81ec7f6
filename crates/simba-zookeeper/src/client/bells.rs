//! Who is to be woken: one bell for each contender, in little space, since a process may have thousands.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use futures_util::task::AtomicWaker;

/// What a bell rings for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ring {
    /// It may be the contender's turn.
    Turn,
    /// There is something new for one who only looks.
    News,
    /// The contender may have lost its node.
    Own,
}

impl Ring {
    const fn bit(self) -> u8 {
        match self {
            Self::Turn => 1,
            Self::News => 2,
            Self::Own => 4,
        }
    }
}

/// Whom a hint is for, and what it says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Topic {
    contender: u64,
    pub(super) ring: Ring,
}

/// Rings that were not heard yet, and who listens for them: one task at a time, the contender's own.
#[derive(Debug)]
struct Bell {
    contender: u64,
    rings: AtomicU8,
    waker: AtomicWaker,
}

impl Bell {
    fn ring(&self, bits: u8) {
        self.rings.fetch_or(bits, Ordering::AcqRel);
        self.waker.wake();
    }

    fn take(&self, ring: Ring) -> bool {
        self.rings.fetch_and(!ring.bit(), Ordering::AcqRel) & ring.bit() != 0
    }
}

/// The bells of all contenders of a session.
#[derive(Debug, Default)]
pub(super) struct Bells {
    of: Mutex<HashMap<u64, Arc<Bell>>>,
    count: AtomicU64,
}

impl Bells {
    /// A bell for one more contender.
    pub(super) fn ear(self: &Arc<Self>) -> Ear {
        let contender = self.count.fetch_add(1, Ordering::Relaxed);
        let bell = Arc::new(Bell { contender, rings: AtomicU8::new(0), waker: AtomicWaker::new() });
        self.of().insert(contender, Arc::clone(&bell));
        Ear { bells: Arc::clone(self), bell }
    }

    pub(super) fn ring(&self, topic: Topic) {
        if let Some(bell) = self.of().get(&topic.contender) {
            bell.ring(topic.ring.bit());
        }
    }

    /// Whether the contender still listens.
    pub(super) fn has(&self, topic: Topic) -> bool {
        self.of().contains_key(&topic.contender)
    }

    /// Wakes everybody, as after a reconnect, when anything may have been missed.
    pub(super) fn ring_all(&self) {
        self.of().values().for_each(|bell| bell.ring(u8::MAX));
    }

    fn of(&self) -> MutexGuard<'_, HashMap<u64, Arc<Bell>>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One contender's ear, until it is dropped.
#[derive(Debug)]
pub(crate) struct Ear {
    bells: Arc<Bells>,
    bell: Arc<Bell>,
}

impl Ear {
    /// What a watch is to ring.
    pub(crate) fn topic(&self, ring: Ring) -> Topic {
        Topic { contender: self.bell.contender, ring }
    }

    /// Completes at the next ring of this kind, or at once if one came since the last call.
    ///
    /// # Cancel safety
    ///
    /// A ring is kept for the next call.
    pub(crate) async fn rung(&mut self, ring: Ring) {
        poll_fn(|context| {
            // From before the look, or a ring in between would wake nobody.
            self.bell.waker.register(context.waker());
            if self.bell.take(ring) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }

    /// Forgets the rings of this kind that came so far.
    pub(crate) fn forget(&mut self, ring: Ring) {
        self.bell.take(ring);
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.bells.of().remove(&self.bell.contender);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[test]
    fn a_ring_is_kept_and_reaches_its_own_kind_alone() {
        let bells = Arc::new(Bells::default());
        let (mut one, mut other) = (bells.ear(), bells.ear());
        bells.ring(one.topic(Ring::Turn));
        assert!(one.rung(Ring::Own).now_or_never().is_none());
        assert!(other.rung(Ring::Turn).now_or_never().is_none());
        assert!(one.rung(Ring::Turn).now_or_never().is_some(), "kept");
        assert!(one.rung(Ring::Turn).now_or_never().is_none(), "and heard once");
        bells.ring_all();
        other.forget(Ring::Turn);
        assert!(one.rung(Ring::Own).now_or_never().is_some());
        assert!(other.rung(Ring::Turn).now_or_never().is_none());
        assert!(other.rung(Ring::Own).now_or_never().is_some());
    }

    #[tokio::test]
    async fn who_listens_already_is_woken() {
        let bells = Arc::new(Bells::default());
        let mut ear = bells.ear();
        let topic = ear.topic(Ring::Own);
        let listens = tokio::spawn(async move { ear.rung(Ring::Own).await });
        tokio::task::yield_now().await;
        bells.ring(topic);
        listens.await.unwrap();
        bells.ring(topic);
        assert!(bells.of().is_empty(), "who is gone has no bell");
    }
}
