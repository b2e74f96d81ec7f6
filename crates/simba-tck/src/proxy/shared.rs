//! The state that the handle and the connections share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::watch;

use super::conditions::{Conditions, Watcher};
use super::http2;
use crate::held::{Released, Trap};

/// The counters of a [`FaultProxy`](super::FaultProxy).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Connections that are open now.
    pub connections: usize,
    /// Connects so far, including those that were reset at once.
    pub accepted: usize,
    /// Chunks with requests from clients so far.
    pub requests: usize,
}

/// Single events that have not happened yet.
#[derive(Debug, Default)]
pub(super) struct Events {
    pub(super) lost_replies: usize,
    /// Each holds back a chunk that contains one of these texts.
    pub(super) traps: Vec<(Vec<String>, Trap)>,
}

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) upstream: String,
    conditions: watch::Sender<Conditions>,
    counts: watch::Sender<Counts>,
    events: Mutex<Events>,
    is_http2: AtomicBool,
}

impl Shared {
    pub(super) fn new(upstream: String) -> Self {
        Self {
            upstream,
            conditions: watch::Sender::default(),
            counts: watch::Sender::default(),
            events: Mutex::default(),
            is_http2: AtomicBool::new(false),
        }
    }

    pub(super) fn expect_http2(&self) {
        self.is_http2.store(true, Ordering::Relaxed);
    }

    /// Returns whether a chunk from a client contains a request.
    pub(super) fn is_request(&self, chunk: &[u8]) -> bool {
        !self.is_http2.load(Ordering::Relaxed) || http2::has_request(chunk)
    }

    pub(super) fn change(&self, change: impl FnOnce(&mut Conditions)) {
        self.conditions.send_modify(change);
    }

    pub(super) fn watcher(&self) -> Watcher {
        Watcher::new(&self.conditions)
    }

    pub(super) fn count(&self, count: impl FnOnce(&mut Counts)) {
        self.counts.send_modify(count);
    }

    pub(super) fn counts(&self) -> Counts {
        *self.counts.borrow()
    }

    pub(super) async fn counted(&self, wanted: impl FnMut(&Counts) -> bool + Send) {
        let _ = self.counts.subscribe().wait_for(wanted).await;
    }

    pub(super) fn events(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a request that has just reached the server loses its reply.
    pub(super) fn loses_reply(&self) -> bool {
        let mut events = self.events();
        let loses = events.lost_replies > 0;
        events.lost_replies -= usize::from(loses);
        loses
    }

    /// Returns what decides about a received request, if it is to be held.
    pub(super) fn hold(&self, chunk: &[u8]) -> Option<Released> {
        let mut events = self.events();
        let is_wanted = |(texts, _): &mut (Vec<String>, Trap)| texts.iter().any(|text| contains(chunk, text));
        events.traps.extract_if(.., is_wanted).find_map(|(_, trap)| trap.trigger())
    }
}

fn contains(chunk: &[u8], text: &str) -> bool {
    text.is_empty() || chunk.windows(text.len()).any(|part| part == text.as_bytes())
}
