//! Many contenders and many mutexes at once.

use std::sync::Arc;

use simba_core::{Loss, MutexName};

use crate::suite::CASE_LIMIT;
use crate::world::{Peer, assert_ok, lease_limit, name, now, since_zero, within};
use crate::{Fixture, History, What};

/// The number of contenders for one mutex, and how often each acquires it.
const CONTENDERS: usize = 50;
const TURNS: usize = 3;

/// Fifty contenders in five processes acquire one mutex in turn; the whole history satisfies every rule.
pub async fn fifty_contenders_take_turns(fixture: &dyn Fixture) {
    let mut peers = Vec::new();
    for _ in 0..5 {
        peers.push(Arc::new(Peer::connect(fixture).await));
    }
    let (mutex, history) = (name(), History::new());
    let contenders: Vec<_> = (0..CONTENDERS)
        .map(|index| {
            let peer = Arc::clone(&peers[index % peers.len()]);
            tokio::spawn(take_turns(peer, mutex.clone(), format!("c{index:02}"), history.clone()))
        })
        .collect();
    for contender in contenders {
        within(CASE_LIMIT, "every contender gets its turns", contender).await.unwrap();
    }
    let broken = history.check();
    assert!(broken.is_empty(), "broken: {broken:?}\n{}", history.timeline());
    peers[0].assert_free(&mutex).await;
}

async fn take_turns(peer: Arc<Peer>, mutex: MutexName, who: String, history: History) {
    // With so many at once, a busy store may not answer one contender for the length of a lease.
    let locker = peer.locker(&mutex).with_patience(CASE_LIMIT);
    for _ in 0..TURNS {
        let guard = assert_ok("every contender gets its turns", locker.lock().await);
        let (tenure, token) = (guard.tenure(), guard.token());
        history.record(since_zero(now()), &who, What::Acquired { token });
        history.record(since_zero(now()), &who, What::WorkStarted { token });
        tokio::task::yield_now().await;
        history.record(since_zero(now()), &who, What::WorkEnded);
        assert!(tenure.is_held(), "broken: a renewed hold is held: {:?}", tenure.loss());
        let at = since_zero(now());
        history.record(at, &who, What::Lost { loss: Loss::Released, valid_until: at });
        assert_ok("a release is confirmed", guard.release().await);
    }
}

/// Two hundred mutexes are held at once through one handle, for several leases.
pub async fn two_hundred_mutexes_are_held_at_once(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let names: Vec<_> = std::iter::repeat_with(name).take(200).collect();
    let locks: Vec<_> = names
        .iter()
        .map(|mutex| {
            let locker = one.locker(mutex).with_patience(CASE_LIMIT);
            tokio::spawn(async move { assert_ok("every mutex is acquired", locker.lock().await) })
        })
        .collect();
    let mut guards = Vec::new();
    for locked in locks {
        guards.push(within(CASE_LIMIT, "every mutex is acquired", locked).await.unwrap());
    }
    tokio::time::sleep(fixture.lease().total() * 2).await;
    for (guard, mutex) in guards.iter().zip(&names) {
        assert!(guard.is_held(), "broken: every hold is renewed: {:?}", guard.tenure().loss());
        assert_eq!(guard.tenure().mutex(), mutex, "broken: a hold is for the requested mutex");
    }
    for mutex in names.iter().step_by(20) {
        assert!(two.try_lock(mutex).await.is_none(), "broken: every held mutex is refused to others");
    }
    drop(guards);
    within(lease_limit(fixture), "a shutdown ends", one.simba.shutdown()).await;
    for mutex in names.iter().step_by(20) {
        assert!(two.try_lock(mutex).await.is_some(), "broken: a shutdown frees every mutex");
    }
}
