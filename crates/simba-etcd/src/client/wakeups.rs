//! Wakes sessions when a key that they watch changes, and after a reconnect.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use futures_util::task::AtomicWaker;
use tokio::sync::mpsc;

use super::protocol::{
    NO_DELETE, NO_PUT, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse,
};

/// The event to watch for, and the revision to start from. Its id is set when it is sent.
pub(crate) type WatchTarget = WatchCreateRequest;

impl WatchTarget {
    /// Targets the deletion of this key.
    pub(crate) fn deletion_of(key: &[u8], from: i64) -> Self {
        Self::new(key, Vec::new(), from, NO_PUT)
    }

    /// Targets the creation of a key with this prefix.
    pub(crate) fn creation_under(prefix: &str, end: Vec<u8>, from: i64) -> Self {
        Self::new(prefix.as_bytes(), end, from, NO_DELETE)
    }

    fn new(key: &[u8], range_end: Vec<u8>, start_revision: i64, filter: i32) -> Self {
        Self { key: key.to_vec(), range_end, start_revision, filters: vec![filter], watch_id: 0 }
    }
}

/// The number of batches in which deferrable watches are notified after a reconnect, so that many reconnecting sessions
/// do not send all their calls at once.
const BATCHES: usize = 20;

/// A flag that is set once and wakes one task.
#[derive(Debug, Default)]
struct Wakeup {
    deferrable: bool,
    notified: AtomicBool,
    waker: AtomicWaker,
}

impl Wakeup {
    fn notify(&self) {
        self.notified.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// A watch at the server, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    watches: Arc<Watches>,
    id: i64,
    wakeup: Arc<Wakeup>,
}

impl Watch {
    /// Completes once the watched event has happened, or may have: events during a reconnect are not known.
    ///
    /// # Cancel safety
    ///
    /// The watch stays notified.
    pub(crate) async fn notified(&self) {
        poll_fn(|context| {
            // Registered before the load: a notification in between would wake no task.
            self.wakeup.waker.register(context.waker());
            if self.wakeup.notified.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
        })
        .await;
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.watches.remove(self.id);
    }
}

/// The watches of a client.
#[derive(Debug, Default)]
pub(super) struct Watches {
    inner: Mutex<Inner>,
}

/// The sender of requests to the server on the stream of watches.
pub(super) type Requests = mpsc::UnboundedSender<WatchRequest>;

#[derive(Debug, Default)]
struct Inner {
    wakeups: HashMap<i64, Arc<Wakeup>>,
    /// Requests that are sent by the next [`Watches::run_deferred`], unless their watch is dropped before.
    deferred: Vec<WatchCreateRequest>,
    /// Wakeups still to notify since the last reconnect, and how many in a batch.
    to_notify: Vec<Arc<Wakeup>>,
    batch: usize,
    count: i64,
    /// The number of streams opened so far.
    streams: u64,
    stream: Stream,
}

#[derive(Debug, Default)]
enum Stream {
    /// New watches are notified by the next connection.
    #[default]
    Disconnected,
    /// Connected by the connection of this number, without a watch so far.
    Unused(u64),
    Open {
        connection: u64,
        /// Its number among all streams.
        number: u64,
        requests: Requests,
    },
}

/// A new stream to open on the connection of this number, with the requests to send on it.
#[derive(Debug)]
pub(super) struct NewStream {
    pub(super) connection: u64,
    /// Its number among all streams.
    pub(super) number: u64,
    pub(super) requests: mpsc::UnboundedReceiver<WatchRequest>,
}

impl Watches {
    /// Adds a watch. Returns the stream to open if there is none yet. After a reconnect the watch is notified
    /// immediately, or in batches if it is deferrable.
    pub(super) fn add(self: &Arc<Self>, target: WatchTarget, deferrable: bool) -> (Watch, Option<NewStream>) {
        let mut inner = self.inner();
        let (watch, request) = self.register(&mut inner, target, deferrable);
        let opened = inner.create(request);
        (watch, opened)
    }

    /// Adds a watch whose request is sent by the next [`run_deferred`](Self::run_deferred): a mutex that is released
    /// before costs no watch.
    pub(super) fn add_deferred(self: &Arc<Self>, target: WatchTarget) -> Watch {
        let mut inner = self.inner();
        let (watch, request) = self.register(&mut inner, target, false);
        if !matches!(inner.stream, Stream::Disconnected) {
            inner.deferred.push(request);
        }
        watch
    }

    /// Adds a watch of no key, which is notified after the next reconnect.
    pub(super) fn add_for_reconnect(self: &Arc<Self>) -> Watch {
        let nothing = WatchTarget::deletion_of(b"", 0);
        self.register(&mut self.inner(), nothing, true).0
    }

    fn register(
        self: &Arc<Self>,
        inner: &mut Inner,
        target: WatchTarget,
        deferrable: bool,
    ) -> (Watch, WatchCreateRequest) {
        inner.count += 1;
        let (id, wakeup) = (inner.count, Arc::new(Wakeup { deferrable, ..Wakeup::default() }));
        inner.wakeups.insert(id, Arc::clone(&wakeup));
        let request = WatchCreateRequest { watch_id: id, ..target };
        (Watch { watches: Arc::clone(self), id, wakeup }, request)
    }

    /// Sends the deferred requests and notifies the next batch. Returns the stream to open if there is none yet.
    pub(super) fn run_deferred(&self) -> Option<NewStream> {
        let mut inner = self.inner();
        inner.notify_batch();
        let deferred = std::mem::take(&mut inner.deferred);
        let mut opened = None;
        for request in deferred {
            opened = inner.create(request).or(opened);
        }
        opened
    }

    /// Handles a message of the server.
    pub(super) fn handle(&self, response: &WatchResponse) {
        if response.canceled && response.compact_revision == 0 {
            // Cancelled by this client, or refused for another reason than compaction: the engine polls.
            if self.inner().wakeups.contains_key(&response.watch_id) {
                tracing::debug!(reason = response.cancel_reason, "the server refused a watch");
            }
            return;
        }
        if response.events.is_empty() && !response.canceled {
            return;
        }
        let mut inner = self.inner();
        let Some(wakeup) = inner.wakeups.remove(&response.watch_id) else { return };
        if !response.canceled {
            inner.cancel(response.watch_id);
        }
        drop(inner);
        wakeup.notify();
    }

    /// Starts over on a new connection and notifies all watches: events may have been missed.
    pub(super) fn connected(&self, number: u64) {
        self.inner().restart(number);
    }

    /// Ends the stream of this connection, so that the next watch opens another one, and notifies all watches.
    ///
    /// Servers check each new watch against the login that its stream was opened with.
    pub(super) fn reopen(&self, number: u64) {
        let mut inner = self.inner();
        if matches!(inner.stream, Stream::Unused(on) | Stream::Open { connection: on, .. } if on == number) {
            inner.restart(number);
        }
    }

    /// Returns whether this stream is in use: not replaced by another stream or connection.
    pub(super) fn is_open(&self, stream: u64) -> bool {
        matches!(self.inner().stream, Stream::Open { number, .. } if number == stream)
    }

    /// Returns whether any watch waits for its event.
    pub(super) fn has_watches(&self) -> bool {
        !self.inner().wakeups.is_empty()
    }

    pub(super) fn disconnected(&self) {
        self.inner().stream = Stream::Disconnected;
    }

    fn remove(&self, id: i64) {
        let mut inner = self.inner();
        if inner.wakeups.remove(&id).is_some() {
            inner.cancel(id);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Starts over without a stream on this connection.
    fn restart(&mut self, connection: u64) {
        self.stream = Stream::Unused(connection);
        self.deferred.clear();
        let (deferrable, urgent): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.wakeups).into_values().partition(|wakeup| wakeup.deferrable);
        urgent.iter().for_each(|wakeup| wakeup.notify());
        self.to_notify.extend(deferrable);
        self.batch = self.to_notify.len().div_ceil(BATCHES);
        self.notify_batch();
    }

    fn notify_batch(&mut self) {
        let left = self.to_notify.len().saturating_sub(self.batch);
        self.to_notify.drain(left..).for_each(|wakeup| wakeup.notify());
    }

    /// Creates a watch at the server. Returns the stream to open if there is none yet.
    fn create(&mut self, request: WatchCreateRequest) -> Option<NewStream> {
        let request = WatchRequest { create: Some(request), cancel: None };
        match &self.stream {
            Stream::Disconnected => None,
            Stream::Open { requests, .. } => {
                let _ = requests.send(request);
                None
            }
            &Stream::Unused(connection) => {
                let (sender, requests) = mpsc::unbounded_channel();
                let _ = sender.send(request);
                self.streams += 1;
                let number = self.streams;
                self.stream = Stream::Open { connection, number, requests: sender };
                Some(NewStream { connection, number, requests })
            }
        }
    }

    /// Cancels a watch at the server, or drops its request if that was not sent yet.
    fn cancel(&mut self, watch_id: i64) {
        let deferred = self.deferred.iter().position(|request| request.watch_id == watch_id);
        match deferred {
            Some(at) => drop(self.deferred.swap_remove(at)),
            None => {
                if let Stream::Open { requests, .. } = &self.stream {
                    let cancel = Some(WatchCancelRequest { watch_id });
                    let _ = requests.send(WatchRequest { create: None, cancel });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::super::protocol::Empty;
    use super::*;

    fn target() -> WatchTarget {
        WatchTarget::deletion_of(b"simba/orders/1-a", 8)
    }

    fn event_for(watch: &Watch) -> WatchResponse {
        WatchResponse { watch_id: watch.id, events: vec![Empty {}], ..WatchResponse::default() }
    }

    fn is_notified(watch: &Watch) -> bool {
        watch.notified().now_or_never().is_some()
    }

    #[test]
    fn the_first_watch_opens_the_stream_and_an_event_notifies_its_own_watch() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (one, opened) = watches.add(target(), false);
        let mut requests = opened.expect("a stream").requests;
        let (other, opened) = watches.add(target(), false);
        assert!(opened.is_none());
        watches.handle(&WatchResponse { watch_id: one.id, ..WatchResponse::default() });
        assert!(!is_notified(&one), "the confirmation of a watch is no event");
        watches.handle(&event_for(&one));
        assert!(is_notified(&one) && is_notified(&one), "it stays notified");
        assert!(!is_notified(&other));
        drop((one, other));
        let mut cancelled = Vec::new();
        while let Ok(request) = requests.try_recv() {
            cancelled.extend(request.cancel.map(|cancel| cancel.watch_id));
        }
        assert_eq!(cancelled, [1, 2], "a server keeps a watch until it is cancelled");
    }

    #[test]
    fn a_new_connection_notifies_all_watches_including_those_added_meanwhile() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (before, _requests) = watches.add(target(), false);
        watches.disconnected();
        let (meanwhile, opened) = watches.add(target(), false);
        let deferred = watches.add_deferred(target());
        assert!(opened.is_none() && !is_notified(&before) && !is_notified(&meanwhile));
        watches.connected(1);
        assert!(is_notified(&before) && is_notified(&meanwhile) && is_notified(&deferred));
        assert!(watches.run_deferred().is_none());
    }

    #[test]
    fn a_reopened_stream_notifies_all_watches_and_an_old_connection_reopens_nothing() {
        let watches = Arc::new(Watches::default());
        watches.connected(2);
        let (before, opened) = watches.add(target(), false);
        let first = opened.expect("a stream").number;
        watches.reopen(1);
        assert!(!is_notified(&before) && watches.is_open(first), "of a connection that has ended");
        watches.reopen(2);
        assert!(is_notified(&before) && !watches.is_open(first));
        let (_after, opened) = watches.add(target(), false);
        let second = opened.expect("another stream");
        assert!(second.connection == 2 && watches.is_open(second.number) && !watches.is_open(first));
    }

    #[test]
    fn a_reconnect_notifies_deferrable_watches_in_batches_and_the_others_immediately() {
        let watches = Arc::new(Watches::default());
        let deferrable: Vec<_> = (0..100).map(|_| watches.add(target(), true).0).collect();
        let urgent: Vec<_> = (0..100).map(|_| watches.add(target(), false).0).collect();
        let notified = |some: &[Watch]| some.iter().filter(|watch| is_notified(watch)).count();
        watches.connected(1);
        assert_eq!((notified(&deferrable), notified(&urgent)), (5, 100));
        for batch in 2..=BATCHES {
            watches.run_deferred();
            assert_eq!(notified(&deferrable), batch * 5);
        }
    }

    #[test]
    fn a_deferred_request_is_not_sent_if_its_watch_is_dropped_before() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (dropped, kept) = (watches.add_deferred(target()), watches.add_deferred(target()));
        drop(dropped);
        let mut requests = watches.run_deferred().expect("a stream").requests;
        let created = requests.try_recv().unwrap().create.expect("a creation");
        assert_eq!(created.watch_id, kept.id);
        assert!(requests.try_recv().is_err());
    }

    #[test]
    fn a_watch_from_a_compacted_revision_is_notified_and_a_refused_one_is_not() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (compacted, _requests) = watches.add(target(), false);
        let (refused, _) = watches.add(target(), false);
        let cancelled = |watch: &Watch, compact_revision| WatchResponse {
            watch_id: watch.id,
            canceled: true,
            compact_revision,
            ..WatchResponse::default()
        };
        watches.handle(&cancelled(&compacted, 7));
        watches.handle(&cancelled(&refused, 0));
        assert!(is_notified(&compacted) && !is_notified(&refused));
    }
}
