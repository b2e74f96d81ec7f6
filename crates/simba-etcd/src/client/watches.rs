//! Who is to be woken when a key changes.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use futures_util::task::AtomicWaker;
use tokio::sync::mpsc;

use super::proto::{
    NO_DELETE, NO_PUT, WatchCancelRequest, WatchCreateRequest, WatchRequest, WatchResponse, Watching,
};

/// What is watched, from which revision on.
#[derive(Clone, Debug)]
pub(crate) struct Sight {
    request: WatchCreateRequest,
}

impl Sight {
    /// That this key is deleted.
    pub(crate) fn end_of(key: &[u8], from: i64) -> Self {
        Self::new(key, Vec::new(), from, NO_PUT)
    }

    /// That a key with this prefix is made.
    pub(crate) fn arrival(prefix: &str, end: Vec<u8>, from: i64) -> Self {
        Self::new(prefix.as_bytes(), end, from, NO_DELETE)
    }

    fn new(key: &[u8], range_end: Vec<u8>, from: i64, filter: i32) -> Self {
        let key = key.to_vec();
        let request =
            WatchCreateRequest { key, range_end, start_revision: from, filters: vec![filter], watch_id: 0 };
        Self { request }
    }
}

/// After a reconnect those who have time are woken in so many steps: a fleet that comes back does not storm its store.
const STEPS: usize = 20;

/// Rings once, and is heard by one task.
#[derive(Debug, Default)]
struct Bell {
    has_time: bool,
    rung: AtomicBool,
    waker: AtomicWaker,
}

impl Bell {
    fn ring(&self) {
        self.rung.store(true, Ordering::Release);
        self.waker.wake();
    }
}

/// A watch at the server, until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    watches: Arc<Watches>,
    id: i64,
    bell: Arc<Bell>,
}

impl Watch {
    /// Completes once what is watched for has happened, or may have: after a reconnect nobody knows.
    ///
    /// # Cancel safety
    ///
    /// It stays rung.
    pub(crate) async fn rung(&self) {
        poll_fn(|context| {
            // From before the look, or a ring in between would wake nobody.
            self.bell.waker.register(context.waker());
            if self.bell.rung.load(Ordering::Acquire) { Poll::Ready(()) } else { Poll::Pending }
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

/// The way to the server's end of the stream.
pub(super) type Requests = mpsc::UnboundedSender<WatchRequest>;

#[derive(Debug, Default)]
struct Inner {
    bells: HashMap<i64, Arc<Bell>>,
    /// What is asked for in a moment, if it is still wanted then.
    later: Vec<WatchCreateRequest>,
    /// Who is to be woken since the last reconnect, and how many at a time.
    waking: Vec<Arc<Bell>>,
    step: usize,
    count: i64,
    /// How many streams were opened so far.
    streams: u64,
    stream: Stream,
}

#[derive(Debug, Default)]
enum Stream {
    /// What is watched now rings with the next connection.
    #[default]
    Disconnected,
    /// Nobody watches anything yet on the connection of this number.
    Unused(u64),
    Open {
        on: u64,
        /// Its number among all streams.
        number: u64,
        requests: Requests,
    },
}

/// What the server is to be asked by, on the connection of this number.
#[derive(Debug)]
pub(super) struct Opened {
    pub(super) on: u64,
    /// Its number among all streams.
    pub(super) number: u64,
    pub(super) asked: mpsc::UnboundedReceiver<WatchRequest>,
}

impl Watches {
    /// Watches; gives what the server is to be asked by if there is no stream yet. After a reconnect it rings at once,
    /// unless it has time.
    pub(super) fn add(self: &Arc<Self>, sight: Sight, has_time: bool) -> (Watch, Option<Opened>) {
        let mut inner = self.inner();
        let (watch, request) = self.register(&mut inner, sight, has_time);
        let opened = inner.send(Watching::Create(request));
        (watch, opened)
    }

    /// The same in a moment: a mutex that is held for less costs no watch.
    pub(super) fn add_later(self: &Arc<Self>, sight: Sight) -> Watch {
        let mut inner = self.inner();
        let (watch, request) = self.register(&mut inner, sight, false);
        if !matches!(inner.stream, Stream::Disconnected) {
            inner.later.push(request);
        }
        watch
    }

    /// Watches nothing but the connection: rings after the next reconnect.
    pub(super) fn add_idle(self: &Arc<Self>) -> Watch {
        let nothing = Sight::end_of(b"", 0);
        self.register(&mut self.inner(), nothing, true).0
    }

    fn register(
        self: &Arc<Self>,
        inner: &mut Inner,
        sight: Sight,
        has_time: bool,
    ) -> (Watch, WatchCreateRequest) {
        inner.count += 1;
        let (id, bell) = (inner.count, Arc::new(Bell { has_time, ..Bell::default() }));
        inner.bells.insert(id, Arc::clone(&bell));
        (Watch { watches: Arc::clone(self), id, bell }, WatchCreateRequest { watch_id: id, ..sight.request })
    }

    /// The moment has come for what was put off, and for the next of those who are to be woken.
    pub(super) fn hurry(&self) -> Option<Opened> {
        let mut inner = self.inner();
        inner.wake_some();
        let later = std::mem::take(&mut inner.later);
        let mut opened = None;
        for request in later {
            opened = inner.send(Watching::Create(request)).or(opened);
        }
        opened
    }

    /// The server says something of a watch.
    pub(super) fn told(&self, said: &WatchResponse) {
        if said.canceled && said.compact_revision == 0 {
            // As we asked for, or not for being late: the engine polls.
            if self.inner().bells.contains_key(&said.watch_id) {
                tracing::debug!(reason = said.cancel_reason, "the server does not watch");
            }
            return;
        }
        if said.events.is_empty() && !said.canceled {
            return;
        }
        let mut inner = self.inner();
        let Some(bell) = inner.bells.remove(&said.watch_id) else { return };
        if !said.canceled {
            inner.cancel(said.watch_id);
        }
        drop(inner);
        bell.ring();
    }

    /// There is a connection, and with it another stream: anything may have been missed.
    pub(super) fn connected(&self, number: u64) {
        self.inner().begin(number);
    }

    /// Ends the stream of this connection, so that the next watch opens another one, and wakes everybody who watches.
    ///
    /// Servers check each new watch by the login that its stream was opened with.
    pub(super) fn reopen(&self, number: u64) {
        let mut inner = self.inner();
        if matches!(inner.stream, Stream::Unused(on) | Stream::Open { on, .. } if on == number) {
            inner.begin(number);
        }
    }

    /// Returns whether this stream is in use: not replaced by another, nor by another connection.
    pub(super) fn is_open(&self, stream: u64) -> bool {
        matches!(self.inner().stream, Stream::Open { number, .. } if number == stream)
    }

    /// Whether somebody waits for something.
    pub(super) fn anybody(&self) -> bool {
        !self.inner().bells.is_empty()
    }

    pub(super) fn disconnected(&self) {
        self.inner().stream = Stream::Disconnected;
    }

    fn remove(&self, id: i64) {
        let mut inner = self.inner();
        if inner.bells.remove(&id).is_some() {
            inner.cancel(id);
        }
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    /// Begins with a new stream on this connection.
    fn begin(&mut self, connection: u64) {
        self.stream = Stream::Unused(connection);
        self.later.clear();
        let (later, now): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.bells).into_values().partition(|bell| bell.has_time);
        now.iter().for_each(|bell| bell.ring());
        self.waking.extend(later);
        self.step = self.waking.len().div_ceil(STEPS);
        self.wake_some();
    }

    fn wake_some(&mut self) {
        let left = self.waking.len().saturating_sub(self.step);
        self.waking.drain(left..).for_each(|bell| bell.ring());
    }

    fn send(&mut self, request: Watching) -> Option<Opened> {
        let request = WatchRequest { request: Some(request) };
        match &self.stream {
            Stream::Disconnected => None,
            Stream::Open { requests, .. } => {
                let _ = requests.send(request);
                None
            }
            &Stream::Unused(on) => {
                let (requests, asked) = mpsc::unbounded_channel();
                let _ = requests.send(request);
                self.streams += 1;
                let number = self.streams;
                self.stream = Stream::Open { on, number, requests };
                Some(Opened { on, number, asked })
            }
        }
    }

    /// The server need not look any more. What it was never asked for, it does not know.
    fn cancel(&mut self, watch_id: i64) {
        let asked = self.later.iter().position(|request| request.watch_id == watch_id);
        match asked {
            Some(at) => drop(self.later.swap_remove(at)),
            None if matches!(self.stream, Stream::Open { .. }) => {
                self.send(Watching::Cancel(WatchCancelRequest { watch_id }));
            }
            None => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::super::proto::Event;
    use super::*;

    fn sight() -> Sight {
        Sight::end_of(b"simba/orders/1-a", 8)
    }

    fn happened(watch: &Watch) -> WatchResponse {
        WatchResponse { watch_id: watch.id, events: vec![Event {}], ..WatchResponse::default() }
    }

    fn is_rung(watch: &Watch) -> bool {
        watch.rung().now_or_never().is_some()
    }

    #[test]
    fn the_first_watch_opens_the_stream_and_each_rings_once_for_its_own() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (one, opened) = watches.add(sight(), false);
        let mut asked = opened.expect("a stream").asked;
        let (other, opened) = watches.add(sight(), false);
        assert!(opened.is_none());
        watches.told(&WatchResponse { watch_id: one.id, ..WatchResponse::default() });
        assert!(!is_rung(&one), "that it was created is nothing new");
        watches.told(&happened(&one));
        assert!(is_rung(&one) && is_rung(&one), "it stays rung");
        assert!(!is_rung(&other));
        drop((one, other));
        let mut cancelled = Vec::new();
        while let Ok(WatchRequest { request: Some(request) }) = asked.try_recv() {
            if let Watching::Cancel(cancel) = request {
                cancelled.push(cancel.watch_id);
            }
        }
        assert_eq!(cancelled, [1, 2], "a server watches for ever unless it is told");
    }

    #[test]
    fn a_new_connection_rings_for_everybody_also_for_who_came_meanwhile() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (before, _asked) = watches.add(sight(), false);
        watches.disconnected();
        let (meanwhile, opened) = watches.add(sight(), false);
        let later = watches.add_later(sight());
        assert!(opened.is_none() && !is_rung(&before) && !is_rung(&meanwhile));
        watches.connected(1);
        assert!(is_rung(&before) && is_rung(&meanwhile) && is_rung(&later));
        assert!(watches.hurry().is_none());
    }

    #[test]
    fn a_reopened_stream_wakes_everybody_and_an_old_connection_reopens_nothing() {
        let watches = Arc::new(Watches::default());
        watches.connected(2);
        let (before, opened) = watches.add(sight(), false);
        let first = opened.expect("a stream").number;
        watches.reopen(1);
        assert!(!is_rung(&before) && watches.is_open(first), "of a connection that is gone");
        watches.reopen(2);
        assert!(is_rung(&before) && !watches.is_open(first));
        let (_after, opened) = watches.add(sight(), false);
        let second = opened.expect("another stream");
        assert!(second.on == 2 && watches.is_open(second.number) && !watches.is_open(first));
    }

    #[test]
    fn many_are_woken_in_steps_after_a_reconnect_and_whoever_has_no_time_at_once() {
        let watches = Arc::new(Watches::default());
        let later: Vec<_> = (0..100).map(|_| watches.add(sight(), true).0).collect();
        let now: Vec<_> = (0..100).map(|_| watches.add(sight(), false).0).collect();
        let rung = |some: &[Watch]| some.iter().filter(|watch| is_rung(watch)).count();
        watches.connected(1);
        assert_eq!((rung(&later), rung(&now)), (5, 100));
        for step in 2..=STEPS {
            watches.hurry();
            assert_eq!(rung(&later), step * 5);
        }
    }

    #[test]
    fn what_has_time_is_not_asked_for_if_it_is_not_wanted_any_more() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (dropped, kept) = (watches.add_later(sight()), watches.add_later(sight()));
        drop(dropped);
        let mut asked = watches.hurry().expect("a stream").asked;
        let WatchRequest { request: Some(Watching::Create(created)) } = asked.try_recv().unwrap() else {
            panic!("not a creation");
        };
        assert_eq!(created.watch_id, kept.id);
        assert!(asked.try_recv().is_err());
    }

    #[test]
    fn a_watch_from_what_is_forgotten_rings_and_one_that_is_refused_does_not() {
        let watches = Arc::new(Watches::default());
        watches.connected(1);
        let (late, _asked) = watches.add(sight(), false);
        let (refused, _) = watches.add(sight(), false);
        let cancelled = |watch: &Watch, compact_revision| WatchResponse {
            watch_id: watch.id,
            canceled: true,
            compact_revision,
            ..WatchResponse::default()
        };
        watches.told(&cancelled(&late, 7));
        watches.told(&cancelled(&refused, 0));
        assert!(is_rung(&late) && !is_rung(&refused));
    }
}
