//! Replies that are lost, late or errors: what a call and a delayed write do then.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::task::Poll;
use std::time::Duration;

use common::Product;
use common::calls::{contend_all, hold_next_request_for, owner_on, poll_once, token};
use common::injector::Injector;
use common::{SECOND, lead, ms, simba};
use mysql_async::prelude::Queryable;
use simba_core::spi::{Answer, Backend, Claim, Holding, Prior, Session};
use simba_core::{ContenderId, Lease, MutexName};
use simba_tck::{FaultProxy, Fixture, rounds};
use tokio::time::timeout;

on_both_servers! {
    row_15_a_renewal_without_a_reply_is_retried_after_one_read
    row_17_a_take_without_a_reply_is_adopted
    row_18_a_take_after_a_release_has_no_effect
    row_18_a_take_after_its_session_gave_up_has_no_effect
    renewals_without_a_reply_are_retried_together
    row_39_a_rolled_back_or_lost_statement_is_retried_immediately
    slow_writes_do_not_time_out
    a_lease_that_is_over_limits_no_call
}

/// Row 17 where the mutex has a row: the take is carried out, and its reply is lost.
async fn row_17_a_take_without_a_reply_is_adopted(on: Product) {
    // So long that only an adoption can be the cause of the next acquisition.
    let lease = Lease::new(30 * SECOND, 30 * SECOND).unwrap();
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    // One connection, so that nothing else is sent while the take is delayed.
    let ours =
        simba(&format!("{}?connections=1", common::least_url(proxy.address()))).await.with_lease(lease);
    let theirs = simba(&common::least_url(on.shared().await)).await.with_lease(lease);
    for _ in 0..rounds() {
        let mutex = common::name("row17");
        // A handle that released the mutex takes it without a read before.
        ours.locker(mutex.clone()).lock().await.unwrap().release().await.unwrap();
        // Statements may still be prepared: those requests do not name the mutex.
        let (mut take, locker) = (hold_next_request_for(&proxy, &mutex), ours.locker(mutex.clone()));
        let locking = tokio::spawn(async move { locker.lock().await });
        take.caught().await;
        proxy.drop_next_reply();
        take.deliver();
        let guard = timeout(20 * SECOND, locking).await.expect("a take without a reply is adopted");
        let guard = guard.unwrap().unwrap();
        assert!(
            theirs.locker(mutex.clone()).try_lock().await.unwrap().is_none(),
            "the adopted mutex is held"
        );
        guard.release().await.unwrap();
        assert!(
            theirs.locker(mutex).try_lock().await.unwrap().is_some(),
            "the mutex is free after the release"
        );
    }
    ours.shutdown().await;
    theirs.shutdown().await;
}

/// Row 15: a renewal whose reply is lost is retried on the next connection, after one read. It has to name the version
/// of the row: one that named several could be carried out after its successor, and set the lease back.
async fn row_15_a_renewal_without_a_reply_is_retried_after_one_read(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    let lease = Lease::new(15 * SECOND, 15 * SECOND).unwrap();
    let claim = Claim::new(common::name("row15"), ContenderId::generate(), lease);
    let mut session = connection.backend.open(claim).await.unwrap();
    let first = token(session.contend(Prior::Nothing).await.unwrap());
    // The extra round trips of the first login without TLS on MySQL are over.
    connection.network.cut();
    assert_eq!(token(session.contend(Prior::Held).await.unwrap()), first);
    for _ in 0..rounds() {
        let before = connection.network.requests();
        connection.network.lose_next_reply();
        assert_eq!(token(session.contend(Prior::Held).await.unwrap()), first, "a renewal keeps its token");
        let requests = connection.network.requests() - before;
        assert!(requests <= 4, "a renewal, a login, a read and another renewal, not {requests} requests");
    }
}

/// A session whose take is delayed by the network.
struct DelayedTake {
    _proxy: FaultProxy,
    /// Dropping it would close the connections that the session still needs.
    _backend: simba_mysql::MySqlBackend,
    mutex: MutexName,
    session: Box<dyn Session>,
    held: simba_tck::Held,
}

async fn delayed_take(on: Product) -> DelayedTake {
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let url = format!("{}?connections=1", common::least_url(proxy.address()));
    let backend = common::connect(&url).await;
    // A call times out after a third of the ttl.
    let lease = Lease::new(15 * SECOND, 30 * SECOND).unwrap();
    let claim = Claim::new(common::name("row18"), ContenderId::generate(), lease);
    let mutex = claim.mutex.clone();
    let mut session = backend.open(claim).await.unwrap();
    // A handle that released the mutex takes it without a read before.
    let first = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    session.release(Holding::Under(first)).await.unwrap();
    // Statements may still be prepared: those requests do not name the mutex.
    let held = hold_next_request_for(&proxy, &mutex);
    let error = session.contend(Prior::Nothing).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert_eq!(owner_on(on, &mutex).await, "");
    DelayedTake { _proxy: proxy, _backend: backend, mutex, session, held }
}

/// Row 18: the session retried, acquired and released; then its first take arrives.
async fn row_18_a_take_after_a_release_has_no_effect(on: Product) {
    let DelayedTake { _proxy, _backend, mutex, mut session, held } = delayed_take(on).await;
    let second = token(session.contend(Prior::Unknown).await.unwrap()).unwrap();
    session.release(Holding::Under(second)).await.unwrap();
    held.deliver_and_wait().await;
    assert_eq!(owner_on(on, &mutex).await, "", "a released mutex stays free");
}

/// Row 18: the session gave up without knowing the outcome; then its take arrives.
async fn row_18_a_take_after_its_session_gave_up_has_no_effect(on: Product) {
    let DelayedTake { _proxy, _backend, mutex, mut session, held } = delayed_take(on).await;
    session.release(Holding::Unknown).await.unwrap();
    held.deliver_and_wait().await;
    assert_eq!(owner_on(on, &mutex).await, "", "an abandoned mutex stays free");
}

/// A hundred renewals share a statement whose reply is late or lost. The retries share statements too: one by
/// one, the reads and the renewals would take two hundred round trips.
async fn renewals_without_a_reply_are_retried_together(on: Product) {
    simba_tck::explain_failures();
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let backend = common::connect(&format!("{}?connections=1", common::least_url(proxy.address()))).await;
    // A call times out after five seconds.
    let lease = Lease::new(15 * SECOND, 60 * SECOND).unwrap();
    let (mut names, mut sessions) = (Vec::new(), Vec::new());
    for _ in 0..101 {
        let claim = Claim::new(common::name("together"), ContenderId::generate(), lease);
        names.push(claim.mutex.clone());
        sessions.push(backend.open(claim).await.unwrap());
    }
    let tokens: Vec<_> = contend_all(&mut sessions, Prior::Nothing)
        .await
        .into_iter()
        .map(|answer| token(answer.unwrap()))
        .collect();
    for is_cut in [false, true] {
        // The others queue up behind a delayed call, so they are sent together.
        let mut first = hold_next_request_for(&proxy, &names[0]);
        let mut calls: Vec<_> = sessions.iter_mut().map(|session| session.contend(Prior::Held)).collect();
        tokio::select! {
            biased;
            () = first.caught() => {}
            answer = &mut calls[0] => panic!("a delayed call ended: {answer:?}"),
        }
        let queued = poll_once(&mut calls[1..]).await;
        assert!(queued.iter().all(Poll::is_pending), "no call ends before the delayed one");
        let mut batch = hold_next_request_for(&proxy, &names[1]);
        first.deliver();
        batch.caught().await;
        let mut before = proxy.requests();
        if is_cut {
            proxy.cut();
        }
        let mut answers = Vec::new();
        for call in calls {
            answers.push(call.await);
        }
        if !is_cut {
            assert!(
                answers[0].is_ok() && answers[1..].iter().all(Result::is_err),
                "no reply within the limit"
            );
            // It is carried out although its callers have given up.
            batch.deliver_and_wait().await;
            before = proxy.requests();
            answers = contend_all(&mut sessions, Prior::Held).await;
        }
        let renewed: Vec<_> = answers.into_iter().map(|answer| token(answer.unwrap())).collect();
        assert_eq!(renewed, tokens, "a renewal keeps its token");
        let requests = proxy.requests() - before;
        assert!(requests < 100, "{requests} requests for a hundred renewals, after a cut: {is_cut}");
    }
}

/// Row 39: the server answers with a lock timeout, a deadlock or a conflict, timed out the statement, does
/// not know whether it committed, or forgot a prepared statement. The same call retries immediately.
async fn row_39_a_rolled_back_or_lost_statement_is_retried_immediately(on: Product) {
    let (injector, address) = Injector::start(on.shared().await).await;
    let backend = common::connect(&common::least_url(address)).await;
    let claim = Claim::new(common::name("row39"), ContenderId::generate(), Lease::default());
    let mut session = backend.open(claim).await.unwrap();
    let mut prior = Prior::Nothing;
    for code in [1205, 1213, 1969, 1180, 1243, 1615, 3100, 3101].repeat(rounds() as usize) {
        let injected = injector.injected();
        injector.refuse(code, 1);
        let answer = session.contend(prior).await.expect("a rolled back statement is retried");
        assert!(matches!(answer, Answer::Ours(_)), "{code}: {answer:?}");
        assert_eq!(injector.injected(), injected + 1);
        prior = Prior::Held;
    }
    // A fault that lasts longer than the retries is an error, and a leader survives it.
    let simba = simba(&common::least_url(address)).await;
    let (_contention, tenure) = lead(&simba, &common::name("row39")).await;
    let deadline = tenure.deadline();
    injector.refuse(1205, 6);
    common::until("it is renewed", || tenure.deadline() > deadline).await;
    assert_eq!(tenure.loss(), None);
    simba.shutdown().await;
}

/// Every write takes 300 ms, as with replicas far away. Each call is one statement with a known outcome.
async fn slow_writes_do_not_time_out(on: Product) {
    let server = common::private(on.setup()).await;
    let mut admin = common::admin(&server.url()).await;
    let slow = "CREATE TRIGGER slow BEFORE UPDATE ON simba_mutex FOR EACH ROW DO SLEEP(0.3)";
    admin.query_drop(slow).await.unwrap();
    let connection = common::MySql::at(server.address()).with_keys("connections=1").connect().await;
    let lease = Lease::new(15 * SECOND, 15 * SECOND).unwrap();
    let claim = Claim::new(common::name("slow"), ContenderId::generate(), lease);
    let mut session = connection.backend.open(claim).await.unwrap();
    let began = tokio::time::Instant::now();
    let first = token(session.contend(Prior::Nothing).await.unwrap());
    for _ in 0..rounds() {
        let before = connection.network.requests();
        assert_eq!(token(session.contend(Prior::Held).await.unwrap()), first);
        assert_eq!(connection.network.requests() - before, 1, "a renewal is one statement");
    }
    session.release(Holding::Under(first.unwrap())).await.unwrap();
    assert!(began.elapsed() > ms(300) * (rounds() + 2), "writes are slow");
}

/// Statements are limited by the shortest lease in use. A session that has ended limits those of others no longer.
async fn a_lease_that_is_over_limits_no_call(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    let lease = Lease::new(15 * SECOND, 15 * SECOND).unwrap();
    let open = async |lease| {
        let claim = Claim::new(common::name("over"), ContenderId::generate(), lease);
        connection.backend.open(claim).await.unwrap()
    };
    let mut session = open(lease).await;
    let first = token(session.contend(Prior::Nothing).await.unwrap());
    drop(open(Lease::new(ms(300), ms(300)).unwrap()).await);
    // Each reply takes longer than the limit of the short lease.
    connection.network.delay(ms(150), Duration::ZERO);
    assert_eq!(token(session.contend(Prior::Held).await.unwrap()), first);
}
