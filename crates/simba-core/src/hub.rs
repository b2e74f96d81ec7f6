//! One upstream subscription for thousands of sessions.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Hands hints from one upstream subscription to the sessions that wait for them.
///
/// Sessions [`listen`](Self::listen) to a topic; the backend's supervisor waits for
/// [`demand`](Self::demand) and subscribes upstream when the first listener of a topic comes, unsubscribes
/// when the last one goes, [`ring`](Self::ring)s a topic for every message and [`ring_all`](Self::ring_all)s
/// after a reconnect.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use simba_core::Hub;
///
/// let hub = Hub::<&str>::new();
/// let mut listener = hub.listen("orders");
/// assert_eq!(hub.demand().await.subscribe, ["orders"]);
/// assert_eq!(hub.ring(&"orders"), 1);
/// listener.rung().await;
/// # }
/// ```
pub struct Hub<K: Hash + Eq + Clone> {
    inner: Arc<Inner<K>>,
}

struct Inner<K> {
    state: Mutex<State<K>>,
    demand: Notify,
}

struct State<K> {
    topics: HashMap<K, Vec<Arc<Notify>>>,
    upstream: Option<Upstream<K>>,
}

/// What the supervisor knows and does not know yet.
struct Upstream<K> {
    /// Topics that it was told to subscribe to.
    subscribed: HashSet<K>,
    /// Topics whose need changed since it last looked.
    touched: HashSet<K>,
}

/// What the supervisor has to do upstream.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Demand<K> {
    /// Topics with their first listener.
    pub subscribe: Vec<K>,
    /// Topics without any listener.
    pub unsubscribe: Vec<K>,
}

impl<K: Hash + Eq + Clone> Hub<K> {
    /// A hub whose topics are subscribed to upstream, by a supervisor that waits for [`demand`](Self::demand).
    #[must_use]
    pub fn new() -> Self {
        Self::with_upstream(Some(Upstream { subscribed: HashSet::new(), touched: HashSet::new() }))
    }

    /// A hub without an upstream: its rings come from this process. It has no demand.
    #[must_use]
    pub fn local() -> Self {
        Self::with_upstream(None)
    }

    fn with_upstream(upstream: Option<Upstream<K>>) -> Self {
        let state = State { topics: HashMap::new(), upstream };
        Self { inner: Arc::new(Inner { state: Mutex::new(state), demand: Notify::new() }) }
    }

    /// Listens to a topic until the listener is dropped.
    #[must_use]
    pub fn listen(&self, topic: K) -> Listener<K> {
        let bell = Arc::new(Notify::new());
        let mut state = self.inner.state();
        let listeners = state.topics.entry(topic.clone()).or_default();
        listeners.push(Arc::clone(&bell));
        if listeners.len() == 1 {
            self.inner.touch(state, &topic);
        }
        Listener { inner: Arc::clone(&self.inner), topic, bell }
    }

    /// Wakes the listeners of a topic; returns how many there are.
    pub fn ring(&self, topic: &K) -> usize {
        let state = self.inner.state();
        let listeners = state.topics.get(topic).map_or(&[][..], Vec::as_slice);
        listeners.iter().for_each(|bell| bell.notify_one());
        listeners.len()
    }

    /// Wakes every listener, as after a reconnect, when anything may have been missed.
    pub fn ring_all(&self) {
        let state = self.inner.state();
        state.topics.values().flatten().for_each(|bell| bell.notify_one());
    }

    /// Waits until something has to be subscribed or unsubscribed upstream, and takes it over.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing: what it would have returned stays for the next.
    pub async fn demand(&self) -> Demand<K> {
        loop {
            let notified = self.inner.demand.notified();
            if let Some(demand) = self.inner.state().take_demand() {
                return demand;
            }
            notified.await;
        }
    }

    /// All topics with listeners, to subscribe to after a reconnect. The open demand is covered by them.
    #[must_use]
    pub fn resubscribe(&self) -> Vec<K> {
        let mut state = self.inner.state();
        let topics: Vec<K> = state.topics.keys().cloned().collect();
        if let Some(upstream) = &mut state.upstream {
            upstream.touched.clear();
            upstream.subscribed = topics.iter().cloned().collect();
        }
        topics
    }
}

impl<K: Hash + Eq + Clone> State<K> {
    fn take_demand(&mut self) -> Option<Demand<K>> {
        let Upstream { subscribed, touched } = self.upstream.as_mut()?;
        let mut demand = Demand { subscribe: Vec::new(), unsubscribe: Vec::new() };
        for topic in touched.drain() {
            // A topic that came and went, or went and came, between two looks needs nothing.
            match (self.topics.contains_key(&topic), subscribed.contains(&topic)) {
                (true, false) => {
                    subscribed.insert(topic.clone());
                    demand.subscribe.push(topic);
                }
                (false, true) => {
                    subscribed.remove(&topic);
                    demand.unsubscribe.push(topic);
                }
                _ => {}
            }
        }
        (!demand.subscribe.is_empty() || !demand.unsubscribe.is_empty()).then_some(demand)
    }
}

impl<K: Hash + Eq + Clone> Inner<K> {
    /// Lets the supervisor look at a topic whose need changed.
    fn touch(&self, mut state: MutexGuard<'_, State<K>>, topic: &K) {
        let Some(upstream) = &mut state.upstream else { return };
        upstream.touched.insert(topic.clone());
        drop(state);
        self.demand.notify_one();
    }
}

impl<K> Inner<K> {
    fn state(&self) -> MutexGuard<'_, State<K>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<K: Hash + Eq + Clone> Clone for Hub<K> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<K: Hash + Eq + Clone> Default for Hub<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Hash + Eq + Clone> fmt::Debug for Hub<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("topics", &self.inner.state().topics.len()).finish_non_exhaustive()
    }
}

/// One session's ear on a topic.
pub struct Listener<K: Hash + Eq + Clone> {
    inner: Arc<Inner<K>>,
    topic: K,
    bell: Arc<Notify>,
}

impl<K: Hash + Eq + Clone> Listener<K> {
    /// Completes at the next ring, or at once if one came since the last call.
    ///
    /// # Cancel safety
    ///
    /// A ring is kept for the next call.
    pub async fn rung(&mut self) {
        self.bell.notified().await;
    }

    /// Rings this listener alone, as a backend does once its topic is confirmed upstream.
    pub fn ring(&self) {
        self.bell.notify_one();
    }
}

impl<K: Hash + Eq + Clone> Drop for Listener<K> {
    fn drop(&mut self) {
        let mut state = self.inner.state();
        let Some(listeners) = state.topics.get_mut(&self.topic) else { return };
        listeners.retain(|bell| !Arc::ptr_eq(bell, &self.bell));
        if listeners.is_empty() {
            state.topics.remove(&self.topic);
            self.inner.touch(state, &self.topic);
        }
    }
}

impl<K: Hash + Eq + Clone> fmt::Debug for Listener<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Listener").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn the_first_listener_subscribes_and_the_last_unsubscribes() {
        let hub = Hub::<&str>::new();
        let (one, two) = (hub.listen("a"), hub.listen("a"));
        assert_eq!(hub.demand().await.subscribe, ["a"]);
        drop(one);
        assert!(hub.demand().now_or_never().is_none(), "one listener is left");
        drop(two);
        assert_eq!(hub.demand().await.unsubscribe, ["a"]);
    }

    #[tokio::test]
    async fn a_topic_that_comes_and_goes_between_two_looks_asks_for_nothing() {
        let hub = Hub::<&str>::new();
        drop(hub.listen("a"));
        assert!(hub.demand().now_or_never().is_none());
    }

    #[tokio::test]
    async fn a_ring_is_kept_and_reaches_its_topic_alone() {
        let hub = Hub::<&str>::new();
        let (mut a, mut b) = (hub.listen("a"), hub.listen("b"));
        assert_eq!((hub.ring(&"a"), hub.ring(&"c")), (1, 0));
        a.rung().await;
        assert!(b.rung().now_or_never().is_none());
        hub.ring_all();
        b.rung().await;
    }

    #[tokio::test]
    async fn after_a_reconnect_every_topic_is_named_once() {
        let hub = Hub::<&str>::new();
        let _listeners = [hub.listen("a"), hub.listen("a"), hub.listen("b")];
        let mut topics = hub.resubscribe();
        topics.sort_unstable();
        assert_eq!(topics, ["a", "b"]);
        assert!(hub.demand().now_or_never().is_none(), "the demand is covered");
    }
}
