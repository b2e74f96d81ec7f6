//! The rows of the fault matrix that are specific to MySQL and MariaDB.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::task::Poll;
use std::time::Duration;

use common::Product;
use common::injector::Injector;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, Pool, PoolConstraints, PoolOpts};
use simba_core::operate::{EvictIf, Eviction};
use simba_core::spi::{Answer, Backend, Claim, Holding, Prior, Session};
use simba_core::{
    Contender, ContenderId, Contention, ErrorKind, FencingToken, Lease, Loss, MutexName, MutexState, Simba,
    Tenure,
};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, FaultProxy, Fixture, Profile, async_trait, rounds};
use simba_test_support::{set_server_clock, with_server_clock};
use tokio::time::{sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn simba(url: &str) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(std::sync::Arc::new(common::connect(url).await)).with_lease(common::lease()).build()
}

on_both_servers! {
    row_15_a_renewal_without_a_reply_is_retried_after_one_read
    row_17_a_take_without_a_reply_is_adopted
    row_18_a_take_after_a_release_has_no_effect
    row_18_a_take_after_its_session_gave_up_has_no_effect
    row_37_a_frozen_transaction_affects_only_its_own_mutex
    row_37_many_locked_rows_affect_no_other_mutex
    row_37_a_locked_row_of_another_mutex_splits_no_batch
    row_37_a_call_that_pauses_for_a_locked_row_delays_no_other
    row_37_a_release_of_a_locked_row_delays_no_renewal_of_its_batch
    row_37_a_release_of_a_locked_row_leaves_a_connection_for_renewals
    row_37_many_calls_for_locked_rows_wait_for_none_of_them
    row_37_an_insert_that_a_peer_does_not_end_affects_only_its_own_mutex
    renewals_without_a_reply_are_retried_together
    a_name_that_the_table_spells_differently_is_found_in_a_batch
    takes_of_names_that_differ_by_case_have_one_winner
    row_38_a_cold_start_has_no_deadlocks
    row_39_a_rolled_back_or_lost_statement_is_retried_immediately
    row_40_killed_connections_end_no_tenure
    row_44_versions_at_their_limits
    a_restart_of_the_server_is_survived
    a_killed_server_keeps_confirmed_writes
    slow_writes_do_not_time_out
    a_lease_that_is_over_limits_no_call
    a_waiter_survives_a_temporarily_read_only_server
}

async fn lead(simba: &Simba, mutex: &MutexName) -> (Contention, Tenure) {
    let contention = simba.contend(mutex.clone());
    contention.start().unwrap();
    let tenure = timeout(30 * SECOND, contention.acquired()).await.unwrap().unwrap();
    (contention, tenure)
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
    // So slow that optional round trips are left out.
    connection.network.delay(ms(8), Duration::ZERO);
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

fn token(answer: Answer) -> Option<FencingToken> {
    match answer {
        Answer::Ours(ours) => ours.token,
        other => panic!("not acquired: {other:?}"),
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

/// Delays the next request that names this mutex: as text if the statement is prepared, as hexadecimal bytes
/// if not.
fn hold_next_request_for(proxy: &FaultProxy, mutex: &MutexName) -> simba_tck::Held {
    let codes: String = mutex.as_str().bytes().map(|byte| format!("{byte:02x}")).collect();
    proxy.hold_next_request_with(&[mutex.as_str(), &codes])
}

async fn owner_on(on: Product, mutex: &MutexName) -> String {
    let mut admin = common::admin(&on.admin_url()).await;
    let owner = "SELECT owner_id FROM simba_mutex WHERE mutex = ?";
    admin.exec_first(owner, (mutex.as_str(),)).await.unwrap().unwrap()
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

/// Row 37: a peer is stopped inside its transaction, as a stopped JVM, with one row locked. Only that mutex
/// may be lost, although its renewal shares a connection and statements with the others.
async fn row_37_a_frozen_transaction_affects_only_its_own_mutex(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    // MySQL waits for a locked row for at least a second: a third of the ttl must be much longer. A call that
    // times out earlier leaves a statement behind that keeps the rows of others locked while it waits.
    let lease = Lease::new(9 * SECOND, 4 * SECOND).unwrap();
    let simba = Simba::builder(connection.backend).with_lease(lease).build();
    // Calls that arrive during a statement are sent with the next: all of them together.
    connection.network.delay(ms(3), Duration::ZERO);
    let names: Vec<MutexName> = (0..96).map(|_| common::name("row37")).collect();
    let contentions: Vec<_> = names.iter().map(|name| simba.contend(name.clone())).collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    let mut leaders = Vec::new();
    for contention in contentions {
        let tenure = timeout(30 * SECOND, contention.acquired()).await.unwrap().unwrap();
        leaders.push((contention, tenure));
    }
    for _ in 0..rounds().div_ceil(3) {
        let mut frozen = common::admin(&on.admin_url()).await;
        frozen.query_drop("BEGIN").await.unwrap();
        frozen
            .exec_drop("SELECT 1 FROM simba_mutex WHERE mutex = ? FOR UPDATE", (names[7].as_str(),))
            .await
            .unwrap();
        let others = || leaders.iter().enumerate().filter(|(at, _)| *at != 7).map(|(_, one)| one);
        let deadlines: Vec<_> = others().map(|(_, tenure)| tenure.deadline()).collect();
        common::until("the locked row is lost, and the others are renewed", || {
            for (contention, tenure) in others() {
                let last = contention.last_error().map(|error| error.to_string());
                assert_eq!(
                    tenure.loss(),
                    None,
                    "a locked row affects no other mutex; the last error: {last:?}"
                );
                // A shared statement is sent again without the locked row, not refused.
                assert!(!last.as_ref().is_some_and(|last| last.contains("locked")), "{last:?}");
            }
            let renewed = others().zip(&deadlines).all(|((_, tenure), before)| tenure.deadline() > *before);
            renewed && leaders[7].1.loss().is_some()
        })
        .await;
        assert_eq!(leaders[7].1.loss(), Some(Loss::Deadline), "the locked row could not be renewed");
        frozen.query_drop("ROLLBACK").await.unwrap();
        let again = timeout(30 * SECOND, leaders[7].0.acquired()).await.unwrap().unwrap();
        assert!(again.token() > leaders[7].1.token());
        leaders[7].1 = again;
    }
    simba.shutdown().await;
}

/// Row 37: a peer is stopped with 120 rows locked. Their holders have long leases and long limits. Others
/// with a shorter lease share their connection.
async fn row_37_many_locked_rows_affect_no_other_mutex(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    let simba = Simba::builder(connection.backend).build();
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_renew_at(2 * SECOND).unwrap();
    // MySQL waits for a locked row for at least a second: a third of the ttl must be longer. From the renewal
    // on there is time for a paused machine, and less than 120 single calls for locked rows take.
    let short = Lease::new(9 * SECOND, 4 * SECOND).unwrap().with_renew_at(4 * SECOND).unwrap();
    let names: Vec<MutexName> = (0..128).map(|_| common::name("row37")).collect();
    let lease_of = |at: usize| if at < 8 { short } else { long };
    let contentions: Vec<_> = names
        .iter()
        .enumerate()
        .map(|(at, name)| simba.contend(name.clone()).with_lease(lease_of(at)))
        .collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    let mut tenures = Vec::new();
    for contention in &contentions {
        tenures.push(timeout(30 * SECOND, contention.acquired()).await.unwrap().unwrap());
    }
    let mut frozen = common::admin(&on.admin_url()).await;
    frozen.query_drop("BEGIN").await.unwrap();
    for name in &names[8..] {
        frozen
            .exec_drop("SELECT 1 FROM simba_mutex WHERE mutex = ? FOR UPDATE", (name.as_str(),))
            .await
            .unwrap();
    }
    let others = &tenures[..8];
    let is_locked = |contention: &Contention| {
        contention.last_error().is_some_and(|error| error.to_string().contains("locked"))
    };
    for _ in 0..2 {
        let deadlines: Vec<_> = others.iter().map(Tenure::deadline).collect();
        common::until("the other mutexes are renewed, and every locked row was tried", || {
            assert!(others.iter().all(|tenure| !tenure.is_expiring()), "locked rows delay no other renewal");
            let renewed = others.iter().zip(&deadlines).all(|(tenure, before)| tenure.deadline() > *before);
            renewed && contentions[8..].iter().all(is_locked)
        })
        .await;
    }
    frozen.query_drop("ROLLBACK").await.unwrap();
    simba.shutdown().await;
}

/// Row 37: a hundred mutexes are taken, renewed and released while a peer has locked the row of another one
/// in the same table. A server that scans the table for a statement about many rows would reach that row.
async fn row_37_a_locked_row_of_another_mutex_splits_no_batch(on: Product) {
    let (_, other) = table_at(on, "row37_small", "BIGINT UNSIGNED", 1).await;
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let url = format!("{}?connections=1&table=row37_small", common::least_url(proxy.address()));
    let backend = common::connect(&url).await;
    let lease = Lease::new(30 * SECOND, 60 * SECOND).unwrap();
    let mut sessions = Vec::new();
    for _ in 0..100 {
        let claim = Claim::new(common::name("row37"), ContenderId::generate(), lease);
        sessions.push(backend.open(claim).await.unwrap());
    }
    let mut peer = common::admin(&on.admin_url()).await;
    peer.query_drop("BEGIN").await.unwrap();
    let lock = "SELECT 1 FROM row37_small WHERE mutex = ? FOR UPDATE";
    peer.exec_drop(lock, (other.as_str(),)).await.unwrap();
    let mut tokens = Vec::new();
    for prior in [Prior::Nothing, Prior::Held] {
        let before = proxy.requests();
        let answers = contend_all(&mut sessions, prior).await;
        tokens = answers.into_iter().map(|answer| token(answer.unwrap()).unwrap()).collect();
        let requests = proxy.requests() - before;
        assert!(requests < 40, "{prior:?}: {requests} requests for a hundred mutexes");
    }
    let before = proxy.requests();
    let releases = sessions.iter_mut().zip(tokens);
    let mut releases: Vec<_> =
        releases.map(|(session, token)| session.release(Holding::Under(token))).collect();
    let released = poll_once(&mut releases).await;
    for outcome in outcomes(releases, released).await {
        outcome.unwrap();
    }
    let requests = proxy.requests() - before;
    assert!(requests < 40, "{requests} requests for a hundred releases");
    peer.query_drop("ROLLBACK").await.unwrap();
}

/// Row 37: a call for a locked row pauses between its tries, and leaves the connection to other calls meanwhile.
async fn row_37_a_call_that_pauses_for_a_locked_row_delays_no_other(on: Product) {
    let address = on.shared().await;
    let backend = common::connect(&format!("{}?connections=1", common::least_url(address))).await;
    let open = async |mutex: &MutexName| {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
        backend.open(claim).await.unwrap()
    };
    let (locked, other) = (common::name("row37"), common::name("row37"));
    let (mut paused, mut free) = (open(&locked).await, open(&other).await);
    assert!(token(paused.contend(Prior::Nothing).await.unwrap()).is_some());
    assert!(token(free.contend(Prior::Nothing).await.unwrap()).is_some());
    let mut peer = common::admin(&on.admin_url()).await;
    peer.query_drop("BEGIN").await.unwrap();
    let lock = "SELECT 1 FROM simba_mutex WHERE mutex = ? FOR UPDATE";
    peer.exec_drop(lock, (locked.as_str(),)).await.unwrap();
    // The pauses take 80 ms. On a busy machine the other call may take as long, but not every time.
    let mut overtaken = 0;
    for _ in 0..10 {
        let mut call = paused.contend(Prior::Held);
        if poll_once(std::slice::from_mut(&mut call)).await[0].is_ready() {
            // It has ended already, which shows nothing.
            continue;
        }
        free.contend(Prior::Held).await.unwrap();
        overtaken += u32::from(poll_once(std::slice::from_mut(&mut call)).await[0].is_pending());
        if overtaken > 0 {
            let error = call.await.unwrap_err();
            assert!(error.to_string().contains("locked"), "{error}");
            break;
        }
    }
    assert!(overtaken > 0, "a call that pauses occupies the connection");
    peer.query_drop("ROLLBACK").await.unwrap();
    assert!(token(paused.contend(Prior::Unknown).await.unwrap()).is_some());
}

/// Row 37: no call for a locked row waits for it. MySQL itself would wait for a second.
async fn row_37_many_calls_for_locked_rows_wait_for_none_of_them(on: Product) {
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let backend = common::connect(&format!("{}?connections=1", common::least_url(proxy.address()))).await;
    let lease = Lease::new(30 * SECOND, 60 * SECOND).unwrap();
    let (mut names, mut sessions) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        let claim = Claim::new(common::name("row37"), ContenderId::generate(), lease);
        names.push(claim.mutex.clone());
        sessions.push(backend.open(claim).await.unwrap());
    }
    for answer in contend_all(&mut sessions, Prior::Nothing).await {
        assert!(token(answer.unwrap()).is_some());
    }
    let mut peer = common::admin(&on.admin_url()).await;
    peer.query_drop("BEGIN").await.unwrap();
    for name in &names {
        let lock = "SELECT 1 FROM simba_mutex WHERE mutex = ? FOR UPDATE";
        peer.exec_drop(lock, (name.as_str(),)).await.unwrap();
    }
    // On a busy machine a call may take as long as the wait for a row, but not every time.
    let mut fastest = Duration::MAX;
    for session in &mut sessions {
        let began = tokio::time::Instant::now();
        let error = session.contend(Prior::Held).await.unwrap_err();
        assert!(error.to_string().contains("locked"), "{error}");
        fastest = fastest.min(began.elapsed());
    }
    assert!(fastest < ms(900), "the fastest call took {fastest:?}");
    peer.query_drop("ROLLBACK").await.unwrap();
    for answer in contend_all(&mut sessions, Prior::Held).await {
        assert!(token(answer.unwrap()).is_some());
    }
}

/// Row 37: a peer is stopped while it inserts the row of a mutex that was never used. Others are inserted with it.
async fn row_37_an_insert_that_a_peer_does_not_end_affects_only_its_own_mutex(on: Product) {
    let backend = common::connect(&format!("{}?connections=1", common::least_url(on.shared().await))).await;
    // So long that no statement times out: MySQL waits for a second for each insert of the locked row.
    let lease = Lease::new(30 * SECOND, 60 * SECOND).unwrap();
    let mut names: Vec<_> = (0..40).map(|_| common::name("row37")).collect();
    names.insert(20, common::name("row37-locked"));
    let mut sessions = Vec::new();
    for name in &names {
        let claim = Claim::new(name.clone(), ContenderId::generate(), lease);
        sessions.push(backend.open(claim).await.unwrap());
    }
    let mut peer = common::admin(&on.admin_url()).await;
    peer.query_drop("BEGIN").await.unwrap();
    let insert = "INSERT INTO simba_mutex VALUES (?, 0, 0, 0, '', 0)";
    peer.exec_drop(insert, (names[20].as_str(),)).await.unwrap();
    let mut answers = contend_all(&mut sessions, Prior::Nothing).await;
    let error = answers.remove(20).unwrap_err();
    assert!(error.to_string().contains("locked"), "{error}");
    for answer in answers {
        assert!(token(answer.unwrap()).is_some());
    }
    peer.query_drop("ROLLBACK").await.unwrap();
    assert!(token(sessions[20].contend(Prior::Nothing).await.unwrap()).is_some());
}

/// Row 37: a release of a locked row shares a batch with a renewal. MySQL would wait for the row for a second, and the
/// renewal with it.
async fn row_37_a_release_of_a_locked_row_delays_no_renewal_of_its_batch(on: Product) {
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let mut fastest = Duration::MAX;
    // On a busy machine a renewal may take as long as the wait for a row, but not every time.
    for _ in 0..10 {
        let backend = common::connect(&format!("{}?connections=1", common::least_url(proxy.address()))).await;
        let (mut names, mut sessions) = (Vec::new(), Vec::new());
        for _ in 0..3 {
            let claim = Claim::new(common::name("row37"), ContenderId::generate(), Lease::default());
            names.push(claim.mutex.clone());
            sessions.push(backend.open(claim).await.unwrap());
        }
        let answers = contend_all(&mut sessions, Prior::Nothing).await;
        let tokens: Vec<_> = answers.into_iter().map(|answer| token(answer.unwrap()).unwrap()).collect();
        let mut peer = common::admin(&on.admin_url()).await;
        peer.query_drop("BEGIN").await.unwrap();
        let lock = "SELECT 1 FROM simba_mutex WHERE mutex = ? FOR UPDATE";
        peer.exec_drop(lock, (names[2].as_str(),)).await.unwrap();
        let [first, second, third] = sessions.as_mut_slice() else { unreachable!("there are three") };
        // The others queue up behind a delayed call, so they are sent together.
        let mut delayed = hold_next_request_for(&proxy, &names[0]);
        let mut first = first.contend(Prior::Held);
        tokio::select! {
            biased;
            () = delayed.caught() => {}
            answer = &mut first => panic!("a delayed call ended: {answer:?}"),
        }
        let (mut renewal, mut release) =
            (second.contend(Prior::Held), third.release(Holding::Under(tokens[2])));
        assert!(poll_once(std::slice::from_mut(&mut renewal)).await[0].is_pending());
        assert!(poll_once(std::slice::from_mut(&mut release)).await[0].is_pending());
        let began = tokio::time::Instant::now();
        delayed.deliver();
        assert!(token(first.await.unwrap()).is_some() && token(renewal.await.unwrap()).is_some());
        fastest = fastest.min(began.elapsed());
        let error = release.await.unwrap_err();
        assert!(error.to_string().contains("locked"), "{error}");
        peer.query_drop("ROLLBACK").await.unwrap();
        if fastest < ms(900) {
            return;
        }
    }
    panic!("the fastest renewal took {fastest:?}");
}

/// Row 37: a release of a locked row does not wait for it on the last connection. MySQL would wait for a second, and a
/// renewal that comes meanwhile with it.
async fn row_37_a_release_of_a_locked_row_leaves_a_connection_for_renewals(on: Product) {
    let address = on.shared().await;
    let mut fastest = Duration::MAX;
    // On a busy machine a renewal may take as long as the wait for a row, but not every time.
    for _ in 0..10 {
        let backend = common::connect(&format!("{}?connections=1", common::least_url(address))).await;
        let (locked, other) = (common::name("row37"), common::name("row37"));
        let mut sessions = Vec::new();
        for mutex in [&locked, &other] {
            let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
            sessions.push(backend.open(claim).await.unwrap());
        }
        let answers = contend_all(&mut sessions, Prior::Nothing).await;
        let tokens: Vec<_> = answers.into_iter().map(|answer| token(answer.unwrap()).unwrap()).collect();
        let mut peer = common::admin(&on.admin_url()).await;
        peer.query_drop("BEGIN").await.unwrap();
        let lock = "SELECT 1 FROM simba_mutex WHERE mutex = ? FOR UPDATE";
        peer.exec_drop(lock, (locked.as_str(),)).await.unwrap();
        let [releasing, renewing] = sessions.as_mut_slice() else { unreachable!("there are two") };
        let mut release = releasing.release(Holding::Under(tokens[0]));
        if poll_once(std::slice::from_mut(&mut release)).await[0].is_ready() {
            // It has ended already, which shows nothing.
            peer.query_drop("ROLLBACK").await.unwrap();
            continue;
        }
        let began = tokio::time::Instant::now();
        assert!(token(renewing.contend(Prior::Held).await.unwrap()).is_some());
        fastest = fastest.min(began.elapsed());
        let error = release.await.unwrap_err();
        assert!(error.to_string().contains("locked"), "{error}");
        peer.query_drop("ROLLBACK").await.unwrap();
        if fastest < ms(900) {
            return;
        }
    }
    panic!("the fastest renewal took {fastest:?}");
}

/// Sends all calls together, then waits for the answers.
async fn contend_all(sessions: &mut [Box<dyn Session>], prior: Prior) -> Vec<simba_core::Result<Answer>> {
    let mut calls: Vec<_> = sessions.iter_mut().map(|session| session.contend(prior)).collect();
    let answered = poll_once(&mut calls).await;
    outcomes(calls, answered).await
}

/// Polls each call once, which puts it into the queue of its connection. Returns what has ended already: on a
/// busy machine a call may be answered meanwhile.
async fn poll_once<T>(calls: &mut [impl Future<Output = T> + Unpin]) -> Vec<Poll<T>> {
    std::future::poll_fn(|context| {
        Poll::Ready(calls.iter_mut().map(|call| std::pin::Pin::new(call).poll(context)).collect())
    })
    .await
}

/// Waits for the calls that have not ended yet. Returns the outcomes of all.
async fn outcomes<T>(calls: Vec<impl Future<Output = T>>, ended: Vec<Poll<T>>) -> Vec<T> {
    let mut outcomes = Vec::new();
    for (call, ended) in calls.into_iter().zip(ended) {
        outcomes.push(match ended {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => call.await,
        });
    }
    outcomes
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

/// Names that differ by accents only are one row in the usual collations. A read of many rows finds it too.
async fn a_name_that_the_table_spells_differently_is_found_in_a_batch(on: Product) {
    let backend = common::connect(&format!("{}?connections=1", common::least_url(on.shared().await))).await;
    let open = async |mutex: MutexName| {
        let claim = Claim::new(mutex, ContenderId::generate(), Lease::default());
        backend.open(claim).await.unwrap()
    };
    let plain = common::name("cafe");
    let accented = MutexName::legacy(plain.as_str().replacen('e', "é", 1)).unwrap();
    let mut holder = open(plain.clone()).await;
    let held = token(holder.contend(Prior::Nothing).await.unwrap()).unwrap();
    // The first call is sent alone, the others share statements.
    let mut sessions =
        [open(common::name("first")).await, open(accented).await, open(common::name("other")).await];
    let answers = contend_all(&mut sessions, Prior::Nothing).await;
    assert!(matches!(answers[0], Ok(Answer::Ours(_))) && matches!(answers[2], Ok(Answer::Ours(_))));
    assert!(matches!(answers[1], Ok(Answer::Held(_))), "{:?}", answers[1]);

    holder.release(Holding::Under(held)).await.unwrap();
    let [first, accented, other] = &mut sessions;
    assert!(token(accented.contend(Prior::Nothing).await.unwrap()).is_some());
    let (_, inspected, _) = tokio::join!(first.inspect(), accented.inspect(), other.inspect());
    assert!(inspected.unwrap().is_some(), "the mutex is held");
    let (_, released, _) = tokio::join!(first.inspect(), accented.release(Holding::Unknown), other.inspect());
    released.unwrap();
    assert_eq!(owner_on(on, &plain).await, "", "a release of an unknown hold frees the row");
}

/// Names that differ by case only are one row. The handle remembers the version at which each was free, and only the
/// second one is current: a batch with both must not give the row to the first, which cannot know that it acquired.
async fn takes_of_names_that_differ_by_case_have_one_winner(on: Product) {
    let backend = common::connect(&format!("{}?connections=1", common::least_url(on.shared().await))).await;
    let lower = common::name("job");
    let upper = MutexName::new(lower.as_str().replacen('j', "J", 1)).unwrap();
    let mut sessions = Vec::new();
    for mutex in [common::name("first"), upper, lower] {
        let claim = Claim::new(mutex, ContenderId::generate(), Lease::default());
        sessions.push(backend.open(claim).await.unwrap());
    }
    for session in &mut sessions[1..] {
        let token = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
        session.release(Holding::Under(token)).await.unwrap();
    }
    // The first call is sent alone, the others share statements.
    let answers = contend_all(&mut sessions, Prior::Nothing).await;
    let acquired = answers[1..].iter().filter(|answer| matches!(answer, Ok(Answer::Ours(_)))).count();
    assert_eq!(acquired, 1, "{answers:?}");
}

/// Row 38: fifty contenders on twenty names that were never used, each name from several handles. Each name gets one
/// leader, and no call ends in a deadlock.
async fn row_38_a_cold_start_has_no_deadlocks(on: Product) {
    let url = common::least_url(on.shared().await);
    // A call has five seconds: one that takes longer would be an error.
    let lease = Lease::new(15 * SECOND, 15 * SECOND).unwrap();
    let mut handles = Vec::new();
    for _ in 0..5 {
        handles.push(simba(&url).await.with_lease(lease));
    }
    for _ in 0..rounds() {
        let names: Vec<MutexName> = (0..20).map(|_| common::name("row38")).collect();
        let contentions: Vec<Contention> =
            (0..50).map(|at| handles[at / 10].contend(names[at % 20].clone())).collect();
        contentions.iter().for_each(|contention| contention.start().unwrap());
        common::until("every mutex has a leader", || {
            (0..20).all(|name| contentions.iter().skip(name).step_by(20).any(Contention::is_owner))
        })
        .await;
        for contention in &contentions {
            if let Some(error) = contention.last_error() {
                // A call that finds a row locked for longer than its pauses is repeated later.
                let is_deadlock = error.to_string().contains("rolled the statement back");
                assert!(error.is_transient() && !is_deadlock, "{error}");
            }
            contention.stop().await.unwrap();
        }
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

/// Row 40: an operator kills every connection of the handle, and again after every renewal.
async fn row_40_killed_connections_end_no_tenure(on: Product) {
    let address = on.shared().await;
    let mut admin = common::admin(&on.admin_url()).await;
    // A separate user, so that the other tests keep their connections.
    for statement in [
        "CREATE USER IF NOT EXISTS 'row40'@'%' IDENTIFIED BY 'row40'",
        "GRANT SELECT, INSERT, UPDATE ON simba.simba_mutex TO 'row40'@'%'",
    ] {
        admin.query_drop(statement).await.unwrap();
    }
    // On a busy machine a new connection may be killed before it has carried the renewal.
    let lease = Lease::new(3 * SECOND, 9 * SECOND).unwrap();
    let simba = simba(&format!("mysql://row40:row40@{address}/simba")).await.with_lease(lease);
    let (_contention, tenure) = lead(&simba, &common::name("row40")).await;
    let (mut killed, find) = (0, "SELECT id FROM information_schema.processlist WHERE user = 'row40'");
    let killing = async {
        // A connection that was not needed since the last round is not there to be killed.
        while killed < rounds() * 5 {
            let deadline = tenure.deadline();
            let ids: Vec<u64> = admin.query(find).await.unwrap();
            for id in ids {
                killed += u32::from(admin.query_drop(format!("KILL CONNECTION {id}")).await.is_ok());
            }
            common::until("it is renewed", || tenure.loss().is_some() || tenure.deadline() > deadline).await;
            assert_eq!(tenure.loss(), None, "killed connections end no tenure");
        }
    };
    timeout(30 * SECOND * rounds(), killing).await.expect("connections are killed");
    simba.shutdown().await;
}

/// A planned failover makes the old primary read-only first. A waiter keeps waiting, and acquires afterwards.
async fn a_waiter_survives_a_temporarily_read_only_server(on: Product) {
    let server = common::private(on.setup()).await;
    let url = common::least_url(server.address());
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let handle =
        async || Simba::builder(std::sync::Arc::new(common::connect(&url).await)).with_lease(long).build();
    let (one, two) = (handle().await, handle().await);
    let mutex = common::name("failover");
    let guard = one.locker(mutex.clone()).lock().await.unwrap();
    let waiter = two.locker(mutex.clone());
    let waiting = tokio::spawn(async move { waiter.lock().await });
    let mut admin = common::admin(&server.url()).await;
    // A handle reconnects after a refusal: the name may lead to the new primary then.
    let connections = "SHOW GLOBAL STATUS LIKE 'Connections'";
    let count = |row: Option<(String, String)>| row.unwrap().1.parse::<u64>().unwrap();
    admin.query_drop("SET GLOBAL read_only = 1").await.unwrap();
    // An administrator can write in spite of it.
    let free = "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                version = version + 1 WHERE mutex = ?";
    admin.exec_drop(free, (mutex.as_str(),)).await.unwrap();
    let before = count(admin.query_first(connections).await.unwrap());
    let refused = async {
        while count(admin.query_first(connections).await.unwrap()) < before + 2 {
            sleep(ms(20)).await;
        }
    };
    timeout(20 * SECOND, refused).await.expect("the waiter tries to take the free mutex more than once");
    assert!(!waiting.is_finished(), "a temporarily read-only server ends no wait");
    admin.query_drop("SET GLOBAL read_only = 0").await.unwrap();
    let next = timeout(20 * SECOND, waiting).await.unwrap().unwrap().unwrap();
    assert!(next.token() > guard.token());
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

/// Row 41: the application has used up its own pool and every connection that the server has left. The handle
/// has its own, and keeps them.
#[tokio::test(flavor = "multi_thread")]
async fn row_41_an_application_that_uses_all_connections_ends_no_tenure() {
    let server = common::private(Setup::mariadb().with_arg("--max-connections=20")).await;
    let url = common::least_url(server.address());
    let simba = simba(&url).await;
    let mutex = common::name("row41");
    let (leader, tenure) = lead(&simba, &mutex).await;
    let successor = simba.contend(mutex);
    successor.start().unwrap();
    common::until("the successor sees the leader", || successor.owner().is_owner(tenure.contender())).await;
    let opts = mysql_async::OptsBuilder::from_opts(Opts::from_url(&url).unwrap())
        .prefer_socket(false)
        .pool_opts(PoolOpts::default().with_constraints(PoolConstraints::new(0, 100).unwrap()));
    let (pool, mut taken) = (Pool::new(opts), Vec::new());
    while let Ok(Ok(conn)) = timeout(30 * SECOND, pool.get_conn()).await {
        taken.push(conn);
    }
    assert!(taken.len() >= 10, "the application took all free connections");
    for _ in 0..rounds() {
        let deadline = tenure.deadline();
        common::until("it is renewed", || tenure.loss().is_some() || tenure.deadline() > deadline).await;
        assert_eq!(tenure.loss(), None, "an application without connections ends no tenure");
    }
    let refused = simba_mysql::MySqlBackend::connect(common::config(&url)).await.err().unwrap();
    assert!(refused.is_transient() && refused.to_string().contains("max_connections"), "{refused}");
    timeout(20 * SECOND, leader.stop()).await.unwrap().unwrap();
    timeout(20 * SECOND, successor.acquired()).await.unwrap().unwrap();
}

// ===== time =====

/// Makes the server use the time in this file. MySQL takes a minute to start this way, so the rows about the
/// server's clock run on MariaDB only.
fn with_clock(setup: Setup, file: &Path) -> Setup {
    with_server_clock(setup, file, true)
}

/// Leads for some seconds around `time`, in seconds since 1970, at which the clocks of Los Angeles change.
/// `time` is the end of this hour in UTC.
async fn leads_through(time: u64, hour: u32) {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    // A server takes long to start on a busy machine.
    set_server_clock(&file, time - 600);
    let setup = Setup::mariadb().with_zone("America/Los_Angeles").with_env("TZ", "UTC");
    let server = common::private(with_clock(setup, &file)).await;
    let simba = simba(&common::least_url(server.address())).await;
    let mutex = common::name("row42");
    let mut admin = common::admin(&server.url()).await;
    // No lease exists yet that a step of the clock could end.
    set_server_clock(&file, time - 30);
    let (_contention, tenure) = lead(&simba, &mutex).await;
    let hour_now = "SELECT HOUR(UTC_TIMESTAMP())";
    let before: u32 = admin.query_first(hour_now).await.unwrap().unwrap();
    assert_eq!(before, hour, "the clock of the server is set");
    let mut after = before;
    let total = u64::try_from(common::lease().total().as_millis()).unwrap();
    let left = "SELECT CAST(transition_at AS SIGNED) - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) \
                DIV 1000 FROM simba_mutex WHERE mutex = ?";
    timeout(90 * SECOND, async {
        let mut more = 20;
        while more > 0 {
            let left: i64 = admin.exec_first(left, (mutex.as_str(),)).await.unwrap().unwrap();
            assert!(left > 0 && left <= total as i64, "a lease keeps its length, not {left} ms");
            after = admin.query_first(hour_now).await.unwrap().unwrap();
            more -= i32::from(after != before);
            sleep(ms(100)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(after, hour + 1);
    assert_eq!(tenure.loss(), None, "a change of the local time ends no lease");
    simba.shutdown().await;
}

/// Row 42: the zone's clocks are set back, and an hour repeats.
#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_autumn_time_change_ends_no_tenure() {
    // 2026-11-01 09:00:00
    leads_through(1_793_523_600, 8).await;
}

/// Row 42: the zone's clocks are set forward, and an hour is missing.
#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_spring_time_change_ends_no_tenure() {
    // 2027-03-14 10:00:00
    leads_through(1_805_018_400, 9).await;
}

/// Records every tenure's token.
#[derive(Clone, Default)]
struct Tokens(std::sync::Arc<std::sync::Mutex<Vec<FencingToken>>>);

impl Contender for Tokens {
    async fn on_acquired(&mut self, tenure: &Tenure, _: &MutexState) {
        self.0.lock().unwrap().push(tenure.token());
    }

    async fn on_released(&mut self, _: &Tenure, _: &MutexState) {}
}

impl Tokens {
    fn all(&self) -> Vec<FencingToken> {
        self.0.lock().unwrap().clone()
    }
}

/// Returns the first tenure of either contention that is renewed after the step.
async fn settled(contentions: [&Contention; 2]) -> Tenure {
    let led = async {
        loop {
            let tenure = tokio::select! {
                biased;
                tenure = contentions[0].acquired() => tenure.unwrap(),
                tenure = contentions[1].acquired() => tenure.unwrap(),
            };
            let deadline = tenure.deadline();
            common::until("it is renewed or lost", || {
                tenure.loss().is_some() || tenure.deadline() > deadline
            })
            .await;
            if tenure.is_held() {
                return tenure;
            }
        }
    };
    timeout(60 * SECOND, led).await.unwrap()
}

/// Row 43: the server's clock is set by an hour, forward and back. Every tenure has a token of its own, and
/// tokens still grow.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_a_step_of_the_server_s_clock_repeats_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let server = common::private(with_clock(Setup::mariadb(), &file)).await;
    let (one, two) = (
        simba(&common::least_url(server.address())).await,
        simba(&common::least_url(server.address())).await,
    );
    let (mutex, tokens) = (common::name("row43"), Tokens::default());
    let start = |simba: &Simba| {
        let contention = simba.contend(mutex.clone()).with_contender(tokens.clone());
        contention.start().unwrap();
        contention
    };
    let leader = start(&one);
    let tenure = timeout(20 * SECOND, leader.acquired()).await.unwrap().unwrap();
    let successor = start(&two);
    common::until("the successor sees the leader", || successor.owner().is_owner(tenure.contender())).await;
    let mut last = tenure.token();
    for round in 0..rounds() {
        for offset in ["+1h", "+0"] {
            let before = tokens.all();
            std::fs::write(&file, offset).unwrap();
            if offset == "+1h" {
                // Every lease has ended: a tenure that continues would be a fault of the test.
                common::until("another tenure begins", || tokens.all().len() > before.len()).await;
            }
            let other_tenure = async {
                loop {
                    let led = settled([&leader, &successor]).await;
                    // An old leader that has not noticed the end of its lease is not the one that leads now.
                    if offset == "+0" || led.token() != last {
                        return led;
                    }
                }
            };
            let led = timeout(60 * SECOND, other_tenure).await.unwrap();
            let began = led.token() != last || tokens.all().len() > before.len();
            assert!(!began || led.token() > last, "round {round}, {offset}: {} after {last}", led.token());
            // The old leader notices the step at its next renewal.
            common::until("one leads after the step", || leader.is_owner() != successor.is_owner()).await;
            last = led.token();
        }
    }
    one.shutdown().await;
    two.shutdown().await;
    let three = simba(&common::least_url(server.address())).await;
    let (_contention, next) = lead(&three, &mutex).await;
    assert!(next.token() > last);
    three.shutdown().await;
    let mut all = tokens.all();
    let count = all.len();
    all.sort_unstable();
    all.dedup();
    assert_eq!(all.len(), count, "no two tenures have the same token");
}

/// Creates a table with one row of this version.
async fn table_at(on: Product, table: &str, column: &str, version: u64) -> (Simba, MutexName) {
    let address = on.shared().await;
    let mut admin = common::admin(&on.admin_url()).await;
    admin.query_drop(format!("DROP TABLE IF EXISTS {table}")).await.unwrap();
    let create = "CREATE TABLE {table} (mutex VARCHAR(66) NOT NULL PRIMARY KEY, acquired_at BIGINT UNSIGNED NOT NULL, \
                  ttl_at BIGINT UNSIGNED NOT NULL, transition_at BIGINT UNSIGNED NOT NULL, \
                  owner_id CHAR(32) NOT NULL, version {column} NOT NULL)";
    admin.query_drop(create.replace("{table}", table).replace("{column}", column)).await.unwrap();
    let mutex = common::name("row44");
    let insert = format!("INSERT INTO {table} VALUES (?, 0, 0, 0, '', ?)");
    admin.exec_drop(insert, (mutex.as_str(), version)).await.unwrap();
    for grant in common::grants(table) {
        admin.query_drop(grant).await.unwrap();
    }
    // Every write increases the version. With this lease nothing is renewed, and no call is repeated.
    let lease = Lease::new(30 * SECOND, 30 * SECOND).unwrap();
    (simba(&format!("{}?table={table}", common::least_url(address))).await.with_lease(lease), mutex)
}

/// Row 44: a version near 2^31 works, at the limit of its column it is an error, in a wider column it works.
async fn row_44_versions_at_their_limits(on: Product) {
    let (simba, mutex) = table_at(on, "row44_jvm", "INT UNSIGNED", (1 << 31) - 2).await;
    for wanted in [(1 << 31) - 1, (1 << 31) + 1] {
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        assert_eq!(guard.token().get(), wanted);
        guard.release().await.unwrap();
    }

    let (simba, mutex) = table_at(on, "row44_int", "INT UNSIGNED", (1 << 32) - 2).await;
    let guard = simba.locker(mutex.clone()).lock().await.unwrap();
    assert_eq!(guard.token().get(), u64::from(u32::MAX));
    let error = guard.release().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    // As after the end of the lease.
    let mut admin = common::admin(&on.admin_url()).await;
    admin.query_drop("UPDATE row44_int SET transition_at = 0").await.unwrap();
    for _ in 0..3 {
        let error = simba.locker(mutex.clone()).lock().await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("BIGINT UNSIGNED"), "{error}");
    }

    let (simba, mutex) = table_at(on, "row44_bigint", "BIGINT UNSIGNED", (1 << 32) - 1).await;
    for wanted in [1 << 32, (1 << 32) + 2] {
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        assert_eq!(guard.token().get(), wanted);
        guard.release().await.unwrap();
    }
}

// ===== row 45: a client whose wall clock jumps =====

const CHILD_ARGS: &str = "SIMBA_ROW_45";

/// The child process of row 45: leads while its wall clock jumps, and prints the result.
#[test]
#[ignore = "the child process of row 45"]
fn jumping_client() {
    let args = std::env::var(CHILD_ARGS).unwrap();
    let (address, mutex) = args.split_once(' ').unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let simba = simba(&common::least_url(address)).await;
        let (_contention, tenure) = lead(&simba, &MutexName::new(mutex).unwrap()).await;
        println!("leads");
        let (mut jumps, mut last) = (0, std::time::SystemTime::now());
        while jumps < 100 {
            sleep(ms(5)).await;
            let now = std::time::SystemTime::now();
            let moved = now.duration_since(last).unwrap_or_else(|error| error.duration());
            jumps += u32::from(moved > 60 * SECOND);
            last = now;
            assert_eq!(tenure.loss(), None, "a jump of the wall clock ends no tenure");
        }
        println!("jumped {jumps} times, still leads: {}", tenure.is_held());
        simba.shutdown().await;
    });
}

/// Row 45: the wall clock of the client jumps by an hour a hundred times. The tenure continues.
#[tokio::test(flavor = "multi_thread")]
async fn row_45_a_client_whose_wall_clock_jumps_stays_leader() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "jumping_client", "--ignored", "--nocapture"])
        .env(CHILD_ARGS, format!("{} {}", common::shared().await, common::name("row45")))
        .env("LD_PRELOAD", simba_servers::faketime_library(true))
        .env("FAKETIME_TIMESTAMP_FILE", &file)
        .env("FAKETIME_NO_CACHE", "1")
        .env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        .stdout(std::process::Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let jumping = tokio::spawn(async move {
        for offset in ["+1h", "+0", "-1h", "+0"].iter().cycle() {
            std::fs::write(&file, offset).unwrap();
            sleep(ms(40)).await;
        }
    });
    let output = timeout(120 * SECOND, child.wait_with_output()).await.unwrap().unwrap();
    jumping.abort();
    let stdout = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && stdout.contains("jumped 100 times, still leads: true"), "{stdout}");
}

// ===== a restart =====

/// A private server that can be restarted.
struct Private(std::sync::Arc<std::sync::Mutex<Server>>);

#[async_trait]
impl Fixture for Private {
    async fn connect(&self) -> Connection {
        let address = self.0.lock().unwrap().address();
        common::MySql::at(address).connect().await
    }

    fn profile(&self) -> Profile {
        common::profile()
    }

    async fn restart(&self) -> bool {
        let server = std::sync::Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || server.lock().unwrap().restart().unwrap()).await.unwrap();
        true
    }
}

async fn a_restart_of_the_server_is_survived(on: Product) {
    let server = common::private(on.setup()).await;
    let fixture = Private(std::sync::Arc::new(std::sync::Mutex::new(server)));
    let case = simba_tck::cases().iter().find(|case| case.name == "a_restart_of_the_store_is_survived");
    case.unwrap().run(&fixture).await;
}

/// A server that is killed and restarted has the writes that it confirmed.
async fn a_killed_server_keeps_confirmed_writes(on: Product) {
    let mut server = common::private(on.setup()).await;
    let url = common::least_url(server.address());
    let simba = simba(&url).await;
    let mutex = common::name("killed");
    let mut last = 0;
    for _ in 0..rounds() {
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        assert!(guard.token().get() > last);
        last = guard.token().get();
        server = tokio::task::spawn_blocking(move || {
            server.kill().unwrap();
            server.restart().unwrap();
            server
        })
        .await
        .unwrap();
        drop(guard);
        let locked = async {
            loop {
                match simba.locker(mutex.clone()).lock().await {
                    Ok(guard) => return guard,
                    Err(error) => assert!(error.is_transient(), "{error}"),
                }
            }
        };
        let guard = timeout(60 * SECOND, locked).await.unwrap();
        assert!(guard.token().get() > last, "tokens survive a power cut");
        last = guard.token().get();
        guard.release().await.unwrap();
    }
}

// ===== batches and polls =====

/// Renewals that are due together share statements, and a handle has the configured number of connections.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_share_statements_and_connections() {
    let connection = common::MySql::shared().with_keys("connections=2").connect().await;
    let simba = Simba::builder(connection.backend).build();
    let lease = Lease::new(3 * SECOND, 9 * SECOND).unwrap();
    let contentions: Vec<Contention> =
        (0..200).map(|_| simba.contend(common::name("batch")).with_lease(lease)).collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    common::until("all lead", || contentions.iter().all(Contention::is_owner)).await;
    // Calls that arrive during a statement are sent with the next.
    connection.network.delay(ms(4), Duration::ZERO);
    let before = connection.network.requests();
    for _ in 0..2 {
        let tenures: Vec<Tenure> = contentions.iter().filter_map(Contention::tenure).collect();
        assert_eq!(tenures.len(), contentions.len(), "all still lead");
        let deadlines: Vec<_> = tenures.iter().map(Tenure::deadline).collect();
        common::until("all are renewed", || {
            tenures.iter().zip(&deadlines).all(|(tenure, before)| tenure.deadline() > *before)
        })
        .await;
    }
    let requests = connection.network.requests() - before;
    assert!(requests < 200, "400 renewals took {requests} requests");
    let mut admin = common::admin(&common::admin_url()).await;
    let version: u64 = admin
        .exec_first("SELECT MIN(version) FROM simba_mutex WHERE owner_id = ?", (owner(&contentions[0]),))
        .await
        .unwrap()
        .unwrap();
    assert!(version >= 3, "every renewal increases the version");
    simba.shutdown().await;
}

fn owner(contention: &Contention) -> String {
    contention.tenure().unwrap().contender().to_string()
}

/// Without waiters there are no polls. Many waiters share one statement, sent at most ten times a second.
#[tokio::test(flavor = "multi_thread")]
async fn one_poll_serves_everyone_who_waits() {
    let one = common::MySql::shared().connect().await;
    let long = Lease::new(30 * SECOND, 20 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let holder = Simba::builder(one.backend).with_lease(long).build();
    let names: Vec<MutexName> = (0..40).map(|_| common::name("poll")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(holder.locker(name.clone()).lock().await.unwrap());
    }
    // Only now: a connection that is idle for 15 seconds is pinged.
    let two = common::MySql::shared().connect().await;
    let waiting = Simba::builder(two.backend).with_lease(long).build();
    let quiet = two.network.requests();
    sleep(SECOND).await;
    assert_eq!(two.network.requests(), quiet, "no polls without waiters");
    let waiters: Vec<Contention> = names.iter().map(|name| waiting.contend(name.clone())).collect();
    waiters.iter().for_each(|waiter| waiter.start().unwrap());
    common::until("all see the holder", || {
        waiters.iter().all(|waiter| waiter.owner() != simba_core::MutexOwner::none())
    })
    .await;
    sleep(2 * SECOND).await;
    let (began, before) = (tokio::time::Instant::now(), two.network.requests());
    sleep(5 * SECOND).await;
    let requests = two.network.requests() - before;
    // A busy machine may have slept for longer than five seconds.
    let most = (12.0 * began.elapsed().as_secs_f64()).ceil() as usize;
    assert!((2..=most).contains(&requests), "{requests} requests for forty waiters, at most {most}");
    drop(guards);
    common::until("all acquire", || waiters.iter().all(Contention::is_owner)).await;
    waiting.shutdown().await;
    holder.shutdown().await;
}

/// However often mutexes change hands, a handle polls at most a hundred times in ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_poll_keeps_to_its_budget_while_mutexes_go_round() {
    let setup = Setup::mariadb().with_arg("--general-log").with_arg("--general-log-file=general.log");
    let server = common::private(setup).await;
    let url = common::least_url(server.address());
    let long = Lease::new(30 * SECOND, 20 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let handle =
        async || Simba::builder(std::sync::Arc::new(common::connect(&url).await)).with_lease(long).build();
    let (one, two) = (handle().await, handle().await);
    let names: Vec<MutexName> = (0..8).map(|_| common::name("budget")).collect();
    let cycle = |simba: &Simba, name: &MutexName| {
        let locker = simba.locker(name.clone());
        tokio::spawn(async move {
            loop {
                let guard = locker.lock().await.unwrap();
                sleep(ms(150)).await;
                guard.release().await.unwrap();
                sleep(ms(5)).await;
            }
        })
    };
    let tasks: Vec<_> = names.iter().flat_map(|name| [cycle(&one, name), cycle(&two, name)]).collect();
    sleep(SECOND).await;
    let (began, before) = (tokio::time::Instant::now(), polls(&server));
    sleep(10 * SECOND).await;
    let after = polls(&server);
    // A busy machine may have slept for longer: forty polls that were saved up, and six a second, of each
    // handle.
    let most = 2 * (41 + (6.0 * began.elapsed().as_secs_f64()).ceil() as usize);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    assert!((20..=most).contains(&(after - before)), "at most {most} polls, not {}", after - before);
    one.shutdown().await;
    two.shutdown().await;
}

/// Returns the number of polls in the server's log. A handle polls over one connection at a time, and over a
/// new one if the server does not answer.
fn polls(server: &Server) -> usize {
    let log = std::fs::read_to_string(server.dir().join("data/general.log")).unwrap();
    let mut polls = BTreeMap::<String, usize>::new();
    for line in log.lines() {
        let logged = ["Execute", "Query"].iter().find_map(|word| line.split_once(word));
        let Some((before, statement)) = logged else { continue };
        let connection = before.split_whitespace().last().unwrap().to_owned();
        if statement.contains("max_statement_time = 5 ") {
            polls.insert(connection.clone(), 0);
        }
        if let Some(count) = polls.get_mut(&connection).filter(|_| statement.contains("WHERE mutex IN (")) {
            *count += 1;
        }
    }
    polls.into_values().sum()
}

/// A list of all mutexes that the server does not answer delays no notification.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_hangs_delays_no_waiter() {
    let address = common::shared().await;
    let (injector, between) = Injector::start(address).await;
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let holder = Simba::builder(std::sync::Arc::new(common::connect(&common::least_url(address)).await))
        .with_lease(long)
        .build();
    let backend: std::sync::Arc<dyn Backend> =
        std::sync::Arc::new(common::connect(&common::least_url(between)).await);
    let waiting = Simba::builder(std::sync::Arc::clone(&backend)).with_lease(long).build();
    let mutex = common::name("list");
    injector.hang("ORDER BY mutex");
    // A list ends after five seconds. On a busy machine an acquisition may take as long, but not every time.
    for round in 1..=10 {
        let guard = holder.locker(mutex.clone()).lock().await.unwrap();
        let waiter = waiting.contend(mutex.clone());
        waiter.start().unwrap();
        common::until("the waiter sees the holder", || waiter.owner().is_owner(guard.tenure().contender()))
            .await;
        let backend = std::sync::Arc::clone(&backend);
        let mut list = tokio::spawn(async move { backend.operate().unwrap().list().await.map(drop) });
        common::until("the list hangs", || injector.injected() == round).await;
        guard.release().await.unwrap();
        tokio::select! {
            biased;
            tenure = waiter.acquired() => {
                drop(tenure.unwrap());
                list.abort();
                waiting.shutdown().await;
                return;
            }
            ended = &mut list => assert!(ended.unwrap().is_err(), "the list hangs"),
        }
        waiter.stop().await.unwrap();
    }
    panic!("no waiter is notified while a list hangs");
}

/// An operator names the holder by its token, where the row shows it, or by its id.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_the_row_does_not_show_frees_nothing() {
    let backend: std::sync::Arc<dyn Backend> =
        std::sync::Arc::new(common::connect(&common::least_url(common::shared().await)).await);
    let operate = backend.operate().unwrap();
    let lease = Lease::new(30 * SECOND, 30 * SECOND).unwrap();
    let claim = Claim::new(common::name("evict"), ContenderId::generate(), lease);
    let (mutex, id) = (claim.mutex.clone(), claim.contender.clone());
    let mut session = backend.open(claim).await.unwrap();
    let first = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    let by_token = |token: FencingToken| operate.evict(&mutex, EvictIf::Token(token));
    let later = FencingToken::new(first.get() + 1);
    assert_eq!(
        by_token(later).await.unwrap(),
        Eviction::Other(id.clone()),
        "no token is greater than the version"
    );
    assert!(matches!(by_token(first).await.unwrap(), Eviction::Freed { owner, .. } if owner == id));

    let second = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    assert_eq!(token(session.contend(Prior::Held).await.unwrap()), Some(second));
    for unsure in [first, second] {
        let error = by_token(unsure).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Invalid, "{error}");
        assert!(error.to_string().contains(&format!("--if-owner {id}")), "{error}");
    }
    assert!(operate.read(&mutex).await.unwrap().owner == Some(id.clone()), "nothing was freed");
    let freed = operate.evict(&mutex, EvictIf::Owner(id.clone())).await.unwrap();
    assert!(matches!(freed, Eviction::Freed { owner, .. } if owner == id));
}

/// An id that is longer than the owner's column is refused before it is used.
#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_does_not_fit_is_refused_at_open() {
    let (_, mutex) = table_at(Product::MariaDb, "narrow", "INT UNSIGNED", 1).await;
    let mut admin: Conn = common::admin(&common::admin_url()).await;
    admin.query_drop("ALTER TABLE narrow MODIFY owner_id CHAR(8) NOT NULL").await.unwrap();
    let backend =
        common::connect(&format!("{}?table=narrow", common::least_url(common::shared().await))).await;
    let fits = Claim::new(mutex.clone(), ContenderId::new("eight-ch").unwrap(), common::lease());
    assert!(backend.open(fits).await.is_ok());
    let long = Claim::new(mutex, ContenderId::new("nine-char").unwrap(), common::lease());
    let error = backend.open(long).await.err().unwrap();
    assert!(error.kind() == ErrorKind::Config && error.to_string().contains("VARCHAR(128)"), "{error}");
}
