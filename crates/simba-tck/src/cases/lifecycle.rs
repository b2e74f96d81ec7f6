//! Whoever leaves, leaves nothing behind.

use std::convert::Infallible;
use std::time::Duration;

use simba_core::{Contention, ErrorKind, FencingToken, Schedule};

use crate::Fixture;
use crate::world::{Peer, Told, kept, lock, long, name, patience, recorder, release, soon, within};

/// A shutdown frees every mutex, leaves every queue, and tells the work first.
pub async fn a_shutdown_leaves_nothing(fixture: &dyn Fixture) {
    let (leaving, staying) = Peer::pair(fixture).await;
    let names @ [held, led, scheduled, awaited] = &[name(), name(), name(), name()];
    let guard = lock(&leaving.long_locker(held)).await;
    // A shutdown waits for the work, which stops when it is told to.
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
    leaving.shutdown().await;
    soon("work is told to stop", work).await.unwrap();
    release(other).await;
    for mutex in names {
        staying.finds_nothing_of(mutex).await;
    }
}

/// A dropped guard frees its mutex.
pub async fn a_dropped_guard_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    drop(lock(&one.long_locker(&mutex)).await);
    two.finds_nothing_of(&mutex).await;
}

/// A dropped contention frees its mutex, or leaves the queue.
pub async fn a_dropped_contention_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let [leader, waiter] = [&one, &two].map(|peer| peer.simba.contend(mutex.clone()).with_lease(long()));
    leader.start().unwrap();
    soon("a free mutex is acquired", leader.acquired()).await.unwrap();
    waiter.start().unwrap();
    drop(waiter);
    drop(leader);
    two.finds_nothing_of(&mutex).await;
}

/// A panic under the mutex frees it.
pub async fn a_panic_leaves_nothing(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let guard = lock(&one.long_locker(&mutex)).await;
    let work = tokio::spawn(async move {
        let _guard = guard;
        // A panic that nobody needs to read.
        std::panic::resume_unwind(Box::new("work failed"));
    });
    assert!(work.await.is_err(), "the work panics");
    two.finds_nothing_of(&mutex).await;
}

/// A handle that shuts down leaves those of others alone.
pub async fn a_handle_outlives_another(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, theirs) = (name(), name());
    let guard = one.lock(&mutex).await;
    let other = lock(&two.long_locker(&theirs)).await;
    release(other).await;
    two.shutdown().await;
    tokio::time::sleep(fixture.lease().total() * 2).await;
    assert!(guard.is_held(), "broken: another's shutdown ends no hold: {:?}", guard.tenure().loss());
    release(guard).await;
}

/// A contention can be stopped and started at once under its label, and waits for no hold that it left behind.
pub async fn a_contention_restarts_under_its_label(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let contention = peer.simba.contend(name()).with_label("tck").with_lease(long());
    let mut last = FencingToken::new(0);
    for _ in 0..5 {
        contention.start().unwrap();
        let tenure = soon("a restart acquires at once", contention.acquired()).await.unwrap();
        assert!(tenure.token() > last, "broken: a restart gets a greater token");
        last = tenure.token();
        // The stop goes on in the background, and the start comes after it.
        drop(crate::world::polled(contention.stop(), 1).await);
    }
}

/// A contender is told of every tenure's beginning and end in turn.
pub async fn callbacks_alternate(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let mut parties = Vec::new();
    for peer in [&one, &two] {
        let (recorder, told) = recorder();
        let contention = peer.simba.contend(mutex.clone()).with_contender(recorder);
        contention.start().unwrap();
        parties.push((contention, told));
    }
    let mut last = FencingToken::new(0);
    for _ in 0..6 {
        let index = leading(fixture, &parties[0].0, &parties[1].0).await;
        let (leader, told) = &mut parties[index];
        let begun = soon("a new holder is told", told.recv()).await;
        let Some(Told::Acquired(token)) = begun else {
            panic!("broken: `acquired` comes first, not {begun:?}")
        };
        assert!(token > last, "broken: tenures are told in their order");
        last = token;
        leader.step_down(Duration::from_millis(50));
        let ended = soon("every `acquired` has its `released`", told.recv()).await;
        assert_eq!(ended, Some(Told::Released(token)), "broken: a tenure ends before the next begins");
    }
    for (contention, _) in &parties {
        kept("a contention stops", soon("a contention stops", contention.stop()).await);
    }
}

/// Which of the two leads.
async fn leading(fixture: &dyn Fixture, one: &Contention, two: &Contention) -> usize {
    let leads = async {
        tokio::select! {
            biased;
            led = one.acquired() => led.map(|_| 0),
            led = two.acquired() => led.map(|_| 1),
        }
    };
    within(patience(fixture), "somebody leads", leads).await.unwrap()
}

/// A handle that was shut down refuses everything, and says why.
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
        assert_eq!(kind, Some(ErrorKind::Closed), "broken: a closed handle says that it is closed");
    }
}

/// Closing a connection twice is closing it once, and others live on.
pub async fn closing_twice_is_closing_once(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    for _ in 0..2 {
        soon("a shutdown ends", one.simba.shutdown()).await;
        soon("a close ends", one.backend.close()).await;
    }
    release(two.lock(&name()).await).await;
}
