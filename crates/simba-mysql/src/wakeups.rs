//! The sessions of this process that wait for a mutex or observe it, and which of them to notify.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::spi::Intent;
use simba_core::{Moment, MutexName};
use tokio::sync::Notify;

use crate::fairness::LocalHandoverLimit;
use crate::poll::{FAST_PERIOD, Plan};
use crate::row::{Row, RowsByName};

/// The maximum number of mutexes whose free version is remembered.
const MAX_FREE: usize = 4_096;

/// The waiters and watchers of one handle.
#[derive(Debug)]
pub(crate) struct Wakeups {
    interval: Duration,
    state: Mutex<State>,
    /// Signals a change that the poller has to plan for.
    pub(crate) plan_changed: Notify,
}

#[derive(Debug)]
struct State {
    topics: HashMap<MutexName, Topic>,
    /// The versions at which mutexes were last seen free: the next take needs no read before it.
    free_versions: HashMap<MutexName, u64>,
    fast_until: Moment,
}

/// One mutex with waiters or watchers in this process.
#[derive(Debug)]
struct Topic {
    /// The waiters in the order of their arrival.
    queue: VecDeque<Arc<Subscriber>>,
    watchers: Vec<Arc<Subscriber>>,
    last: Option<Observed>,
    /// The position in the queue of the waiter to notify next while the mutex stays free.
    next_waiter: usize,
    /// The end of the owner's lease, unless it is renewed.
    ends_at: Option<Moment>,
    handover_limit: LocalHandoverLimit,
    /// The last owner that is a session of this process.
    local_owner: Option<String>,
}

/// The state of a mutex at a poll.
#[derive(Clone, Debug)]
struct Observed {
    /// The owner and the time since which it holds the mutex.
    owner: Option<(String, u64)>,
    /// The version, if there is a row.
    version: Option<u64>,
}

impl Observed {
    fn of(row: Option<&Row>) -> Self {
        let held = row.filter(|row| row.is_held());
        let owner = held.map(|row| (row.owner.clone(), row.acquired_at));
        Self { owner, version: row.map(|row| row.version) }
    }

    /// Returns whether `later` is the same state, apart from a renewal.
    ///
    /// Our renewals keep `acquired_at`. JVM peers rewrite it, but a renewal is one write, while a release and
    /// a take by the same owner are two. A mutex that is free at another version was held between two polls.
    fn is_same_tenure(&self, later: &Self) -> bool {
        match (&self.owner, &later.owner) {
            (None, None) => self.version == later.version,
            (Some((owner, since)), Some((now, at))) => {
                owner == now
                    && (since == at
                        || self.version.and_then(|version| version.checked_add(1)) == later.version)
            }
            _ => false,
        }
    }
}

/// The notification state of one session.
#[derive(Debug, Default)]
struct Subscriber {
    notify: Notify,
    /// Whether the session has not used its last notification yet.
    is_unused: AtomicBool,
}

impl Wakeups {
    pub(crate) fn new(interval: Duration) -> Arc<Self> {
        let state = State { topics: HashMap::new(), free_versions: HashMap::new(), fast_until: Moment::ZERO };
        Arc::new(Self { interval, state: Mutex::new(state), plan_changed: Notify::new() })
    }

    /// Subscribes until the subscription is dropped. A session that queues waits for its turn, another observes every
    /// change of owner.
    pub(crate) fn subscribe(
        self: &Arc<Self>,
        mutex: &MutexName,
        intent: Intent,
        now: Moment,
    ) -> Subscription {
        let subscriber = Arc::<Subscriber>::default();
        let mut state = self.state();
        let topic = state.topics.entry(mutex.clone()).or_insert_with(|| Topic::new(self.interval));
        match intent {
            Intent::Queue => topic.queue.push_back(Arc::clone(&subscriber)),
            _ => topic.watchers.push(Arc::clone(&subscriber)),
        }
        // Most mutexes are held for a short time.
        state.expect_release(now);
        drop(state);
        self.plan_changed.notify_one();
        Subscription { wakeups: Arc::clone(self), mutex: mutex.clone(), subscriber }
    }

    /// Returns when to poll; `None` without subscribers.
    pub(crate) fn plan(&self, now: Moment) -> Option<Plan> {
        let mut state = self.state();
        if state.topics.is_empty() {
            return None;
        }
        let events =
            state.topics.values().flat_map(|topic| [topic.ends_at, topic.handover_limit.paused_until()]);
        let (past, coming): (Vec<_>, Vec<_>) = events.flatten().partition(|at| *at <= now);
        let fast_until = past.into_iter().map(|end| end + FAST_PERIOD).fold(state.fast_until, Moment::max);
        state.fast_until = fast_until;
        Some(Plan { fast_until, wake_at: coming.into_iter().min() })
    }

    /// Returns the mutexes to poll.
    pub(crate) fn topics(&self) -> Vec<MutexName> {
        self.state().topics.keys().cloned().collect()
    }

    /// Processes the rows that a poll of `asked` found at `now`, and notifies waiters and watchers.
    pub(crate) fn polled(&self, asked: &[MutexName], rows: &[Row], now: Moment) {
        let by_name = RowsByName::new(rows);
        let state = &mut *self.state();
        for mutex in asked {
            let Some(topic) = state.topics.get_mut(mutex) else { continue };
            let row = by_name.row(mutex);
            let has_changed = topic.update(row, now);
            if topic.queue.is_empty() {
                continue;
            }
            if has_changed {
                state.expect_release(now);
            }
            if let Some(row) = row.filter(|row| row.is_free()) {
                state.note_free(mutex, row.version);
            }
        }
    }

    /// Records that a session of this process owns the mutex.
    pub(crate) fn acquired(&self, mutex: &MutexName, owner: &str) {
        if let Some(topic) = self.state().topics.get_mut(mutex) {
            topic.local_owner = Some(owner.to_owned());
            topic.next_waiter = 0;
        }
    }

    /// Records that a session of this process freed the mutex, which left this version. Notifies the next waiter of this
    /// process, unless hand-overs are paused for the benefit of other processes.
    pub(crate) fn released(&self, mutex: &MutexName, version: u64, now: Moment) {
        let state = &mut *self.state();
        state.note_free(mutex, version);
        let Some(topic) = state.topics.get_mut(mutex) else { return };
        topic.last = Some(Observed { owner: None, version: Some(version) });
        topic.ends_at = None;
        topic.watchers.iter().for_each(|subscriber| subscriber.notify());
        if topic.queue.is_empty() {
            return;
        }
        topic.next_waiter = 0;
        if topic.handover_limit.allow(now) {
            topic.notify_next();
        }
        state.expect_release(now);
        self.plan_changed.notify_one();
    }

    /// Returns the version at which this handle last saw the mutex free, and forgets it.
    pub(crate) fn take_free_version(&self, mutex: &MutexName) -> Option<u64> {
        self.state().free_versions.remove(mutex)
    }

    /// Notifies all subscribers: after a reconnect any change may have been missed.
    pub(crate) fn notify_all(&self) {
        let state = self.state();
        state.topics.values().flat_map(Topic::subscribers).for_each(|subscriber| subscriber.notify());
    }

    fn unsubscribe(&self, mutex: &MutexName, subscriber: &Arc<Subscriber>) {
        let mut state = self.state();
        let Some(topic) = state.topics.get_mut(mutex) else { return };
        topic.watchers.retain(|other| !Arc::ptr_eq(other, subscriber));
        let before = topic.queue.len();
        topic.queue.retain(|other| !Arc::ptr_eq(other, subscriber));
        // Pass an unused notification on to the next waiter.
        if subscriber.is_unused.load(Ordering::Relaxed) && topic.queue.len() < before {
            topic.next_waiter = 0;
            topic.notify_next();
        }
        if topic.queue.is_empty() && topic.watchers.is_empty() {
            state.topics.remove(mutex);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Polls fast for a while: a release is expected.
    fn expect_release(&mut self, now: Moment) {
        self.fast_until = self.fast_until.max(now + FAST_PERIOD);
    }

    fn note_free(&mut self, mutex: &MutexName, version: u64) {
        if self.free_versions.len() >= MAX_FREE {
            self.free_versions.clear();
        }
        self.free_versions.insert(mutex.clone(), version);
    }
}

impl Topic {
    fn new(interval: Duration) -> Self {
        Self {
            queue: VecDeque::new(),
            watchers: Vec::new(),
            last: None,
            next_waiter: 0,
            ends_at: None,
            handover_limit: LocalHandoverLimit::new(interval),
            local_owner: None,
        }
    }

    fn subscribers(&self) -> impl Iterator<Item = &Arc<Subscriber>> {
        self.queue.iter().chain(&self.watchers)
    }

    /// Notifies the subscribers that this row affects; returns whether the tenure has changed since the last poll.
    fn update(&mut self, row: Option<&Row>, now: Moment) -> bool {
        let held = row.filter(|row| row.is_held());
        let observed = Observed::of(row);
        let changed = self.last.as_ref().is_some_and(|last| !last.is_same_tenure(&observed));
        // Changes before the first poll are as unknown as changes since the last one.
        if changed || self.last.is_none() {
            self.watchers.iter().for_each(|subscriber| subscriber.notify());
        }
        if held.is_some_and(|row| self.local_owner.as_deref() != Some(&row.owner)) {
            self.handover_limit.reset();
        }
        self.last = Some(observed);
        self.ends_at = held.map(|row| now + row.remaining());
        match row {
            Some(row) if !row.is_free() => self.next_waiter = 0,
            _ if self.handover_limit.is_paused(now) => {}
            _ => self.notify_next(),
        }
        changed
    }

    /// Notifies the first waiter in the queue that was not notified since the mutex became free.
    fn notify_next(&mut self) {
        if self.queue.is_empty() {
            return;
        }
        self.queue[self.next_waiter % self.queue.len()].notify();
        self.next_waiter += 1;
    }
}

impl Subscriber {
    fn notify(&self) {
        self.is_unused.store(true, Ordering::Relaxed);
        self.notify.notify_one();
    }
}

/// One session's subscription. Dropping it leaves the queue and passes an unused notification on.
#[derive(Debug)]
pub(crate) struct Subscription {
    wakeups: Arc<Wakeups>,
    mutex: MutexName,
    subscriber: Arc<Subscriber>,
}

impl Subscription {
    /// Waits for the next notification; returns immediately if one came since the last call.
    ///
    /// # Cancel safety
    ///
    /// A notification is kept for the next call.
    pub(crate) async fn notified(&self) {
        self.subscriber.notify.notified().await;
    }

    /// Marks the notification as used: the session reads the row now.
    pub(crate) fn mark_used(&self) {
        self.subscriber.is_unused.store(false, Ordering::Relaxed);
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.wakeups.unsubscribe(&self.mutex, &self.subscriber);
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::task::{Context, Poll, Waker};

    use super::*;

    const INTERVAL: Duration = Duration::from_millis(250);

    fn at(ms: u64) -> Moment {
        Moment::ZERO + Duration::from_millis(ms)
    }

    fn name(name: &str) -> MutexName {
        MutexName::new(name).unwrap()
    }

    fn free(mutex: &str, version: u64) -> Row {
        Row::from((mutex.into(), 0, 0, 0, String::new(), version, 1_000))
    }

    fn held(mutex: &str, owner: &str, acquired_at: u64) -> Row {
        held_at(mutex, owner, acquired_at, 9)
    }

    fn held_at(mutex: &str, owner: &str, acquired_at: u64, version: u64) -> Row {
        Row::from((mutex.into(), acquired_at, 1_500, 2_000, owner.into(), version, 1_000))
    }

    fn is_notified(subscription: &Subscription) -> bool {
        pin!(subscription.notified()).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    fn two_waiters() -> (Arc<Wakeups>, Subscription, Subscription) {
        let wakeups = Wakeups::new(INTERVAL);
        let first = wakeups.subscribe(&name("m"), Intent::Queue, at(0));
        let second = wakeups.subscribe(&name("m"), Intent::Queue, at(0));
        (wakeups, first, second)
    }

    #[test]
    fn a_free_mutex_notifies_the_first_waiter_and_at_the_next_poll_the_second() {
        let (wakeups, first, second) = two_waiters();
        let asked = [name("m")];
        wakeups.polled(&asked, &[free("m", 7)], at(0));
        assert!(is_notified(&first) && !is_notified(&second));
        assert_eq!(wakeups.take_free_version(&name("m")), Some(7));
        wakeups.polled(&asked, &[free("m", 7)], at(25));
        assert!(is_notified(&second) && !is_notified(&first));
    }

    #[test]
    fn a_held_mutex_notifies_no_waiter() {
        let (wakeups, first, second) = two_waiters();
        wakeups.polled(&[name("m")], &[held("m", "x", 1)], at(0));
        assert!(!is_notified(&first) && !is_notified(&second));
    }

    #[test]
    fn an_unused_notification_is_passed_on() {
        let (wakeups, first, second) = two_waiters();
        wakeups.polled(&[name("m")], &[free("m", 7)], at(0));
        drop(first);
        assert!(is_notified(&second));
        assert_eq!(wakeups.take_free_version(&name("m")), Some(7));
    }

    #[test]
    fn a_used_notification_is_not_passed_on() {
        let (wakeups, first, second) = two_waiters();
        wakeups.polled(&[name("m")], &[free("m", 7)], at(0));
        first.mark_used();
        drop(first);
        assert!(!is_notified(&second));
    }

    #[test]
    fn watchers_are_notified_of_every_tenure_and_of_no_renewal() {
        let wakeups = Wakeups::new(INTERVAL);
        let watcher = wakeups.subscribe(&name("m"), Intent::Observe, at(0));
        let notified = |row: Row| {
            wakeups.polled(&[name("m")], &[row], at(0));
            is_notified(&watcher)
        };
        assert!(notified(held("m", "x", 1)), "changes before the first poll are unknown");
        assert!(!notified(held("m", "x", 1)));
        assert!(notified(held("m", "x", 2)), "the same owner acquired again");
        assert!(notified(held("m", "y", 3)));
        assert!(notified(free("m", 9)));
        assert!(!notified(free("m", 9)));
        assert!(notified(free("m", 11)), "it was held and released between two polls");
    }

    #[test]
    fn renewals_by_jvm_peers_notify_no_watcher_and_speed_up_no_poll() {
        let (wakeups, _first, _second) = two_waiters();
        let watcher = wakeups.subscribe(&name("m"), Intent::Observe, at(0));
        let poll = |row: Row, now: u64| {
            wakeups.polled(&[name("m")], &[row], at(now));
            (is_notified(&watcher), wakeups.plan(at(now)).unwrap().fast_until)
        };
        poll(held_at("m", "jvm", 1, 9), 0);
        let (_, slow) = poll(held_at("m", "jvm", 1, 9), 2_000);
        // JVM peers set `acquired_at` anew with every renewal.
        assert_eq!(poll(held_at("m", "jvm", 2, 10), 2_500), (false, slow));
        assert!(poll(held_at("m", "jvm", 3, 12), 2_600).0, "the same owner released and acquired again");
    }

    #[test]
    fn a_local_release_notifies_the_next_local_waiter_up_to_the_limit() {
        let (wakeups, first, _second) = two_waiters();
        for round in 0..4 {
            wakeups.released(&name("m"), round, at(round));
            assert!(is_notified(&first));
        }
        wakeups.released(&name("m"), 4, at(4));
        wakeups.polled(&[name("m")], &[free("m", 4)], at(5));
        assert!(!is_notified(&first), "hand-overs are paused for one interval");
        wakeups.polled(&[name("m")], &[free("m", 4)], at(255));
        assert!(is_notified(&first));
    }

    #[test]
    fn a_name_in_another_case_is_found() {
        let wakeups = Wakeups::new(INTERVAL);
        let subscription = wakeups.subscribe(&name("Job"), Intent::Queue, at(0));
        wakeups.polled(&[name("Job")], &[held("job", "x", 1)], at(0));
        assert!(!is_notified(&subscription));
        wakeups.polled(&[name("Job")], &[free("JOB", 1)], at(0));
        assert!(is_notified(&subscription));
    }

    #[test]
    fn without_subscribers_there_is_no_plan() {
        let (wakeups, first, second) = two_waiters();
        assert!(wakeups.plan(at(0)).is_some());
        drop((first, second));
        assert!(wakeups.plan(at(0)).is_none() && wakeups.topics().is_empty());
    }

    #[test]
    fn the_end_of_a_lease_is_planned_for() {
        let (wakeups, _first, _second) = two_waiters();
        wakeups.polled(&[name("m")], &[held("m", "x", 1)], at(0));
        assert_eq!(wakeups.plan(at(0)).unwrap().wake_at, Some(at(1_001)));
        assert_eq!(wakeups.plan(at(1_001)).unwrap().fast_until, at(1_001) + FAST_PERIOD);
    }
}
