//! Rows, tables and queue entries that are locked, and statements that conflict.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{
    Delay, Private, Store, USER, contend, leads, lock_row, lock_waits, long, name, open, open_as,
    sends_statement, simba, soon, stays, take, until,
};
use simba_core::spi::{Answer, Holding, Intent, Operate as _, Prior};
use simba_core::{Contention, Lease, Moment, Tenure};
use simba_servers::Setup;
use simba_tck::rounds;

/// A leader whose renewals are recorded for the message of a failed test.
struct Recorded<'a> {
    contention: &'a Contention,
    tenure: Tenure,
    /// The time of each renewal, and the deadline since then.
    renewals: Vec<(Duration, Moment)>,
}

impl<'a> Recorded<'a> {
    async fn of(contentions: &'a [Contention]) -> Vec<Self> {
        let mut leaders = Vec::new();
        for contention in contentions {
            leaders.push(Self { contention, tenure: leads(contention).await, renewals: Vec::new() });
        }
        leaders
    }

    /// Records a renewal, and checks that the mutex is not lost.
    fn check(&mut self, since: tokio::time::Instant) {
        let (now, deadline) = (since.elapsed(), self.tenure.deadline());
        if self.renewals.last().is_none_or(|(_, last)| *last != deadline) {
            self.renewals.push((now, deadline));
        }
        let times: Vec<_> = self.renewals.iter().map(|(at, _)| at).collect();
        assert_eq!(
            self.tenure.loss(),
            None,
            "broken: {} keeps its leader; after {now:?}, renewed at {times:?}, last error {:?}, load {:?}",
            self.tenure.mutex(),
            self.contention.last_error(),
            std::fs::read_to_string("/proc/loadavg"),
        );
    }
}

/// No call waits for the row at the server: all mutexes share the connection.
#[tokio::test(flavor = "multi_thread")]
async fn row_37_a_stuck_transaction_blocks_its_own_mutex_only() {
    let store = Store::shared();
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(3)).unwrap();
    let stuck = name("row-37-stuck");
    let keys = format!("application_name={stuck}&lock_timeout=100ms");
    let simba = simba(&store.clone().with_keys(&keys)).await.with_lease(lease);
    // Not lost while the machine pauses.
    let others = simba.with_lease(Lease::new(Duration::from_secs(3), Duration::from_secs(27)).unwrap());
    let leaders: Vec<_> = (0..50).map(|n| contend(&others, &name(&format!("row-37-{n}")))).collect();
    let mut leaders = Recorded::of(&leaders).await;
    let holder = contend(&simba, &stuck);
    let lost = leads(&holder).await;
    let mut admin = store.admin().await;
    let locked_row = lock_row(&mut admin, &stuck).await;
    // Each of them needs the row to join the queue. On the same connection they delay no other mutex either.
    let waiting: Vec<_> = (0..50).map(|_| contend(&simba, &stuck)).collect();
    let begun = tokio::time::Instant::now();
    let locked = |contention: &Contention| {
        contention.last_error().is_some_and(|error| error.to_string().contains("locked"))
    };
    let watcher = store.admin().await;
    let mut reported = false;
    while begun.elapsed() < lease.total() * 3 / 2 || lost.loss().is_none() {
        leaders.iter_mut().for_each(|leader| leader.check(begun));
        assert_eq!(lock_waits(&watcher, stuck.as_str()).await, 0, "broken: no statement waits for a row");
        reported |= locked(&holder) || waiting.iter().any(locked);
        assert!(begun.elapsed() < lease.total() * 4, "the mutex of the locked row is lost");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(reported, "the error says that the row is locked");
    until("each other leader renews while the row is locked", || {
        leaders.iter_mut().for_each(|leader| leader.check(begun));
        leaders.iter().all(|leader| leader.renewals.len() > 1)
    })
    .await;
    locked_row.rollback().await.unwrap();
    let leads_again = || holder.is_owner() || waiting.iter().any(Contention::is_owner);
    until("the stuck mutex has a leader again", leads_again).await;
    leaders.iter_mut().for_each(|leader| leader.check(begun));
}

#[tokio::test(flavor = "multi_thread")]
async fn row_38_a_cold_start_gives_each_mutex_one_leader() {
    let store = Store::shared();
    let mut handles = Vec::new();
    for _ in 0..5 {
        handles.push(simba(&store).await.with_lease(long()));
    }
    for _ in 0..rounds() {
        let mutexes: Vec<_> = (0..20).map(|n| name(&format!("row-38-{n}"))).collect();
        let contend = |at: usize| contend(&handles[at % handles.len()], &mutexes[at % mutexes.len()]);
        let contentions: Vec<_> = (0..50).map(contend).collect();
        let led = |mutex: usize| (mutex..50).step_by(20).filter(|at| contentions[*at].is_owner()).count();
        until("each mutex has a leader", || (0..20).all(|mutex| led(mutex) == 1)).await;
        for contention in &contentions {
            assert!(contention.last_error().is_none(), "broken: {:?}", contention.last_error());
        }
        for contention in &contentions {
            contention.stop().await.unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_39_rows_that_are_locked_briefly_cost_no_leader() {
    let (store, mutex) = (Store::shared(), name("row-39"));
    let keys = format!("application_name={mutex}&lock_timeout=100ms");
    let simba = simba(&store.clone().with_keys(&keys)).await;
    // Renewed often, and not lost while the machine pauses.
    let lease = Lease::new(Duration::from_millis(600), Duration::from_secs(30)).unwrap();
    let leader = simba.contend(mutex.clone()).with_lease(lease);
    let (mut admin, watcher) = (store.admin().await, store.admin().await);
    leader.start().unwrap();
    let tenure = leads(&leader).await;
    for _ in 0..rounds() * 3 {
        let locked_row = lock_row(&mut admin, &mutex).await;
        // Then the previous renewal was answered.
        sends_statement(&watcher, mutex.as_str()).await;
        let deadline = tenure.deadline();
        // Longer than the lock timeout.
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert_eq!(tenure.deadline(), deadline, "the row cannot be renewed");
        locked_row.rollback().await.unwrap();
        until("a leader renews", || tenure.deadline() > deadline).await;
        stays(std::slice::from_ref(&tenure), Duration::from_millis(20)).await;
    }
}

/// A waiter whose queue entry is locked does not keep the row of the mutex locked while it waits for that.
#[tokio::test(flavor = "multi_thread")]
async fn row_39_a_locked_queue_entry_causes_no_deadlock() {
    let private = Private::start(Setup::postgres().with_arg("-c").with_arg("deadlock_timeout=4s")).await;
    let backend = private.store.backend().await;
    let mut admin = private.store.admin().await;
    admin.batch_execute("SET deadlock_timeout = '30s'").await.unwrap();
    let watcher = private.store.admin().await;
    let mutex = name("row-39");
    for _ in 0..rounds() {
        let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
        let token = take(&mut *holder).await;
        assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        holder.release(Holding::Under(token)).await.unwrap();
        // It locks the waiter's entry; the waiter locks the mutex and needs its entry; then it locks the mutex.
        let transaction = admin.transaction().await.unwrap();
        transaction.batch_execute("SELECT FROM simba_waiter FOR UPDATE").await.unwrap();
        let (taken, ended) = tokio::join!(soon("an answer", waiter.contend(Prior::Nothing)), async {
            sends_statement(&watcher, APPLICATION).await;
            let lock = "SELECT FROM simba_mutex WHERE mutex = $1 FOR UPDATE";
            transaction.execute(lock, &[&mutex.as_str()]).await.unwrap();
            transaction.commit().await
        });
        ended.unwrap();
        assert!(
            matches!(taken.unwrap(), Answer::Ours(_)),
            "broken: the waiter acquires when the locks are gone"
        );
        waiter.release(Holding::Unknown).await.unwrap();
    }
    let log = std::fs::read_to_string(private.server().dir().join("log")).unwrap();
    assert!(!log.contains("deadlock detected"), "broken: no deadlock");
}

/// The default application name of a handle.
const APPLICATION: &str = "simba";

/// With repeatable reads as the role's default and no session settings, the server rolls back a statement whose row
/// changed before the statement locked it. The statement is sent again immediately.
#[tokio::test(flavor = "multi_thread")]
async fn row_39_serialisation_failures_are_retried_immediately() {
    let private = Private::start(Setup::postgres()).await;
    let delay = Delay::install(&private.store, "due.lapsed").await;
    let admin = private.store.admin().await;
    let strict = format!("ALTER ROLE {USER} SET default_transaction_isolation = 'repeatable read'");
    admin.batch_execute(&strict).await.unwrap();
    let store = private.store.clone().with_keys("pooler=true");
    let (backend, mutex) = (store.backend().await, name("row-39"));
    for round in 1..=rounds() as usize {
        let mut session = open(&backend, &mutex).await;
        if round == 1 {
            let token = take(&mut *session).await;
            session.release(Holding::Under(token)).await.unwrap();
        }
        delay.begin().await;
        let changed = async {
            delay.is_reached(APPLICATION).await;
            let change = "UPDATE simba_mutex SET watched = watched WHERE mutex = $1";
            admin.execute(change, &[&mutex.as_str()]).await.unwrap();
            delay.end().await;
        };
        let (answer, ()) =
            soon("an answer", async { tokio::join!(session.contend(Prior::Nothing), changed) }).await;
        let Answer::Ours(ours) = answer.expect("broken: a rolled back statement is retried") else {
            panic!("broken: a free mutex is taken");
        };
        let log = std::fs::read_to_string(private.server().dir().join("log")).unwrap();
        let failures = log.matches("could not serialize access").count();
        assert!(failures >= round, "a statement fails in each round, not {failures} in {round}");
        session.release(Holding::Under(ours.token.unwrap())).await.unwrap();
    }
}

/// The same with many contenders.
#[tokio::test(flavor = "multi_thread")]
async fn row_39_many_contenders_see_no_serialisation_failure() {
    let private = Private::start(Setup::postgres()).await;
    let admin = private.store.admin().await;
    let strict = format!("ALTER ROLE {USER} SET default_transaction_isolation = 'repeatable read'");
    admin.batch_execute(&strict).await.unwrap();
    let store = private.store.clone().with_keys("pooler=true");
    let mutex = name("row-39");
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (backend, mutex) = (store.backend().await, mutex.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds() * 5 {
                let mut session = open(&backend, &mutex).await;
                while !matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                session.release(Holding::Unknown).await.unwrap();
            }
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(300), task).await.expect("each task completes").unwrap();
    }
}

/// A statement decides by the row as it is when it is locked, not when it was read.
#[tokio::test(flavor = "multi_thread")]
async fn a_mutex_that_was_lost_during_a_statement_is_held_by_the_other_session() {
    let private = Private::start(Setup::postgres()).await;
    let delay = Delay::install(&private.store, "due.lapsed").await;
    let (admin, mutex) = (private.store.admin().await, name("meanwhile"));
    let keys = format!("application_name={mutex}");
    let backend = private.store.clone().with_keys(&keys).backend().await;
    let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
    take(&mut *holder).await;
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    // As after an acquisition whose reply was lost: the waiter holds the mutex and is still queued.
    let acquire = "UPDATE simba_mutex m SET owner = w.contender, session = w.session FROM simba_waiter w \
               WHERE m.mutex = $1 AND w.mutex = $1";
    assert_eq!(admin.execute(acquire, &[&mutex.as_str()]).await.unwrap(), 1);
    delay.begin().await;
    let (answer, ()) = tokio::join!(waiter.contend(Prior::Unknown), async {
        delay.is_reached(mutex.as_str()).await;
        let lost = "UPDATE simba_mutex SET owner = 'another', session = 'another', token = token + 1 WHERE mutex = $1";
        admin.execute(lost, &[&mutex.as_str()]).await.unwrap();
        delay.end().await;
    });
    match answer.unwrap() {
        Answer::Held(other) => assert_eq!(other.owner.as_str(), "another"),
        other => panic!("broken: the other session holds the mutex, not {other:?}"),
    }
}

/// Another transaction changes the row of one mutex and stays open. Meanwhile another mutex is renewed and created on the
/// same connection, waiters of the locked one leave, and its holder releases it after that.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_locked_for_seconds_delays_only_its_own_mutex() {
    let (store, stuck, other) = (Store::shared(), name("stuck"), name("other"));
    let keys = format!("application_name={stuck}&lock_timeout=100ms");
    let backend = store.clone().with_keys(&keys).backend().await;
    let (mut holder, mut leader) = (open(&backend, &stuck).await, open(&backend, &other).await);
    let (token, other_token) = (take(&mut *holder).await, take(&mut *leader).await);
    let (mut leaving, mut dropped, mut next) =
        (open(&backend, &stuck).await, open(&backend, &stuck).await, open(&backend, &stuck).await);
    for waiter in [&mut leaving, &mut dropped, &mut next] {
        assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        // The first wakeup reports the subscription.
        soon("a subscription", waiter.changed()).await.unwrap();
    }
    let (mut admin, watcher) = (store.admin().await, store.admin().await);
    let locked = lock_row(&mut admin, &stuck).await;
    let release = tokio::spawn(async move {
        let mut refusals = 0;
        while let Err(error) = holder.release(Holding::Under(token)).await {
            assert!(error.is_transient() && error.to_string().contains("locked"), "{error}");
            refusals += 1;
        }
        refusals
    });
    soon("a waiter leaves a locked mutex", leaving.release(Holding::Nothing)).await.unwrap();
    drop(dropped);
    let waiters = "SELECT count(*) FROM simba_waiter WHERE mutex = $1 AND NOT watches";
    let left = async {
        while watcher.query_one(waiters, &[&stuck.as_str()]).await.unwrap().get::<_, i64>(0) > 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("both entries are deleted", left).await;
    let end = tokio::time::Instant::now() + Duration::from_secs(3);
    while tokio::time::Instant::now() < end {
        let Answer::Ours(ours) = leader.contend(Prior::Held).await.unwrap() else {
            panic!("broken: another mutex is renewed");
        };
        assert_eq!(ours.token, Some(other_token));
        let mut new = open_as(&backend, &name("new"), Intent::Try).await;
        let token = take(&mut *new).await;
        new.release(Holding::Under(token)).await.unwrap();
        assert_eq!(lock_waits(&watcher, stuck.as_str()).await, 0, "broken: no statement waits for a row");
        assert!(!release.is_finished(), "the row is locked");
    }
    locked.rollback().await.unwrap();
    let refusals = soon("the release succeeds after the lock ends", release).await.unwrap();
    assert!(refusals > 0, "the release was refused meanwhile");
    let taken = async {
        while !matches!(next.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)) {
            next.changed().await.unwrap();
        }
    };
    soon("the next waiter is woken", taken).await;
}

/// An operator's call may take as long as the statement timeout allows.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_call_of_an_operator_delays_no_renewal() {
    let private = Private::start(Setup::postgres()).await;
    // A part of the statements that read and list records.
    let delay = Delay::install(&private.store, "m.acquired_at, m.ttl_at").await;
    let mutex = name("slow");
    let store = private.store.clone().with_keys(&format!("application_name={mutex}"));
    let backend = store.backend().await;
    let mut holder = open(&backend, &mutex).await;
    take(&mut *holder).await;
    for reads_all in [true, false] {
        delay.begin().await;
        let call =
            async { if reads_all { backend.list().await } else { Ok(vec![backend.read(&mutex).await?]) } };
        let renewed = async {
            delay.is_reached(mutex.as_str()).await;
            let renewal = soon("broken: a renewal waits for no operator", holder.contend(Prior::Held)).await;
            delay.end().await;
            renewal
        };
        let (records, renewal) = tokio::join!(call, renewed);
        assert!(matches!(renewal.unwrap(), Answer::Ours(_)));
        assert!(records.unwrap().iter().any(|record| record.mutex == mutex && record.owner.is_some()));
    }
}

/// Another transaction inserts the row of a new mutex and stays open.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_being_inserted_is_reported_as_locked() {
    let (store, mutex) = (Store::shared().with_keys("lock_timeout=100ms"), name("inserted"));
    let backend = store.backend().await;
    let mut session = open_as(&backend, &mutex, Intent::Try).await;
    let mut admin = store.admin().await;
    let inserting = admin.transaction().await.unwrap();
    let insert = "INSERT INTO simba_mutex VALUES ($1, '', '', 1, now(), now(), now(), now())";
    inserting.execute(insert, &[&mutex.as_str()]).await.unwrap();
    let error = soon("the call gives up", session.contend(Prior::Nothing)).await.unwrap_err();
    assert!(error.is_transient() && error.to_string().contains("locked"), "{error}");
    inserting.rollback().await.unwrap();
    take(&mut *session).await;
}
