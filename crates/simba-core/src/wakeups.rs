//! Wake-ups for many sessions over one subscription to the store.
//!
//! A session subscribes to a topic and awaits [`Subscription::notified`]. The backend's supervisor holds one connection
//! for messages, subscribes it to the topics that sessions need, and passes each message on with [`Wakeups::notify`].
//!
//! A wake-up is a hint: it says that a call is worthwhile, never who holds the mutex. Wake-ups of one subscription that
//! come before the session awaits them count as one. A wake-up that comes between two calls of `notified` is kept, and
//! so is one whose `notified` was dropped. After a broken connection the supervisor subscribes again to everything that
//! [`Wakeups::resubscribe`] returns and calls [`Wakeups::notify_all`], since any message may have been missed.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::future::Future;
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

/// Passes wake-ups from one subscription to the store on to the sessions that wait for them.
///
/// Sessions [`subscribe`](Self::subscribe) to a topic. The backend's supervisor awaits [`demand`](Self::demand): it
/// subscribes upstream when a topic gets its first subscription, unsubscribes when the last one is dropped, calls
/// [`notify`](Self::notify) for every message and [`notify_all`](Self::notify_all) after a reconnect.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use simba_core::spi::Wakeups;
///
/// let wakeups = Wakeups::<&str>::new();
/// let mut subscription = wakeups.subscribe("orders");
/// assert_eq!(wakeups.demand().await.subscribe, ["orders"]);
/// assert_eq!(wakeups.notify(&"orders"), 1);
/// subscription.notified().await;
/// # }
/// ```
pub struct Wakeups<K: Hash + Eq + Clone> {
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

/// The supervisor's view of the topics.
struct Upstream<K> {
    /// Topics that it was asked to subscribe to.
    subscribed: HashSet<K>,
    /// Topics for the next demand: new ones, and subscribed ones that lost their last subscription.
    touched: HashSet<K>,
}

/// The topics that the supervisor has to subscribe to, and to unsubscribe from.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Demand<K> {
    /// Topics that got their first subscription.
    pub subscribe: Vec<K>,
    /// Topics that lost their last subscription.
    pub unsubscribe: Vec<K>,
}

impl<K: Hash + Eq + Clone> Wakeups<K> {
    /// Creates wake-ups whose topics a supervisor subscribes to upstream, see [`demand`](Self::demand).
    #[must_use]
    pub fn new() -> Self {
        Self::with_upstream(Some(Upstream { subscribed: HashSet::new(), touched: HashSet::new() }))
    }

    /// Creates wake-ups that only come from this process. There is never a demand.
    #[must_use]
    pub fn local() -> Self {
        Self::with_upstream(None)
    }

    fn with_upstream(upstream: Option<Upstream<K>>) -> Self {
        let state = State { topics: HashMap::new(), upstream };
        Self { inner: Arc::new(Inner { state: Mutex::new(state), demand: Notify::new() }) }
    }

    /// Subscribes to a topic until the subscription is dropped.
    #[must_use]
    pub fn subscribe(&self, topic: K) -> Subscription<K> {
        let notify = Arc::new(Notify::new());
        let mut state = self.inner.state();
        // Most topics have one subscription, and a process may have thousands of topics.
        let subscriptions = state.topics.entry(topic.clone()).or_insert_with(|| Vec::with_capacity(1));
        subscriptions.push(Arc::clone(&notify));
        if subscriptions.len() == 1 {
            self.inner.touch(state, &topic);
        }
        Subscription { inner: Arc::clone(&self.inner), topic, notify }
    }

    /// Wakes all subscriptions of a topic, and returns how many there are.
    pub fn notify(&self, topic: &K) -> usize {
        let state = self.inner.state();
        let subscriptions = state.topics.get(topic).map_or(&[][..], Vec::as_slice);
        subscriptions.iter().for_each(|notify| notify.notify_one());
        subscriptions.len()
    }

    /// Wakes every subscription, as after a reconnect: any message may have been missed.
    pub fn notify_all(&self) {
        let state = self.inner.state();
        state.topics.values().flatten().for_each(|notify| notify.notify_one());
    }

    /// Waits until a topic has to be subscribed to or unsubscribed from upstream, and returns all such topics.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing: the next one returns the same topics.
    pub async fn demand(&self) -> Demand<K> {
        loop {
            let notified = self.inner.demand.notified();
            if let Some(demand) = self.inner.state().take_demand() {
                return demand;
            }
            notified.await;
        }
    }

    /// Returns all topics with a subscription, to subscribe to after a reconnect. The current demand is part of them.
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
            // A topic that was dropped and needed again between two demands needs nothing.
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
    /// Notes that a topic got its first or lost its last subscription, and wakes the supervisor.
    fn touch(&self, mut state: MutexGuard<'_, State<K>>, topic: &K) {
        let State { topics, upstream: Some(upstream) } = &mut *state else { return };
        if !topics.contains_key(topic) && !upstream.subscribed.contains(topic) {
            // The next demand would leave it out, but may never come: a backend may have no connection for messages.
            upstream.touched.remove(topic);
            return;
        }
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

impl<K: Hash + Eq + Clone> Clone for Wakeups<K> {
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<K: Hash + Eq + Clone> Default for Wakeups<K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<K: Hash + Eq + Clone> fmt::Debug for Wakeups<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wakeups").field("topics", &self.inner.state().topics.len()).finish_non_exhaustive()
    }
}

/// A subscription of one session to a topic.
pub struct Subscription<K: Hash + Eq + Clone> {
    inner: Arc<Inner<K>>,
    topic: K,
    notify: Arc<Notify>,
}

impl<K: Hash + Eq + Clone> Subscription<K> {
    /// Completes at the next wake-up, or at once if one came since the last call.
    ///
    /// # Cancel safety
    ///
    /// A dropped call keeps the wake-up for the next one.
    pub fn notified(&mut self) -> impl Future<Output = ()> + Send {
        // Not an async function, which would keep a second reference for every session that waits.
        self.notify.notified()
    }

    /// Wakes this subscription alone, as a backend does once its topic is confirmed upstream.
    pub fn notify(&self) {
        self.notify.notify_one();
    }
}

impl<K: Hash + Eq + Clone> Drop for Subscription<K> {
    fn drop(&mut self) {
        let mut state = self.inner.state();
        let Some(subscriptions) = state.topics.get_mut(&self.topic) else { return };
        subscriptions.retain(|notify| !Arc::ptr_eq(notify, &self.notify));
        if subscriptions.is_empty() {
            state.topics.remove(&self.topic);
            self.inner.touch(state, &self.topic);
        }
    }
}

impl<K: Hash + Eq + Clone> fmt::Debug for Subscription<K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Subscription").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn first_subscription_subscribes_upstream_and_last_one_unsubscribes() {
        let wakeups = Wakeups::<&str>::new();
        let (one, two) = (wakeups.subscribe("a"), wakeups.subscribe("a"));
        assert_eq!(wakeups.demand().await.subscribe, ["a"]);
        drop(one);
        assert!(wakeups.demand().now_or_never().is_none(), "one subscription is left");
        drop(two);
        assert_eq!(wakeups.demand().await.unsubscribe, ["a"]);
    }

    #[tokio::test]
    async fn topic_that_is_dropped_before_the_next_demand_is_not_part_of_it() {
        let wakeups = Wakeups::<&str>::new();
        drop(wakeups.subscribe("a"));
        assert!(wakeups.demand().now_or_never().is_none());
    }

    #[tokio::test]
    async fn topic_that_is_dropped_and_needed_again_before_the_next_demand_is_subscribed_to_once() {
        let wakeups = Wakeups::<&str>::new();
        drop(wakeups.subscribe("a"));
        let subscription = wakeups.subscribe("a");
        assert_eq!(wakeups.demand().await.subscribe, ["a"]);
        drop(subscription);
        let _subscription = wakeups.subscribe("a");
        assert!(wakeups.demand().now_or_never().is_none(), "it is still subscribed to");
    }

    #[test]
    fn dropped_subscriptions_leave_no_topic_behind() {
        let (local, upstream) = (Wakeups::local(), Wakeups::new());
        for wakeups in [local, upstream] {
            drop((0..100).map(|topic| wakeups.subscribe(topic)).collect::<Vec<_>>());
            let state = wakeups.inner.state();
            assert_eq!(state.topics.len(), 0);
            // A handle without a connection for messages never awaits the demand.
            assert!(state.upstream.as_ref().is_none_or(|upstream| upstream.touched.is_empty()));
        }
    }

    #[tokio::test]
    async fn wake_up_is_kept_and_reaches_its_topic_only() {
        let wakeups = Wakeups::<&str>::new();
        let (mut a, mut b) = (wakeups.subscribe("a"), wakeups.subscribe("b"));
        assert_eq!((wakeups.notify(&"a"), wakeups.notify(&"c")), (1, 0));
        a.notified().await;
        assert!(b.notified().now_or_never().is_none());
        wakeups.notify_all();
        b.notified().await;
    }

    #[tokio::test]
    async fn resubscribe_returns_every_topic_once() {
        let wakeups = Wakeups::<&str>::new();
        let _subscriptions = [wakeups.subscribe("a"), wakeups.subscribe("a"), wakeups.subscribe("b")];
        let mut topics = wakeups.resubscribe();
        topics.sort_unstable();
        assert_eq!(topics, ["a", "b"]);
        assert!(wakeups.demand().now_or_never().is_none(), "the demand is covered");
    }
}
