//! Locked rows: a peer that hangs inside its transaction affects only its own mutexes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::Product;
use common::calls::{contend_all, hold_next_request_for, outcomes, poll_once, table_at, token};
use common::{SECOND, ms, simba};
use mysql_async::Conn;
use mysql_async::prelude::Queryable;
use simba_core::spi::{Backend, Claim, Holding, Prior};
use simba_core::{ContenderId, Contention, Lease, Loss, MutexName, Simba, Tenure};
use simba_tck::{FaultProxy, Fixture, rounds};
use tokio::time::timeout;

on_both_servers! {
    row_37_a_frozen_transaction_affects_only_its_own_mutex
    row_37_many_locked_rows_affect_no_other_mutex
    row_37_a_locked_row_of_another_mutex_splits_no_batch
    row_37_a_call_that_pauses_for_a_locked_row_delays_no_other
    row_37_a_release_of_a_locked_row_delays_no_renewal_of_its_batch
    row_37_a_release_of_a_locked_row_leaves_a_connection_for_renewals
    row_37_many_calls_for_locked_rows_wait_for_none_of_them
    row_37_an_insert_that_a_peer_does_not_end_affects_only_its_own_mutex
    row_38_a_cold_start_has_no_deadlocks
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
        let mut frozen = lock_rows(on, "simba_mutex", &names[7..8]).await;
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
    let mut frozen = lock_rows(on, "simba_mutex", &names[8..]).await;
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
    let mut peer = lock_rows(on, "row37_small", &[other]).await;
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
    let mut peer = lock_rows(on, "simba_mutex", &[locked]).await;
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
    let mut peer = lock_rows(on, "simba_mutex", &names).await;
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
    let mut peer = begin_as_peer(on).await;
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
        let mut peer = lock_rows(on, "simba_mutex", &names[2..]).await;
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
        let mut peer = lock_rows(on, "simba_mutex", &[locked]).await;
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

/// Begins a transaction that locks single rows. At REPEATABLE READ, InnoDB widens a lock to the gap before its row when
/// the page splits there: then inserts of other tests fail.
async fn begin_as_peer(on: Product) -> Conn {
    let mut peer = common::admin(&on.admin_url()).await;
    peer.query_drop("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED").await.unwrap();
    peer.query_drop("BEGIN").await.unwrap();
    peer
}

/// Locks rows, as a peer that is stopped inside its transaction.
async fn lock_rows(on: Product, table: &str, names: &[MutexName]) -> Conn {
    let mut peer = begin_as_peer(on).await;
    for name in names {
        let lock = format!("SELECT 1 FROM {table} WHERE mutex = ? FOR UPDATE");
        peer.exec_drop(lock, (name.as_str(),)).await.unwrap();
    }
    peer
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
