//! Leading: every tenure, every callback, every way to stop, and every outage on the way.

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
use simba_core::{
    Answer, Backend, Claim, Clock, Contender, ContenderId, Contention, ErrorKind, FencingToken, Holding,
    Loss, MemoryBackend, Moment, MutexOwner, MutexState, Operate, Ownership, Prior, Result, Session, Status,
    Tenure, async_trait,
};
use simba_tck::{Call, FaultyBackend, Leg, Passage, SkewedClock, Switch, Weather};
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};
use world::{
    CALL_LIMIT, DEADLINE, EXPIRING, LAST_CALL, LEASE, MUTEX, Peer, RELEASE_LIMIT, RENEWAL, TTL, World,
    WorldClock, handle, lease, ms, name, secs,
};

// ===== a contender that writes down what it is told =====

#[derive(Clone, Debug)]
struct Told {
    gained: bool,
    tenure: Tenure,
    state: MutexState,
    at: Moment,
    held: bool,
}

struct Recorder {
    told: mpsc::UnboundedSender<Told>,
    clock: Arc<dyn Clock>,
    /// How long each callback takes, in turn; those after the last take no time.
    busy: VecDeque<Duration>,
}

/// What a [`Recorder`] wrote down.
struct Book {
    told: mpsc::UnboundedReceiver<Told>,
    read: Vec<Told>,
}

fn recorder(world: &World, busy: &[Duration]) -> (Recorder, Book) {
    recorder_on(world.clock.clone(), busy)
}

fn recorder_on(clock: impl Clock, busy: &[Duration]) -> (Recorder, Book) {
    let (told, book) = mpsc::unbounded_channel();
    let recorder = Recorder { told, clock: Arc::new(clock), busy: busy.iter().copied().collect() };
    (recorder, Book { told: book, read: Vec::new() })
}

impl Recorder {
    async fn tell(&mut self, gained: bool, tenure: &Tenure, state: &MutexState) {
        let (tenure, state) = (tenure.clone(), state.clone());
        let (at, held) = (self.clock.now(), tenure.is_held());
        let _ = self.told.send(Told { gained, tenure, state, at, held });
        if let Some(busy) = self.busy.pop_front() {
            self.clock.sleep_until(self.clock.now() + busy).await;
        }
    }
}

impl Contender for Recorder {
    async fn on_acquired(&mut self, tenure: &Tenure, state: &MutexState) {
        self.tell(true, tenure, state).await;
    }

    async fn on_released(&mut self, tenure: &Tenure, state: &MutexState) {
        self.tell(false, tenure, state).await;
    }
}

impl Book {
    /// Waits for the next callback.
    async fn next(&mut self) -> Told {
        let told = self.told.recv().await.unwrap();
        self.read.push(told.clone());
        told
    }

    /// Waits for the next acquired.
    async fn acquired(&mut self) -> Told {
        loop {
            let told = self.next().await;
            if told.gained {
                return told;
            }
        }
    }

    /// All tenures so far: each with exactly one acquired and one released, in order, with the right states.
    fn pairs(&mut self) -> Vec<(Told, Told)> {
        while let Ok(told) = self.told.try_recv() {
            self.read.push(told);
        }
        let pairs: Vec<_> = self.read.chunks(2).map(pair).collect();
        for two in pairs.windows(2) {
            assert!(two[0].0.tenure.token() < two[1].0.tenure.token(), "tokens grow");
            assert!(two[0].1.at <= two[1].0.at);
        }
        pairs
    }
}

fn pair(told: &[Told]) -> (Told, Told) {
    let [gained, lost] = told else { panic!("an acquired without its released: {told:?}") };
    assert!(gained.gained && !lost.gained, "out of order: {told:?}");
    assert_eq!(gained.tenure.token(), lost.tenure.token(), "of the same tenure");
    assert!(gained.held, "acquired what was lost already");
    assert!(gained.at <= lost.at);
    let me = gained.tenure.contender();
    assert_eq!(me, lost.tenure.contender());
    assert!(gained.state.is_acquired(me) && !gained.state.is_released(me), "{:?}", gained.state);
    assert!(gained.state.after.is_owner(me) && !gained.state.before.is_owner(me));
    assert_eq!(gained.state.after.token, Some(gained.tenure.token()));
    assert!(lost.state.is_released(me) && !lost.state.is_acquired(me), "{:?}", lost.state);
    assert!(lost.state.before.is_owner(me) && !lost.state.after.is_owner(me));
    (gained.clone(), lost.clone())
}

// ===== helpers =====

impl Peer {
    fn contend(&self) -> Contention {
        self.simba.contend(MUTEX)
    }

    /// A contention that leads.
    async fn lead(&self) -> (Contention, Tenure) {
        let contention = self.contend();
        contention.start().unwrap();
        let tenure = contention.acquired().await.unwrap();
        (contention, tenure)
    }

    /// A contention that has asked the store and was refused.
    async fn wait(&self, world: &World) -> Contention {
        let before = world.record().await.waiters.unwrap_or(0);
        let contention = self.contend();
        contention.start().unwrap();
        world.queue_of(before + 1).await;
        contention
    }
}

fn until(world: &World, since: Moment) -> Duration {
    world.now() - since
}

/// A log that several parties write to.
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
async fn a_leader_keeps_its_tenure_for_fifty_leases_and_is_never_told_to_stop() {
    let world = World::new();
    let peer = world.peer(1);
    let (contention, tenure) = peer.lead().await;
    timeout(50 * LEASE, tenure.expiring()).await.unwrap_err();
    assert!(tenure.is_held() && contention.is_owner() && contention.is_in_ttl());
    assert_eq!(contention.tenure().unwrap().token(), tenure.token());
    assert!(contention.state().is_acquired(tenure.contender()), "a renewal changes no owner");
    let record = world.record().await;
    assert_eq!((record.owner, record.token), (contention.id(), Some(tenure.token())));
    // One call won, and renewals come 360 to 400 ms apart.
    let calls = peer.switch.count(Call::Contend);
    assert!((1 + 50_000 / 400..=1 + 50_000 / 360).contains(&calls), "{calls} calls");
}

#[tokio::test(start_paused = true)]
async fn the_handle_tells_status_owner_state_and_windows() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let idle = one.contend();
    assert_eq!((idle.status(), idle.id(), idle.is_owner()), (Status::Idle, None, false));
    assert_eq!((idle.owner(), idle.state()), (MutexOwner::none(), MutexState::none()));
    assert!(idle.tenure().is_none() && idle.last_error().is_none() && !idle.is_in_ttl());

    let (leader, tenure) = one.lead().await;
    let follower = two.wait(&world).await;
    let (me, other) = (leader.id().unwrap(), follower.id().unwrap());
    assert_eq!((leader.status(), follower.status()), (Status::Running, Status::Running));
    assert!(leader.state().is_acquired(&me) && leader.owner().is_owner(&me));
    assert!(follower.owner().is_owner(&me) && !follower.is_owner() && !follower.is_in_ttl());
    assert_eq!(follower.owner().token, Some(tenure.token()));
    assert!(follower.owner().is_in_ttl(world.now()));

    leader.stop().await.unwrap();
    let second = follower.acquired().await.unwrap();
    assert_eq!((leader.status(), leader.owner()), (Status::Idle, MutexOwner::none()));
    assert!(leader.state().is_released(&me) && leader.tenure().is_none());
    assert!(follower.state().is_acquired(&other) && follower.is_owner() && follower.is_in_ttl());
    assert_eq!(second.contender(), &other);

    // Without renewals: in the ttl, then in the transition, then no owner any more.
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
    assert_eq!(follower.status(), Status::Running, "it contends on");
}

#[tokio::test(start_paused = true)]
async fn a_failed_renewal_is_tried_again_and_costs_no_tenure() {
    let world = World::new();
    let peer = world.peer(1);
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
async fn an_outage_that_ends_before_the_deadline_costs_no_tenure() {
    let world = World::new();
    let peer = world.peer(1);
    let (_contention, tenure) = peer.lead().await;
    for _ in 0..20 {
        // From just before a renewal until the last moment at which a retry still comes in time.
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
async fn a_win_whose_reply_was_lost_is_adopted_with_its_token() {
    let world = World::new();
    let peer = world.peer(1);
    peer.switch.once(Call::Contend, Passage::REPLY_LOST);
    let (_contention, tenure) = peer.lead().await;
    // One call that is waited out, and the first retry: half of 30 ms to 30 ms.
    assert!((CALL_LIMIT + ms(15)..=CALL_LIMIT + ms(30)).contains(&tenure.acquired_at().since_zero()));
    let record = world.record().await;
    assert_eq!((record.token, record.waiters), (Some(tenure.token()), Some(0)));
    assert_eq!(tenure.token().get(), 1, "the one that the lost reply had");
}

// ===== callbacks =====

#[tokio::test(start_paused = true)]
async fn every_acquired_has_one_released_with_the_states_on_both_sides() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
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
    assert_eq!(of_a[0].0.state.before, MutexOwner::none(), "nobody owned it before");
    for ((gained, _), (other, _)) in of_a[1..].iter().zip(&of_b) {
        assert!(gained.state.is_released(other.tenure.contender()), "taken over from the other: {gained:?}");
    }
    assert!(of_b[0].0.state.is_released(of_a[0].0.tenure.contender()), "and the other way round");
    let ends: Vec<_> = of_b.iter().map(|(_, lost)| lost.tenure.loss().unwrap()).collect();
    assert_eq!(ends[..10], vec![Loss::SteppedDown; 10]);
    assert_eq!(ends[10], Loss::Released);
    assert!(of_a.iter().all(|(_, lost)| lost.tenure.loss() == Some(Loss::Released)));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn the_contender_is_told_at_the_deadline_when_the_store_hangs() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    let tenure = book.next().await.tenure;
    sleep(secs(3)).await;
    peer.switch.set(Passage::HANG);
    let deadline = tenure.deadline();
    let told = book.next().await;
    assert_eq!((told.gained, told.at, world.now()), (false, deadline, deadline));
    assert_eq!(tenure.loss(), Some(Loss::Deadline));
    peer.switch.clear();
    assert!(book.next().await.gained, "it leads again");
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_contender_is_told_at_its_next_renewal_that_it_was_evicted() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (contender, mut book) = recorder(&world, &[]);
    let contention = one.contend().with_contender(contender);
    contention.start().unwrap();
    let first = book.next().await.tenure;

    // With nobody else around it gets the mutex back at once, as a new tenure.
    sleep(ms(100)).await;
    world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap();
    let told = book.next().await;
    assert_eq!(told.tenure.loss(), Some(Loss::Vanished));
    assert!(told.at <= first.acquired_at() + RENEWAL);
    let gained = book.next().await;
    assert_eq!(gained.at, told.at);
    assert!(gained.tenure.token() > first.token());

    // With a waiter around, the waiter gets it.
    let rival = two.wait(&world).await;
    world.store.evict(&name(MUTEX), EvictIf::Token(gained.tenure.token())).await.unwrap();
    let taken = rival.acquired().await.unwrap();
    let told = book.next().await;
    assert_eq!(told.tenure.loss(), Some(Loss::TakenBy(taken.contender().clone())));
    assert!(told.state.after.is_owner(taken.contender()), "the state names the new owner");
    assert!(told.at <= gained.at + RENEWAL);
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
    assert!(taken.is_held(), "and the stop of the old one does not touch it");
}

#[tokio::test(start_paused = true)]
async fn an_acquired_that_outlives_its_tenure_is_still_followed_by_its_released() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[secs(3)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    let tenure = book.next().await.tenure;
    peer.switch.set(Passage::HANG);
    assert_eq!(tenure.lost().await, Loss::Deadline);
    assert_eq!(world.now(), tenure.acquired_at() + DEADLINE, "the callback delays no loss");
    let told = book.next().await;
    assert_eq!((told.gained, told.at), (false, tenure.acquired_at() + secs(3)));
    assert_eq!(told.tenure.token(), tenure.token());
    peer.switch.clear();
    assert!(book.next().await.gained);
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_tenure_that_came_and_went_while_a_callback_was_busy_is_skipped_as_a_pair() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[secs(10)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    let first = book.next().await.tenure;
    let mut skipped = Vec::new();
    for _ in 0..2 {
        peer.switch.set(Passage::HANG);
        contention.tenure().unwrap().lost().await;
        peer.switch.clear();
        skipped.push(contention.acquired().await.unwrap().token());
    }
    let last = skipped.pop().unwrap();
    assert!(first.token() < skipped[0] && skipped[0] < last);
    assert!(world.now() < first.acquired_at() + secs(10), "all within the first callback");
    assert!(!book.next().await.gained);
    assert_eq!(world.now(), first.acquired_at() + secs(10));
    assert_eq!(book.next().await.tenure.token(), last, "the one in between is skipped");
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_tenure_that_ends_in_the_very_moment_in_which_a_callback_does_is_skipped() {
    let world = World::new();
    let (clock, switch) = (SkewedClock::new(world.clock.clone()), Switch::new());
    let simba = world.handle(1, Arc::clone(&switch) as Arc<dyn Weather>, clock.clone());
    let (contender, mut book) = recorder_on(clock.clone(), &[secs(10)]);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    let first = book.next().await.tenure;
    switch.set(Passage::HANG);
    first.lost().await;
    switch.clear();
    let second = contention.acquired().await.unwrap();
    // The machine was asleep: the callback is over, and so is the tenure, though no task has noticed yet.
    clock.jump(secs(10));
    assert!(!second.is_held());
    assert!(!book.next().await.gained);
    assert!(book.next().await.tenure.token() > second.token());
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn row_61_a_callback_that_takes_ten_leases_costs_no_renewal() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (contender, mut book) = recorder(&world, &[10 * LEASE]);
    let contention = one.contend().with_contender(contender);
    contention.start().unwrap();
    let tenure = book.next().await.tenure;
    let rival = two.wait(&world).await;
    timeout(10 * LEASE, tenure.expiring()).await.unwrap_err();
    assert!(tenure.is_held() && !rival.is_owner());
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 1);
}

/// Panics in its callbacks: before their futures are made, or within them.
struct Clumsy {
    told: mpsc::UnboundedSender<bool>,
    early: bool,
}

impl Clumsy {
    fn stumble(&self, gained: bool) -> impl Future<Output = ()> + Send + use<> {
        let (told, early) = (self.told.clone(), self.early);
        let _ = told.send(gained);
        assert!(!early, "clumsy, early");
        async move { panic!("clumsy, late") }
    }
}

impl Contender for Clumsy {
    fn on_acquired(&mut self, _: &Tenure, _: &MutexState) -> impl Future<Output = ()> + Send {
        self.stumble(true)
    }

    fn on_released(&mut self, _: &Tenure, _: &MutexState) -> impl Future<Output = ()> + Send {
        self.stumble(false)
    }
}

#[tokio::test(start_paused = true)]
async fn a_callback_that_panics_ends_neither_the_tenure_nor_the_callbacks() {
    for early in [false, true] {
        let world = World::new();
        let peer = world.peer(1);
        let (told, mut book) = mpsc::unbounded_channel();
        let contention = peer.contend().with_contender(Clumsy { told, early });
        contention.start().unwrap();
        assert_eq!(book.recv().await, Some(true));
        let tenure = contention.acquired().await.unwrap();
        timeout(3 * LEASE, tenure.expiring()).await.unwrap_err();
        contention.step_down(Duration::ZERO);
        assert_eq!(book.recv().await, Some(false), "early: {early}");
        assert_eq!(book.recv().await, Some(true), "early: {early}");
        contention.stop().await.unwrap();
        assert_eq!(book.recv().await, Some(false), "early: {early}");
        world.assert_empty().await;
    }
}

// ===== the order of a graceful stop =====

/// Writes down the begin and the end of its callbacks.
struct Scribe {
    name: &'static str,
    log: Log,
    clock: WorldClock,
}

impl Contender for Scribe {
    async fn on_acquired(&mut self, _: &Tenure, _: &MutexState) {
        self.log.note(format!("{} acquired", self.name));
    }

    async fn on_released(&mut self, tenure: &Tenure, _: &MutexState) {
        assert!(tenure.is_held(), "told before the mutex is freed");
        self.log.note(format!("{} releases", self.name));
        self.clock.sleep_until(self.clock.now() + ms(50)).await;
        self.log.note(format!("{} released", self.name));
    }
}

#[tokio::test(start_paused = true)]
async fn a_stop_ends_the_work_then_tells_the_contender_and_only_then_lets_another_lead() {
    for step_down in [false, true] {
        let world = World::new();
        let (one, two) = (world.peer(1), world.peer(2));
        let log = Log::default();
        let scribe = |name| Scribe { name, log: log.clone(), clock: world.clock.clone() };
        let a = one.contend().with_contender(scribe("a"));
        let b = two.contend().with_contender(scribe("b"));
        a.start().unwrap();
        let first = a.acquired().await.unwrap();
        b.start().unwrap();
        world.queue_of(1).await;
        let (tenure, notes) = (first.clone(), log.clone());
        let work = tokio::spawn(async move {
            let work = async {
                notes.note("work starts");
                tenure.expiring().await;
                notes.note("work is told");
                sleep(ms(100)).await;
                notes.note("work ended");
            };
            tenure.run(work).await
        });
        sleep(ms(100)).await;
        let asked = world.now();
        if step_down {
            a.step_down(secs(10));
            first.lost().await;
        } else {
            a.stop().await.unwrap();
        }
        assert_eq!(until(&world, asked), ms(150), "100 ms of work and 50 ms of callback");
        assert!(work.await.unwrap().is_ok(), "the work came to its own end");
        let second = b.acquired().await.unwrap();
        assert_eq!(second.acquired_at(), asked + ms(150), "handed over without a gap, and without overlap");
        assert!(second.token() > first.token());
        b.stop().await.unwrap();
        let expected = [
            "a acquired",
            "work starts",
            "work is told",
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

/// Tells when it is dropped.
struct Dropped(Option<tokio::sync::oneshot::Sender<Moment>>, WorldClock);

impl Drop for Dropped {
    fn drop(&mut self) {
        let _ = self.0.take().unwrap().send(self.1.now());
    }
}

#[tokio::test(start_paused = true)]
async fn work_that_does_not_end_is_dropped_before_the_deadline_and_the_stop_goes_on() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
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
    assert_eq!(world.now(), tenure.acquired_at() + LAST_CALL);
    assert_eq!(when.await.unwrap(), tenure.acquired_at() + LAST_CALL);
    assert_eq!(work.await.unwrap().unwrap_err().kind(), ErrorKind::Lost);
    assert_eq!(rival.acquired().await.unwrap().acquired_at(), tenure.acquired_at() + LAST_CALL);
}

#[tokio::test(start_paused = true)]
async fn a_stop_waits_for_a_callback_until_the_deadline_and_no_longer() {
    for busy in [vec![secs(3600)], vec![Duration::ZERO, secs(3600)]] {
        let world = World::new();
        let peer = world.peer(1);
        let (contender, mut book) = recorder(&world, &busy);
        let contention = peer.contend().with_contender(contender);
        contention.start().unwrap();
        let tenure = book.next().await.tenure;
        sleep(ms(100)).await;
        contention.stop().await.unwrap();
        assert_eq!(world.now(), tenure.acquired_at() + DEADLINE);
        assert_eq!(tenure.loss(), Some(Loss::Deadline));
        world.assert_empty().await;
    }
}

#[tokio::test(start_paused = true)]
async fn no_work_starts_once_the_end_is_announced() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[Duration::ZERO, ms(100)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    let tenure = book.next().await.tenure;
    assert!(contention.stop().now_or_never().is_none());
    book.next().await;
    assert!(tenure.is_held() && tenure.is_expiring());
    assert_eq!(tenure.run(async { panic!("started") }).await.unwrap_err().kind(), ErrorKind::Lost);
    assert!(contention.acquired().now_or_never().is_none(), "nor is the tenure handed out any more");
    contention.stop().await.unwrap();
    assert_eq!(until(&world, tenure.acquired_at()), ms(100));
}

// ===== stopping in every state =====

#[tokio::test(start_paused = true)]
async fn a_stop_before_the_start_does_nothing() {
    let world = World::new();
    let peer = world.peer(1);
    let contention = peer.contend();
    contention.stop().await.unwrap();
    contention.step_down(secs(1));
    assert_eq!(contention.status(), Status::Idle);
    contention.start().unwrap();
    contention.acquired().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO);
}

#[tokio::test(start_paused = true)]
async fn the_initial_delay_comes_first_and_a_stop_ends_it_at_once() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[]);
    let contention = peer.contend().with_contender(contender).with_initial_delay(secs(5));
    contention.start().unwrap();
    sleep(ms(4999)).await;
    assert_eq!(contention.status(), Status::Running);
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + ms(4999));
    assert_eq!((peer.switch.count(Call::Open), contention.status()), (0, Status::Idle));
    assert!(book.pairs().is_empty());

    contention.start().unwrap();
    let tenure = contention.acquired().await.unwrap();
    assert_eq!(tenure.acquired_at(), Moment::ZERO + ms(4999 + 5000));
}

#[tokio::test(start_paused = true)]
async fn a_stop_while_waiting_leaves_the_queue_at_once() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (_leader, tenure) = one.lead().await;
    let (contender, mut book) = recorder(&world, &[]);
    let contention = two.contend().with_contender(contender);
    contention.start().unwrap();
    world.queue_of(1).await;
    sleep(ms(10)).await;
    contention.stop().await.unwrap();
    assert_eq!((world.now(), contention.status()), (Moment::ZERO + ms(10), Status::Idle));
    assert_eq!(world.record().await.waiters, Some(0));
    assert!(tenure.is_held() && book.pairs().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_stop_while_a_callback_is_busy_waits_for_both_callbacks() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[ms(300), ms(200)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    let tenure = book.next().await.tenure;
    contention.stop().await.unwrap();
    assert_eq!(world.now(), tenure.acquired_at() + ms(500));
    assert_eq!(book.pairs()[0].1.at, tenure.acquired_at() + ms(300));
    assert_eq!(tenure.loss(), Some(Loss::Released));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_in_the_cooldown_of_a_step_down_ends_it_at_once() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    book.next().await;
    contention.step_down(secs(100));
    book.next().await;
    sleep(secs(1)).await;
    assert_eq!(contention.status(), Status::Running);
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + secs(1));
    assert_eq!(book.pairs().len(), 1);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_while_the_store_hangs_is_bounded_and_says_so() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (contender, mut book) = recorder(&world, &[]);
    let leader = one.contend().with_contender(contender);
    leader.start().unwrap();
    let tenure = book.next().await.tenure;
    let follower = two.wait(&world).await;
    sleep(ms(100)).await;
    one.switch.set(Passage::HANG);
    two.switch.set(Passage::HANG);

    // Between two calls: the release alone is tried.
    let asked = world.now();
    assert_eq!(leader.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(until(&world, asked) <= RELEASE_LIMIT && one.switch.count(Call::Release) >= 3);
    assert_eq!((leader.status(), tenure.loss()), (Status::Idle, Some(Loss::Released)));
    assert_eq!(leader.last_error().unwrap().kind(), ErrorKind::Unavailable);
    assert_eq!(book.pairs()[0].1.at, asked);
    leader.stop().await.unwrap();
    assert_eq!(leader.acquired().await.unwrap_err().kind(), ErrorKind::Closed, "stopped all the same");

    // In the middle of a call: that one is waited out before.
    let calls = two.switch.calls();
    while two.switch.calls() == calls {
        sleep(ms(1)).await;
    }
    let asked = world.now();
    assert_eq!(follower.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let took = until(&world, asked);
    assert!(took > CALL_LIMIT && took <= CALL_LIMIT + RELEASE_LIMIT, "{took:?}");

    // What could not be freed, the lease ends.
    let rest = world.record().await.remaining.unwrap_or_default().max(2 * TTL);
    sleep(rest).await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_stop_of_a_leader_in_the_middle_of_a_hanging_call_is_bounded() {
    let world = World::new();
    let peer = world.peer(1);
    let (leader, tenure) = peer.lead().await;
    peer.switch.set(Passage::HANG);
    world.clock.sleep_until(tenure.acquired_at() + RENEWAL + ms(1)).await;
    assert_eq!(peer.switch.count(Call::Contend), 2, "a renewal is under way");
    let asked = world.now();
    assert_eq!(leader.stop().await.unwrap_err().kind(), ErrorKind::Unavailable);
    let took = until(&world, asked);
    assert!(took > CALL_LIMIT && took <= CALL_LIMIT + RELEASE_LIMIT, "{took:?}");
    assert_eq!(tenure.loss(), Some(Loss::Released));
}

#[tokio::test(start_paused = true)]
async fn a_stop_while_the_session_cannot_be_opened_is_bounded() {
    let world = World::new();
    let peer = world.peer(1);
    peer.switch.set(Passage::HANG);
    let contention = peer.contend();
    contention.start().unwrap();
    sleep(ms(50)).await;
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + CALL_LIMIT);
    assert_eq!(peer.switch.count(Call::Release), 0, "nothing was ever asked for");
}

#[tokio::test(start_paused = true)]
async fn two_stops_at_once_and_one_more_free_the_mutex_once() {
    let world = World::new();
    let peer = world.peer(1);
    let (contention, _tenure) = peer.lead().await;
    let (one, two) = tokio::join!(contention.stop(), contention.stop());
    one.unwrap();
    two.unwrap();
    contention.stop().await.unwrap();
    assert_eq!((peer.switch.count(Call::Release), contention.status()), (1, Status::Idle));
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_dropped_stop_goes_on_in_the_background() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (contention, _tenure) = one.lead().await;
    let rival = two.wait(&world).await;
    assert!(contention.stop().now_or_never().is_none());
    assert_eq!(contention.status(), Status::Stopping);
    assert_eq!(rival.acquired().await.unwrap().acquired_at(), Moment::ZERO);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_contention_stops_in_order() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (contender, mut book) = recorder(&world, &[Duration::ZERO, ms(50)]);
    let contention = one.contend().with_contender(contender);
    contention.start().unwrap();
    book.next().await;
    let rival = two.wait(&world).await;
    drop(contention);
    let taken = rival.acquired().await.unwrap();
    assert_eq!(taken.acquired_at(), Moment::ZERO + ms(50), "after the callback");
    assert_eq!(book.pairs()[0].1.tenure.loss(), Some(Loss::Released));
    drop(rival);
    two.simba.shutdown().await;
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_stops_every_contention_and_closes_them() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[Duration::ZERO, ms(50)]);
    let leader = peer.contend().with_contender(contender);
    leader.start().unwrap();
    book.next().await;
    let follower = peer.wait(&world).await;
    peer.simba.shutdown().await;
    assert_eq!(world.now(), Moment::ZERO + ms(50));
    assert_eq!((leader.status(), follower.status()), (Status::Idle, Status::Idle));
    assert_eq!(leader.start().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(follower.acquired().await.unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(book.pairs().len(), 1);
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_acquired_unless_it_runs() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
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
async fn a_restart_gives_a_new_tenure_with_a_larger_token_and_another_id() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[]);
    let contention = peer.contend().with_contender(contender);
    let mut ids: Vec<ContenderId> = Vec::new();
    for _ in 0..5 {
        contention.start().unwrap();
        book.acquired().await;
        ids.push(contention.id().unwrap());
        contention.stop().await.unwrap();
    }
    let pairs = book.pairs();
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
async fn a_wrong_label_is_an_error_of_the_start() {
    let world = World::new();
    let contention = world.peer(1).contend().with_label("no@host");
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!((contention.status(), contention.label()), (Status::Idle, None));
}

#[tokio::test(start_paused = true)]
async fn a_second_start_changes_nothing() {
    let world = World::new();
    let peer = world.peer(1);
    let (contention, tenure) = peer.lead().await;
    let id = contention.id();
    contention.start().unwrap();
    assert_eq!(contention.id(), id);
    timeout(3 * LEASE, tenure.expiring()).await.unwrap_err();
    assert_eq!((peer.switch.count(Call::Open), world.record().await.owner), (1, id));
}

#[tokio::test(start_paused = true)]
async fn a_start_during_a_stop_goes_after_it() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[Duration::ZERO, ms(100)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    let first = book.next().await.tenure;
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
    assert_eq!(contention.status(), Status::Running, "the stop was for the first start alone");
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_start_that_is_refused_leaves_the_stop_before_it_in_sight() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[Duration::ZERO, ms(100)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    book.next().await;
    let shutdown = peer.simba.shutdown();
    let mut shutdown = pin!(shutdown);
    assert!(poll!(&mut shutdown).is_pending());
    book.next().await;
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Closed);
    assert_eq!(contention.status(), Status::Stopping);
    contention.stop().await.unwrap();
    assert_eq!(world.now(), Moment::ZERO + ms(100));
    world.assert_empty().await;
    shutdown.await;
}

#[tokio::test(start_paused = true)]
async fn a_wrong_name_is_an_error_of_the_start() {
    let world = World::new();
    let contention = world.peer(1).simba.contend("no/slash");
    assert_eq!(contention.start().unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(contention.status(), Status::Idle);
    contention.stop().await.unwrap();
}

// ===== stepping down =====

#[tokio::test(start_paused = true)]
async fn who_steps_down_lets_another_lead_and_comes_back_after_the_cooldown_only() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (leader, tenure) = one.lead().await;
    let rival = two.wait(&world).await;
    sleep(ms(100)).await;
    let stepped = world.now();
    leader.step_down(secs(5));
    assert_eq!(tenure.lost().await, Loss::SteppedDown);
    let between = rival.acquired().await.unwrap();
    assert_eq!(between.acquired_at(), stepped, "handed over at once");
    assert_eq!(leader.status(), Status::Running);

    let calls = one.switch.count(Call::Contend);
    sleep(secs(2)).await;
    rival.stop().await.unwrap();
    assert_eq!(world.record().await.owner, None);
    let back = leader.acquired().await.unwrap();
    assert_eq!(back.acquired_at(), stepped + secs(5));
    assert!(back.token() > between.token());
    assert_eq!(one.switch.count(Call::Contend), calls + 1, "it did not ask meanwhile");
}

#[tokio::test(start_paused = true)]
async fn who_steps_down_alone_leaves_the_mutex_vacant_for_the_cooldown() {
    let world = World::new();
    let peer = world.peer(1);
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
async fn a_waiter_that_steps_down_leaves_the_queue_for_the_cooldown() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
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
async fn a_step_down_that_the_store_does_not_confirm_still_keeps_the_cooldown() {
    let world = World::new();
    let peer = world.peer(1);
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
async fn a_step_down_during_a_step_down_counts_too() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut book) = recorder(&world, &[Duration::ZERO, ms(100)]);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
    book.next().await;
    contention.step_down(secs(1));
    book.next().await;
    contention.step_down(secs(10));
    assert_eq!(book.next().await.at, Moment::ZERO + ms(100) + secs(10));
}

// ===== outages =====

#[tokio::test(start_paused = true)]
async fn a_contention_rides_out_an_outage_of_any_kind_and_length_and_leads_again() {
    let kinds = [ErrorKind::Unavailable, ErrorKind::Denied, ErrorKind::Config, ErrorKind::Protocol];
    let mut outages: Vec<_> = kinds.into_iter().map(Passage::fail).collect();
    outages.extend([Passage::HANG, Passage::REPLY_LOST]);
    for outage in outages {
        for length in [ms(1000), secs(10), secs(3600)] {
            let world = World::new();
            let peer = world.peer(1);
            let (contender, mut book) = recorder(&world, &[]);
            let contention = peer.contend().with_contender(contender);
            contention.start().unwrap();
            let first = book.next().await.tenure;
            peer.switch.set(outage);
            let deadline = first.deadline();
            let told = book.next().await;
            assert_eq!((told.gained, told.at), (false, deadline), "{outage:?}");
            world.clock.sleep_until(deadline + length).await;
            assert_eq!((contention.status(), contention.is_owner()), (Status::Running, false));
            assert!(contention.last_error().is_some());
            peer.switch.clear();
            let cleared = world.now();
            let second = book.next().await.tenure;
            // The rest of a call that hangs, and a pause that grows to one ttl at most.
            assert!(second.acquired_at() <= cleared + CALL_LIMIT + TTL, "{outage:?} for {length:?}");
            assert!(second.token() > first.token());
            assert!(contention.last_error().is_none());
            contention.stop().await.unwrap();
            assert_eq!(book.pairs().len(), 2);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_error_that_a_person_must_mend_is_tried_at_most_twice_a_second() {
    for seed in 0..20 {
        let world = World::new();
        let (one, two) = (world.peer(seed), world.peer(seed + 1000));
        // One cannot open a session, the other has one and cannot contend.
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
                assert!((1..=2).contains(&tries), "{tries} tries of {call:?} in a second");
            }
            assert_eq!(contention.last_error().unwrap().kind(), ErrorKind::Denied);
            peer.switch.clear();
            assert!(contention.acquired().await.unwrap().is_held());
            contention.stop().await.unwrap();
        }
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_error_names_backend_and_mutex_and_goes_with_the_next_answer() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
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
    assert!(tenure.is_held(), "an error is no loss");
}

// ===== hints =====

/// The weather of a switch, with hints of its own.
#[derive(Debug)]
struct Hints {
    switch: Arc<Switch>,
    /// How often a hint is forged.
    forged: Option<Duration>,
    /// Whether true ones are lost.
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
async fn a_flood_of_forged_hints_makes_no_hot_loop_and_changes_no_owner() {
    for every in [Duration::ZERO, ms(1)] {
        let world = World::new();
        let (one, two) = (hinted(&world, 1, Some(every), false), hinted(&world, 2, Some(every), false));
        let (leader, tenure) = one.lead().await;
        let follower = two.wait(&world).await;
        // The first calls are free, then the pauses double from 1 ms up to a tenth of the ttl.
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
        // And a true one still gets through.
        let freed = world.now();
        leader.stop().await.unwrap();
        assert!(follower.acquired().await.unwrap().acquired_at() - freed <= TTL / 10);
    }
}

#[tokio::test(start_paused = true)]
async fn a_flood_of_forged_hints_does_not_cut_a_cooldown_short() {
    let world = World::new();
    let peer = hinted(&world, 1, Some(ms(1)), false);
    let (leader, tenure) = peer.lead().await;
    leader.step_down(secs(5));
    tenure.lost().await;
    assert_eq!(leader.acquired().await.unwrap().acquired_at(), tenure.acquired_at() + secs(5));
}

#[tokio::test(start_paused = true)]
async fn a_hand_over_comes_within_one_poll_when_every_wake_up_is_lost() {
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
async fn a_hand_over_takes_no_time_when_the_wake_up_comes() {
    let world = World::new();
    let (one, two) = (world.peer(1), world.peer(2));
    let (leader, _tenure) = one.lead().await;
    let follower = two.wait(&world).await;
    sleep(ms(123)).await;
    leader.stop().await.unwrap();
    let taken = follower.acquired().await.unwrap();
    assert_eq!(taken.acquired_at(), Moment::ZERO + ms(123));
    // Won, asked again once subscribed, and asked once when woken: two calls, and one that wins.
    assert_eq!(two.switch.count(Call::Contend), 3);
}

#[tokio::test(start_paused = true)]
async fn a_vanished_leader_is_replaced_within_its_lease_and_two_percent() {
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
        assert_eq!(tenure.loss(), Some(Loss::Deadline), "the old one knew before");
        assert!(tenure.deadline() < taken.acquired_at());
        drop((leader, follower));
    }
}

// ===== odd answers =====

type Twist = Arc<dyn Fn(Prior, Answer) -> Answer + Send + Sync>;

/// A store whose answers are twisted on their way.
struct Twisted(MemoryBackend, Twist);

struct TwistedSession(Box<dyn Session>, Twist);

impl fmt::Debug for Twisted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Twisted")
    }
}

#[async_trait]
impl Backend for Twisted {
    fn name(&self) -> &'static str {
        "twisted"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(TwistedSession(self.0.open(claim).await?, Arc::clone(&self.1))))
    }
}

#[async_trait]
impl Session for TwistedSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        Ok(self.1(prior, self.0.contend(prior).await?))
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.0.inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.0.release(holding).await
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_grants_no_time_is_not_asked_in_a_hot_loop() {
    let world = World::new();
    let calls = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&calls);
    let twist: Twist = Arc::new(move |_, answer| {
        count.fetch_add(1, Ordering::SeqCst);
        match answer {
            Answer::Ours(ours) => Answer::Ours(Ownership::new(ours.owner, ours.token, Duration::ZERO)),
            answer => answer,
        }
    });
    let simba = handle(Twisted(world.store.clone(), twist), 1, world.clock.clone());
    let contention = simba.contend(MUTEX);
    contention.start().unwrap();
    sleep(secs(10)).await;
    assert!(!contention.is_owner());
    // The pauses double from 3 ms up to the poll, and half of each is for sure.
    let calls = calls.load(Ordering::SeqCst);
    assert!(calls <= 10 + 10_000 / 300, "{calls} calls in ten seconds");
    contention.stop().await.unwrap();
    world.assert_empty().await;
}

#[tokio::test(start_paused = true)]
async fn the_answer_to_a_renewal_that_comes_after_the_deadline_brings_nothing_back() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let asleep = clock.clone();
    let slept = AtomicBool::new(false);
    // The machine falls asleep while the answer to its first renewal comes in, 360 to 400 ms after the first
    // call: past the deadline of that one, though not past what the answer grants.
    let twist: Twist = Arc::new(move |prior, answer| {
        if prior == Prior::Held && !slept.swap(true, Ordering::SeqCst) {
            asleep.jump(ms(700));
        }
        answer
    });
    let simba = handle(Twisted(world.store.clone(), twist), 1, clock.clone());
    let (contender, mut book) = recorder_on(clock, &[]);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    let first = book.next().await.tenure;
    assert_eq!(first.lost().await, Loss::Deadline);
    assert!(!book.next().await.gained);
    let second = book.next().await.tenure;
    assert!(second.token() > first.token(), "a new tenure has a new token");
    contention.stop().await.unwrap();
    assert_eq!(book.pairs().len(), 2);
}

// ===== everything at once =====

/// What may happen to a contention.
#[derive(Clone, Copy, Debug)]
enum Event {
    Start,
    Stop,
    DropStop,
    StepDown,
    Outage(Passage),
    Clear,
    Evict,
    Pass,
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
        _ => Event::Pass,
    }
}

#[tokio::test(start_paused = true)]
async fn row_10_any_order_of_events_keeps_one_owner_and_every_pair_and_leaves_nothing_behind() {
    let mut tenures = 0;
    for seed in 0..300 {
        let world = World::new();
        let mut random = fastrand::Rng::with_seed(seed);
        let peers = [0, 1, 2].map(|number| world.peer(seed * 3 + number));
        let mut books = Vec::new();
        let mut contentions = Vec::new();
        for peer in &peers {
            let busy: Vec<_> = (0..20).map(|_| ms(random.u64(..50) * random.u64(..2))).collect();
            let (contender, book) = recorder(&world, &busy);
            contentions.push(peer.contend().with_contender(contender));
            books.push(book);
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
                Event::Pass => sleep(ms(random.u64(..1000))).await,
            }
            sleep(ms(random.u64(..100))).await;
            // After an eviction, the old holder finds out at its deadline at the latest.
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
        // A callback may outlast its tenure, and an unconfirmed release leaves the mutex to its lease.
        sleep(2 * LEASE).await;
        world.assert_empty().await;
        tenures += books.iter_mut().map(|book| book.pairs().len()).sum::<usize>();
    }
    assert!(tenures > 1000, "{tenures} tenures");
}

// ===== stores that grant less, or the same again =====

/// The first answer leaves half of the lease, as one does that shares a session with an earlier contender.
#[tokio::test(start_paused = true)]
async fn a_renewal_with_a_whole_lease_brings_the_whole_grace_back() {
    let world = World::new();
    let first = AtomicBool::new(true);
    let twist: Twist = Arc::new(move |_, answer| match answer {
        Answer::Ours(ours) if first.swap(false, Ordering::SeqCst) => {
            Answer::Ours(Ownership::new(ours.owner, ours.token, ours.remaining / 2))
        }
        answer => answer,
    });
    let switch = Switch::new();
    let weather = Arc::clone(&switch) as Arc<dyn Weather>;
    let backend = FaultyBackend::new(Twisted(world.store.clone(), twist), world.clock.clone(), weather);
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

/// Renews a lapsed hold under its old token, which the contract of backends forbids.
#[derive(Debug)]
struct Stubborn(MemoryBackend);

struct StubbornSession(Box<dyn Session>);

#[async_trait]
impl Backend for Stubborn {
    fn name(&self) -> &'static str {
        "stubborn"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(StubbornSession(self.0.open(claim).await?)))
    }
}

#[async_trait]
impl Session for StubbornSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let prior = if matches!(prior, Prior::Lapsed(_)) { Prior::Unknown } else { prior };
        self.0.contend(prior).await
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.0.inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.0.release(holding).await
    }
}

/// Keeps what is logged on this thread.
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

/// A store that was restored from a backup: it gives smaller tokens from then on.
#[derive(Clone, Debug)]
struct Restored {
    store: MemoryBackend,
    set_back: Arc<AtomicBool>,
}

struct RestoredSession(Box<dyn Session>, Arc<AtomicBool>);

#[async_trait]
impl Backend for Restored {
    fn name(&self) -> &'static str {
        "restored"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(RestoredSession(self.store.open(claim).await?, Arc::clone(&self.set_back))))
    }
}

#[async_trait]
impl Session for RestoredSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let set_back = self.1.load(Ordering::SeqCst);
        Ok(match self.0.contend(prior).await? {
            Answer::Ours(mut ours) if set_back => {
                ours.token = Some(FencingToken::new(0));
                Answer::Ours(ours)
            }
            answer => answer,
        })
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.0.inspect().await
    }

    async fn release(&mut self, _: Holding) -> Result<()> {
        self.0.release(Holding::Unknown).await
    }
}

#[tokio::test(start_paused = true)]
async fn tokens_that_went_back_are_refused_and_logged_once_with_the_fix() {
    let log = ErrorLog::default();
    let _logging = log.start();
    let world = World::new();
    let store = Restored { store: world.store.clone(), set_back: Arc::default() };
    let simba = handle(store.clone(), 1, world.clock.clone());
    let contention = simba.contend(MUTEX);
    contention.start().unwrap();
    for occurrence in 1..=2 {
        let tenure = contention.acquired().await.unwrap();
        store.set_back.store(true, Ordering::SeqCst);
        assert_eq!(tenure.lost().await, Loss::Vanished);
        timeout(secs(60), contention.acquired()).await.unwrap_err();
        let errors = log.errors();
        assert_eq!(errors.len(), occurrence, "{errors:?}");
        let last = format!("the last tenure had token {}", tenure.token());
        for part in [MUTEX, &last, "restored from an older state", "Fix: raise the token in the store"] {
            assert!(errors[occurrence - 1].contains(part), "{part}: {errors:?}");
        }
        assert_eq!(contention.last_error().unwrap().kind(), ErrorKind::Protocol);
        store.set_back.store(false, Ordering::SeqCst);
    }
    let tenure = contention.acquired().await.unwrap();
    assert!(tenure.is_held(), "a greater token is accepted");
    contention.stop().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn no_tenure_begins_under_the_token_of_the_one_before() {
    let world = World::new();
    let clock = SkewedClock::new(world.clock.clone());
    let simba = handle(Stubborn(world.store.clone()), 1, clock.clone());
    let (contender, mut book) = recorder(&world, &[]);
    let contention = simba.contend(MUTEX).with_contender(contender);
    contention.start().unwrap();
    for _ in 0..5 {
        let tenure = contention.acquired().await.unwrap();
        // The machine sleeps for longer than its lease by its own clock. The store still has the hold.
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
    assert_eq!(book.pairs().len(), 6, "with greater and greater tokens");
    world.assert_empty().await;
}

// ===== notified before the end =====

type Called = (&'static str, Moment, FencingToken);

/// Writes down all of its callbacks, the first of which takes a while.
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
async fn a_contender_is_notified_before_the_deadline_while_the_store_hangs() {
    // While `on_acquired` runs, the next callback waits for it.
    for (busy, expiring, released) in
        [(Duration::ZERO, EXPIRING, DEADLINE), (ms(900), ms(900), DEADLINE), (secs(2), secs(2), secs(2))]
    {
        let world = World::new();
        let peer = world.peer(1);
        let (contender, mut calls) = phases(world.clock.clone(), busy);
        let contention = peer.contend().with_contender(contender);
        contention.start().unwrap();
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
async fn a_contender_is_notified_again_when_a_renewal_came_in_between() {
    let world = World::new();
    let peer = world.peer(1);
    let (contender, mut calls) = phases(world.clock.clone(), Duration::ZERO);
    let contention = peer.contend().with_contender(contender);
    contention.start().unwrap();
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
        assert!(calls.try_recv().is_err(), "renewals are no news");
    }
    peer.switch.set(Passage::HANG);
    assert_eq!(called(&mut calls).await.0, "expiring");
    assert_eq!(called(&mut calls).await, ("released", tenure.deadline() - Moment::ZERO));
}

#[tokio::test(start_paused = true)]
async fn a_contender_is_notified_to_stop_before_every_released() {
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
            // The machine sleeps through both moments.
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
