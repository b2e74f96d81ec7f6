//! The sessions of this process that wait for a mutex or watch it, and which of them to wake.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Moment, MutexName};
use tokio::sync::Notify;

use crate::courtesy::Courtesy;
use crate::pace::{BURST, Plan};
use crate::row::Row;

/// Who waits and who watches, for one handle.
#[derive(Debug)]
pub(crate) struct Waiters {
    interval: Duration,
    state: Mutex<State>,
    /// Something changed that the poller has to plan for.
    demand: Notify,
}

#[derive(Debug)]
struct State {
    topics: HashMap<MutexName, Topic>,
    fast_until: Moment,
}

/// One mutex that somebody here waits for or watches.
#[derive(Debug)]
struct Topic {
    /// In the order in which they came.
    queue: VecDeque<Arc<Bell>>,
    watchers: Vec<Arc<Bell>>,
    last: Option<Seen>,
    /// Whose turn it is to be woken while the mutex stays free.
    turn: usize,
    /// When the owner's lease ends, unless it is renewed.
    ends_at: Option<Moment>,
    courtesy: Courtesy,
    /// The last owner that is a session of this process.
    local: Option<String>,
}

/// What a look found.
#[derive(Clone, Debug)]
enum Seen {
    /// The version, if there is a row.
    Free(Option<u64>),
    Held {
        owner: String,
        acquired_at: u64,
        version: u64,
    },
}

impl Seen {
    fn of(row: Option<&Row>) -> Self {
        match row.filter(|row| row.is_held()) {
            Some(Row { owner, acquired_at, version, .. }) => {
                Self::Held { owner: owner.clone(), acquired_at: *acquired_at, version: *version }
            }
            None => Self::Free(row.map(|row| row.version)),
        }
    }

    /// Returns whether a renewal, or nothing at all, leads from here to `later`.
    ///
    /// Our renewals keep `acquired_at`. JVM peers rewrite it, but a renewal is one write, while a release and a take by
    /// the same owner are two. A mutex that is free at another version was held between two looks.
    fn goes_on_as(&self, later: &Self) -> bool {
        match (self, later) {
            (Self::Free(before), Self::Free(after)) => before == after,
            (
                Self::Held { owner, acquired_at, version },
                Self::Held { owner: now, acquired_at: since, version: after },
            ) => owner == now && (acquired_at == since || version.checked_add(1) == Some(*after)),
            _ => false,
        }
    }
}

/// What wakes one session.
#[derive(Debug)]
struct Bell {
    notify: Notify,
    /// Woken, and not looked since.
    rung: AtomicBool,
    /// The version at which the mutex was free, plus one; 0 if none is known.
    offer: AtomicU64,
}

/// Why a session listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ask {
    /// It wants its turn.
    Turn,
    /// It wants to see every change of owner.
    Changes,
}

impl Waiters {
    pub(crate) fn new(interval: Duration) -> Arc<Self> {
        let state = State { topics: HashMap::new(), fast_until: Moment::ZERO };
        Arc::new(Self { interval, state: Mutex::new(state), demand: Notify::new() })
    }

    /// Listens until the ear is dropped.
    pub(crate) fn listen(self: &Arc<Self>, mutex: &MutexName, ask: Ask, now: Moment) -> Ear {
        let bell = Arc::new(Bell::new());
        let mut state = self.state();
        let topic = state.topics.entry(mutex.clone()).or_insert_with(|| Topic::new(self.interval));
        match ask {
            Ask::Turn => topic.queue.push_back(Arc::clone(&bell)),
            Ask::Changes => topic.watchers.push(Arc::clone(&bell)),
        }
        // Most mutexes are held for a moment.
        state.expect(now);
        drop(state);
        self.demand.notify_one();
        Ear { waiters: Arc::clone(self), mutex: mutex.clone(), bell }
    }

    /// Waits until the plan may have changed.
    ///
    /// # Cancel safety
    ///
    /// A change is kept for the next call.
    pub(crate) async fn demand(&self) {
        self.demand.notified().await;
    }

    /// What to look at, and when; `None` while nobody listens.
    pub(crate) fn plan(&self, now: Moment) -> Option<Plan> {
        let mut state = self.state();
        if state.topics.is_empty() {
            return None;
        }
        let events = state.topics.values().flat_map(|topic| [topic.ends_at, topic.courtesy.rest_until()]);
        let (past, coming): (Vec<_>, Vec<_>) = events.flatten().partition(|at| *at <= now);
        let fast_until = past.into_iter().map(|end| end + BURST).fold(state.fast_until, Moment::max);
        state.fast_until = fast_until;
        Some(Plan { fast_until, wake_at: coming.into_iter().min() })
    }

    /// The mutexes to look at.
    pub(crate) fn topics(&self) -> Vec<MutexName> {
        self.state().topics.keys().cloned().collect()
    }

    /// A look at `asked` found these rows, at `now`. Wakes who has to know.
    pub(crate) fn saw(&self, asked: &[MutexName], rows: &[Row], now: Moment) {
        let found = Found::new(rows);
        let state = &mut *self.state();
        for mutex in asked {
            let Some(topic) = state.topics.get_mut(mutex) else { continue };
            if topic.saw(found.row(mutex), now) && !topic.queue.is_empty() {
                state.fast_until = state.fast_until.max(now + BURST);
            }
        }
    }

    /// A session of this process owns the mutex from now on.
    pub(crate) fn took(&self, mutex: &MutexName, owner: &str) {
        if let Some(topic) = self.state().topics.get_mut(mutex) {
            topic.local = Some(owner.to_owned());
            topic.turn = 0;
        }
    }

    /// A session of this process freed the mutex, which has this version since. Wakes the next one here,
    /// unless others are to have a chance.
    pub(crate) fn freed(&self, mutex: &MutexName, version: u64, now: Moment) {
        let state = &mut *self.state();
        let Some(topic) = state.topics.get_mut(mutex) else { return };
        topic.last = Some(Seen::Free(Some(version)));
        topic.ends_at = None;
        topic.watchers.iter().for_each(|bell| bell.ring(None));
        if topic.queue.is_empty() {
            return;
        }
        topic.turn = 0;
        if topic.courtesy.hand_on(now) {
            topic.wake_next(Some(version));
        }
        state.expect(now);
        self.demand.notify_one();
    }

    /// Wakes everyone, as after a reconnect, when anything may have been missed.
    pub(crate) fn ring_all(&self) {
        let state = self.state();
        state.topics.values().flat_map(Topic::bells).for_each(|bell| bell.ring(None));
    }

    fn leave(&self, mutex: &MutexName, bell: &Arc<Bell>) {
        let mut state = self.state();
        let Some(topic) = state.topics.get_mut(mutex) else { return };
        topic.watchers.retain(|other| !Arc::ptr_eq(other, bell));
        let before = topic.queue.len();
        topic.queue.retain(|other| !Arc::ptr_eq(other, bell));
        // A wake-up that was not used is for the next one.
        if topic.queue.len() < before && bell.rung.load(Ordering::Acquire) {
            topic.turn = 0;
            topic.wake_next(bell.offered());
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
    /// A release is expected from now on.
    fn expect(&mut self, now: Moment) {
        self.fast_until = self.fast_until.max(now + BURST);
    }
}

impl Topic {
    fn new(interval: Duration) -> Self {
        Self {
            queue: VecDeque::new(),
            watchers: Vec::new(),
            last: None,
            turn: 0,
            ends_at: None,
            courtesy: Courtesy::new(interval),
            local: None,
        }
    }

    fn bells(&self) -> impl Iterator<Item = &Arc<Bell>> {
        self.queue.iter().chain(&self.watchers)
    }

    /// Wakes who has to know of this row; returns whether the tenure is another than the last time.
    fn saw(&mut self, row: Option<&Row>, now: Moment) -> bool {
        let held = row.filter(|row| row.is_held());
        let seen = Seen::of(row);
        let changed = self.last.as_ref().is_some_and(|last| !last.goes_on_as(&seen));
        // What happened before the first look is as unknown as what happened since the last one.
        if changed || self.last.is_none() {
            self.watchers.iter().for_each(|bell| bell.ring(None));
        }
        if held.is_some_and(|row| self.local.as_deref() != Some(&row.owner)) {
            self.courtesy.another_came();
        }
        self.last = Some(seen);
        self.ends_at = held.map(|row| now + row.remaining());
        match row {
            Some(row) if !row.is_free() => self.turn = 0,
            _ if self.courtesy.rests(now) => {}
            row => self.wake_next(row.map(|row| row.version)),
        }
        changed
    }

    /// Wakes the longest waiting of those that were not woken since the mutex became free.
    fn wake_next(&mut self, version: Option<u64>) {
        if self.queue.is_empty() {
            return;
        }
        self.queue[self.turn % self.queue.len()].ring(version);
        self.turn += 1;
    }
}

impl Bell {
    fn new() -> Self {
        Self { notify: Notify::new(), rung: AtomicBool::new(false), offer: AtomicU64::new(0) }
    }

    fn ring(&self, version: Option<u64>) {
        self.offer.store(version.map_or(0, |version| version.saturating_add(1)), Ordering::Release);
        self.rung.store(true, Ordering::Release);
        self.notify.notify_one();
    }

    fn offered(&self) -> Option<u64> {
        self.offer.load(Ordering::Acquire).checked_sub(1)
    }
}

/// The rows of a look by name. The table may hold a name in another spelling than ours: in most collations
/// case makes no difference.
struct Found<'a> {
    exact: HashMap<&'a str, &'a Row>,
    folded: HashMap<String, &'a Row>,
}

impl<'a> Found<'a> {
    fn new(rows: &'a [Row]) -> Self {
        let exact = rows.iter().map(|row| (row.mutex.as_str(), row)).collect();
        let upper = |row: &&Row| row.mutex.chars().any(char::is_uppercase);
        let folded = rows.iter().filter(upper).map(|row| (row.mutex.to_lowercase(), row)).collect();
        Self { exact, folded }
    }

    fn row(&self, mutex: &MutexName) -> Option<&'a Row> {
        let folded = || {
            let name = mutex.as_str().to_lowercase();
            self.exact.get(name.as_str()).or_else(|| self.folded.get(&name)).copied()
        };
        self.exact.get(mutex.as_str()).copied().or_else(folded)
    }
}

/// One session's ear. Dropping it leaves the queue and passes an unused wake-up on.
#[derive(Debug)]
pub(crate) struct Ear {
    waiters: Arc<Waiters>,
    mutex: MutexName,
    bell: Arc<Bell>,
}

impl Ear {
    /// Completes at the next ring, or at once if one came since the last call.
    ///
    /// # Cancel safety
    ///
    /// A ring is kept for the next call.
    pub(crate) async fn rung(&self) {
        self.bell.notify.notified().await;
    }

    /// The session looks now. Gives the version at which the mutex was free, if that is why it was woken.
    pub(crate) fn answer(&self) -> Option<u64> {
        self.bell.rung.store(false, Ordering::Release);
        self.bell.offer.swap(0, Ordering::AcqRel).checked_sub(1)
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.waiters.leave(&self.mutex, &self.bell);
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

    fn is_rung(ear: &Ear) -> bool {
        pin!(ear.rung()).poll(&mut Context::from_waker(Waker::noop())) == Poll::Ready(())
    }

    fn two_waiters() -> (Arc<Waiters>, Ear, Ear) {
        let waiters = Waiters::new(INTERVAL);
        let first = waiters.listen(&name("m"), Ask::Turn, at(0));
        let second = waiters.listen(&name("m"), Ask::Turn, at(0));
        (waiters, first, second)
    }

    #[test]
    fn a_free_mutex_wakes_the_first_and_at_the_next_look_the_second() {
        let (waiters, first, second) = two_waiters();
        let asked = [name("m")];
        waiters.saw(&asked, &[free("m", 7)], at(0));
        assert!(is_rung(&first) && !is_rung(&second));
        assert_eq!(first.answer(), Some(7));
        waiters.saw(&asked, &[free("m", 7)], at(25));
        assert!(is_rung(&second) && !is_rung(&first));
    }

    #[test]
    fn a_held_mutex_wakes_nobody_who_waits() {
        let (waiters, first, second) = two_waiters();
        waiters.saw(&[name("m")], &[held("m", "x", 1)], at(0));
        assert!(!is_rung(&first) && !is_rung(&second));
    }

    #[test]
    fn a_wake_up_that_is_not_used_is_passed_on() {
        let (waiters, first, second) = two_waiters();
        waiters.saw(&[name("m")], &[free("m", 7)], at(0));
        drop(first);
        assert!(is_rung(&second));
        assert_eq!(second.answer(), Some(7));
    }

    #[test]
    fn a_wake_up_that_was_used_is_not() {
        let (waiters, first, second) = two_waiters();
        waiters.saw(&[name("m")], &[free("m", 7)], at(0));
        first.answer();
        drop(first);
        assert!(!is_rung(&second));
    }

    #[test]
    fn watchers_hear_of_every_tenure_and_of_no_renewal() {
        let waiters = Waiters::new(INTERVAL);
        let watcher = waiters.listen(&name("m"), Ask::Changes, at(0));
        let heard = |row: Row| {
            waiters.saw(&[name("m")], &[row], at(0));
            is_rung(&watcher)
        };
        assert!(heard(held("m", "x", 1)), "what happened before the first look is unknown");
        assert!(!heard(held("m", "x", 1)));
        assert!(heard(held("m", "x", 2)), "the same owner came again");
        assert!(heard(held("m", "y", 3)));
        assert!(heard(free("m", 9)));
        assert!(!heard(free("m", 9)));
        assert!(heard(free("m", 11)), "it was held and released between two looks");
    }

    #[test]
    fn renewals_by_jvm_peers_wake_no_watcher_and_speed_up_no_poll() {
        let (waiters, _first, _second) = two_waiters();
        let watcher = waiters.listen(&name("m"), Ask::Changes, at(0));
        let look = |row: Row, now: u64| {
            waiters.saw(&[name("m")], &[row], at(now));
            (is_rung(&watcher), waiters.plan(at(now)).unwrap().fast_until)
        };
        look(held_at("m", "jvm", 1, 9), 0);
        let (_, calm) = look(held_at("m", "jvm", 1, 9), 2_000);
        // They set `acquired_at` anew with every renewal.
        assert_eq!(look(held_at("m", "jvm", 2, 10), 2_500), (false, calm));
        assert!(look(held_at("m", "jvm", 3, 12), 2_600).0, "the same owner released and came again");
    }

    #[test]
    fn a_release_here_wakes_the_next_here_until_courtesy_ends() {
        let (waiters, first, _second) = two_waiters();
        for round in 0..4 {
            waiters.freed(&name("m"), round, at(round));
            assert!(is_rung(&first));
        }
        waiters.freed(&name("m"), 4, at(4));
        waiters.saw(&[name("m")], &[free("m", 4)], at(5));
        assert!(!is_rung(&first), "others have an interval");
        waiters.saw(&[name("m")], &[free("m", 4)], at(255));
        assert!(is_rung(&first));
    }

    #[test]
    fn a_name_in_another_case_is_found() {
        let waiters = Waiters::new(INTERVAL);
        let ear = waiters.listen(&name("Job"), Ask::Turn, at(0));
        waiters.saw(&[name("Job")], &[held("job", "x", 1)], at(0));
        assert!(!is_rung(&ear));
        waiters.saw(&[name("Job")], &[free("JOB", 1)], at(0));
        assert!(is_rung(&ear));
    }

    #[test]
    fn nobody_listens_no_plan() {
        let (waiters, first, second) = two_waiters();
        assert!(waiters.plan(at(0)).is_some());
        drop((first, second));
        assert!(waiters.plan(at(0)).is_none() && waiters.topics().is_empty());
    }

    #[test]
    fn the_end_of_a_lease_is_planned_for() {
        let (waiters, _first, _second) = two_waiters();
        waiters.saw(&[name("m")], &[held("m", "x", 1)], at(0));
        assert_eq!(waiters.plan(at(0)).unwrap().wake_at, Some(at(1_001)));
        assert_eq!(waiters.plan(at(1_001)).unwrap().fast_until, at(1_001) + BURST);
    }
}
