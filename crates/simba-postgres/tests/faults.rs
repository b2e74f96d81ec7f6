//! The rows of the fault matrix that concern PostgreSQL, against real servers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{
    Private, Store, USER, contend, leads, long, name, open, simba, soon, stays, take, unpaused, until,
};
use simba_core::spi::{Backend, Operate as _, Prior};
use simba_core::{Contention, Lease, MutexName, Simba, Tenure};
use simba_postgres::PostgresBackend;
use simba_servers::Setup;
use simba_tck::rounds;
use tokio_postgres::Client;

simba_tck::rows!(Store::shared());

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_of_the_store_is_survived() {
    let private = Private::start(Setup::postgres()).await;
    let case = simba_tck::cases().iter().find(|case| case.name == "a_restart_of_the_store_is_survived");
    case.expect("the suite has the case").run(&private).await;
}

/// A crash of the server loses the queue and nothing else: its waiters join again, and tokens increase.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_keeps_holders_and_waiters() {
    let private = Private::start(Setup::postgres()).await;
    // Longer than the server may take to restart.
    let lease = Lease::new(Duration::from_secs(10), Duration::from_secs(30)).unwrap();
    let (one, mutex) = (simba(&private.store).await.with_lease(lease), name("crash"));
    let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
    let waiting = contend(&one, &mutex);
    until("a waiter waits", || waiting.owner().is_owner(guard.tenure().contender())).await;
    tokio::task::block_in_place(|| {
        let mut server = private.server();
        server.kill().unwrap();
        server.restart().unwrap();
    });
    let deadline = guard.deadline();
    until("a holder renews after a crash", || guard.deadline() > deadline).await;
    let token = guard.token();
    soon("a release", guard.release()).await.unwrap();
    assert!(leads(&waiting).await.token() > token, "broken: tokens survive a crash");
}

/// Row 17 with an existing row: the statement that acquires is executed, and its reply is lost.
#[tokio::test(flavor = "multi_thread")]
async fn row_17_a_take_without_a_reply_is_adopted() {
    let store = Store::shared();
    // One connection, and nothing else is sent on it while the take is held back.
    let (backend, network) = store.clone().with_keys("ping=10min").proxied().await;
    let one = Simba::builder(Arc::new(backend) as Arc<dyn Backend>).with_lease(long()).build();
    let two = simba(&store).await.with_lease(long());
    for _ in 0..rounds() {
        let mutex = name("row-17");
        soon("a lock", two.locker(mutex.clone()).lock()).await.unwrap().release().await.unwrap();
        let mut taking = network.hold_next_request_with(&[mutex.as_str()]);
        let locker = one.locker(mutex.clone());
        let locking = tokio::spawn(async move { locker.lock().await });
        soon("the take is sent", taking.caught()).await;
        network.drop_next_reply();
        taking.deliver();
        let guard = soon("an acquisition without a reply is adopted", locking).await.unwrap().unwrap();
        let seen = two.operate().unwrap().read(&mutex).await.unwrap();
        assert_eq!((seen.owner.as_ref(), seen.waiters), (Some(guard.tenure().contender()), Some(0)));
        guard.release().await.unwrap();
        assert!(two.locker(mutex).try_lock().await.unwrap().is_some(), "broken: the mutex is free");
    }
}

/// Row 15: a call that waits for a new connection is sent right after the login, which is three requests. It does not
/// wait for the reply to anything that is sent with it.
#[tokio::test(flavor = "multi_thread")]
async fn row_15_after_a_cut_a_call_is_sent_with_the_fourth_request() {
    let store = Store::shared();
    // One connection, so that all requests are its own, and no pings.
    let (backend, network) = store.clone().with_keys("ping=10min").proxied().await;
    let (admin, mutex) = (store.admin().await, name("slow"));
    let mut session = open(&backend, &mutex).await;
    take(&mut *session).await;
    let renewed_at = async || -> std::time::SystemTime {
        let renewed = "SELECT renewed_at FROM simba_mutex WHERE mutex = $1";
        admin.query_one(renewed, &[&mutex.as_str()]).await.unwrap().get(0)
    };
    let (taken_at, before) = (renewed_at().await, network.requests());
    network.delay(Duration::from_millis(200), Duration::ZERO);
    network.cut();
    let answered = async {
        // The first call may still be sent over the broken connection.
        while session.contend(Prior::Nothing).await.is_err() {}
    };
    let arrived = async {
        network.until(|counts| counts.requests >= before + 4).await;
        // The reply to the fourth request is in flight, and never arrives.
        network.stall_replies();
        while renewed_at().await == taken_at {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        network.pass();
    };
    soon("a call arrives, and is answered", async { tokio::join!(answered, arrived) }).await;
}

/// Answers of a server that accepts no writes do not count, not even for reads.
#[tokio::test]
async fn a_server_that_became_read_only_is_refused_for_reads() {
    let private = Private::start(Setup::postgres()).await;
    // One connection, so that all requests are its own, and no pings. A read may wait for it.
    let keys = "ping=10min&statement_timeout=20s";
    let (backend, network) = private.store.clone().with_keys(keys).proxied().await;
    let (admin, mutex) = (private.store.admin().await, name("read-only"));
    backend.read(&mutex).await.unwrap();
    let role = format!("ALTER ROLE {USER} SET default_transaction_read_only = on");
    admin.batch_execute(&role).await.unwrap();
    network.delay(Duration::from_millis(30), Duration::ZERO);
    let sent = network.requests();
    network.cut();
    let read = async {
        loop {
            match backend.read(&mutex).await {
                Err(error) if error.to_string().contains("is lost") => {}
                other => break other,
            }
        }
    };
    // Three requests to log in. After the next one the thread is blocked until all answers have arrived, so that none
    // is lost with the connection.
    let block_thread = async {
        until("the read is sent", || network.requests() >= sent + 4).await;
        std::thread::sleep(Duration::from_secs(1));
    };
    let (read, ()) = soon("a refusal", async { tokio::join!(read, block_thread) }).await;
    let refusal = read.expect_err("broken: the read is refused").to_string();
    assert!(refusal.contains("takes no writes"), "{refusal}");
}

/// Ends the wakeup connections, and returns their number.
async fn cut_listeners(admin: &Client) -> i64 {
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
               WHERE usename = $1 AND query LIKE 'LISTEN%'";
    admin.query_one(cut, &[&USER]).await.unwrap().get(0)
}

/// Waits until the mutex has a waiter.
async fn queued(admin: &Client, mutex: &MutexName) {
    let queued = "SELECT EXISTS (SELECT FROM simba_waiter WHERE mutex = $1 AND NOT watches)";
    let poll = async {
        while !admin.query_one(queued, &[&mutex.as_str()]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    soon("a waiter is queued", poll).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_20_a_lost_subscription_costs_at_most_one_poll() {
    let private = Private::start(Setup::postgres()).await;
    let admin = Arc::new(private.store.admin().await);
    // Only the poll explains a hand-over.
    let polled = long().with_poll(Duration::from_millis(400)).unwrap();
    // No ping: only the cuts end a connection.
    let store = private.store.clone().with_keys("ping=10min");
    let (one, two) = (simba(&store).await.with_lease(polled), simba(&store).await.with_lease(polled));
    let cutting = Arc::new(AtomicBool::new(true));
    let (cutter, go_on) = (Arc::clone(&admin), Arc::clone(&cutting));
    let cuts = tokio::spawn(async move {
        let mut cuts = 0;
        while go_on.load(Ordering::Relaxed) {
            cuts += cut_listeners(&cutter).await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        cuts
    });
    let mutex = name("row-20");
    for _ in 0..rounds() {
        let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
        let locker = two.locker(mutex.clone());
        let waiting = tokio::spawn(async move { locker.lock().await });
        queued(&admin, &mutex).await;
        guard.release().await.unwrap();
        let next = soon("a poll finds the release", waiting).await.unwrap().unwrap();
        next.release().await.unwrap();
    }
    cutting.store(false, Ordering::Relaxed);
    assert!(cuts.await.unwrap() > 0, "the subscription was cut");
    // With a new subscription wakeups arrive again: the poll interval is too long to explain the hand-over.
    let pushed = long().with_poll(Duration::from_secs(30)).unwrap();
    let guard = soon("a lock", one.locker(mutex.clone()).with_lease(pushed).lock()).await.unwrap();
    let waiting = two.contend(mutex.clone()).with_lease(pushed);
    waiting.start().unwrap();
    until("a waiter waits", || waiting.owner().is_owner(guard.tenure().contender())).await;
    soon("a release", guard.release()).await.unwrap();
    leads(&waiting).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_40_connections_that_are_ended_repeatedly_cost_no_leader() {
    let private = Private::start(Setup::postgres()).await;
    let (admin, mutex) = (private.store.admin().await, name("row-40"));
    // 200 ms between two ends, as in the fault matrix. On a busy machine many connections end before they have sent a
    // renewal.
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(60)).unwrap();
    let (one, two) = (simba(&private.store).await, simba(&private.store).await);
    let contentions = [&one, &two].map(|handle| contend(&handle.with_lease(lease), &mutex));
    until("a leader", || contentions.iter().any(Contention::is_owner)).await;
    let first = contentions.iter().find(|one| one.is_owner()).unwrap().tenure().unwrap().token();
    let mut changes = 0;
    let mut last = first;
    for _ in 0..rounds() * 15 {
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = $1";
        admin.execute(end, &[&USER]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let held = |contention: &Contention| contention.tenure().filter(Tenure::is_held);
        // Time passes between two samples: there are two leaders if the first one still leads after the second sample.
        let samples = [&contentions[0], &contentions[1], &contentions[0]].map(held);
        assert!(samples.iter().any(Option::is_none), "broken: two leaders");
        for leader in samples.into_iter().flatten() {
            assert!(leader.token() >= last, "broken: tokens increase");
            changes += u32::from(leader.token() > last);
            last = leader.token();
        }
    }
    assert!(changes <= 1, "broken: at most one change of leader, not {changes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn row_41_an_application_that_uses_all_connections_costs_no_leader() {
    let private = Private::start(Setup::postgres().with_arg("-c").with_arg("max_connections=20")).await;
    let (simba, mutex) = (simba(&private.store).await.with_lease(unpaused()), name("row-41"));
    let leader = contend(&simba, &mutex);
    let tenure = leads(&leader).await;
    let waiter = contend(&simba, &mutex);
    until("a waiter waits", || waiter.owner().is_owner(tenure.contender())).await;
    let mut greedy = Vec::new();
    let mut login = tokio_postgres::Config::new();
    login.host(private.store.address().ip().to_string()).port(private.store.address().port());
    login.user("postgres").password("simba-admin");
    while let Ok((client, connection)) = login.connect(tokio_postgres::NoTls).await {
        tokio::spawn(connection);
        greedy.push(client);
    }
    assert!(greedy.len() > 10, "the application uses all connections");
    let deadline = tenure.deadline();
    until("a leader renews without a new connection", || tenure.deadline() > deadline).await;
    stays(&[tenure], Duration::from_secs(2) * rounds()).await;
    let refused = PostgresBackend::connect(private.store.config(private.store.address())).await.unwrap_err();
    assert!(refused.is_transient() && refused.to_string().contains("max_connections"), "{refused}");
    soon("a stop", leader.stop()).await.unwrap();
    leads(&waiter).await;
}

/// Row 44: a token passes the limits of 32-bit numbers; at the limit of its column it is an error.
#[tokio::test(flavor = "multi_thread")]
async fn row_44_a_token_at_its_maximum_is_reported_and_never_wraps() {
    let store = Store::shared();
    let (backend, admin) = (store.backend().await, store.admin().await);
    for end in [(1 << 31) - 2, (1 << 32) - 2, i64::MAX] {
        let mutex = name("row-44");
        let write = "INSERT INTO simba_mutex VALUES ($1, '', '', $2, now(), now(), now(), now())";
        admin.execute(write, &[&mutex.as_str(), &end]).await.unwrap();
        let mut session = open(&backend, &mutex).await;
        if end < i64::MAX {
            assert!(take(&mut *session).await.get() > end as u64, "broken: tokens increase");
            continue;
        }
        let error = session.contend(Prior::Nothing).await.unwrap_err();
        assert_eq!(error.kind(), simba_core::ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("reached its maximum"), "{error}");
    }
}
