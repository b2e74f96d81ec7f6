//! A contender that stops leaves nothing behind.

use std::convert::Infallible;
use std::time::Duration;

use simba_core::{Contention, ErrorKind, FencingToken, Schedule};

use crate::Fixture;
use crate::world::{
    Callback, Peer, assert_ok, lease_limit, lock, long, name, recorder, release, soon, until, within,
};

/// A shutdown frees every mutex, leaves every queue, and asks the work to stop first.
pub async fn a_shutdown_leaves_nothing(fixture: &dyn Fixture) {
    let (leaving, staying) = Peer::pair(fixture).await;
    let names @ [held, led, scheduled, awaited] = &[name(), name(), name(), name()];
    let guard = lock(&leaving.long_locker(held)).await;
    // A shutdown waits for the work, which stops when it is asked to.
    let work = tokio::spawn(async move { guard.expiring().await });
    let long = leaving.simba.with_lease(long());
    let leader = long.contend(led.clone());
    leader.start().unwrap();
    soon("a free mutex is acquired", leader.acquired()).await.unwrap();
    let every = Schedule::fixed_rate(Duration::from_millis(50)).unwrap();
    let job = long.scheduler(scheduled.clone()).start(every, |_| async { Ok::<_, Infallible>(()) }).unwrap();
    soon("a free mutex is acquired", job.acquired()).await.unwrap();
    let other = lock(&staying.long_locker(awaited)).await;
    let waiting = long.contend(awaited.clone());
    waiting.start().unwrap();
    until("a waiter sees the holder", || waiting.owner().is_owner(other.contender())).await;
    leaving.shutdown().await;
    soon("work is asked to stop", work).await.unwrap();
    release(other).await;
    for mutex in names {
        staying.assert_free(mutex).await;
    }
}

/// A dropped guard frees its mutex.
pub async fn a_dropped_guard_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    drop(lock(&one.long_locker(&mutex)).await);
    two.assert_free(&mutex).await;
}

/// A dropped contention frees its mutex, or leaves the queue.
pub async fn a_dropped_contention_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let [leader, waiter] = [&one, &two].map(|peer| peer.simba.contend(mutex.clone()).with_lease(long()));
    leader.start().unwrap();
    let tenure = soon("a free mutex is acquired", leader.acquired()).await.unwrap();
    waiter.start().unwrap();
    until("a waiter sees the holder", || waiter.owner().is_owner(tenure.contender())).await;
    drop(waiter);
    drop(leader);
    two.assert_free(&mutex).await;
}

/// A panic under the mutex frees it.
pub async fn a_panic_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = lock(&one.long_locker(&mutex)).await;
    let work = tokio::spawn(async move {
        let _guard = guard;
        // Without a message on stderr.
        std::panic::resume_unwind(Box::new("work failed"));
    });
    assert!(work.await.is_err(), "the work panics");
    two.assert_free(&mutex).await;
}

/// A shutdown of one handle does not affect others.
pub async fn a_shutdown_does_not_affect_other_handles(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, other_mutex) = (name(), name());
    let guard = one.lock(&mutex).await;
    let other = lock(&two.long_locker(&other_mutex)).await;
    release(other).await;
    two.shutdown().await;
    tokio::time::sleep(fixture.lease().total() * 2).await;
    assert!(
        guard.is_held(),
        "broken: a shutdown of another handle ends no hold: {:?}",
        guard.tenure().loss()
    );
    release(guard).await;
}

/// A contention can be stopped and started again at once under its label, and does not wait for its own earlier hold.
pub async fn a_contention_restarts_under_its_label(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let contention = peer.simba.contend(name()).with_label("tck").with_lease(long());
    let mut last = FencingToken::new(0);
    for _ in 0..5 {
        contention.start().unwrap();
        let tenure = soon("a restart acquires at once", contention.acquired()).await.unwrap();
        assert!(tenure.token() > last, "broken: a restart gets a greater token");
        last = tenure.token();
        // The stop continues in the background, and the start comes after it.
        drop(crate::world::polled(contention.stop(), 1).await);
    }
}

/// A contender is notified of the start and end of every tenure alternately.
pub async fn callbacks_alternate(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut parties = Vec::new();
    for peer in [&one, &two] {
        let (recorder, callbacks) = recorder();
        let contention = peer.simba.contend(mutex.clone()).with_contender(recorder);
        contention.start().unwrap();
        parties.push((contention, callbacks));
    }
    let mut last = FencingToken::new(0);
    for _ in 0..6 {
        let index = leading(fixture, &parties[0].0, &parties[1].0).await;
        let (leader, callbacks) = &mut parties[index];
        let begun = soon("a new holder is notified", callbacks.recv()).await;
        let Some(Callback::Acquired(token)) = begun else {
            panic!("broken: `acquired` comes first, not {begun:?}")
        };
        assert!(token > last, "broken: callbacks come in the order of the tenures");
        last = token;
        leader.step_down(Duration::from_millis(50));
        let ended = soon("every `acquired` has its `released`", callbacks.recv()).await;
        assert_eq!(ended, Some(Callback::Released(token)), "broken: a tenure ends before the next begins");
    }
    for (contention, _) in &parties {
        assert_ok("a contention stops", soon("a contention stops", contention.stop()).await);
    }
}

/// Returns the index of the leader.
async fn leading(fixture: &dyn Fixture, one: &Contention, two: &Contention) -> usize {
    let leads = async {
        tokio::select! {
            biased;
            led = one.acquired() => led.map(|_| 0),
            led = two.acquired() => led.map(|_| 1),
        }
    };
    within(lease_limit(fixture), "one of them leads", leads).await.unwrap()
}

/// A handle that was shut down refuses every call with a specific error.
pub async fn a_closed_handle_refuses(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let mutex = name();
    let (locker, contention) = (peer.locker(&mutex), peer.simba.contend(mutex.clone()));
    let simba = peer.simba.clone();
    peer.shutdown().await;
    let refusals = [
        soon("a closed handle answers", locker.lock()).await.err(),
        soon("a closed handle answers", locker.try_lock()).await.err(),
        contention.start().err(),
        simba.observe(mutex).err(),
    ];
    for refusal in refusals {
        let kind = refusal.map(|error| error.kind());
        assert_eq!(kind, Some(ErrorKind::Closed), "broken: a closed handle returns `Closed`");
    }
}

/// Closing a connection twice has no further effect, and other connections stay open.
pub async fn close_is_idempotent(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    for _ in 0..2 {
        soon("a shutdown ends", one.simba.shutdown()).await;
        soon("a close ends", one.backend.close()).await;
    }
    release(two.lock(&name()).await).await;
}
