mod store;

use std::sync::atomic::Ordering;

use futures_util::FutureExt as _;
use simba_core::Clock as _;

use self::store::{Fault, LEASE, MemoryQueue, Store, token};
use super::*;

async fn ours(session: &mut QueueSession<MemoryQueue>, prior: Prior) -> Ownership {
    match session.contend(prior).await.unwrap() {
        Answer::Ours(ownership) => ownership,
        other => panic!("not acquired: {other:?}"),
    }
}

async fn held_by(session: &mut QueueSession<MemoryQueue>, prior: Prior) -> String {
    match session.contend(prior).await.unwrap() {
        Answer::Held(ownership) => ownership.owner.to_string(),
        other => panic!("not held by another: {other:?}"),
    }
}

fn is_pending(session: &mut QueueSession<MemoryQueue>) -> bool {
    session.changed().now_or_never().is_none()
}

#[test]
fn every_entry_has_an_owner_whatever_its_bytes_are() {
    let owner = |value: &[u8], key: &[u8]| Holder::of(value, key, token(7)).owner.as_str().to_owned();
    assert_eq!(owner(b"me\n", b"m/x"), "me");
    assert_eq!(owner(b"\xff", b"m/x"), "x");
    assert_eq!(owner(b"", b"x"), "x");
    assert_eq!(owner(b"", b"m/\xff"), "m/\\xff");
    assert_eq!(owner(b"", b"m/"), "m/");
    assert_eq!(owner(b" ", b" "), " ");
    let long = owner(b"", &[0xff; 600]);
    assert_eq!((long.len(), &long[..8]), (ContenderId::MAX_FOREIGN_LEN, "\\xff\\xff"));
}

#[tokio::test(start_paused = true)]
async fn entries_acquire_in_their_order_and_tokens_grow() {
    let store = Store::new();
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|id| store.session(id, Intent::Queue));
    let first = ours(&mut a, Prior::Nothing).await;
    assert_eq!(
        (held_by(&mut b, Prior::Nothing).await, held_by(&mut c, Prior::Nothing).await),
        ("a".into(), "a".into())
    );
    a.release(Holding::Under(first.token.unwrap())).await.unwrap();
    assert_eq!(held_by(&mut c, Prior::Nothing).await, "b");
    let second = ours(&mut b, Prior::Nothing).await;
    assert!(second.token > first.token);
    assert_eq!(inspected(&mut c).await.as_deref(), Some("b"));
    let before = store.requests.load(Ordering::SeqCst);
    assert_eq!(ours(&mut b, Prior::Held).await.token, second.token, "a renewal keeps the token");
    assert_eq!(store.requests.load(Ordering::SeqCst) - before, 1, "a renewal is one request");
}

async fn inspected(session: &mut QueueSession<MemoryQueue>) -> Option<String> {
    session.inspect().await.unwrap().map(|ownership| ownership.owner.to_string())
}

#[tokio::test(start_paused = true)]
async fn an_answer_grants_no_more_than_the_proof_counted_from_the_beginning_of_the_call() {
    let store = Store::new();
    store.state().delay = Duration::from_secs(1);
    let mut a = store.session("a", Intent::Queue);
    // The creation was sent at the beginning, and the read of the position a second later.
    assert_eq!(ours(&mut a, Prior::Nothing).await.remaining, LEASE);
    let mut b = store.session("b", Intent::Queue);
    held_by(&mut b, Prior::Nothing).await;
    a.release(Holding::Unknown).await.unwrap();
    // b's creation has proven its entry three seconds ago: seven are left.
    assert_eq!(ours(&mut b, Prior::Nothing).await.remaining, LEASE - Duration::from_secs(4));
}

#[tokio::test(start_paused = true)]
async fn a_first_entry_with_an_old_proof_is_granted_after_a_new_one_only() {
    let store = Store::new();
    let (mut a, mut b) = (store.session("a", Intent::Queue), store.session("b", Intent::Queue));
    ours(&mut a, Prior::Nothing).await;
    held_by(&mut b, Prior::Nothing).await;
    store.pass(LEASE / 2 + Duration::from_secs(1)).await;
    a.release(Holding::Unknown).await.unwrap();
    store.state().delay = Duration::from_millis(1);
    // The read of the position succeeds, and the proof fails.
    let refused = async {
        tokio::time::sleep(Duration::from_micros(500)).await;
        store.fail_next(Fault::Refused);
    };
    let (answer, ()) = tokio::join!(b.contend(Prior::Nothing), refused);
    assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unavailable);
    assert!(ours(&mut b, Prior::Unknown).await.remaining > LEASE - Duration::from_millis(10));
}

#[tokio::test(start_paused = true)]
async fn an_unanswered_creation_leaves_one_entry_which_the_next_call_finds() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        let mut a = store.session("a", Intent::Queue);
        store.fail_next(fault);
        assert!(a.contend(Prior::Nothing).await.is_err());
        ours(&mut a, Prior::Unknown).await;
        assert_eq!(store.owners(), ["a"], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_creation_is_awaited_by_the_next_call_and_covered_by_a_release() {
    let store = Store::new();
    store.state().delay = Duration::from_secs(1);
    let [mut a, mut b] = ["a", "b"].map(|id| store.session(id, Intent::Queue));
    assert!(a.contend(Prior::Nothing).now_or_never().is_none());
    assert!(b.contend(Prior::Nothing).now_or_never().is_none());
    ours(&mut a, Prior::Unknown).await;
    b.release(Holding::Unknown).await.unwrap();
    assert_eq!(store.owners(), ["a"]);
}

#[tokio::test(start_paused = true)]
async fn a_dropped_session_leaves_no_entry() {
    let store = Store::new();
    store.state().delay = Duration::from_secs(1);
    let [mut a, mut b, mut c] = ["a", "b", "c"].map(|id| store.session(id, Intent::Queue));
    ours(&mut a, Prior::Nothing).await;
    held_by(&mut b, Prior::Nothing).await;
    assert!(c.contend(Prior::Nothing).now_or_never().is_none(), "its creation is under way");
    drop((b, c));
    store.pass(Duration::from_secs(3)).await;
    assert_eq!(store.owners(), ["a"]);
    // A release that was dropped half-way.
    assert!(a.release(Holding::Unknown).now_or_never().is_none());
    drop(a);
    store.pass(Duration::from_secs(3)).await;
    assert!(store.owners().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_late_creation_that_a_failed_release_found_is_deleted_with_its_session() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        store.state().delay = Duration::from_secs(1);
        let mut a = store.session("a", Intent::Queue);
        assert!(a.contend(Prior::Nothing).now_or_never().is_none(), "its creation is under way");
        tokio::task::yield_now().await;
        // The next request is the deletion.
        store.fail_next(fault);
        assert!(a.release(Holding::Unknown).await.is_err());
        drop(a);
        store.pass(Duration::from_secs(3)).await;
        assert_eq!((store.owners(), store.state().created), (Vec::new(), 1), "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_session_that_contends_and_is_dropped_after_a_dropped_release_leaves_no_entry() {
    let store = Store::new();
    let mut a = store.session("a", Intent::Queue);
    let first = ours(&mut a, Prior::Nothing).await;
    store.state().delay = Duration::from_secs(1);
    // Executed later.
    assert!(a.release(Holding::Unknown).now_or_never().is_none());
    let second = ours(&mut a, Prior::Unknown).await;
    assert!(second.token > first.token, "the entry is not used again");
    assert_eq!(store.owners(), ["a"]);
    drop(a);
    store.pass(Duration::from_secs(3)).await;
    assert!(store.owners().is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_entry_of_a_lapsed_tenure_is_given_up_behind_the_waiters() {
    let store = Store::new();
    let [mut a, mut b] = ["a", "b"].map(|id| store.session(id, Intent::Queue));
    let lost = ours(&mut a, Prior::Nothing).await.token.unwrap();
    assert!(ours(&mut a, Prior::Lapsed(lost)).await.token > Some(lost), "no waiter");
    let lost = ours(&mut a, Prior::Held).await.token.unwrap();
    held_by(&mut b, Prior::Nothing).await;
    assert_eq!(held_by(&mut a, Prior::Lapsed(lost)).await, "b", "the waiter is first now");
    let of_b = ours(&mut b, Prior::Nothing).await.token;
    b.release(Holding::Unknown).await.unwrap();
    assert!(ours(&mut a, Prior::Lapsed(lost)).await.token > of_b);
}

#[tokio::test(start_paused = true)]
async fn a_failed_leave_of_a_lapsed_tenure_does_not_revive_its_token() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        let mut a = store.session("a", Intent::Queue);
        let lost = ours(&mut a, Prior::Nothing).await.token.unwrap();
        store.fail_next(fault);
        assert!(a.contend(Prior::Lapsed(lost)).await.is_err());
        // The entry that was left may still be the first until the background has deleted it.
        let _ = a.contend(Prior::Lapsed(lost)).await.unwrap();
        store.pass(Duration::from_secs(1)).await;
        assert!(ours(&mut a, Prior::Lapsed(lost)).await.token > Some(lost), "{fault:?}");
        assert_eq!(store.owners(), ["a"], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_whose_deletion_was_not_confirmed_is_not_used_again() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        let mut a = store.session("a", Intent::Queue);
        let first = ours(&mut a, Prior::Nothing).await;
        store.fail_next(fault);
        assert!(a.release(Holding::Unknown).await.is_err());
        // The entry that was left may still be the first until the background has deleted it.
        let _ = a.contend(Prior::Unknown).await.unwrap();
        store.pass(Duration::from_secs(1)).await;
        assert!(ours(&mut a, Prior::Unknown).await.token > first.token, "{fault:?}");
        assert_eq!(store.owners(), ["a"], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_try_never_stays_in_the_queue() {
    let store = Store::new();
    let mut holder = store.session("holder", Intent::Queue);
    let token = ours(&mut holder, Prior::Nothing).await.token.unwrap();
    let mut tries = store.session("tries", Intent::Try);
    assert_eq!(held_by(&mut tries, Prior::Nothing).await, "holder");
    assert_eq!(store.owners(), ["holder"]);
    holder.release(Holding::Under(token)).await.unwrap();
    // Another entry is created between the read of the queue and the own creation.
    store.state().rival = Some(ContenderId::foreign("rival").unwrap());
    assert_eq!(held_by(&mut tries, Prior::Nothing).await, "rival");
    assert_eq!(store.owners(), ["rival"]);
    store.evict();
    ours(&mut tries, Prior::Nothing).await;
}

#[tokio::test(start_paused = true)]
async fn a_try_whose_leave_fails_does_not_use_its_entry_again() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        let mut tries = store.session("tries", Intent::Try);
        store.state().rival = Some(ContenderId::foreign("rival").unwrap());
        store.state().delay = Duration::from_millis(10);
        // The third request, after the creation and a read, is the deletion.
        let fails = async {
            tokio::time::sleep(Duration::from_millis(15)).await;
            store.fail_next(fault);
        };
        let (answer, ()) = tokio::join!(tries.contend(Prior::Nothing), fails);
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unavailable);
        let left = token(store.state().created);
        store.evict();
        // The entry that was left may be the first until the background has deleted it.
        let _ = tries.contend(Prior::Unknown).await.unwrap();
        store.pass(Duration::from_secs(1)).await;
        assert!(ours(&mut tries, Prior::Unknown).await.token > Some(left), "{fault:?}");
        assert_eq!(store.owners(), ["tries"], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_predecessor_ends_before_it_is_watched_acquires_in_the_same_call() {
    let store = Store::new();
    let [mut a, mut b] = ["a", "b"].map(|id| store.session(id, Intent::Queue));
    ours(&mut a, Prior::Nothing).await;
    store.state().delay = Duration::from_millis(10);
    // After the creation and the read of the position, and before the watch.
    let evicted = async {
        tokio::time::sleep(Duration::from_millis(25)).await;
        store.evict();
    };
    let (owned, ()) = tokio::join!(ours(&mut b, Prior::Nothing), evicted);
    assert_eq!((owned.owner.as_str(), store.owners()), ("b", vec!["b".into()]));
}

#[tokio::test(start_paused = true)]
async fn a_waiter_whose_watch_fails_keeps_its_entry_and_watches_in_the_next_call() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        let [mut a, mut b] = ["a", "b"].map(|id| store.session(id, Intent::Queue));
        ours(&mut a, Prior::Nothing).await;
        store.state().delay = Duration::from_millis(10);
        // The third request, after the creation and a read, is the watch.
        let fails = async {
            tokio::time::sleep(Duration::from_millis(15)).await;
            store.fail_next(fault);
        };
        let (answer, ()) = tokio::join!(b.contend(Prior::Nothing), fails);
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(held_by(&mut b, Prior::Unknown).await, "a");
        assert_eq!((store.owners(), store.state().created), (vec!["a".into(), "b".into()], 2), "{fault:?}");
        assert!(!is_pending(&mut b) && is_pending(&mut b), "the first hint comes once");
        store.evict();
        assert!(!is_pending(&mut b));
        ours(&mut b, Prior::Nothing).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_of_the_holder_neither_queues_nor_acquires() {
    let store = Store::new();
    let [mut holder, mut duplicate] = ["same", "same"].map(|id| store.session(id, Intent::Queue));
    ours(&mut holder, Prior::Nothing).await;
    for _ in 0..2 {
        assert_eq!(held_by(&mut duplicate, Prior::Nothing).await, "same");
        assert_eq!(store.owners(), ["same"]);
    }
    holder.release(Holding::Unknown).await.unwrap();
    ours(&mut duplicate, Prior::Nothing).await;
}

#[tokio::test(start_paused = true)]
async fn a_duplicate_whose_deletion_was_not_confirmed_leaves_no_entry() {
    for fault in [Fault::Refused, Fault::Unanswered] {
        let store = Store::new();
        let [mut holder, mut duplicate] = ["same", "same"].map(|id| store.session(id, Intent::Queue));
        ours(&mut holder, Prior::Nothing).await;
        store.state().delay = Duration::from_millis(1);
        // The fourth request, after a creation and two reads, is the deletion.
        let fails = async {
            tokio::time::sleep(Duration::from_micros(2_500)).await;
            store.fail_next(fault);
        };
        let (answer, ()) = tokio::join!(duplicate.contend(Prior::Nothing), fails);
        assert_eq!(answer.unwrap_err().kind(), ErrorKind::Unavailable);
        assert_eq!(held_by(&mut duplicate, Prior::Unknown).await, "same");
        store.pass(Duration::from_secs(1)).await;
        assert_eq!(store.owners(), ["same"], "{fault:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_hint_is_given_once_and_later_ones_are_kept() {
    let store = Store::new();
    let [mut a, mut b] = ["a", "b"].map(|id| store.session(id, Intent::Queue));
    ours(&mut a, Prior::Nothing).await;
    held_by(&mut b, Prior::Nothing).await;
    assert!(!is_pending(&mut b) && is_pending(&mut b), "the first hint comes once");
    a.release(Holding::Unknown).await.unwrap();
    assert!(!is_pending(&mut b), "the hint came while nothing awaited it");
    assert!(is_pending(&mut b));
    ours(&mut b, Prior::Nothing).await;
}

#[tokio::test(start_paused = true)]
async fn a_holder_gets_a_hint_when_its_entry_is_deleted_and_acquires_with_a_greater_token() {
    let store = Store::new();
    let mut a = store.session("a", Intent::Queue);
    let lost = ours(&mut a, Prior::Nothing).await.token;
    assert!(is_pending(&mut a), "a holder gets no first hint");
    store.evict();
    a.changed().await.unwrap();
    assert!(ours(&mut a, Prior::Held).await.token > lost);
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_is_a_hint_for_waiters_observers_and_holders() {
    let store = Store::new();
    let [mut a, mut b] = ["a", "b"].map(|id| store.session(id, Intent::Queue));
    let mut observer = store.session("o", Intent::Observe);
    ours(&mut a, Prior::Nothing).await;
    held_by(&mut b, Prior::Nothing).await;
    inspected(&mut observer).await;
    for waits in [&mut b, &mut observer] {
        assert!(!is_pending(waits) && is_pending(waits), "the first hint comes once");
    }
    // Nothing awaits the watch of the holder yet.
    assert!(is_pending(&mut a));
    store.wakeups.notify_all();
    for session in [&mut a, &mut b, &mut observer] {
        assert!(!is_pending(session));
    }
    // Nothing has changed: a waiter is not woken before the next reconnect.
    assert_eq!(held_by(&mut b, Prior::Nothing).await, "a");
    assert!(is_pending(&mut b));
    store.wakeups.notify_all();
    assert!(!is_pending(&mut b));
}

#[tokio::test(start_paused = true)]
async fn an_observer_gets_a_hint_after_every_change_of_owner() {
    let store = Store::new();
    let (mut observer, mut a) = (store.session("o", Intent::Observe), store.session("a", Intent::Queue));
    assert_eq!(inspected(&mut observer).await, None);
    observer.changed().await.unwrap();
    assert!(is_pending(&mut observer));
    ours(&mut a, Prior::Nothing).await;
    observer.changed().await.unwrap();
    assert_eq!(inspected(&mut observer).await.as_deref(), Some("a"));
    assert!(is_pending(&mut observer));
    a.release(Holding::Unknown).await.unwrap();
    observer.changed().await.unwrap();
    assert_eq!(inspected(&mut observer).await, None);
}

#[tokio::test(start_paused = true)]
async fn a_release_frees_the_named_hold_only_and_can_be_repeated() {
    let store = Store::new();
    let mut a = store.session("a", Intent::Queue);
    let own = ours(&mut a, Prior::Nothing).await.token.unwrap();
    a.release(Holding::Under(token(own.get() + 1))).await.unwrap();
    assert_eq!(store.owners(), ["a"], "a hold under another token");
    store.fail_next(Fault::Unanswered);
    assert!(a.release(Holding::Under(own)).await.is_err());
    a.release(Holding::Under(own)).await.unwrap();
    assert!(store.owners().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_changes_during_every_attempt_is_unavailable() {
    let store = Store::new();
    let mut a = store.session("a", Intent::Queue);
    let mut contend = std::pin::pin!(a.contend(Prior::Nothing));
    store.state().delay = Duration::from_secs(1);
    let error = loop {
        tokio::select! {
            answer = &mut contend => break answer.unwrap_err(),
            () = tokio::time::sleep(Duration::from_millis(10)) => store.state().entries.clear(),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Unavailable);
}

/// What one contender believes.
struct Belief {
    session: QueueSession<MemoryQueue>,
    /// The token and the end of its tenure.
    tenure: Option<(FencingToken, Moment)>,
    prior: Prior,
}

impl Belief {
    /// Makes one call as the engine does, and drops it after `patience`.
    async fn step(&mut self, store: &Store, patience: Duration, release: bool) {
        let began = store.clock.now();
        if let Some((token, _)) = self.tenure.filter(|(_, until)| *until <= began) {
            (self.tenure, self.prior) = (None, Prior::Lapsed(token));
        }
        if let (true, Some((token, _))) = (release, self.tenure) {
            let released = tokio::time::timeout(patience, self.session.release(Holding::Under(token))).await;
            (self.tenure, self.prior) = match released {
                Ok(Ok(())) => (None, Prior::Nothing),
                _ => (None, Prior::Lapsed(token)),
            };
            return;
        }
        match tokio::time::timeout(patience, self.session.contend(self.prior)).await {
            Ok(Ok(Answer::Ours(ownership))) => {
                self.tenure = Some((ownership.token.unwrap(), began + ownership.remaining));
                self.prior = Prior::Held;
            }
            Ok(Ok(_)) => (self.tenure, self.prior) = (None, Prior::Nothing),
            _ if self.prior == Prior::Nothing => self.prior = Prior::Unknown,
            _ => {}
        }
    }
}

#[tokio::test(start_paused = true)]
async fn with_faults_there_is_one_valid_holder_and_every_tenure_has_a_greater_token() {
    for seed in 0..200 {
        let (store, mut random) = (Store::new(), fastrand::Rng::with_seed(seed));
        let mut beliefs = ["a", "b", "c"].map(|id| Belief {
            session: store.session(id, Intent::Queue),
            tenure: None,
            prior: Prior::Nothing,
        });
        let mut last = (token(0), usize::MAX);
        for step in 0..100 {
            store.state().delay = Duration::from_millis(random.u64(0..3_000));
            if random.u8(..) < 80 {
                store.fail_next(if random.bool() { Fault::Refused } else { Fault::Unanswered });
            }
            let at = random.usize(0..3);
            let patience = Duration::from_millis(random.u64(1..8_000));
            beliefs[at].step(&store, patience, random.u8(..) < 60).await;
            let now = store.clock.now();
            let valid = beliefs.iter().filter(|belief| belief.tenure.is_some_and(|(_, until)| until > now));
            assert!(valid.count() <= 1, "seed {seed}, step {step}");
            if let Some((token, _)) = beliefs[at].tenure {
                assert!(
                    token > last.0 || (token, at) == last,
                    "seed {seed}, step {step}: {token:?} after {last:?}"
                );
                last = (token, at);
            }
            store.pass(Duration::from_millis(random.u64(0..2_000))).await;
        }
        drop(beliefs);
        store.pass(LEASE * 2).await;
        assert!(store.owners().is_empty(), "seed {seed}: {:?}", store.owners());
    }
}
