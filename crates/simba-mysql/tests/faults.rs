//! The rows of the fault matrix about a server that speaks MySQL.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::Product;
use common::injector::Injector;
use mysql_async::prelude::Queryable;
use mysql_async::{Conn, Opts, Pool, PoolConstraints, PoolOpts};
use simba_core::operate::{EvictIf, Eviction};
use simba_core::{
    Answer, Backend, Claim, Contender, ContenderId, Contention, ErrorKind, FencingToken, Holding, Lease,
    Loss, MutexName, MutexState, Prior, Session, Simba, Tenure,
};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, FaultProxy, Fixture, Profile, async_trait, rounds};
use tokio::time::{sleep, timeout};

const SECOND: Duration = Duration::from_secs(1);

fn ms(ms: u64) -> Duration {
    Duration::from_millis(ms)
}

async fn simba(url: &str) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(std::sync::Arc::new(common::connect(url).await)).lease(common::lease()).build()
}

on_both_servers! {
    row_15_a_renewal_without_a_reply_is_made_good_by_one_statement
    row_17_a_take_without_a_reply_is_adopted
    row_18_a_take_that_arrives_after_a_release_does_nothing
    row_18_a_take_that_arrives_after_its_session_gave_up_does_nothing
    row_37_a_frozen_transaction_costs_its_own_mutex_only
    row_37_many_locked_rows_cost_no_other_mutex
    row_37_a_locked_row_of_another_mutex_splits_no_batch
    row_37_a_call_does_not_pause_for_a_row_that_stayed_locked
    renewals_without_a_reply_are_made_good_together
    row_38_a_cold_start_has_no_deadlocks
    row_39_what_the_server_undid_or_lost_is_tried_again_at_once
    row_40_killed_connections_cost_no_leader
    row_44_versions_at_their_ends
    a_restart_of_the_server_is_survived
    a_killed_server_keeps_what_it_confirmed
    writes_that_are_slow_are_waited_for
    a_waiter_survives_a_server_that_is_read_only_for_a_while
}

async fn lead(simba: &Simba, mutex: &MutexName) -> (Contention, Tenure) {
    let contention = simba.contend(mutex.clone());
    contention.start().unwrap();
    let tenure = timeout(10 * SECOND, contention.acquired()).await.unwrap().unwrap();
    (contention, tenure)
}

/// Row 17 where the mutex has a row: the very write that takes it is carried out, and its reply is lost.
async fn row_17_a_take_without_a_reply_is_adopted(on: Product) {
    let (one, two) = (on.fixture().connect().await, on.fixture().connect().await);
    // So long that nothing but an adoption explains who comes next.
    let lease = Lease::new(30 * SECOND, 30 * SECOND).unwrap();
    let (ours, theirs) =
        (Simba::builder(one.backend).lease(lease).build(), Simba::builder(two.backend).lease(lease).build());
    for _ in 0..rounds() {
        let mutex = common::name("row17");
        // A handle that released the mutex takes it without a look before.
        ours.locker(mutex.clone()).lock().await.unwrap().release().await.unwrap();
        one.network.lose_next_reply();
        let guard = timeout(20 * SECOND, ours.locker(mutex.clone()).lock()).await;
        let guard = guard.expect("what was won without a reply is adopted").unwrap();
        assert!(theirs.locker(mutex.clone()).try_lock().await.unwrap().is_none(), "what was adopted is held");
        guard.release().await.unwrap();
        assert!(theirs.locker(mutex).try_lock().await.unwrap().is_some(), "nothing is left of it");
    }
    ours.shutdown().await;
    theirs.shutdown().await;
}

/// Row 15: a renewal whose reply is lost is made good by one statement on the next connection. On a slow network a
/// look before it would cost the lease.
async fn row_15_a_renewal_without_a_reply_is_made_good_by_one_statement(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    let lease = Lease::new(15 * SECOND, 15 * SECOND).unwrap();
    let claim = Claim::new(common::name("row15"), ContenderId::generate(), lease);
    let mut session = connection.backend.open(claim).await.unwrap();
    // So slow that nothing is asked that can be done without.
    connection.network.delay(ms(8), Duration::ZERO);
    let first = token(session.contend(Prior::Nothing).await.unwrap());
    // What MySQL asks of a client that logs in without TLS for the first time is over.
    connection.network.cut();
    assert_eq!(token(session.contend(Prior::Held).await.unwrap()), first);
    for _ in 0..rounds() {
        let before = connection.network.requests();
        connection.network.lose_next_reply();
        assert_eq!(token(session.contend(Prior::Held).await.unwrap()), first, "a renewal keeps its token");
        let requests = connection.network.requests() - before;
        assert!(requests <= 3, "a renewal, a login and another renewal, not {requests} requests");
    }
}

fn token(answer: Answer) -> Option<FencingToken> {
    match answer {
        Answer::Ours(ours) => ours.token,
        other => panic!("it is ours: {other:?}"),
    }
}

/// A session whose take is kept back by the network.
struct KeptBack {
    _proxy: FaultProxy,
    /// Dropped, it would close the connections that the session still needs.
    _backend: simba_mysql::MySqlBackend,
    mutex: MutexName,
    session: Box<dyn Session>,
    held: simba_tck::Held,
}

async fn kept_back(on: Product) -> KeptBack {
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let url = format!("{}?connections=1", common::least_url(proxy.address()));
    let backend = common::connect(&url).await;
    // A call is given up after a third of the ttl.
    let lease = Lease::new(9 * SECOND, 30 * SECOND).unwrap();
    let claim = Claim::new(common::name("row18"), ContenderId::generate(), lease);
    let mutex = claim.mutex.clone();
    let mut session = backend.open(claim).await.unwrap();
    // A handle that released the mutex takes it without a look before.
    let first = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    session.release(Holding::Under(first)).await.unwrap();
    // Statements may still be prepared: those requests do not name the mutex.
    let held = hold_next_request_for(&proxy, &mutex);
    let error = session.contend(Prior::Nothing).await.unwrap_err();
    assert!(error.is_transient(), "{error}");
    assert_eq!(owner_on(on, &mutex).await, "");
    KeptBack { _proxy: proxy, _backend: backend, mutex, session, held }
}

/// Keeps back the next request that names this mutex: as text where the statement is prepared, by the codes of its bytes
/// where it is not.
fn hold_next_request_for(proxy: &FaultProxy, mutex: &MutexName) -> simba_tck::Held {
    let codes: String = mutex.as_str().bytes().map(|byte| format!("{byte:02x}")).collect();
    proxy.hold_next_request_with(&[mutex.as_str(), &codes])
}

async fn owner_on(on: Product, mutex: &MutexName) -> String {
    let mut admin = common::admin(&on.admin_url()).await;
    let owner = "SELECT owner_id FROM simba_mutex WHERE mutex = ?";
    admin.exec_first(owner, (mutex.as_str(),)).await.unwrap().unwrap()
}

/// Row 18: the session tried again, won, and released; then its first take arrives.
async fn row_18_a_take_that_arrives_after_a_release_does_nothing(on: Product) {
    let KeptBack { _proxy, _backend, mutex, mut session, held } = kept_back(on).await;
    let second = token(session.contend(Prior::Unknown).await.unwrap()).unwrap();
    session.release(Holding::Under(second)).await.unwrap();
    held.deliver_and_wait().await;
    assert_eq!(owner_on(on, &mutex).await, "", "what was released stays free");
}

/// Row 18: the session gave up without knowing the outcome; then its take arrives.
async fn row_18_a_take_that_arrives_after_its_session_gave_up_does_nothing(on: Product) {
    let KeptBack { _proxy, _backend, mutex, mut session, held } = kept_back(on).await;
    session.release(Holding::Unknown).await.unwrap();
    held.deliver_and_wait().await;
    assert_eq!(owner_on(on, &mutex).await, "", "what was given up stays free");
}

/// Row 37: a peer stands still inside its transaction, as a stopped JVM does, with one row locked. Only that
/// mutex may be lost, although its renewal shares a connection and statements with the others.
async fn row_37_a_frozen_transaction_costs_its_own_mutex_only(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    // MySQL waits for a locked row for a second, whatever it is told: a third of the ttl must be much longer. A call that
    // gives up earlier leaves a statement behind that keeps the rows of others locked while it waits.
    let lease = Lease::new(9 * SECOND, 4 * SECOND).unwrap();
    let simba = Simba::builder(connection.backend).lease(lease).build();
    // What comes while a statement is under way goes out with the next: all of them together.
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
                    "a locked row costs no other mutex; the last error: {last:?}"
                );
                // A statement that they share is sent again without the locked row, not refused.
                assert!(!last.as_ref().is_some_and(|last| last.contains("locked")), "{last:?}");
            }
            let renewed = others().zip(&deadlines).all(|((_, tenure), before)| tenure.deadline() > *before);
            renewed && leaders[7].1.loss().is_some()
        })
        .await;
        assert_eq!(leaders[7].1.loss(), Some(Loss::Deadline), "the locked row could not be renewed");
        frozen.query_drop("ROLLBACK").await.unwrap();
        let again = timeout(20 * SECOND, leaders[7].0.acquired()).await.unwrap().unwrap();
        assert!(again.token() > leaders[7].1.token());
        leaders[7].1 = again;
    }
    simba.shutdown().await;
}

/// Row 37: a peer stands still with 120 rows locked. Their holders have long leases, and wait long for an answer. Others
/// with a shorter lease share their connection.
async fn row_37_many_locked_rows_cost_no_other_mutex(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    let simba = Simba::builder(connection.backend).build();
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_renew_at(2 * SECOND).unwrap();
    // MySQL waits for a locked row for a second, whatever it is told: a third of the ttl must be longer.
    let short = Lease::new(5 * SECOND, 2 * SECOND).unwrap();
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
        common::until("the other mutexes are renewed, and every locked row was asked for", || {
            assert!(
                others.iter().all(|tenure| !tenure.is_expiring()),
                "locked rows cost no other mutex time"
            );
            let renewed = others.iter().zip(&deadlines).all(|(tenure, before)| tenure.deadline() > *before);
            renewed && contentions[8..].iter().all(is_locked)
        })
        .await;
    }
    frozen.query_drop("ROLLBACK").await.unwrap();
    simba.shutdown().await;
}

/// Row 37: a hundred mutexes are taken, renewed and released while a peer has locked the row of another one in the same
/// table. A server that reads the whole table for a statement about many rows would meet that row.
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
    hand_over(&mut releases).await;
    for release in releases {
        release.await.unwrap();
    }
    let requests = proxy.requests() - before;
    assert!(requests < 40, "{requests} requests for a hundred releases");
    peer.query_drop("ROLLBACK").await.unwrap();
}

/// Row 37: the first call for a locked row tries five times. Later calls try once, whichever session makes them, until
/// the row is unlocked.
async fn row_37_a_call_does_not_pause_for_a_row_that_stayed_locked(on: Product) {
    let (injector, address) = Injector::start(on.shared().await).await;
    let backend = common::connect(&format!("{}?connections=1", common::least_url(address))).await;
    let (mutex, other) = (common::name("row37"), common::name("row37"));
    let open = async |mutex: &MutexName| {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
        backend.open(claim).await.unwrap()
    };
    let mut sessions = [open(&mutex).await, open(&mutex).await, open(&other).await];
    injector.refuse(1205, usize::MAX);
    for (session, tries) in [(0, 5), (1, 1), (0, 1), (2, 5), (1, 1)] {
        let before = injector.struck();
        let error = sessions[session].contend(Prior::Nothing).await.unwrap_err();
        assert!(error.to_string().contains("locked"), "{error}");
        assert_eq!(injector.struck() - before, tries);
    }
    injector.refuse(1205, 0);
    assert!(matches!(sessions[1].contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    let before = injector.struck();
    injector.refuse(1205, usize::MAX);
    sessions[1].contend(Prior::Held).await.unwrap_err();
    assert_eq!(injector.struck() - before, 5, "a row that was unlocked is paused for again");
}

/// Hands all calls over at once, then waits for the answers.
async fn contend_all(sessions: &mut [Box<dyn Session>], prior: Prior) -> Vec<simba_core::Result<Answer>> {
    let mut calls: Vec<_> = sessions.iter_mut().map(|session| session.contend(prior)).collect();
    hand_over(&mut calls).await;
    let mut answers = Vec::new();
    for call in calls {
        answers.push(call.await);
    }
    answers
}

/// Polls each call once, which puts it into the queue of its connection.
async fn hand_over(calls: &mut [impl Future + Unpin]) {
    std::future::poll_fn(|context| {
        for call in &mut *calls {
            assert!(std::pin::Pin::new(call).poll(context).is_pending());
        }
        std::task::Poll::Ready(())
    })
    .await;
}

/// A hundred renewals share a statement that gets no reply, in time or at all. The next tries share statements too:
/// one by one they would take a hundred round trips or more.
async fn renewals_without_a_reply_are_made_good_together(on: Product) {
    simba_tck::explain_failures();
    let proxy = FaultProxy::start(on.shared().await).await.unwrap();
    let backend = common::connect(&format!("{}?connections=1", common::least_url(proxy.address()))).await;
    let lease = Lease::new(9 * SECOND, 60 * SECOND).unwrap();
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
        // The others queue up behind a call that is kept back, so they go out together.
        let mut first = hold_next_request_for(&proxy, &names[0]);
        let mut calls: Vec<_> = sessions.iter_mut().map(|session| session.contend(Prior::Held)).collect();
        tokio::select! {
            () = first.caught() => {}
            answer = &mut calls[0] => panic!("a call that is kept back ended: {answer:?}"),
        }
        hand_over(&mut calls[1..]).await;
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
            // It is carried out although nobody waits for it any more.
            batch.deliver_and_wait().await;
            before = proxy.requests();
            answers = contend_all(&mut sessions, Prior::Held).await;
        }
        let renewed: Vec<_> = answers.into_iter().map(|answer| token(answer.unwrap())).collect();
        assert_eq!(renewed, tokens, "a renewal keeps its token");
        let requests = proxy.requests() - before;
        assert!(requests < 40, "{requests} requests for a hundred renewals, after a cut: {is_cut}");
    }
}

/// Row 38: fifty contenders on twenty names that nobody ever used. One leads each, and nobody sees an error.
async fn row_38_a_cold_start_has_no_deadlocks(on: Product) {
    let url = common::least_url(on.shared().await);
    let mut handles = Vec::new();
    for _ in 0..5 {
        handles.push(simba(&url).await);
    }
    for _ in 0..rounds() {
        let names: Vec<MutexName> = (0..20).map(|_| common::name("row38")).collect();
        let contentions: Vec<Contention> =
            (0..50).map(|at| handles[at % 5].contend(names[at % 20].clone())).collect();
        contentions.iter().for_each(|contention| contention.start().unwrap());
        common::until("every name is led", || {
            (0..20).all(|name| contentions.iter().skip(name).step_by(20).any(Contention::is_owner))
        })
        .await;
        for contention in &contentions {
            assert!(contention.last_error().is_none(), "{:?}", contention.last_error());
            contention.stop().await.unwrap();
        }
    }
}

/// Row 39: the server answers with a lock timeout, a deadlock or a conflict, had no time for the statement, does not
/// know whether it committed, or forgot a prepared statement. The same call tries again at once.
async fn row_39_what_the_server_undid_or_lost_is_tried_again_at_once(on: Product) {
    let (injector, address) = Injector::start(on.shared().await).await;
    let backend = common::connect(&common::least_url(address)).await;
    let claim = Claim::new(common::name("row39"), ContenderId::generate(), Lease::default());
    let mut session = backend.open(claim).await.unwrap();
    let mut prior = Prior::Nothing;
    for code in [1205, 1213, 1969, 1180, 1243, 1615, 3100, 3101].repeat(rounds() as usize) {
        let struck = injector.struck();
        injector.refuse(code, 1);
        let answer = session.contend(prior).await.expect("what the server undid stays inside");
        assert!(matches!(answer, Answer::Ours(_)), "{code}: {answer:?}");
        assert_eq!(injector.struck(), struck + 1);
        prior = Prior::Held;
    }
    // What does not end at once is an error, and a leader survives it.
    let simba = simba(&common::least_url(address)).await;
    let (_contention, tenure) = lead(&simba, &common::name("row39")).await;
    let deadline = tenure.deadline();
    injector.refuse(1205, 6);
    common::until("it is renewed", || tenure.deadline() > deadline).await;
    assert_eq!(tenure.loss(), None);
    simba.shutdown().await;
}

/// Row 40: an operator kills every connection of the handle five times a second.
async fn row_40_killed_connections_cost_no_leader(on: Product) {
    let address = on.shared().await;
    let mut admin = common::admin(&on.admin_url()).await;
    // A user of its own: the other tests keep their connections.
    for statement in [
        "CREATE USER IF NOT EXISTS 'row40'@'%' IDENTIFIED BY 'row40'",
        "GRANT SELECT, INSERT, UPDATE ON simba.simba_mutex TO 'row40'@'%'",
    ] {
        admin.query_drop(statement).await.unwrap();
    }
    let simba = simba(&format!("mysql://row40:row40@{address}/simba")).await;
    let (_contention, tenure) = lead(&simba, &common::name("row40")).await;
    let (mut killed, find) = (0, "SELECT id FROM information_schema.processlist WHERE user = 'row40'");
    let killing = async {
        // One that is not needed before the next time is not there to be killed.
        while killed < rounds() * 5 {
            sleep(ms(200)).await;
            assert_eq!(tenure.loss(), None, "killed connections cost no leader");
            let ids: Vec<u64> = admin.query(find).await.unwrap();
            for id in ids {
                killed += u32::from(admin.query_drop(format!("KILL CONNECTION {id}")).await.is_ok());
            }
        }
    };
    timeout(30 * SECOND * rounds(), killing).await.expect("connections are killed");
    simba.shutdown().await;
}

/// A planned failover makes the old primary read-only first. Who waits for a mutex waits on, and gets it afterwards.
async fn a_waiter_survives_a_server_that_is_read_only_for_a_while(on: Product) {
    let server = common::private(on.setup()).await;
    let url = common::least_url(server.address());
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let handle =
        async || Simba::builder(std::sync::Arc::new(common::connect(&url).await)).lease(long).build();
    let (one, two) = (handle().await, handle().await);
    let mutex = common::name("failover");
    let guard = one.locker(mutex.clone()).lock().await.unwrap();
    let waiter = two.locker(mutex.clone());
    let waiting = tokio::spawn(async move { waiter.lock().await });
    let mut admin = common::admin(&server.url()).await;
    // A handle connects anew after a refusal: the name may lead to the new primary then.
    let connections = "SHOW GLOBAL STATUS LIKE 'Connections'";
    let count = |row: Option<(String, String)>| row.unwrap().1.parse::<u64>().unwrap();
    admin.query_drop("SET GLOBAL read_only = 1").await.unwrap();
    // An administrator may write all the same.
    let free = "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                version = version + 1 WHERE mutex = ?";
    admin.exec_drop(free, (mutex.as_str(),)).await.unwrap();
    let before = count(admin.query_first(connections).await.unwrap());
    let refused = async {
        while count(admin.query_first(connections).await.unwrap()) < before + 2 {
            sleep(ms(20)).await;
        }
    };
    timeout(20 * SECOND, refused).await.expect("the waiter tries to take what is free, more than once");
    assert!(!waiting.is_finished(), "a server that is read-only for a while ends no wait");
    admin.query_drop("SET GLOBAL read_only = 0").await.unwrap();
    let next = timeout(20 * SECOND, waiting).await.unwrap().unwrap().unwrap();
    assert!(next.token() > guard.token());
}

/// Every write takes 300 ms, as it does where it waits for servers far away. Each call is one statement and has a sure
/// outcome.
async fn writes_that_are_slow_are_waited_for(on: Product) {
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

/// Row 41: the application has used up its own pool and every connection that the server has left. The handle
/// has its own, and keeps them.
#[tokio::test(flavor = "multi_thread")]
async fn row_41_an_application_that_uses_all_connections_up_costs_no_leader() {
    let server = common::private(Setup::mariadb().with_arg("--max-connections=20")).await;
    let url = common::least_url(server.address());
    let simba = simba(&url).await;
    let mutex = common::name("row41");
    let (leader, tenure) = lead(&simba, &mutex).await;
    let heir = simba.contend(mutex);
    heir.start().unwrap();
    common::until("the heir sees the leader", || heir.owner().is_owner(tenure.contender())).await;
    let opts = mysql_async::OptsBuilder::from_opts(Opts::from_url(&url).unwrap())
        .prefer_socket(false)
        .pool_opts(PoolOpts::default().with_constraints(PoolConstraints::new(0, 100).unwrap()));
    let (pool, mut taken) = (Pool::new(opts), Vec::new());
    while let Ok(Ok(conn)) = timeout(SECOND, pool.get_conn()).await {
        taken.push(conn);
    }
    assert!(taken.len() >= 10, "the application took what there was");
    for _ in 0..rounds() {
        let deadline = tenure.deadline();
        common::until("it is renewed", || tenure.loss().is_some() || tenure.deadline() > deadline).await;
        assert_eq!(tenure.loss(), None, "an application without connections costs no leader");
    }
    let config = simba_mysql::MySqlConfig::from_url(&url.parse().unwrap()).unwrap();
    let refused = simba_mysql::MySqlBackend::connect(config).await.err().unwrap();
    assert!(refused.is_transient() && refused.to_string().contains("max_connections"), "{refused}");
    timeout(20 * SECOND, leader.stop()).await.unwrap().unwrap();
    timeout(20 * SECOND, heir.acquired()).await.unwrap().unwrap();
}

// ===== time =====

/// Under it MySQL takes a minute to start, so the rows about the server's clock run on MariaDB alone.
/// A server whose clock begins at this time of day in UTC, in a zone where clocks are set.
async fn server_at(time: &str) -> Server {
    let setup = Setup::mariadb()
        .with_zone("America/Los_Angeles")
        .with_env("LD_PRELOAD", simba_servers::faketime_library(true))
        .with_env("TZ", "UTC")
        .with_env("FAKETIME", format!("@{time}"))
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    common::private(setup).await
}

/// Leads for some seconds in which the clocks of the zone are set.
async fn leads_through(start: &str, hour: u32) {
    let server = server_at(start).await;
    let simba = simba(&common::least_url(server.address())).await;
    let mutex = common::name("row42");
    let (_contention, tenure) = lead(&simba, &mutex).await;
    let mut admin = common::admin(&server.url()).await;
    let hour_now = "SELECT HOUR(UTC_TIMESTAMP())";
    let before: u32 = admin.query_first(hour_now).await.unwrap().unwrap();
    assert_eq!(before, hour, "the clock of the server is bent");
    let mut after = before;
    let total = u64::try_from(common::lease().total().as_millis()).unwrap();
    let left = "SELECT CAST(transition_at AS SIGNED) - TIMESTAMPDIFF(MICROSECOND, '1970-01-01', UTC_TIMESTAMP(3)) \
                DIV 1000 FROM simba_mutex WHERE mutex = ?";
    timeout(60 * SECOND, async {
        let mut more = 20;
        while more > 0 {
            let left: i64 = admin.exec_first(left, (mutex.as_str(),)).await.unwrap().unwrap();
            assert!(left > 0 && left <= total as i64, "a lease is as long as ever, not {left} ms");
            after = admin.query_first(hour_now).await.unwrap().unwrap();
            more -= i32::from(after != before);
            sleep(ms(100)).await;
        }
    })
    .await
    .unwrap();
    assert_eq!(after, hour + 1);
    assert_eq!(tenure.loss(), None, "the hour of the zone is nothing to a lease");
    simba.shutdown().await;
}

/// Row 42: the zone's clocks are set back, and the hour happens twice.
#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_autumn_hour_costs_no_leader() {
    leads_through("2026-11-01 08:59:50", 8).await;
}

/// Row 42: the zone's clocks are set forward, and an hour is missing.
#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_spring_gap_costs_no_leader() {
    leads_through("2027-03-14 09:59:50", 9).await;
}

/// Counts every tenure's token.
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

/// Row 43: the server's clock is set by an hour, forward and back. Every tenure has a token of its own, and tokens grow
/// all the same.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_a_step_of_the_server_s_clock_repeats_no_token() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let setup = Setup::mariadb()
        .with_env("LD_PRELOAD", simba_servers::faketime_library(true))
        .with_env("FAKETIME_TIMESTAMP_FILE", &file)
        .with_env("FAKETIME_NO_CACHE", "1")
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let server = common::private(setup).await;
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
    let heir = start(&two);
    common::until("the heir sees the leader", || heir.owner().is_owner(tenure.contender())).await;
    let mut last = tenure.token();
    for round in 0..rounds() {
        for offset in ["+1h", "+0"] {
            let before = tokens.all();
            std::fs::write(&file, offset).unwrap();
            if offset == "+1h" {
                // Every lease has run out: a tenure that goes on would be the fault of the test.
                common::until("another tenure begins", || tokens.all().len() > before.len()).await;
            }
            let led = settled([&leader, &heir]).await;
            let began = led.token() != last || tokens.all().len() > before.len();
            assert!(!began || led.token() > last, "round {round}, {offset}: {} after {last}", led.token());
            // The old leader learns of the step at its next renewal.
            common::until("one leads once the step is over", || leader.is_owner() != heir.is_owner()).await;
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

/// A table with one row whose version is near the end of its column.
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
    (simba(&format!("{}?table={table}", common::least_url(address))).await, mutex)
}

/// Row 44: a version near 2^31 works on, at the end of its column it is an error, in a wider one it goes on.
async fn row_44_versions_at_their_ends(on: Product) {
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
    sleep(common::lease().total()).await;
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

const ORDERS: &str = "SIMBA_ROW_45";

/// The process of row 45: leads while its wall clock jumps, and says what it saw.
#[test]
#[ignore = "the way into the process of row 45"]
fn jumping_client() {
    let orders = std::env::var(ORDERS).unwrap();
    let (address, mutex) = orders.split_once(' ').unwrap();
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
            assert_eq!(tenure.loss(), None, "a jump of the wall clock costs no leader");
        }
        println!("jumped {jumps} times, still leads: {}", tenure.is_held());
        simba.shutdown().await;
    });
}

/// Row 45: the wall clock of the client jumps by an hour a hundred times. Nothing happens.
#[tokio::test(flavor = "multi_thread")]
async fn row_45_a_client_whose_wall_clock_jumps_keeps_its_lead() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("time");
    std::fs::write(&file, "+0").unwrap();
    let child = tokio::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "jumping_client", "--ignored", "--nocapture"])
        .env(ORDERS, format!("{} {}", common::shared().await, common::name("row45")))
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
    let output = timeout(60 * SECOND, child.wait_with_output()).await.unwrap().unwrap();
    jumping.abort();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("jumped 100 times, still leads: true"), "{said}");
}

// ===== a restart =====

/// A server of one's own, which can be restarted.
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

/// A server that is killed and comes back has what it confirmed.
async fn a_killed_server_keeps_what_it_confirmed(on: Product) {
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

// ===== what is shared =====

/// Renewals that fall due together go out together, and a handle has as many connections as it was told.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_share_statements_and_connections() {
    let connection = common::MySql::shared().with_keys("connections=2").connect().await;
    let simba = Simba::builder(connection.backend).build();
    let lease = Lease::new(3 * SECOND, 3 * SECOND).unwrap();
    let contentions: Vec<Contention> =
        (0..200).map(|_| simba.contend(common::name("batch")).with_lease(lease)).collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    common::until("all lead", || contentions.iter().all(Contention::is_owner)).await;
    // What comes while a statement is under way goes out with the next.
    connection.network.delay(ms(4), Duration::ZERO);
    let before = connection.network.requests();
    for _ in 0..2 {
        let tenures: Vec<Tenure> = contentions.iter().filter_map(Contention::tenure).collect();
        assert_eq!(tenures.len(), contentions.len(), "all lead on");
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
    assert!(version >= 3, "every renewal counts the version up");
    simba.shutdown().await;
}

fn owner(contention: &Contention) -> String {
    contention.tenure().unwrap().contender().to_string()
}

/// Nobody waits: nobody asks. Many wait: one statement for all, and no more than ten a second.
#[tokio::test(flavor = "multi_thread")]
async fn one_poll_serves_everyone_who_waits() {
    let (one, two) = (common::MySql::shared().connect().await, common::MySql::shared().connect().await);
    let long = Lease::new(30 * SECOND, 20 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let holder = Simba::builder(one.backend).lease(long).build();
    let waiting = Simba::builder(two.backend).lease(long).build();
    let names: Vec<MutexName> = (0..40).map(|_| common::name("poll")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(holder.locker(name.clone()).lock().await.unwrap());
    }
    let quiet = two.network.requests();
    sleep(SECOND).await;
    assert_eq!(two.network.requests(), quiet, "nobody waits, nobody asks");
    let waiters: Vec<Contention> = names.iter().map(|name| waiting.contend(name.clone())).collect();
    waiters.iter().for_each(|waiter| waiter.start().unwrap());
    common::until("all see who holds", || {
        waiters.iter().all(|waiter| waiter.owner() != simba_core::MutexOwner::none())
    })
    .await;
    sleep(2 * SECOND).await;
    let before = two.network.requests();
    sleep(5 * SECOND).await;
    let requests = two.network.requests() - before;
    assert!((2..=60).contains(&requests), "{requests} requests in five seconds for forty waiters");
    drop(guards);
    common::until("all come next", || waiters.iter().all(Contention::is_owner)).await;
    waiting.shutdown().await;
    holder.shutdown().await;
}

/// However often mutexes change hands, the one poll of a handle asks a hundred times in ten seconds at the most.
#[tokio::test(flavor = "multi_thread")]
async fn a_poll_keeps_to_its_budget_while_mutexes_go_round() {
    let setup = Setup::mariadb().with_arg("--general-log").with_arg("--general-log-file=general.log");
    let server = common::private(setup).await;
    let url = common::least_url(server.address());
    let long = Lease::new(30 * SECOND, 20 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let handle =
        async || Simba::builder(std::sync::Arc::new(common::connect(&url).await)).lease(long).build();
    let (one, two) = (handle().await, handle().await);
    let names: Vec<MutexName> = (0..8).map(|_| common::name("budget")).collect();
    let round = |simba: &Simba, name: &MutexName| {
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
    let going: Vec<_> = names.iter().flat_map(|name| [round(&one, name), round(&two, name)]).collect();
    sleep(SECOND).await;
    let (before, began) = (looks(&server), tokio::time::Instant::now());
    sleep(10 * SECOND).await;
    let after = looks(&server);
    // A busy machine may have slept for longer: forty looks that were saved up, and six a second.
    let most = 41 + (6.0 * began.elapsed().as_secs_f64()).ceil() as usize;
    let during: Vec<_> =
        after.iter().map(|(who, many)| many - before[who]).filter(|many| *many > 0).collect();
    going.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(during.len(), 2, "each handle looks over one connection");
    assert!(during.iter().all(|many| (10..=most).contains(many)), "at most {most} looks: {during:?}");
    one.shutdown().await;
    two.shutdown().await;
}

/// How many looks for many at once the server has seen, by the connections that are there for them.
fn looks(server: &Server) -> BTreeMap<String, usize> {
    let log = std::fs::read_to_string(server.dir().join("data/general.log")).unwrap();
    let mut looks = BTreeMap::new();
    for line in log.lines() {
        let said = ["Execute", "Query"].iter().find_map(|word| line.split_once(word));
        let Some((before, statement)) = said else { continue };
        let connection = before.split_whitespace().last().unwrap().to_owned();
        if statement.contains("max_statement_time = 5 ") {
            looks.insert(connection.clone(), 0);
        }
        if let Some(count) = looks.get_mut(&connection).filter(|_| statement.contains("WHERE mutex IN (")) {
            *count += 1;
        }
    }
    looks
}

/// A list of all mutexes that the server does not answer keeps nobody from being woken.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_hangs_delays_no_waiter() {
    let address = common::shared().await;
    let (injector, between) = Injector::start(address).await;
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let holder = Simba::builder(std::sync::Arc::new(common::connect(&common::least_url(address)).await))
        .lease(long)
        .build();
    let backend: std::sync::Arc<dyn Backend> =
        std::sync::Arc::new(common::connect(&common::least_url(between)).await);
    let waiting = Simba::builder(std::sync::Arc::clone(&backend)).lease(long).build();
    let mutex = common::name("list");
    let guard = holder.locker(mutex.clone()).lock().await.unwrap();
    let waiter = waiting.contend(mutex.clone());
    waiter.start().unwrap();
    common::until("the waiter sees the holder", || waiter.owner().is_owner(guard.tenure().contender())).await;
    injector.keep_back("ORDER BY mutex");
    let list = tokio::spawn(async move { backend.operate().unwrap().list().await.map(drop) });
    common::until("the list hangs", || injector.struck() == 1).await;
    guard.release().await.unwrap();
    timeout(20 * SECOND, waiter.acquired()).await.unwrap().unwrap();
    assert!(!list.is_finished(), "the waiter was woken while the list hung");
    list.abort();
    waiting.shutdown().await;
}

/// An operator names the holder by its token, where the row tells it, or by its id.
#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_the_row_does_not_tell_frees_nothing() {
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

/// An id that the owner's column cannot hold is refused before it is used.
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
