//! Contention: tenures, callbacks, stops and outages, on virtual time.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::collections::VecDeque;
use std::fmt;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use futures_util::{FutureExt, poll};
use simba_core::operate::EvictIf;
use simba_core::spi::{Answer, Backend, Claim, Holding, Operate, Ownership, Prior, Session, async_trait};
use simba_core::{
    Clock, Contender, ContenderId, Contention, ErrorKind, FencingToken, Loss, MemoryBackend, Moment,
    MutexOwner, MutexState, Result, Status, Tenure,
};
use simba_tck::{Call, FaultyBackend, Leg, Passage, SkewedClock, Switch, Weather};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use world::{
    CALL_LIMIT, DEADLINE, EXPIRING, LEASE, MUTEX, Peer, RELEASE_LIMIT, RENEWAL, TTL, WORK_DROPPED, World,
    WorldClock, handle, lease, ms, name, secs,
};

// ===== a contender that records its callbacks =====

#[derive(Clone, Debug)]
struct Callback {
    gained: bool,
    tenure: Tenure,
    state: MutexState,
    at: Moment,
    held: bool,
}

struct Recorder {
    callback: mpsc::UnboundedSender<Callback>,
    clock: Arc<dyn Clock>,
    /// The duration of each callback, in order. Later ones take no time.
    busy: VecDeque<Duration>,
}

/// The callbacks that a [`Recorder`] recorded.
struct Callbacks {
    callback: mpsc::UnboundedReceiver<Callback>,
    read: Vec<Callback>,
}

fn recorder(world: &World, busy: &[Duration]) -> (Recorder, Callbacks) {
    recorder_on(world.clock.clone(), busy)
}

fn recorder_on(clock: impl Clock, busy: &[Duration]) -> (Recorder, Callbacks) {
    let (callback, callbacks) = mpsc::unbounded_channel();
    let recorder = Recorder { callback, clock: Arc::new(clock), busy: busy.iter().copied().collect() };
    (recorder, Callbacks { callback: callbacks, read: Vec::new() })
}

impl Recorder {
    async fn record(&mut self, gained: bool, tenure: &Tenure, state: &MutexState) {
        let (tenure, state) = (tenure.clone(), state.clone());
        let (at, held) = (self.clock.now(), tenure.is_held());
        let _ = self.callback.send(Callback { gained, tenure, state, at, held });
        if let Some(busy) = self.busy.pop_front() {
            self.clock.sleep_until(self.clock.now() + busy).await;
        }
    }
}

impl Contender for Recorder {
    async fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) {
        self.record(true, tenure, state).await;
    }

    async fn on_released(&mut self, tenure: &Tenure, state: &MutexState) {
        self.record(false, tenure, state).await;
    }
}

impl Callbacks {
    /// Waits for the next callback.
    async fn next(&mut self) -> Callback {
        let callback = self.callback.recv().await.unwrap();
        self.read.push(callback.clone());
        callback
    }

    /// Waits for the next acquired.
    async fn acquired(&mut self) -> Callback {
        loop {
            let callback = self.next().await;
            if callback.gained {
                return callback;
            }
        }
    }

    /// Returns all tenures so far. Checks that each has one acquired and one released, in order, with the right states.
    fn pairs(&mut self) -> Vec<(Callback, Callback)> {
        while let Ok(callback) = self.callback.try_recv() {
            self.read.push(callback);
        }
        let pairs: Vec<_> = self.read.chunks(2).map(pair).collect();
        for two in pairs.windows(2) {
            assert!(two[0].0.tenure.token() < two[1].0.tenure.token(), "tokens increase");
            assert!(two[0].1.at <= two[1].0.at);
        }
        pairs
    }
}

fn pair(callbacks: &[Callback]) -> (Callback, Callback) {
    let [gained, lost] = callbacks else { panic!("an acquired without its released: {callbacks:?}") };
    assert!(gained.gained && !lost.gained, "out of order: {callbacks:?}");
    assert_eq!(gained.tenure.token(), lost.tenure.token(), "of the same tenure");
    assert!(gained.held, "acquired after the loss");
    assert!(gained.at <= lost.at);
    let id = gained.tenure.contender();
    assert_eq!(id, lost.tenure.contender());
    assert!(gained.state.is_acquired(id) && !gained.state.is_released(id), "{:?}", gained.state);
    assert!(gained.state.after.is_owner(id) && !gained.state.before.is_owner(id));
    assert_eq!(gained.state.after.token, Some(gained.tenure.token()));
    assert!(lost.state.is_released(id) && !lost.state.is_acquired(id), "{:?}", lost.state);
    assert!(lost.state.before.is_owner(id) && !lost.state.after.is_owner(id));
    (gained.clone(), lost.clone())
}

// ===== helpers =====

impl Peer {
    fn contend(&self) -> Contention {
        self.simba.contend(MUTEX)
    }

    fn start(&self) -> Contention {
        let contention = self.contend();
        contention.start().unwrap();
        contention
    }

    fn start_with(&self, contender: impl Contender) -> Contention {
        let contention = self.contend().with_contender(contender);
        contention.start().unwrap();
        contention
    }

    /// Starts a contention that records its callbacks, the first of which take `busy`.
    fn recorded(&self, world: &World, busy: &[Duration]) -> (Contention, Callbacks) {
        let (contender, callbacks) = recorder(world, busy);
        (self.start_with(contender), callbacks)
    }

    /// Starts a contention that reports all its callbacks, the first of which takes `busy`.
    fn phased(&self, world: &World, busy: Duration) -> (Contention, mpsc::UnboundedReceiver<Called>) {
        let (contender, calls) = phases(world.clock.clone(), busy);
        (self.start_with(contender), calls)
    }

    /// Starts a contention and waits until it leads.
    async fn lead(&self) -> (Contention, Tenure) {
        let contention = self.start();
        let tenure = contention.acquired().await.unwrap();
        (contention, tenure)
    }

    /// Starts a contention and waits until it is queued.
    async fn wait(&self, world: &World) -> Contention {
        let before = world.record().await.waiters.unwrap_or(0);
        let contention = self.start();
        world.queue_of(before + 1).await;
        contention
    }
}

fn until(world: &World, since: Moment) -> Duration {
    world.now() - since
}

/// A log that several tasks write to.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    fn lines(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

// ===== leading =====

#[tokio::test(start_paused = true)]
async fn leader_keeps_its_tenure_for_fifty_leases_without_expiring() {
    let (world, peer) = World::with_peer();
    let (contention, tenure) = peer.lead().await;
    timeout(50 * LEASE, tenure.expiring()).await.unwrap_err();
    assert!(tenure.is_held() && contention.is_owner() && contention.is_in_ttl());
    assert_eq!(contention.tenure().unwrap().token(), tenure.token());
    assert!(contention.state().is_acquired(tenure.contender()), "a renewal changes no owner");
    let record = world.record().await;
    assert_eq!((record.owner, record.token), (contention.id(), Some(tenure.token())));
    // One call acquired, and renewals follow every 360 to 400 ms.
    let calls = peer.switch.count(Call::Contend);
    assert!((1 + 50_000 / 400..=1 + 50_000 / 360).contains(&calls), "{calls} calls");
}

#[tokio::test(start_paused = true)]
async fn handle_returns_status_owner_state_and_windows() {
    let (world, one, two) = World::with_peers();
    let idle = one.contend();
    assert_eq!((idle.status(), idle.id(), idle.is_owner()), (Status::Idle, None, false));
    assert_eq!((idle.owner(), idle.state()), (MutexOwner::none(), MutexState::none()));
    assert!(idle.tenure().is_none() && idle.last_error().is_none() && !idle.is_in_ttl());

    let (leader, tenure) = one.lead().await;
    let follower = two.wait(&world).await;
    let (id, other) = (leader.id().unwrap(), follower.id().unwrap());
    assert_eq!((leader.status(), follower.status()), (Status::Running, Status::Running));
    assert!(leader.state().is_acquired(&id) && leader.owner().is_owner(&id));
    assert!(follower.owner().is_owner(&id) && !follower.is_owner() && !follower.is_in_ttl());
    assert_eq!(follower.owner().token, Some(tenure.token()));
    assert!(follower.owner().is_in_ttl(world.now()));

    leader.stop().await.unwrap();
    let second = follower.acquired().await.unwrap();
    assert_eq!((leader.status(), leader.owner()), (Status::Idle, MutexOwner::none()));
    assert!(leader.state().is_released(&id) && leader.tenure().is_none());
    assert!(follower.state().is_acquired(&other) && follower.is_owner() && follower.is_in_ttl());
    assert_eq!(second.contender(), &other);

    // Without renewals: in the ttl, then in the transition, then no owner.
    two.switch.set(Passage::HANG);
    let sent = second.deadline().saturating_sub(DEADLINE);
    let at = |after: Duration| world.clock.sleep_until(sent + after);
    at(TTL - ms(1)).await;
    assert_eq!((follower.is_owner(), follower.is_in_ttl()), (true, true));
    at(TTL).await;
    assert_eq!((follower.is_owner(), follower.is_in_ttl()), (true, false));
    at(DEADLINE - ms(1)).await;
    assert!(follower.is_owner() && follower.tenure().is_some());
    at(DEADLINE).await;
    assert!(!follower.is_owner() && follower.tenure().is_none() && !follower.is_in_ttl());
    assert_eq!(follower.status(), Status::Running, "it keeps contending");
}

#[tokio::test(start_paused = true)]
async fn failed_renewal_is_retried_and_ends_no_tenure() {
    let (_world, peer) = World::with_peer();
    let (contention, tenure) = peer.lead().await;
    for faults in 1..=20 {
        peer.switch.once(Call::Contend, Passage::fail(ErrorKind::Unavailable));
        while peer.switch.count(Call::Contend) < 2 * faults {
            let deadline = tenure.deadline();
            timeout(DEADLINE, tenure.lost()).await.unwrap_err();
            assert!(tenure.deadline() > deadline, "renewed");
        }
    }
    assert_eq!(contention.tenure().unwrap().token(), tenure.token());
}

#[tokio::test(start_paused = true)]
async fn outage_that_ends_before_the_deadline_ends_no_tenure() {
    let (world, peer) = World::with_peer();
    let (_contention, tenure) = peer.lead().await;
    for _ in 0..20 {
        // From just before a renewal until the last moment at which a retry is still in time.
        world.clock.sleep_until(tenure.deadline().saturating_sub(DEADLINE) + ms(359)).await;
        peer.switch.set(Passage::fail(ErrorKind::Unavailable));
        tenure.expiring().await;
        assert_eq!(world.now(), tenure.deadline().saturating_sub(DEADLINE - EXPIRING));
        sleep(ms(150)).await;
        peer.switch.clear();
        sleep(ms(50)).await;
        assert!(tenure.is_held() && !tenure.is_expiring(), "at {:?}", world.now());
    }
}

#[tokio::test(start_paused = true)]
async fn acquisition_with_a_lost_reply_is_adopted_with_its_token() {
    let (world, peer) = World::with_peer();
    peer.switch.once(Call::Contend, Passage::REPLY_LOST);
    let (_contention, tenure) = peer.lead().await;
    // One call that times out, and the first retry after 15 to 30 ms.
    assert!((CALL_LIMIT + ms(15)..=CALL_LIMIT + ms(30)).contains(&tenure.acquired_at().since_zero()));
    let record = world.record().await;
    assert_eq!((record.token, record.waiters), (Some(tenure.token()), Some(0)));
    assert_eq!(tenure.token().get(), 1, "the token of the lost reply");
}

// ===== callbacks =====

#[tokio::test(start_paused = true)]
async fn every_acquired_has_one_released_with_the_states_on_both_sides() {
    let (world, one, two) = World::with_peers();
    let (first, mut first_book) = recorder(&world, &[]);
    let (second, mut second_book) = recorder(&world, &[]);
    let (a, b) = (one.contend().with_contender(first), two.contend().with_contender(second));
    a.start().unwrap();
    first_book.next().await;
    b.start().unwrap();
    world.queue_of(1).await;
    for _ in 0..10 {
        a.stop().await.unwrap();
        second_book.next().await;
        a.start().unwrap();
        world.queue_of(1).await;
        b.step_down(Duration::ZERO);
        second_book.next().await;
        first_book.next().await;
        first_book.next().await;
        world.queue_of(1).await;
    }
    a.stop().await.unwrap();
    b.stop().await.unwrap();
    let (of_a, of_b) = (first_book.pairs(), second_book.pairs());
    assert_eq!((of_a.len(), of_b.len()), (11, 11));
    assert_eq!(of_a[0].0.state.before, MutexOwner::none(), "no owner before");
    for ((gained, _), (other, _)) in of_a[1..].iter().zip(&of_b) {
        assert!(gained.state.is_released(other.tenure.contender()), "after the other contender: {gained:?}");
    }
    assert!(of_b[0].0.state.is_released(of_a[0].0.tenure.contender()), "and vice versa");
    let ends: Vec<_> = of_b.iter().map(|(_, lost)| lost.tenure.loss().unwrap()).collect();
    assert_eq!(ends[..10], vec![Loss::SteppedDown; 10]);
    assert_eq!(ends[10], Loss::Released);
    assert!(of_a.iter().all(|(_, lost)| lost.tenure.loss() == Some(Loss::Released)));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn contender_is_notified_at_the_deadline_if_the_store_hangs() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[]);
    let tenure = callbacks.next().await.tenure;
    sleep(secs(3)).await;
    peer.switch.set(Passage::HANG);
    let deadline = tenure.deadline();
    let callback = callbacks.next().await;
    assert_eq!((callback.gained, callback.at, world.now()), (false, deadline, deadline));
    assert_eq!(tenure.loss(), Some(Loss::Deadline));
    peer.switch.clear();
    assert!(callbacks.next().await.gained, "it leads again");
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn evicted_contender_is_notified_at_its_next_renewal() {
    let (world, one, two) = World::with_peers();
    let (contention, mut callbacks) = one.recorded(&world, &[]);
    let first = callbacks.next().await.tenure;

    // Without a waiter it acquires the mutex again at once, as a new tenure.
    sleep(ms(100)).await;
    world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap();
    let callback = callbacks.next().await;
    assert_eq!(callback.tenure.loss(), Some(Loss::Vanished));
    assert!(callback.at <= first.acquired_at() + RENEWAL);
    let gained = callbacks.next().await;
    assert_eq!(gained.at, callback.at);
    assert!(gained.tenure.token() > first.token());

    // With a waiter, the waiter acquires it.
    let rival = two.wait(&world).await;
    world.store.evict(&name(MUTEX), EvictIf::Token(gained.tenure.token())).await.unwrap();
    let taken = rival.acquired().await.unwrap();
    let callback = callbacks.next().await;
    assert_eq!(callback.tenure.loss(), Some(Loss::TakenBy(taken.contender().clone())));
    assert!(callback.state.after.is_owner(taken.contender()), "the state names the new owner");
    assert!(callback.at <= gained.at + RENEWAL);
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
    assert!(taken.is_held(), "the stop of the old holder does not change it");
}

#[tokio::test(start_paused = true)]
async fn released_follows_an_acquired_that_takes_longer_than_its_tenure() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[secs(3)]);
    let tenure = callbacks.next().await.tenure;
    peer.switch.set(Passage::HANG);
    assert_eq!(tenure.lost().await, Loss::Deadline);
    assert_eq!(world.now(), tenure.acquired_at() + DEADLINE, "the callback delays no loss");
    let callback = callbacks.next().await;
    assert_eq!((callback.gained, callback.at), (false, tenure.acquired_at() + secs(3)));
    assert_eq!(callback.tenure.token(), tenure.token());
    peer.switch.clear();
    assert!(callbacks.next().await.gained);
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn tenure_that_begins_and_ends_during_a_callback_is_skipped() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[secs(10)]);
    let first = callbacks.next().await.tenure;
    let mut skipped = Vec::new();
    for _ in 0..2 {
        peer.switch.set(Passage::HANG);
        contention.tenure().unwrap().lost().await;
        peer.switch.clear();
        skipped.push(contention.acquired().await.unwrap().token());
    }
    let last = skipped.pop().unwrap();
    assert!(first.token() < skipped[0] && skipped[0] < last);
    assert!(world.now() < first.acquired_at() + secs(10), "all during the first callback");
    assert!(!callbacks.next().await.gained);
    assert_eq!(world.now(), first.acquired_at() + secs(10));
    assert_eq!(callbacks.next().await.tenure.token(), last, "the tenure in between is skipped");
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn tenure_that_ends_together_with_a_callback_is_skipped() {
    let world = World::new();
    let (clock, switch) = (SkewedClock::new(world.clock.clone()), Switch::new());
    let simba = world.handle(1, Arc::clone(&switch) as Arc<dyn Weather>, clock.clone());
    let (contender, mut callbacks) = recorder_on(clock.clone(), &[secs(10)]);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    let first = callbacks.next().await.tenure;
    switch.set(Passage::HANG);
    first.lost().await;
    switch.clear();
    let second = contention.acquired().await.unwrap();
    // The machine was suspended: callback and tenure have ended, but no task has noticed yet.
    clock.jump(secs(10));
    assert!(!second.is_held());
    assert!(!callbacks.next().await.gained);
    assert!(callbacks.next().await.tenure.token() > second.token());
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn row_61_callback_of_ten_leases_delays_no_renewal() {
    let (world, one, two) = World::with_peers();
    let (contention, mut callbacks) = one.recorded(&world, &[10 * LEASE]);
    let tenure = callbacks.next().await.tenure;
    let rival = two.wait(&world).await;
    timeout(10 * LEASE, tenure.expiring()).await.unwrap_err();
    assert!(tenure.is_held() && !rival.is_owner());
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 1);
}

/// Panics in its callbacks: before their futures are created, or in the futures.
struct Panicking {
    callback: mpsc::UnboundedSender<bool>,
    before_future: bool,
}

impl Panicking {
    fn panics(&self, gained: bool) -> impl Future<Output = ()> + Send + use<> {
        let (callback, before_future) = (self.callback.clone(), self.before_future);
        let _ = callback.send(gained);
        assert!(!before_future, "before the future");
        async move { panic!("in the future") }
    }
}

impl Contender for Panicking {
    fn on_acquired(&mut self, _: &Tenure, _: &MutexState) -> impl Future<Output = ()> + Send {
        self.panics(true)
    }

    fn on_released(&mut self, _: &Tenure, _: &MutexState) -> impl Future<Output = ()> + Send {
        self.panics(false)
    }
}

#[tokio::test(start_paused = true)]
async fn panic_in_a_callback_ends_neither_the_tenure_nor_the_callbacks() {
    for before_future in [false, true] {
        let (world, peer) = World::with_peer();
        let (callback, mut callbacks) = mpsc::unbounded_channel();
        let contention = peer.contend().with_contender(Panicking { callback, before_future });
        contention.start().unwrap();
        assert_eq!(callbacks.recv().await, Some(true));
        let tenure = contention.acquired().await.unwrap();
        timeout(3 * LEASE, tenure.expiring()).await.unwrap_err();
        contention.step_down(Duration::ZERO);
        assert_eq!(callbacks.recv().await, Some(false), "{before_future}");
        assert_eq!(callbacks.recv().await, Some(true), "{before_future}");
        contention.stop().await.unwrap();
        assert_eq!(callbacks.recv().await, Some(false), "{before_future}");
        world.assert_empty().await;
    }
}

// ===== the order of a graceful stop =====

/// Logs the start and the end of its callbacks.
struct Logging {
    name: &'static str,
    log: Log,
    clock: WorldClock,
}

impl Contender for Logging {
    async fn on_acquired(&mut self, _: &Tenure, _: &MutexState) {
        self.log.note(format!("{} acquired", self.name));
    }

    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        assert!(tenure.is_held(), "called before the mutex is freed");
        self.log.note(format!("{} releases", self.name));
        self.clock.sleep_until(self.clock.now() + ms(50)).await;
        self.log.note(format!("{} released", self.name));
    }
}

#[tokio::test(start_paused = true)]
async fn stop_ends_the_work_then_notifies_the_contender_then_frees_the_mutex() {
    for step_down in [false, true] {
        let (world, one, two) = World::with_peers();
        let log = Log::default();
        let logging = |name| Logging { name, log: log.clone(), clock: world.clock.clone() };
        let a = one.contend().with_contender(logging("a"));
        let b = two.contend().with_contender(logging("b"));
        a.start().unwrap();
        let first = a.acquired().await.unwrap();
        b.start().unwrap();
        world.queue_of(1).await;
        let (tenure, notes) = (first.clone(), log.clone());
        let work = tokio::spawn(async move {
            let work = async {
                notes.note("work starts");
                tenure.expiring().await;
                notes.note("work is notified");
                sleep(ms(100)).await;
                notes.note("work ended");
            };
            tenure.run(work).await
        });
        sleep(ms(100)).await;
        let requested = world.now();
        if step_down {
            a.step_down(secs(10));
            first.lost().await;
        } else {
            a.stop().await.unwrap();
        }
        assert_eq!(until(&world, requested), ms(150), "100 ms of work and 50 ms of callback");
        assert!(work.await.unwrap().is_ok(), "the work was not dropped");
        let second = b.acquired().await.unwrap();
        assert_eq!(second.acquired_at(), requested + ms(150), "no gap and no overlap");
        assert!(second.token() > first.token());
        b.stop().await.unwrap();
        let expected = [
            "a acquired",
            "work starts",
            "work is notified",
            "work ended",
            "a releases",
            "a released",
            "b acquired",
            "b releases",
            "b released",
        ];
        assert_eq!(log.lines(), expected);
    }
}

/// Sends the moment of its drop.
struct Dropped(Option<tokio::sync::oneshot::Sender<Moment>>, WorldClock);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.take().unwrap().send(self.1.now());
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_end_is_dropped_before_the_deadline_and_the_stop_continues() {
    let (world, one, two) = World::with_peers();
    let (contention, tenure) = one.lead().await;
    let rival = two.wait(&world).await;
    let (dropped, when) = tokio::sync::oneshot::channel();
    let witness = Dropped(Some(dropped), world.clock.clone());
    let under = tenure.clone();
    let work = tokio::spawn(async move {
        let work = async move {
            let _witness = witness;
            std::future::pending::<()>().await;
        };
        under.run(work).await
    });
    sleep(ms(100)).await;
    contention.stop().await.unwrap();
    assert_eq!(world.now(), tenure.acquired_at() + WORK_DROPPED);
    assert_eq!(when.await.unwrap(), tenure.acquired_at() + WORK_DROPPED);
    assert_eq!(work.await.unwrap().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(rival.acquired().await.unwrap().acquired_at(), tenure.acquired_at() + WORK_DROPPED);
}

#[tokio::test(start_paused = true)]
async fn stop_waits_for_a_callback_until_the_deadline() {
    for busy in [vec![secs(3600)], vec![Duration::ZERO, secs(3600)]] {
        let (world, peer) = World::with_peer();
        let (contention, mut callbacks) = peer.recorded(&world, &busy);
        let tenure = callbacks.next().await.tenure;
        sleep(ms(100)).await;
        contention.stop().await.unwrap();
        assert_eq!(world.now(), tenure.acquired_at() + DEADLINE);
        assert_eq!(tenure.loss(), Some(Loss::Deadline));
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn no_work_starts_once_the_end_is_announced() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[Duration::ZERO, ms(100)]);
    let tenure = callbacks.next().await.tenure;
    assert!(contention.stop().now_or_never().is_none());
    callbacks.next().await;
    assert!(tenure.is_held() && tenure.is_expiring());
    assert_eq!(tenure.run(async { panic!("started") }).await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(contention.acquired().now_or_never().is_none(), "the tenure is not returned any more");
    contention.stop().await.unwrap();
    assert_eq!(until(&world, tenure.acquired_at()), ms(100));
}

// ===== stopping in every state =====

#[tokio::test(start_paused = true)]
async fn stop_before_the_start_does_nothing() {
    let (world, peer) = World::with_peer();
    let contention = peer.contend();
    contention.stop().await.unwrap();
    contention.step_down(secs(1));
    assert_eq!(contention.status(), Status::Idle);
    contention.start().unwrap();
    contention.acquired().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO);
}

#[tokio::test(start_paused = true)]
async fn initial_delay_precedes_the_first_call_and_a_stop_ends_it() {
    let (world, peer) = World::with_peer();
    let (contender, mut callbacks) = recorder(&world, &[]);
    let contention = peer.contend().with_contender(contender).with_initial_delay(secs(5));
    contention.start().unwrap();
    sleep(ms(4999)).await;
    assert_eq!(contention.status(), Status::Running);
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + ms(4999));
    assert_eq!((peer.switch.count(Call::Open), contention.status()), (0, Status::Idle));
    assert!(callbacks.pairs().is_empty());

    contention.start().unwrap();
    let tenure = contention.acquired().await.unwrap();
    assert_eq!(tenure.acquired_at(), Moment::ZERO + ms(4999 + 5000));
}

#[tokio::test(start_paused = true)]
async fn stop_of_a_waiter_leaves_the_queue_at_once() {
    let (world, one, two) = World::with_peers();
    let (_leader, tenure) = one.lead().await;
    let (contention, mut callbacks) = two.recorded(&world, &[]);
    world.queue_of(1).await;
    sleep(ms(10)).await;
    contention.stop().await.unwrap();
    assert_eq!((world.now(), contention.status()), (Moment::ZERO + ms(10), Status::Idle));
    assert_eq!(world.record().await.waiters, Some(0));
    assert!(tenure.is_held() && callbacks.pairs().is_empty());
}

#[tokio::test(start_paused = true)]
async fn stop_during_a_callback_waits_for_both_callbacks() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[ms(300), ms(200)]);
    let tenure = callbacks.next().await.tenure;
    contention.stop().await.unwrap();
    assert_eq!(world.now(), tenure.acquired_at() + ms(500));
    assert_eq!(callbacks.pairs()[0].1.at, tenure.acquired_at() + ms(300));
    assert_eq!(tenure.loss(), Some(Loss::Released));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn stop_during_a_cooldown_ends_it_at_once() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[]);
    callbacks.next().await;
    contention.step_down(secs(100));
    callbacks.next().await;
    sleep(secs(1)).await;
    assert_eq!(contention.status(), Status::Running);
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + secs(1));
    assert_eq!(callbacks.pairs().len(), 1);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn stop_while_the_store_hangs_is_bounded_and_returns_the_error() {
    let (world, one, two) = World::with_peers();
    let (leader, mut callbacks) = one.recorded(&world, &[]);
    let tenure = callbacks.next().await.tenure;
    let follower = two.wait(&world).await;
    sleep(ms(100)).await;
    one.switch.set(Passage::HANG);
    two.switch.set(Passage::HANG);

    // Between two calls: only the release is retried.
    let requested = world.now();
    assert_eq!(leader.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(until(&world, requested) <= RELEASE_LIMIT && one.switch.count(Call::Release) >= 3);
    assert_eq!((leader.status(), tenure.loss()), (Status::Idle, Some(Loss::Released)));
    assert_eq!(leader.last_error().unwrap().kind(), ErrorKind::Unavailable);
    assert_eq!(callbacks.pairs()[0].1.at, requested);
    leader.stop().await.unwrap();
    assert_eq!(leader.acquired().await.unwrap_err().kind(), ErrorKind::Closed, "stopped anyway");

    // During a call: the stop waits for its time limit first.
    let calls = two.switch.calls();
    while two.switch.calls() == calls {
        sleep(ms(1)).await;
    }
    let requested = world.now();
    assert_eq!(follower.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let took = until(&world, requested);
    assert!(took > CALL_LIMIT && took <= CALL_LIMIT + RELEASE_LIMIT, "{took:?}");

    // The lease ends a hold that could not be released.
    let remaining = world.record().await.remaining.unwrap_or_default().max(2 * TTL);
    sleep(remaining).await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn stop_of_a_leader_during_a_hanging_call_is_bounded() {
    let (world, peer) = World::with_peer();
    let (leader, tenure) = peer.lead().await;
    peer.switch.set(Passage::HANG);
    world.clock.sleep_until(tenure.acquired_at() + RENEWAL + ms(1)).await;
    assert_eq!(peer.switch.count(Call::Contend), 2, "a renewal is in flight");
    let requested = world.now();
    assert_eq!(leader.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let took = until(&world, requested);
    assert!(took > CALL_LIMIT && took <= CALL_LIMIT + RELEASE_LIMIT, "{took:?}");
    assert_eq!(tenure.loss(), Some(Loss::Released));
}

#[tokio::test(start_paused = true)]
async fn stop_while_the_session_cannot_be_opened_is_bounded() {
    let (world, peer) = World::with_peer();
    peer.switch.set(Passage::HANG);
    let contention = peer.start();
    sleep(ms(50)).await;
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + CALL_LIMIT);
    assert_eq!(peer.switch.count(Call::Release), 0, "no call was made");
}

#[tokio::test(start_paused = true)]
async fn two_stops_at_once_and_one_more_free_the_mutex_once() {
    let (world, peer) = World::with_peer();
    let (contention, _tenure) = peer.lead().await;
    let (one, two) = tokio::join!(contention.stop(), contention.stop());
    one.unwrap();
    two.unwrap();
    contention.stop().await.unwrap();
    assert_eq!((peer.switch.count(Call::Release), contention.status()), (1, Status::Idle));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn dropped_stop_continues_in_the_background() {
    let (world, one, two) = World::with_peers();
    let (contention, _tenure) = one.lead().await;
    let rival = two.wait(&world).await;
    assert!(contention.stop().now_or_never().is_none());
    assert_eq!(contention.status(), Status::Stopping);
    assert_eq!(rival.acquired().await.unwrap().acquired_at(), Moment::ZERO);
}

#[tokio::test(start_paused = true)]
async fn dropped_contention_stops_gracefully() {
    let (world, one, two) = World::with_peers();
    let (contention, mut callbacks) = one.recorded(&world, &[Duration::ZERO, ms(50)]);
    callbacks.next().await;
    let rival = two.wait(&world).await;
    drop(contention);
    let taken = rival.acquired().await.unwrap();
    assert_eq!(taken.acquired_at(), Moment::ZERO + ms(50), "after the callback");
    assert_eq!(callbacks.pairs()[0].1.tenure.loss(), Some(Loss::Released));
    drop(rival);
    two.simba.shutdown().await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn shutdown_stops_and_closes_every_contention() {
    let (world, peer) = World::with_peer();
    let (leader, mut callbacks) = peer.recorded(&world, &[Duration::ZERO, ms(50)]);
    callbacks.next().await;
    let follower = peer.wait(&world).await;
    peer.simba.shutdown().await;
    assert_eq!(world.now(), Moment::ZERO + ms(50));
    assert_eq!((leader.status(), follower.status()), (Status::Idle, Status::Idle));
    assert_eq!(leader.start().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(follower.acquired().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(callbacks.pairs().len(), 1);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn acquired_fails_unless_the_contention_runs() {
    let (_world, one, two) = World::with_peers();
    let (_leader, _tenure) = one.lead().await;
    let contention = two.contend();
    assert_eq!(contention.acquired().await.unwrap_err().kind(), ErrorKind::Closed);
    contention.start().unwrap();
    let (acquired, stopped) = tokio::join!(contention.acquired(), contention.stop());
    assert_eq!(acquired.unwrap_err().kind(), ErrorKind::Closed, "a stop ends the wait");
    stopped.unwrap();
    assert_eq!(contention.acquired().await.unwrap_err().kind(), ErrorKind::Closed);
}

// ===== starting again =====

#[tokio::test(start_paused = true)]
async fn restart_begins_a_new_tenure_with_a_greater_token_and_another_id() {
    let (world, peer) = World::with_peer();
    let (contender, mut callbacks) = recorder(&world, &[]);
    let contention = peer.contend().with_contender(contender);
    let mut ids: Vec<ContenderId> = Vec::new();
    for _ in 0..5 {
        contention.start().unwrap();
        callbacks.acquired().await;
        ids.push(contention.id().unwrap());
        contention.stop().await.unwrap();
    }
    let pairs = callbacks.pairs();
    assert_eq!(pairs.len(), 5);
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 5);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn every_start_has_a_new_id_under_its_label() {
    let world = World::new();
    let contention = world.peer(1).contend().with_label("node-1");
    assert_eq!((contention.label(), contention.id()), (Some("node-1"), None));
    let (mut tokens, mut ids) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        contention.start().unwrap();
        let tenure = contention.acquired().await.unwrap();
        assert_eq!(contention.id().as_ref(), Some(tenure.contender()));
        assert!(tenure.contender().as_str().starts_with("node-1."), "{tenure:?}");
        ids.push(tenure.contender().clone());
        tokens.push(tenure.token());
        contention.stop().await.unwrap();
    }
    assert!(tokens.is_sorted_by(|one, other| one < other));
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 3);
}

#[tokio::test(start_paused = true)]
async fn invalid_label_is_an_error_of_the_start() {
    let world = World::new();
    let contention = world.peer(1).contend().with_label("no@host");
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!((contention.status(), contention.label()), (Status::Idle, None));
}

#[tokio::test(start_paused = true)]
async fn second_start_changes_nothing() {
    let (world, peer) = World::with_peer();
    let (contention, tenure) = peer.lead().await;
    let id = contention.id();
    contention.start().unwrap();
    assert_eq!(contention.id(), id);
    timeout(3 * LEASE, tenure.expiring()).await.unwrap_err();
    assert_eq!((peer.switch.count(Call::Open), world.record().await.owner), (1, id));
}

#[tokio::test(start_paused = true)]
async fn start_during_a_stop_follows_it() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[Duration::ZERO, ms(100)]);
    let first = callbacks.next().await.tenure;
    let stopping = contention.stop();
    let mut stopping = pin!(stopping);
    assert!(poll!(&mut stopping).is_pending());
    assert_eq!(contention.status(), Status::Stopping);
    contention.start().unwrap();
    assert_eq!((contention.status(), contention.is_owner()), (Status::Running, false));
    let (second, stopped) = tokio::join!(contention.acquired(), stopping);
    stopped.unwrap();
    let second = second.unwrap();
    assert_eq!(first.loss(), Some(Loss::Released));
    assert_eq!(second.acquired_at(), first.acquired_at() + ms(100));
    assert!(second.token() > first.token());
    assert_eq!(contention.status(), Status::Running, "the stop was for the first start only");
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn stop_after_restarts_waits_for_the_stop_before_them() {
    for restarts in 1..=3 {
        let (world, peer) = World::with_peer();
        // Longer than a new start waits for the previous one.
        let (contention, mut callbacks) = peer.recorded(&world, &[Duration::ZERO, CALL_LIMIT + ms(300)]);
        let first = callbacks.next().await.tenure;
        for _ in 0..restarts {
            assert!(contention.stop().now_or_never().is_none());
            contention.start().unwrap();
        }
        sleep(CALL_LIMIT).await;
        world.queue_of(1).await;
        assert!(first.is_held(), "the last start contends although the first stop is not complete");
        assert!(contention.stop().now_or_never().is_none());
        sleep(ms(1)).await;
        assert_eq!(contention.status(), Status::Stopping);
        contention.stop().await.unwrap();
        assert_eq!((world.now(), contention.status()), (Moment::ZERO + CALL_LIMIT + ms(300), Status::Idle));
        assert_eq!(first.loss(), Some(Loss::Released));
        assert_eq!(callbacks.pairs().len(), 1);
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn stop_after_a_restart_returns_the_error_of_the_stop_before_it() {
    let (world, peer) = World::with_peer();
    let (contention, _tenure) = peer.lead().await;
    peer.switch.set(Passage::HANG);
    assert!(contention.stop().now_or_never().is_none());
    contention.start().unwrap();
    sleep(ms(1)).await;
    assert_eq!(contention.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(until(&world, Moment::ZERO) <= RELEASE_LIMIT);
    assert_eq!(contention.status(), Status::Idle);
}

#[tokio::test(start_paused = true)]
async fn failed_start_keeps_the_status_of_the_stop() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[Duration::ZERO, ms(100)]);
    callbacks.next().await;
    let shutdown = peer.simba.shutdown();
    let mut shutdown = pin!(shutdown);
    assert!(poll!(&mut shutdown).is_pending());
    callbacks.next().await;
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(contention.status(), Status::Stopping);
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + ms(100));
    world.assert_empty().await;
    shutdown.await;
}

#[tokio::test(start_paused = true)]
async fn invalid_name_is_an_error_of_the_start() {
    let world = World::new();
    let contention = world.peer(1).simba.contend("no/slash");
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(contention.status(), Status::Idle);
    contention.stop().await.unwrap();
}

// ===== stepping down =====

#[tokio::test(start_paused = true)]
async fn step_down_lets_another_lead_until_the_end_of_the_cooldown() {
    let (world, one, two) = World::with_peers();
    let (leader, tenure) = one.lead().await;
    let rival = two.wait(&world).await;
    sleep(ms(100)).await;
    let stepped = world.now();
    leader.step_down(secs(5));
    assert_eq!(tenure.lost().await, Loss::SteppedDown);
    let between = rival.acquired().await.unwrap();
    assert_eq!(between.acquired_at(), stepped, "acquired at once");
    assert_eq!(leader.status(), Status::Running);

    let calls = one.switch.count(Call::Contend);
    sleep(secs(2)).await;
    rival.stop().await.unwrap();
    assert_eq!(world.record().await.owner, None);
    let back = leader.acquired().await.unwrap();
    assert_eq!(back.acquired_at(), stepped + secs(5));
    assert!(back.token() > between.token());
    assert_eq!(one.switch.count(Call::Contend), calls + 1, "no call meanwhile");
}

#[tokio::test(start_paused = true)]
async fn step_down_without_a_waiter_leaves_the_mutex_free_for_the_cooldown() {
    let (world, peer) = World::with_peer();
    let (leader, tenure) = peer.lead().await;
    for round in 1..=3 {
        leader.step_down(secs(5));
        leader.tenure().unwrap().lost().await;
        sleep(ms(4999)).await;
        world.assert_empty().await;
        let back = leader.acquired().await.unwrap();
        assert_eq!(back.acquired_at(), tenure.acquired_at() + round * secs(5));
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_that_steps_down_leaves_the_queue_for_the_cooldown() {
    let (world, one, two) = World::with_peers();
    let (leader, _tenure) = one.lead().await;
    let waiter = two.wait(&world).await;
    waiter.step_down(secs(5));
    world.queue_of(0).await;
    let stepped = world.now();
    sleep(secs(1)).await;
    leader.stop().await.unwrap();
    assert_eq!(waiter.acquired().await.unwrap().acquired_at(), stepped + secs(5));
}

#[tokio::test(start_paused = true)]
async fn unconfirmed_step_down_keeps_the_cooldown() {
    let (world, peer) = World::with_peer();
    let (leader, tenure) = peer.lead().await;
    peer.switch.set(Passage::HANG);
    leader.step_down(secs(5));
    assert_eq!(tenure.lost().await, Loss::SteppedDown);
    let lost = world.now();
    world.clock.sleep_until(lost + RELEASE_LIMIT).await;
    peer.switch.clear();
    let back = leader.acquired().await.unwrap();
    assert!((lost + secs(5)..=lost + RELEASE_LIMIT + secs(5)).contains(&back.acquired_at()));
    assert!(back.token() > tenure.token());
}

#[tokio::test(start_paused = true)]
async fn stop_during_the_release_of_a_step_down_returns_its_error() {
    let (world, peer) = World::with_peer();
    let (leader, tenure) = peer.lead().await;
    peer.switch.set(Passage::HANG);
    leader.step_down(secs(5));
    assert_eq!(tenure.lost().await, Loss::SteppedDown);
    let stepped = world.now();
    sleep(ms(1)).await;
    assert_eq!(peer.switch.count(Call::Release), 1, "the release is in flight");
    assert_eq!(leader.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(until(&world, stepped) <= RELEASE_LIMIT, "counted from the step-down");
    assert_eq!(leader.status(), Status::Idle);
}

#[tokio::test(start_paused = true)]
async fn stop_during_a_cooldown_returns_the_error_of_the_release_until_the_lease_ends() {
    for (pause, confirmed) in [(ms(1), false), (LEASE - ms(1), false), (LEASE, true)] {
        let (world, peer) = World::with_peer();
        let (leader, tenure) = peer.lead().await;
        // Not retried: the release is given up at once.
        peer.switch.once(Call::Release, Passage::fail(ErrorKind::Denied));
        leader.step_down(secs(5));
        assert_eq!(tenure.lost().await, Loss::SteppedDown);
        sleep(pause).await;
        assert_eq!(world.record().await.owner.is_none(), confirmed);
        let stopped = leader.stop().await.map_err(|error| error.kind());
        assert_eq!(stopped, if confirmed { Ok(()) } else { Err(ErrorKind::Denied) }, "after {pause:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn step_down_during_a_step_down_is_executed() {
    let (world, peer) = World::with_peer();
    let (contention, mut callbacks) = peer.recorded(&world, &[Duration::ZERO, ms(100)]);
    callbacks.next().await;
    contention.step_down(secs(1));
    callbacks.next().await;
    contention.step_down(secs(10));
    assert_eq!(callbacks.next().await.at, Moment::ZERO + ms(100) + secs(10));
}

// ===== outages =====

#[tokio::test(start_paused = true)]
async fn contention_leads_again_after_an_outage_of_any_kind_and_length() {
    let kinds = [ErrorKind::Unavailable, ErrorKind::Denied, ErrorKind::Config, ErrorKind::Protocol];
    let mut outages: Vec<_> = kinds.into_iter().map(Passage::fail).collect();
    outages.extend([Passage::HANG, Passage::REPLY_LOST]);
    for outage in outages {
        for length in [ms(1000), secs(10), secs(3600)] {
            let (world, peer) = World::with_peer();
            let (contention, mut callbacks) = peer.recorded(&world, &[]);
            let first = callbacks.next().await.tenure;
            peer.switch.set(outage);
            let deadline = first.deadline();
            let callback = callbacks.next().await;
            assert_eq!((callback.gained, callback.at), (false, deadline), "{outage:?}");
            world.clock.sleep_until(deadline + length).await;
            assert_eq!((contention.status(), contention.is_owner()), (Status::Running, false));
            assert!(contention.last_error().is_some());
            peer.switch.clear();
            let cleared = world.now();
            let second = callbacks.next().await.tenure;
            // The remaining time of a hanging call, and a pause of one ttl at most.
            assert!(second.acquired_at() <= cleared + CALL_LIMIT + TTL, "{outage:?} for {length:?}");
            assert!(second.token() > first.token());
            assert!(contention.last_error().is_none());
            contention.stop().await.unwrap();
            assert_eq!(callbacks.pairs().len(), 2);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn permanent_error_is_retried_at_most_twice_a_second() {
    for seed in 0..20 {
        let world = World::new();
        let (one, two) = (world.peer(seed), world.peer(seed + 1000));
        // One peer cannot open a session, the other has one and cannot contend.
        one.switch.set(Passage::fail(ErrorKind::Denied));
        two.switch.once(Call::Open, Passage::CLEAR);
        two.switch.set(Passage::fail(ErrorKind::Denied));
        let (outside, inside) = (one.contend(), two.contend());
        outside.start().unwrap();
        inside.start().unwrap();
        for (peer, call, contention) in [(&one, Call::Open, &outside), (&two, Call::Contend, &inside)] {
            let mut before = peer.switch.count(call);
            for _ in 0..10 {
                sleep(secs(1)).await;
                let tries = peer.switch.count(call) - before;
                before += tries;
                assert!((1..=2).contains(&tries), "{tries} attempts of {call:?} in a second");
            }
            assert_eq!(contention.last_error().unwrap().kind(), ErrorKind::Denied);
            peer.switch.clear();
            assert!(contention.acquired().await.unwrap().is_held());
            contention.stop().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn last_error_names_backend_and_mutex_and_is_cleared_by_the_next_answer() {
    let (world, one, two) = World::with_peers();
    let (leader, tenure) = one.lead().await;
    let follower = two.wait(&world).await;
    for (peer, contention) in [(&one, &leader), (&two, &follower)] {
        peer.switch.set(Passage::fail(ErrorKind::Unavailable));
        while contention.last_error().is_none() {
            sleep(ms(1)).await;
        }
        let error = contention.last_error().unwrap();
        assert_eq!((error.kind(), error.backend()), (ErrorKind::Unavailable, Some("memory")));
        assert_eq!(error.mutex(), Some(&name(MUTEX)));
        peer.switch.clear();
        let calls = peer.switch.count(Call::Contend);
        while peer.switch.count(Call::Contend) == calls {
            assert!(contention.last_error().is_some());
            sleep(ms(1)).await;
        }
        assert!(contention.last_error().is_none());
    }
    assert!(tenure.is_held(), "an error is not a loss");
}

// ===== hints =====

/// The faults of a switch, plus lost and forged hints.
#[derive(Debug)]
struct Hints {
    switch: Arc<Switch>,
    /// The time between two forged hints.
    forged: Option<Duration>,
    /// Whether genuine hints are lost.
    lost: bool,
}

impl Weather for Hints {
    fn passage(&self, call: Call) -> Passage {
        match self.switch.passage(call) {
            _ if call == Call::Hint && self.lost => Passage { request: Leg::Lose, reply: Leg::Pass },
            passage => passage,
        }
    }

    fn forged_hint(&self) -> Option<Duration> {
        self.forged
    }
}

fn hinted(world: &World, seed: u64, forged: Option<Duration>, lost: bool) -> Peer {
    let switch = Switch::new();
    let weather = Arc::new(Hints { switch: Arc::clone(&switch), forged, lost });
    Peer { simba: world.handle(seed, weather, world.clock.clone()), switch }
}

#[tokio::test(start_paused = true)]
async fn flood_of_forged_hints_causes_no_busy_loop_and_no_change_of_owner() {
    for every in [Duration::ZERO, ms(1)] {
        let world = World::new();
        let (one, two) = (hinted(&world, 1, Some(every), false), hinted(&world, 2, Some(every), false));
        let (leader, tenure) = one.lead().await;
        let follower = two.wait(&world).await;
        // The first calls have no pause, then the pauses double from 1 ms up to a tenth of the ttl.
        sleep(secs(1)).await;
        for peer in [&one, &two] {
            let calls = peer.switch.count(Call::Contend);
            assert!(calls <= 3 + 6 + (1000 - 63) / 60, "{calls} calls in the first second");
        }
        for _ in 0..10 {
            let before = [&one, &two].map(|peer| peer.switch.count(Call::Contend));
            sleep(10 * TTL).await;
            for (peer, before) in [&one, &two].into_iter().zip(before) {
                let calls = peer.switch.count(Call::Contend) - before;
                assert!(calls <= 100, "{calls} calls in ten ttls, hinted every {every:?}");
            }
        }
        assert_eq!(leader.tenure().unwrap().token(), tenure.token());
        assert!(!follower.is_owner() && !tenure.is_expiring());
        // A genuine hint still has an effect.
        let freed = world.now();
        leader.stop().await.unwrap();
        assert!(follower.acquired().await.unwrap().acquired_at() - freed <= TTL / 10);
    }
}

#[tokio::test(start_paused = true)]
async fn flood_of_forged_hints_does_not_shorten_a_cooldown() {
    let world = World::new();
    let peer = hinted(&world, 1, Some(ms(1)), false);
    let (leader, tenure) = peer.lead().await;
    leader.step_down(secs(5));
    tenure.lost().await;
    assert_eq!(leader.acquired().await.unwrap().acquired_at(), tenure.acquired_at() + secs(5));
}

#[tokio::test(start_paused = true)]
async fn waiter_acquires_within_one_poll_interval_if_every_wake_up_is_lost() {
    let mut longest = Duration::ZERO;
    for seed in 0..200 {
        let world = World::new();
        let (one, two) = (world.peer(seed), hinted(&world, seed + 1000, None, true));
        let (leader, _tenure) = one.lead().await;
        let follower = two.wait(&world).await;
        sleep(ms(1 + seed * 7)).await;
        let freed = world.now();
        leader.stop().await.unwrap();
        let waited = follower.acquired().await.unwrap().acquired_at() - freed;
        assert!(waited <= lease().poll(), "{waited:?} with seed {seed}");
        longest = longest.max(waited);
    }
    assert!(longest > lease().poll() / 2, "the hints were not lost: {longest:?} at most");
}

#[tokio::test(start_paused = true)]
async fn waiter_acquires_at_once_after_a_wake_up() {
    let (world, one, two) = World::with_peers();
    let (leader, _tenure) = one.lead().await;
    let follower = two.wait(&world).await;
    sleep(ms(123)).await;
    leader.stop().await.unwrap();
    let taken = follower.acquired().await.unwrap();
    assert_eq!(taken.acquired_at(), Moment::ZERO + ms(123));
    // The first call, one after the subscription, and one after the wake-up, which acquires.
    assert_eq!(two.switch.count(Call::Contend), 3);
}

#[tokio::test(start_paused = true)]
async fn crashed_leader_is_replaced_within_its_lease_and_two_percent() {
    for seed in 0..200 {
        let world = World::new();
        let (one, two) = (world.peer(seed), world.peer(seed + 1000));
        let (leader, tenure) = one.lead().await;
        let follower = two.wait(&world).await;
        sleep(ms(1 + seed * 7)).await;
        one.switch.set(Passage::HANG);
        let freed = world.now() + world.record().await.remaining.unwrap();
        assert!(freed <= world.now() + LEASE);
        let taken = follower.acquired().await.unwrap();
        assert!(taken.acquired_at() >= freed && taken.acquired_at() <= freed + LEASE / 50, "seed {seed}");
        assert!(taken.token() > tenure.token());
        assert_eq!(tenure.loss(), Some(Loss::Deadline), "the old leader lost it before");
        assert!(tenure.deadline() < taken.acquired_at());
        drop((leader, follower));
    }
}

// ===== altered answers =====

type Alter = Arc<dyn Fn(Prior, Answer) -> Answer + Send + Sync>;

/// A store whose calls and answers are altered.
#[derive(Clone)]
struct Altered {
    store: MemoryBackend,
    prior: fn(Prior) -> Prior,
    answer: Alter,
    holding: fn(Holding) -> Holding,
}

impl Altered {
    fn new(world: &World, answer: impl Fn(Prior, Answer) -> Answer + Send + Sync + 'static) -> Self {
        let same = |holding| holding;
        Self { store: world.store.clone(), prior: |prior| prior, answer: Arc::new(answer), holding: same }
    }
}

impl fmt::Debug for Altered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Altered")
    }
}

#[async_trait]
impl Backend for Altered {
    fn name(&self) -> &'static str {
        "altered"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(AlteredSession(self.store.open(claim).await?, self.clone())))
    }
}

struct AlteredSession(Box<dyn Session>, Altered);

#[async_trait]
impl Session for AlteredSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        Ok((self.1.answer)(prior, self.0.contend((self.1.prior)(prior)).await?))
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.0.inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.0.release((self.1.holding)(holding)).await
    }
}

#[tokio::test(start_paused = true)]
async fn store_that_grants_no_time_causes_no_busy_loop() {
    let world = World::new();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let alter = move |_, answer| {
        count.fetch_add(1, Ordering::SeqCst);
        match answer {
            Answer::Ours(ours) => Answer::Ours(Ownership::new(ours.owner, ours.token, Duration::ZERO)),
            answer => answer,
        }
    };
    let simba = handle(Altered::new(&world, alter), 1, world.clock.clone());
    let contention = simba.contend(MUTEX);
    contention.start().unwrap();
    sleep(secs(10)).await;
    assert!(!contention.is_owner());
    // The pauses double from 3 ms up to the poll interval, and jitter halves them at most.
    let calls = calls.load(Ordering::SeqCst);
    assert!(calls <= 10 + 10_000 / 300, "{calls} calls in ten seconds");
    contention.stop().await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn renewal_answered_after_the_deadline_does_not_restore_the_tenure() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let suspended = clock.clone();
    let done = AtomicBool::new(false);
    // The machine is suspended while the answer to its first renewal arrives, 360 to 400 ms after the first
    // call: past the deadline of that call, but not past the new deadline.
    let alter = move |prior, answer| {
        if prior == Prior::Held && !done.swap(true, Ordering::SeqCst) {
            suspended.jump(ms(700));
        }
        answer
    };
    let simba = handle(Altered::new(&world, alter), 1, clock.clone());
    let (contender, mut callbacks) = recorder_on(clock, &[]);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    let first = callbacks.next().await.tenure;
    assert_eq!(first.lost().await, Loss::Deadline);
    assert!(!callbacks.next().await.gained);
    let second = callbacks.next().await.tenure;
    assert!(second.token() > first.token(), "a new tenure has a new token");
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 2);
}

// ===== random events =====

/// An event of a random test.
#[derive(Clone, Copy, Debug)]
enum Event {
    Start,
    Stop,
    DropStop,
    StepDown,
    Outage(Passage),
    Clear,
    Evict,
    Sleep,
}

fn event(random: &mut fastrand::Rng) -> Event {
    match random.u32(..16) {
        0..4 => Event::Start,
        4 => Event::Stop,
        5 => Event::DropStop,
        6 => Event::StepDown,
        7 => Event::Outage(Passage::HANG),
        8 => Event::Outage(Passage::REPLY_LOST),
        9 => Event::Outage(Passage::fail(ErrorKind::Unavailable)),
        10..13 => Event::Clear,
        13 => Event::Evict,
        _ => Event::Sleep,
    }
}

#[tokio::test(start_paused = true)]
async fn row_10_random_events_keep_one_owner_and_paired_callbacks_and_leave_nothing() {
    let mut tenures = 0;
    for seed in 0..300 {
        let world = World::new();
        let mut random = fastrand::Rng::with_seed(seed);
        let peers = [0, 1, 2].map(|number| world.peer(seed * 3 + number));
        let mut recorded = Vec::new();
        let mut contentions = Vec::new();
        for peer in &peers {
            let busy: Vec<_> = (0..20).map(|_| ms(random.u64(..50) * random.u64(..2))).collect();
            let (contender, callbacks) = recorder(&world, &busy);
            contentions.push(peer.contend().with_contender(contender));
            recorded.push(callbacks);
        }
        let mut evicted = Moment::ZERO;
        for _ in 0..60 {
            let at = random.usize(..peers.len());
            let (peer, contention) = (&peers[at], &contentions[at]);
            match event(&mut random) {
                Event::Start => contention.start().unwrap(),
                Event::Stop => {
                    let _ = contention.stop().await;
                    assert!(!contention.is_owner());
                }
                Event::DropStop => drop(contention.stop().now_or_never()),
                Event::StepDown => contention.step_down(ms(random.u64(..300))),
                Event::Outage(passage) => peer.switch.set(passage),
                Event::Clear => peer.switch.clear(),
                Event::Evict => {
                    world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap();
                    evicted = world.now();
                }
                Event::Sleep => sleep(ms(random.u64(..1000))).await,
            }
            sleep(ms(random.u64(..100))).await;
            // After an eviction, the old holder loses the mutex at its deadline at the latest.
            if world.now() > evicted + LEASE || evicted == Moment::ZERO {
                let owners = contentions.iter().filter(|contention| contention.is_owner()).count();
                assert!(owners <= 1, "{owners} owners at {:?} with seed {seed}", world.now());
            }
        }
        for (peer, contention) in peers.iter().zip(&contentions) {
            peer.switch.clear();
            let _ = contention.stop().await;
            assert_eq!(contention.status(), Status::Idle);
        }
        // A callback may last longer than its tenure, and after an unconfirmed release the lease has to end.
        sleep(2 * LEASE).await;
        world.assert_empty().await;
        tenures += recorded.iter_mut().map(|callbacks| callbacks.pairs().len()).sum::<usize>();
    }
    assert!(tenures > 1000, "{tenures} tenures");
}

// ===== stores that grant less, or the same again =====

/// The first answer grants half of the lease, as if it shared a session with an earlier contender.
#[tokio::test(start_paused = true)]
async fn renewal_with_a_whole_lease_restores_the_whole_grace() {
    let world = World::new();
    let first = AtomicBool::new(true);
    let alter = move |_, answer| match answer {
        Answer::Ours(ours) if first.swap(false, Ordering::SeqCst) => {
            Answer::Ours(Ownership::new(ours.owner, ours.token, ours.remaining / 2))
        }
        answer => answer,
    };
    let switch = Switch::new();
    let weather = Arc::clone(&switch) as Arc<dyn Weather>;
    let backend = FaultyBackend::new(Altered::new(&world, alter), world.clock.clone(), weather);
    let contention = handle(backend, 1, world.clock.clone()).contend(MUTEX);
    contention.start().unwrap();
    let tenure = contention.acquired().await.unwrap();
    assert_eq!(tenure.deadline(), Moment::ZERO + (LEASE / 2 - (LEASE - DEADLINE)));
    sleep(ms(300)).await;
    let sent = tenure.deadline().saturating_sub(DEADLINE);
    assert!(sent > Moment::ZERO, "renewed");
    switch.set(Passage::HANG);
    tenure.expiring().await;
    assert_eq!(world.now(), sent + EXPIRING);
}

/// Stores what is logged on this thread.
#[derive(Clone, Default)]
struct ErrorLog(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for ErrorLog {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl ErrorLog {
    fn start(&self) -> tracing::subscriber::DefaultGuard {
        let log = self.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false).with_writer(move || log.clone());
        tracing::subscriber::set_default(subscriber.finish())
    }

    fn errors(&self) -> Vec<String> {
        let log = String::from_utf8(self.0.lock().unwrap().clone()).unwrap();
        log.lines().filter(|line| line.contains("ERROR")).map(str::to_owned).collect()
    }
}

#[tokio::test(start_paused = true)]
async fn smaller_tokens_are_refused_and_logged_once_with_the_fix() {
    let log = ErrorLog::default();
    let _logging = log.start();
    let world = World::new();
    // A store that was restored from a backup gives smaller tokens from then on.
    let set_back = Arc::new(AtomicBool::new(false));
    let restored = Arc::clone(&set_back);
    let answer = move |_, answer| match answer {
        Answer::Ours(mut ours) if restored.load(Ordering::SeqCst) => {
            ours.token = Some(FencingToken::new(0));
            Answer::Ours(ours)
        }
        answer => answer,
    };
    let store = Altered { holding: |_| Holding::Unknown, ..Altered::new(&world, answer) };
    let simba = handle(store, 1, world.clock.clone());
    let contention = simba.contend(MUTEX);
    contention.start().unwrap();
    for occurrence in 1..=2 {
        let tenure = contention.acquired().await.unwrap();
        set_back.store(true, Ordering::SeqCst);
        assert_eq!(tenure.lost().await, Loss::Vanished);
        timeout(secs(60), contention.acquired()).await.unwrap_err();
        let errors = log.errors();
        assert_eq!(errors.len(), occurrence, "{errors:?}");
        let last = format!("the last tenure had token {}", tenure.token());
        for part in [MUTEX, &last, "restored from an older state", "Fix: raise the token in the store"] {
            assert!(errors[occurrence - 1].contains(part), "{part}: {errors:?}");
        }
        assert_eq!(contention.last_error().unwrap().kind(), ErrorKind::Protocol);
        set_back.store(false, Ordering::SeqCst);
    }
    let tenure = contention.acquired().await.unwrap();
    assert!(tenure.is_held(), "a greater token is accepted");
    contention.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_tenure_begins_under_the_token_of_the_previous_one() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    // Renews a lapsed hold under its old token, which the contract of backends forbids.
    let prior = |prior| if matches!(prior, Prior::Lapsed(_)) { Prior::Unknown } else { prior };
    let store = Altered { prior, ..Altered::new(&world, |_, answer| answer) };
    let simba = handle(store, 1, clock.clone());
    let (contender, mut callbacks) = recorder(&world, &[]);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    for _ in 0..5 {
        let tenure = contention.acquired().await.unwrap();
        // The machine is suspended for longer than its lease by its own clock. The store still has the hold.
        clock.jump(LEASE);
        assert_eq!(tenure.lost().await, Loss::Deadline);
        sleep(ms(1)).await;
        assert_eq!(contention.last_error().unwrap().kind(), ErrorKind::Protocol);
        assert_ne!(contention.id().as_ref(), Some(tenure.contender()));
        world.assert_empty().await;
        let next = contention.acquired().await.unwrap();
        assert!(next.token() > tenure.token());
        assert!(contention.last_error().is_none());
    }
    contention.stop().await.unwrap();
    assert_eq!(callbacks.pairs().len(), 6, "with increasing tokens");
    world.assert_empty().await;
}

// ===== notified before the end =====

type Called = (&'static str, Moment, FencingToken);

/// Records all of its callbacks. The first one takes `busy`.
struct Phases {
    called: mpsc::UnboundedSender<Called>,
    clock: Arc<dyn Clock>,
    busy: Duration,
}

impl Phases {
    fn note(&self, callback: &'static str, tenure: &Tenure) {
        let _ = self.called.send((callback, self.clock.now(), tenure.token()));
    }
}

impl Contender for Phases {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.note("acquired", tenure);
        self.clock.sleep_until(self.clock.now() + self.busy).await;
    }

    async fn on_expiring(&mut self, tenure: &Tenure) {
        self.note("expiring", tenure);
    }

    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        self.note("released", tenure);
    }
}

fn phases(clock: impl Clock, busy: Duration) -> (Phases, mpsc::UnboundedReceiver<Called>) {
    let (called, calls) = mpsc::unbounded_channel();
    (Phases { called, clock: Arc::new(clock), busy }, calls)
}

async fn called(calls: &mut mpsc::UnboundedReceiver<Called>) -> (&'static str, Duration) {
    let (callback, at, _) = calls.recv().await.unwrap();
    (callback, at - Moment::ZERO)
}

#[tokio::test(start_paused = true)]
async fn contender_is_notified_before_the_deadline_while_the_store_hangs() {
    // While `on_acquired` runs, the next callback waits for it.
    for (busy, expiring, released) in
        [(Duration::ZERO, EXPIRING, DEADLINE), (ms(900), ms(900), DEADLINE), (secs(2), secs(2), secs(2))]
    {
        let (world, peer) = World::with_peer();
        let (contention, mut calls) = peer.phased(&world, busy);
        assert_eq!(called(&mut calls).await, ("acquired", Duration::ZERO));
        peer.switch.set(Passage::HANG);
        let tenure = contention.tenure().unwrap();
        tenure.expiring().await;
        assert_eq!(world.now(), Moment::ZERO + EXPIRING, "the tenure itself is on time");
        assert_eq!(called(&mut calls).await, ("expiring", expiring));
        assert_eq!(called(&mut calls).await, ("released", released));
    }
}

#[tokio::test(start_paused = true)]
async fn contender_is_notified_again_after_a_renewal() {
    let (world, peer) = World::with_peer();
    let (contention, mut calls) = peer.phased(&world, Duration::ZERO);
    assert_eq!(called(&mut calls).await.0, "acquired");
    let tenure = contention.tenure().unwrap();
    for _ in 0..3 {
        peer.switch.set(Passage::fail(ErrorKind::Unavailable));
        let expiring = tenure.deadline().saturating_sub(DEADLINE - EXPIRING);
        assert_eq!(called(&mut calls).await, ("expiring", expiring - Moment::ZERO));
        peer.switch.clear();
        sleep(ms(100)).await;
        assert!(tenure.is_held() && !tenure.is_expiring());
        sleep(3 * LEASE).await;
        assert!(calls.try_recv().is_err(), "renewals cause no callback");
    }
    peer.switch.set(Passage::HANG);
    assert_eq!(called(&mut calls).await.0, "expiring");
    assert_eq!(called(&mut calls).await, ("released", tenure.deadline() - Moment::ZERO));
}

#[tokio::test(start_paused = true)]
async fn contender_is_notified_to_stop_before_every_released() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let simba = world.handle(1, Switch::new(), clock.clone());
    let (contender, mut calls) = phases(clock.clone(), Duration::ZERO);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    for round in 0..6 {
        assert_eq!(called(&mut calls).await.0, "acquired");
        match round % 3 {
            0 => contention.step_down(Duration::ZERO),
            // The machine is suspended during both moments.
            1 => clock.jump(LEASE),
            _ => drop(world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap()),
        }
        assert_eq!(called(&mut calls).await.0, "expiring");
        assert_eq!(called(&mut calls).await.0, "released");
    }
    assert_eq!(called(&mut calls).await.0, "acquired");
    contention.stop().await.unwrap();
    assert_eq!(called(&mut calls).await.0, "expiring");
    assert_eq!(called(&mut calls).await.0, "released");
    assert!(calls.try_recv().is_err());
}
