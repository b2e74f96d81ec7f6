//! The five cases of the suite of JVM Simba.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use simba_core::{Contention, Loss, Schedule, Status};
use tokio::sync::mpsc;

use crate::Fixture;
use crate::suite::CASE_LIMIT;
use crate::world::{Callback, Peer, assert_ok, long, name, recorder, soon, within};

/// A contender that starts acquires a free mutex and is notified, and is notified again when it stops.
pub async fn start(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let (recorder, mut callbacks) = recorder();
    // The ttl is longer than any delay before the check of `is_in_ttl`.
    let contention = peer.simba.contend(name()).with_lease(long()).with_contender(recorder);
    let token = lead(&contention).await;
    assert_eq!(soon("a new holder is notified", callbacks.recv()).await, Some(Callback::Acquired(token)));
    assert!(contention.is_owner() && contention.is_in_ttl(), "broken: a contender that was notified holds");
    stop(&contention).await;
    assert_eq!(
        soon("the end of a tenure is notified", callbacks.recv()).await,
        Some(Callback::Released(token))
    );
    assert!(!contention.is_owner(), "broken: a stopped contender does not hold");
}

/// A contention that was stopped can be started again.
pub async fn restart(fixture: &dyn Fixture) {
    let peer = Peer::connect(fixture).await;
    let contention = peer.simba.contend(name());
    let mut last = None;
    for _ in 0..3 {
        let token = lead(&contention).await;
        assert!(Some(token) > last, "broken: a restart gets a greater token");
        stop(&contention).await;
        assert_eq!(contention.status(), Status::Idle, "broken: a stop ends the contention");
        last = Some(token);
    }
}

/// While one contender holds, another waits, and acquires next.
pub async fn guard(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let (first, second) = (one.simba.contend(mutex.clone()), two.simba.contend(mutex));
    let token = lead(&first).await;
    second.start().unwrap();
    let holder = first.id();
    crate::world::until("a contender sees the holder", || second.owner().id == holder).await;
    assert!(first.is_owner() && !second.is_owner(), "broken: one holds and the other waits");
    stop(&first).await;
    let next = within(CASE_LIMIT, "the next one holds", second.acquired()).await;
    assert!(assert_ok("the next one holds", next).token() > token, "broken: the next token is greater");
}

/// Many contenders in several processes all acquire, one at a time.
pub async fn multi_contend(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let mutex = name();
    let inside = Arc::new(AtomicUsize::new(0));
    let turns = (0..10).map(|index| {
        let peer = if index % 2 == 0 { &one } else { &two };
        tokio::spawn(turn(peer.simba.contend(mutex.clone()), Arc::clone(&inside)))
    });
    for turn in turns.collect::<Vec<_>>() {
        within(CASE_LIMIT, "every contender has its turn", turn).await.unwrap();
    }
}

async fn turn(contention: Contention, inside: Arc<AtomicUsize>) {
    contention.start().unwrap();
    let tenure = assert_ok("every contender has its turn", contention.acquired().await);
    let work = tenure.run(async {
        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "broken: one at a time");
        tokio::task::yield_now().await;
        inside.fetch_sub(1, Ordering::SeqCst);
    });
    assert_ok("work runs under the mutex", work.await);
    stop(&contention).await;
}

/// A scheduled job runs on the leader only, repeatedly, until it is stopped.
pub async fn schedule(fixture: &dyn Fixture) {
    let (one, two) = Peer::pair(fixture).await;
    let (mutex, every) = (name(), Schedule::fixed_rate(Duration::from_millis(20)).unwrap());
    let (ticks, mut ticked) = mpsc::unbounded_channel();
    let job = one.simba.scheduler(mutex.clone()).start(every.clone(), move |tenure| {
        ticks.send(tenure.token()).unwrap();
        async { Ok::<_, Infallible>(()) }
    });
    let job = job.unwrap();
    let first = soon("the leader's job runs", ticked.recv()).await;
    let other = two.simba.scheduler(mutex).start(every, |_| async { Ok::<_, Infallible>(()) }).unwrap();
    for _ in 0..10 {
        assert_eq!(soon("the job runs again", ticked.recv()).await, first, "broken: one tenure, one token");
    }
    assert_eq!(other.progress().started, 0, "broken: a job runs on the leader only");
    assert_ok("a schedule can be stopped", soon("a schedule stops", job.stop()).await);
    let runs = job.progress().started;
    within(CASE_LIMIT, "the next leader takes over", other.acquired()).await.unwrap();
    assert_eq!(job.progress().started, runs, "broken: no run starts after the stop");
}

async fn lead(contention: &Contention) -> simba_core::FencingToken {
    assert_ok("a contention starts", contention.start());
    let tenure = soon("a contender acquires a free mutex", contention.acquired()).await;
    assert_ok("a contender acquires a free mutex", tenure).token()
}

async fn stop(contention: &Contention) {
    let tenure = contention.tenure();
    assert_ok("a contention stops", soon("a contention stops", contention.stop()).await);
    if let Some(tenure) = tenure {
        assert_eq!(tenure.loss(), Some(Loss::Released), "broken: a stop ends the tenure");
    }
}
