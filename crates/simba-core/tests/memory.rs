//! The reference backend by direct calls, without the engine.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod world;

use std::time::{Duration, UNIX_EPOCH};

use futures_util::FutureExt;
use simba_core::operate::{EvictIf, Eviction, MutexRecord};
use simba_core::spi::{Answer, Backend, Claim, Holding, Intent, Operate, Ownership, Prior, Session};
use simba_core::{Clock, ContenderId, FencingToken};
use tokio::time::sleep;
use world::{LEASE, MUTEX, TTL, World, WorldClock, lease, ms, name, secs};

/// The lifetime of a queue entry without a poll.
const ENTRY: Duration = ms(2 * 600);

fn id(id: &str) -> ContenderId {
    ContenderId::new(id).unwrap()
}

fn claim(contender: &str) -> Claim {
    Claim::new(name(MUTEX), id(contender), lease())
}

impl World {
    async fn open(&self, contender: &str) -> Box<dyn Session> {
        self.store.open(claim(contender)).await.unwrap()
    }

    async fn open_try(&self, contender: &str) -> Box<dyn Session> {
        self.store.open(claim(contender).with_intent(Intent::Try)).await.unwrap()
    }

    /// Opens a session that holds the mutex, and returns it with its token.
    async fn holder(&self, contender: &str) -> (Box<dyn Session>, FencingToken) {
        let mut session = self.open(contender).await;
        let token = ours(&session.contend(Prior::Nothing).await.unwrap());
        (session, token)
    }

    /// Opens a session that is queued and subscribed.
    async fn waiter(&self, contender: &str) -> Box<dyn Session> {
        let mut session = self.open(contender).await;
        assert!(!matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
        session.changed().await.unwrap();
        session
    }
}

/// Returns the token of [`Answer::Ours`].
fn ours(answer: &Answer) -> FencingToken {
    match answer {
        Answer::Ours(ownership) => ownership.token.unwrap(),
        answer => panic!("not ours: {answer:?}"),
    }
}

fn held(owner: &str, token: FencingToken, remaining: Duration) -> Answer {
    Answer::Held(Ownership::new(id(owner), Some(token), remaining))
}

async fn contend(session: &mut Box<dyn Session>, prior: Prior) -> Answer {
    session.contend(prior).await.unwrap()
}

/// Returns whether a hint has arrived, without waiting for one.
fn is_hinted(session: &mut Box<dyn Session>) -> bool {
    session.changed().now_or_never().is_some()
}

// ===== contending =====

#[tokio::test(start_paused = true)]
async fn open_and_inspect_write_nothing() {
    let world = World::new();
    let mut session = world.open("a").await;
    assert_eq!(session.inspect().await.unwrap(), None);
    session.release(Holding::Unknown).await.unwrap();
    drop(session);
    assert_eq!(world.store.list().await.unwrap(), []);
    assert_eq!(world.store.name(), "memory");
}

#[tokio::test(start_paused = true)]
async fn free_mutex_is_acquired_for_a_whole_lease_and_others_get_the_holder() {
    let world = World::new();
    let mut holder = world.open("a").await;
    let answer = contend(&mut holder, Prior::Nothing).await;
    let token = ours(&answer);
    let whole = Ownership::new(id("a"), Some(token), LEASE);
    assert_eq!(answer, Answer::Ours(whole.clone()));
    let mut other = world.open("b").await;
    assert_eq!(other.inspect().await.unwrap(), Some(whole));
    sleep(ms(300)).await;
    let left = Ownership::new(id("a"), Some(token), LEASE - ms(300));
    assert_eq!(contend(&mut other, Prior::Nothing).await, Answer::Held(left.clone()));
    assert_eq!(other.inspect().await.unwrap(), Some(left));
}

#[tokio::test(start_paused = true)]
async fn renewal_keeps_the_token_and_restarts_the_lease() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    for _ in 0..10 {
        sleep(LEASE - ms(1)).await;
        let renewed = Ownership::new(id("a"), Some(token), LEASE);
        assert_eq!(contend(&mut holder, Prior::Held).await, Answer::Ours(renewed));
    }
}

#[tokio::test(start_paused = true)]
async fn mutex_is_free_exactly_at_the_end_of_its_lease() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    let mut other = world.open("b").await;
    sleep(LEASE - ms(1)).await;
    assert_eq!(contend(&mut other, Prior::Nothing).await, held("a", token, ms(1)));
    sleep(ms(1)).await;
    assert_eq!(holder.inspect().await.unwrap(), None);
    assert!(ours(&contend(&mut other, Prior::Nothing).await) > token);
    // Its renewal is too late: another session holds the mutex.
    let Answer::Held(now) = contend(&mut holder, Prior::Held).await else { panic!() };
    assert_eq!(now.owner, id("b"));
}

#[tokio::test(start_paused = true)]
async fn late_renewal_of_a_free_mutex_is_a_new_acquisition() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    sleep(LEASE).await;
    assert!(ours(&contend(&mut holder, Prior::Held).await) > token);
}

#[tokio::test(start_paused = true)]
async fn session_without_a_hold_is_refused_under_its_own_id_and_extends_nothing() {
    let world = World::new();
    let (_holder, token) = world.holder("a").await;
    let mut other = world.open("a").await;
    sleep(ms(300)).await;
    assert_eq!(contend(&mut other, Prior::Nothing).await, held("a", token, LEASE - ms(300)));
    assert_eq!(world.record().await.waiters, Some(0), "it does not queue behind its own id");
    sleep(LEASE - ms(300)).await;
    assert_eq!(world.record().await.owner, None, "the lease was not extended");
}

#[tokio::test(start_paused = true)]
async fn unknown_prior_adopts_a_hold_under_its_own_id_with_its_token() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    sleep(ms(300)).await;
    let adopted = contend(&mut holder, Prior::Unknown).await;
    assert_eq!(adopted, Answer::Ours(Ownership::new(id("a"), Some(token), LEASE)));
    assert_eq!(ours(&contend(&mut holder, Prior::Held).await), token);
}

#[tokio::test(start_paused = true)]
async fn lapsed_hold_is_acquired_again_once() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    let again = ours(&contend(&mut holder, Prior::Lapsed(token)).await);
    assert!(again > token);
    // The same call again, as if it arrived late.
    assert_eq!(ours(&contend(&mut holder, Prior::Lapsed(token)).await), again);
}

#[tokio::test(start_paused = true)]
async fn release_under_an_older_token_frees_nothing() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    holder.release(Holding::Under(token)).await.unwrap();
    let later = ours(&contend(&mut holder, Prior::Nothing).await);
    holder.release(Holding::Under(token)).await.unwrap();
    assert_eq!(world.record().await.token, Some(later));
    holder.release(Holding::Under(later)).await.unwrap();
    assert_eq!(world.record().await.owner, None);
}

#[tokio::test(start_paused = true)]
async fn unknown_prior_without_a_hold_is_a_normal_contender() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    let mut other = world.open("b").await;
    assert_eq!(contend(&mut other, Prior::Unknown).await, held("a", token, LEASE));
    assert_eq!(world.record().await.waiters, Some(1));
    holder.release(Holding::Unknown).await.unwrap();
    assert!(ours(&contend(&mut other, Prior::Unknown).await) > token);
    assert_eq!(world.record().await.waiters, Some(0));
}

#[tokio::test(start_paused = true)]
async fn tokens_never_repeat_over_release_expiry_eviction_and_lapse() {
    let world = World::new();
    let mut session = world.open("a").await;
    let mut tokens = vec![ours(&contend(&mut session, Prior::Nothing).await)];
    for round in 0..40 {
        let prior = match round % 4 {
            0 => {
                session.release(Holding::Unknown).await.unwrap();
                Prior::Nothing
            }
            1 => {
                sleep(LEASE).await;
                Prior::Held
            }
            2 => {
                world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap();
                Prior::Held
            }
            _ => Prior::Lapsed(tokens[tokens.len() - 1]),
        };
        if round % 8 >= 4 {
            // Another session and another contender in between.
            session.release(Holding::Unknown).await.unwrap();
            let (mut between, token) = world.holder("b").await;
            tokens.push(token);
            between.release(Holding::Unknown).await.unwrap();
        }
        tokens.push(ours(&contend(&mut session, prior).await));
    }
    assert_eq!(tokens.len(), 61);
    assert!(tokens.is_sorted_by(|one, other| one < other), "{tokens:?}");
}

#[tokio::test(start_paused = true)]
async fn each_mutex_has_its_own_owner() {
    let world = World::new();
    let (_holder, _) = world.holder("a").await;
    let other = Claim::new(name("other"), id("b"), lease());
    let mut session = world.store.open(other).await.unwrap();
    ours(&session.contend(Prior::Nothing).await.unwrap());
}

// ===== releasing =====

#[tokio::test(start_paused = true)]
async fn release_is_idempotent_and_never_frees_another_hold() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    let mut other = world.waiter("b").await;
    other.release(Holding::Unknown).await.unwrap();
    assert_eq!(other.inspect().await.unwrap().unwrap().token, Some(token), "still held");
    assert_eq!(world.record().await.waiters, Some(0), "it left the queue");
    holder.release(Holding::Unknown).await.unwrap();
    holder.release(Holding::Unknown).await.unwrap();
    world.assert_empty().await;
    let next = ours(&contend(&mut other, Prior::Nothing).await);
    holder.release(Holding::Unknown).await.unwrap();
    assert_eq!(other.inspect().await.unwrap().unwrap().token, Some(next));
}

#[tokio::test(start_paused = true)]
async fn dropped_session_leaves_the_queue_and_holds_until_the_end_of_its_lease() {
    let world = World::new();
    let (holder, token) = world.holder("a").await;
    let waiter = world.waiter("b").await;
    drop(waiter);
    drop(holder);
    let record = world.record().await;
    assert_eq!((record.token, record.waiters), (Some(token), Some(0)));
    sleep(LEASE).await;
    world.assert_empty().await;
}

// ===== the queue =====

#[tokio::test(start_paused = true)]
async fn waiters_acquire_in_fifo_order() {
    let world = World::new();
    let (mut holder, _) = world.holder("first").await;
    let mut waiters = Vec::new();
    for number in 0..10 {
        waiters.push(world.waiter(&format!("w{number}")).await);
    }
    for next in 0..10 {
        // All poll again, the last one first. That does not change the order.
        for waiter in waiters[next..].iter_mut().rev() {
            assert!(matches!(contend(waiter, Prior::Nothing).await, Answer::Held(_)));
        }
        holder.release(Holding::Unknown).await.unwrap();
        for waiter in waiters[next + 1..].iter_mut().rev() {
            assert_eq!(
                contend(waiter, Prior::Nothing).await,
                Answer::Vacant,
                "free, but another waiter is first"
            );
            assert!(!is_hinted(waiter), "not woken");
        }
        assert!(is_hinted(&mut waiters[next]), "only the next one is woken");
        ours(&contend(&mut waiters[next], Prior::Nothing).await);
        std::mem::swap(&mut holder, &mut waiters[next]);
    }
}

#[tokio::test(start_paused = true)]
async fn try_never_queues_and_never_overtakes_a_live_waiter() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    let mut attempt = world.open_try("t").await;
    assert_eq!(contend(&mut attempt, Prior::Nothing).await, held("a", token, LEASE));
    assert_eq!(world.record().await.waiters, Some(0));
    let mut waiter = world.waiter("b").await;
    holder.release(Holding::Unknown).await.unwrap();
    assert_eq!(
        contend(&mut attempt, Prior::Nothing).await,
        Answer::Vacant,
        "free, but another waiter is first"
    );
    let record = world.record().await;
    assert_eq!((record.owner, record.waiters), (None, Some(1)), "it wrote nothing");
    ours(&contend(&mut waiter, Prior::Nothing).await);
    waiter.release(Holding::Unknown).await.unwrap();
    ours(&contend(&mut attempt, Prior::Nothing).await);
}

#[tokio::test(start_paused = true)]
async fn woken_waiter_that_leaves_passes_its_wake_up_on() {
    for drops in [true, false] {
        let world = World::new();
        let (mut holder, _) = world.holder("a").await;
        let mut first = world.waiter("b").await;
        let mut second = world.waiter("c").await;
        holder.release(Holding::Unknown).await.unwrap();
        assert!(!is_hinted(&mut second));
        if drops {
            drop(first);
        } else {
            assert!(is_hinted(&mut first), "woken, and about to leave");
            first.release(Holding::Unknown).await.unwrap();
        }
        assert!(is_hinted(&mut second), "dropped: {drops}");
        ours(&contend(&mut second, Prior::Nothing).await);
    }
}

#[tokio::test(start_paused = true)]
async fn waiter_that_leaves_while_the_mutex_is_held_wakes_no_other() {
    let world = World::new();
    let (_holder, _) = world.holder("a").await;
    let first = world.waiter("b").await;
    let mut second = world.waiter("c").await;
    drop(first);
    assert!(!is_hinted(&mut second));
}

#[tokio::test(start_paused = true)]
async fn queue_entry_of_a_dead_waiter_expires() {
    let world = World::new();
    let (mut holder, _) = world.holder("a").await;
    let dead = world.waiter("dead").await;
    let mut live = world.waiter("live").await;
    holder.release(Holding::Unknown).await.unwrap();
    sleep(ENTRY - ms(1)).await;
    assert_eq!(contend(&mut live, Prior::Nothing).await, Answer::Vacant);
    sleep(ms(1)).await;
    ours(&contend(&mut live, Prior::Nothing).await);
    drop(dead);
}

#[tokio::test(start_paused = true)]
async fn waiter_that_polls_in_time_keeps_its_entry() {
    let world = World::new();
    let (mut holder, _) = world.holder("a").await;
    let mut first = world.waiter("b").await;
    let mut second = world.waiter("c").await;
    for _ in 0..5 {
        sleep(LEASE - ms(1)).await;
        ours(&contend(&mut holder, Prior::Held).await);
        contend(&mut first, Prior::Nothing).await;
        contend(&mut second, Prior::Nothing).await;
    }
    holder.release(Holding::Unknown).await.unwrap();
    assert_eq!(contend(&mut second, Prior::Nothing).await, Answer::Vacant);
    ours(&contend(&mut first, Prior::Nothing).await);
}

// ===== hints =====

#[tokio::test(start_paused = true)]
async fn first_changed_completes_at_once_and_a_later_hint_is_kept() {
    let world = World::new();
    let (mut holder, _) = world.holder("a").await;
    let mut waiter = world.open("b").await;
    contend(&mut waiter, Prior::Nothing).await;
    assert!(is_hinted(&mut waiter), "after the subscription, since a change may have been missed");
    assert!(!is_hinted(&mut waiter), "once");
    holder.release(Holding::Unknown).await.unwrap();
    assert!(is_hinted(&mut waiter), "kept until the next call");
    assert!(!is_hinted(&mut waiter));
}

#[tokio::test(start_paused = true)]
async fn hint_completes_a_pending_changed() {
    let world = World::new();
    let (mut holder, _) = world.holder("a").await;
    let mut waiter = world.waiter("b").await;
    let freed = async {
        sleep(ms(50)).await;
        holder.release(Holding::Unknown).await.unwrap();
    };
    let (hint, ()) = tokio::join!(waiter.changed(), freed);
    hint.unwrap();
    assert_eq!(world.now().since_zero(), ms(50));
}

#[tokio::test(start_paused = true)]
async fn observer_is_hinted_at_every_change_of_owner_only() {
    let world = World::new();
    let mut observer = world.open_try("w").await;
    assert!(is_hinted(&mut observer) && !is_hinted(&mut observer));
    let (mut holder, _) = world.holder("a").await;
    assert!(is_hinted(&mut observer), "acquired");
    ours(&contend(&mut holder, Prior::Held).await);
    assert!(!is_hinted(&mut observer), "renewed");
    let waiter = world.waiter("b").await;
    drop(waiter);
    assert!(!is_hinted(&mut observer), "queued and left");
    holder.release(Holding::Unknown).await.unwrap();
    assert!(is_hinted(&mut observer), "released");
    holder.release(Holding::Unknown).await.unwrap();
    assert!(!is_hinted(&mut observer), "released again");
    ours(&contend(&mut holder, Prior::Nothing).await);
    assert!(is_hinted(&mut observer));
    world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap();
    assert!(is_hinted(&mut observer), "evicted");
}

#[tokio::test(start_paused = true)]
async fn holder_gets_no_hints() {
    let world = World::new();
    let (mut holder, _) = world.holder("a").await;
    assert!(!is_hinted(&mut holder));
    holder.release(Holding::Unknown).await.unwrap();
    assert!(is_hinted(&mut holder) && !is_hinted(&mut holder), "once it subscribes as a waiter");
}

// ===== for operators =====

#[tokio::test(start_paused = true)]
async fn list_is_sorted_and_includes_free_mutexes() {
    let world = World::new();
    let mut sessions = Vec::new();
    for mutex in ["b", "a:2", "c", "a:10", "B"] {
        let mut session = world.store.open(Claim::new(name(mutex), id("x"), lease())).await.unwrap();
        ours(&session.contend(Prior::Nothing).await.unwrap());
        sessions.push(session);
    }
    sessions[2].release(Holding::Unknown).await.unwrap();
    let list = world.store.list().await.unwrap();
    let names: Vec<_> = list.iter().map(|record| record.mutex.as_str()).collect();
    assert_eq!(names, ["B", "a:10", "a:2", "b", "c"]);
    let owned: Vec<_> = list.iter().map(|record| record.owner.is_some()).collect();
    assert_eq!(owned, [true, true, true, true, false]);
    for record in list {
        assert_eq!(world.store.read(&record.mutex).await.unwrap(), record, "the same as a single read");
    }
}

#[tokio::test(start_paused = true)]
async fn record_has_owner_token_times_and_waiters() {
    let world = World::new();
    assert_eq!(world.record().await, MutexRecord::free(name(MUTEX)), "an unknown mutex is free");
    sleep(secs(7)).await;
    let (mut holder, token) = world.holder("a").await;
    let _waiters = [world.waiter("b").await, world.waiter("c").await];
    sleep(ms(100)).await;
    ours(&contend(&mut holder, Prior::Held).await);
    sleep(TTL - ms(1)).await;
    let record = world.record().await;
    assert_eq!((record.owner, record.token), (Some(id("a")), Some(token)));
    assert_eq!(
        record.acquired_at,
        Some(UNIX_EPOCH + WorldClock::WALL + secs(7)),
        "not the time of the renewal"
    );
    assert_eq!((record.remaining, record.in_transition), (Some(LEASE - TTL + ms(1)), Some(false)));
    assert_eq!(record.waiters, Some(2));
    sleep(ms(1)).await;
    let record = world.record().await;
    assert_eq!((record.remaining, record.in_transition), (Some(LEASE - TTL), Some(true)));
    sleep(LEASE - TTL).await;
    let record = world.record().await;
    assert_eq!((record.owner, record.token, record.remaining), (None, None, None));
    assert_eq!((record.acquired_at, record.in_transition, record.waiters), (None, None, Some(2)));
}

#[tokio::test(start_paused = true)]
async fn eviction_frees_only_the_holder_that_the_condition_names() {
    let world = World::new();
    let evict = |condition| {
        let store = world.store.clone();
        async move { store.evict(&name(MUTEX), condition).await.unwrap() }
    };
    assert_eq!(evict(EvictIf::Any).await, Eviction::Vacant, "an unknown mutex");
    let (mut holder, stale) = world.holder("a").await;
    holder.release(Holding::Unknown).await.unwrap();
    assert_eq!(evict(EvictIf::Any).await, Eviction::Vacant);
    assert_eq!(evict(EvictIf::Token(stale)).await, Eviction::Vacant);
    let token = ours(&contend(&mut holder, Prior::Nothing).await);
    sleep(ms(300)).await;
    for other in [EvictIf::Token(stale), EvictIf::Owner(id("b"))] {
        assert_eq!(evict(other).await, Eviction::Other(id("a")));
        assert_eq!(holder.inspect().await.unwrap().unwrap().remaining, LEASE - ms(300), "unchanged");
    }
    let freed = Eviction::Freed { owner: id("a"), window: LEASE - ms(300) };
    assert_eq!(evict(EvictIf::Token(token)).await, freed);
    assert_eq!(holder.inspect().await.unwrap(), None);
    for condition in [EvictIf::Owner(id("a")), EvictIf::Any] {
        ours(&contend(&mut holder, Prior::Nothing).await);
        assert_eq!(evict(condition).await, Eviction::Freed { owner: id("a"), window: LEASE });
    }
}

#[tokio::test(start_paused = true)]
async fn eviction_wakes_the_next_waiter_and_the_old_holder_cannot_renew() {
    let world = World::new();
    let (mut holder, token) = world.holder("a").await;
    let mut waiter = world.waiter("b").await;
    world.store.evict(&name(MUTEX), EvictIf::Any).await.unwrap();
    assert!(is_hinted(&mut waiter));
    assert_eq!(contend(&mut holder, Prior::Held).await, Answer::Vacant, "the waiter is first");
    let next = ours(&contend(&mut waiter, Prior::Nothing).await);
    assert!(next > token);
    assert_eq!(contend(&mut holder, Prior::Held).await, held("b", next, LEASE));
}

#[tokio::test(start_paused = true)]
async fn probe_succeeds_without_a_schema() {
    let world = World::new();
    let operate = world.store.operate().unwrap();
    let probe = operate.probe().await.unwrap();
    assert_eq!((probe.server.as_str(), probe.round_trip), ("memory", Duration::ZERO));
    let [finding] = &probe.findings[..] else { panic!("{:?}", probe.findings) };
    assert!(finding.problem.contains("only this process"), "{finding:?}");
    assert_eq!(operate.schema(), None);
    operate.apply_schema().await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn clones_share_one_store_and_its_clock() {
    let world = World::new();
    let (_holder, token) = world.holder("a").await;
    let record = world.store.clone().read(&name(MUTEX)).await.unwrap();
    assert_eq!((record.token, record.remaining), (Some(token), Some(LEASE)));
    assert_eq!(record.acquired_at, Some(world.clock.wall()));
}
