//! What the server does with a lease when statements wait, arrive late, or a crash follows.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use common::{Private, Store, USER, freeze, name, open, open_as, soon, take};
use simba_core::{Answer, Holding, Intent, MutexName, Operate as _, Prior, Session};
use simba_postgres::PostgresBackend;
use simba_servers::Setup;
use simba_tck::FaultProxy;
use tokio_postgres::Client;

/// A handle whose statements wait long enough for a locked row, known to the server by a name of its own.
async fn patient(store: &Store, application: &str) -> PostgresBackend {
    patient_at(store, application, store.address()).await
}

/// The same at another address of the server.
async fn patient_at(store: &Store, application: &str, address: SocketAddr) -> PostgresBackend {
    store.set_up().await;
    let store = store.clone().with_keys(&format!("application_name={application}"));
    let config = store.config(address).with_lock_timeout(Duration::from_secs(10));
    PostgresBackend::connect(config.with_statement_timeout(Duration::from_secs(20))).await.unwrap()
}

/// Waits until a statement of this application waits for a lock.
async fn waits_for_a_lock(admin: &Client, application: &str) {
    let waits = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 \
                 AND wait_event_type = 'Lock')";
    let waiting = async {
        while !admin.query_one(waits, &[&application]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("a statement waits for the row", waiting).await;
}

async fn end_of_lease(admin: &Client, mutex: &MutexName) -> SystemTime {
    let until = "SELECT until FROM simba_mutex WHERE mutex = $1";
    admin.query_one(until, &[&mutex.as_str()]).await.unwrap().get(0)
}

/// Contends while the row is locked, and renews the lease before it is free. Returns the answer and when the renewed
/// lease ends.
async fn contend_meanwhile(
    session: &mut dyn Session,
    prior: Prior,
    (store, mutex, application): (&Store, &MutexName, &str),
) -> (Answer, SystemTime) {
    let (mut admin, watcher) = (store.admin().await, store.admin().await);
    let frozen = freeze(&mut admin, mutex).await;
    let renewal = async {
        waits_for_a_lock(&watcher, application).await;
        // The lease of a renewal now ends this much later than one of the moment at which the statement began.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let renew = "UPDATE simba_mutex SET renewed_at = clock_timestamp(), \
                     until = clock_timestamp() + (until - renewed_at) WHERE mutex = $1 RETURNING until";
        let until = frozen.query_one(renew, &[&mutex.as_str()]).await.unwrap().get(0);
        frozen.commit().await.unwrap();
        until
    };
    let (answer, until) = tokio::join!(session.contend(prior), renewal);
    (answer.unwrap(), until)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_does_not_shorten_a_lease_that_was_renewed_while_it_waited_for_the_row() {
    let (store, mutex) = (Store::shared(), name("shortened"));
    let application = mutex.as_str().to_owned();
    let (holders, waiters) = (patient(&store, "holder").await, patient(&store, &application).await);
    let (mut holder, mut waiter) = (open(&holders, &mutex).await, open(&waiters, &mutex).await);
    take(&mut *holder).await;
    let at = (&store, &mutex, &*application);
    let (answer, renewed) = contend_meanwhile(&mut *waiter, Prior::Nothing, at).await;
    assert!(matches!(answer, Answer::Held(_)));
    let until = end_of_lease(&store.admin().await, &mutex).await;
    assert_eq!(until, renewed, "broken: a waiter leaves the lease of the holder as it is");
}

/// A renewal whose connection broke may be carried out after the one that followed it.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_renewal_does_not_shorten_the_lease() {
    let (store, mutex) = (Store::shared(), name("late"));
    let application = mutex.as_str().to_owned();
    let backend = patient(&store, &application).await;
    let mut holder = open(&backend, &mutex).await;
    take(&mut *holder).await;
    let at = (&store, &mutex, &*application);
    let (answer, renewed) = contend_meanwhile(&mut *holder, Prior::Held, at).await;
    assert!(matches!(answer, Answer::Ours(_)));
    let until = end_of_lease(&store.admin().await, &mutex).await;
    assert!(until >= renewed, "broken: the lease ends no earlier than by the renewal before");
}

/// A renewal may arrive after the release that followed it. It must not take the mutex again.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_after_a_release_takes_nothing() {
    let (store, mutex) = (Store::shared(), name("released"));
    let backend = store.backend().await;
    let mut holder = open(&backend, &mutex).await;
    let token = take(&mut *holder).await;
    assert!(matches!(holder.contend(Prior::Held).await.unwrap(), Answer::Ours(_)));
    holder.release(Holding::Under(token)).await.unwrap();
    // Alone, and together with others in one statement.
    assert_eq!(holder.contend(Prior::Held).await.unwrap(), Answer::Vacant, "broken: a renewal takes nothing");
    let mut many = Vec::new();
    for _ in 0..8 {
        let mutex = name("released");
        let mut session = open(&backend, &mutex).await;
        let token = take(&mut *session).await;
        session.release(Holding::Under(token)).await.unwrap();
        many.push(session);
    }
    let renewals = many.iter_mut().map(|session| session.contend(Prior::Held));
    for answer in futures_util::future::join_all(renewals).await {
        assert_eq!(answer.unwrap(), Answer::Vacant, "broken: a renewal takes nothing");
    }
    let mut next = open_as(&backend, &mutex, Intent::Try).await;
    take(&mut *next).await;
}

/// Waits until the server carries out no statement of this application.
async fn is_done(admin: &Client, application: &str) {
    let active =
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE application_name = $1 AND state = 'active')";
    let done = async {
        while admin.query_one(active, &[&application]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("every statement ends", done).await;
}

/// A take that waits at the server for a locked row, and whose connection is gone.
struct InDoubt {
    session: Box<dyn Session>,
    /// Kept, since it carries the connections.
    _proxy: FaultProxy,
    backend: PostgresBackend,
    application: String,
}

impl InDoubt {
    /// Makes the mutex free, has a session take it while `admin` has its row locked, and cuts the connection.
    /// The session takes as one that is in the queue, or as one that is not.
    async fn begin<'a>(
        store: &Store,
        mutex: &MutexName,
        queued: bool,
        admin: &'a mut Client,
    ) -> (Self, tokio_postgres::Transaction<'a>) {
        let application = mutex.as_str().to_owned();
        let proxy = FaultProxy::start(store.address()).await.unwrap();
        let backend = patient_at(store, &application, proxy.address()).await;
        let others = patient(store, "others").await;
        let (mut holder, mut session) = (open(&others, mutex).await, open(&backend, mutex).await);
        let token = take(&mut *holder).await;
        if queued {
            assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        }
        holder.release(Holding::Under(token)).await.unwrap();
        let (frozen, watcher) = (freeze(admin, mutex).await, store.admin().await);
        let cut = async {
            waits_for_a_lock(&watcher, &application).await;
            proxy.cut();
        };
        let (answer, ()) = tokio::join!(session.contend(Prior::Nothing), cut);
        answer.expect_err("the connection is gone");
        (Self { session, _proxy: proxy, backend, application }, frozen)
    }
}

/// A take whose connection broke may still wait for the row. After a release that was confirmed it must take nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_in_doubt_holds_nothing_after_a_release() {
    for queued in [false, true] {
        let (store, mutex) = (Store::shared(), name("doubt"));
        let (mut admin, watcher) = (store.admin().await, store.admin().await);
        let (mut doubt, frozen) = InDoubt::begin(&store, &mutex, queued, &mut admin).await;
        let unlock = async {
            // A release that waits for no row is confirmed by now.
            tokio::time::sleep(Duration::from_secs(1)).await;
            frozen.rollback().await.unwrap();
        };
        let (released, ()) = tokio::join!(doubt.session.release(Holding::Unknown), unlock);
        released.unwrap();
        is_done(&watcher, &doubt.application).await;
        let owner = doubt.backend.read(&mutex).await.unwrap().owner;
        assert_eq!(owner, None, "broken: nothing is held after a release");
    }
}

/// A release without a token may reach the row before a take that waits for it.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_takes_nothing_whose_token_was_raised_while_it_waited_for_the_row() {
    for queued in [false, true] {
        let (store, mutex) = (Store::shared(), name("raised"));
        let (mut admin, watcher) = (store.admin().await, store.admin().await);
        let (doubt, frozen) = InDoubt::begin(&store, &mutex, queued, &mut admin).await;
        let raise = "UPDATE simba_mutex SET token = token + 1 WHERE mutex = $1";
        frozen.execute(raise, &[&mutex.as_str()]).await.unwrap();
        frozen.commit().await.unwrap();
        is_done(&watcher, &doubt.application).await;
        let owner = doubt.backend.read(&mutex).await.unwrap().owner;
        assert_eq!(owner, None, "broken: a take that is too late takes nothing");
    }
}

/// The same for takes that go out together, of which one waits for a row that another transaction is making. On one
/// thread, so that the third and fourth call always go out together.
#[tokio::test]
async fn takes_in_one_statement_take_nothing_whose_token_was_raised_while_it_waited() {
    let (store, free, new) = (Store::shared(), name("raised"), name("raised"));
    let proxy = FaultProxy::start(store.address()).await.unwrap();
    let backend = patient_at(&store, free.as_str(), proxy.address()).await;
    let others = patient(&store, "others").await;
    let mut holder = open(&others, &free).await;
    let token = take(&mut *holder).await;
    holder.release(Holding::Under(token)).await.unwrap();
    let mut sessions = Vec::new();
    for mutex in [&name("raised"), &name("raised"), &free, &new] {
        sessions.push(open_as(&backend, mutex, Intent::Try).await);
    }
    // Both calls before the two find their rows at once.
    for session in &mut sessions[..2] {
        take(&mut **session).await;
    }
    let (mut admin, watcher) = (store.admin().await, store.admin().await);
    let making = admin.transaction().await.unwrap();
    let make = "INSERT INTO simba_mutex VALUES ($1, '', '', 0, now(), now(), now(), now())";
    making.execute(make, &[&new.as_str()]).await.unwrap();
    let cut = async {
        waits_for_a_lock(&watcher, free.as_str()).await;
        proxy.cut();
    };
    let taken = sessions.iter_mut().map(|session| session.contend(Prior::Unknown));
    let (answers, ()) = tokio::join!(futures_util::future::join_all(taken), cut);
    assert!(answers[2].is_err() && answers[3].is_err(), "the connection is gone");
    let raise = "UPDATE simba_mutex SET token = token + 1 WHERE mutex = $1";
    watcher.execute(raise, &[&free.as_str()]).await.unwrap();
    making.rollback().await.unwrap();
    is_done(&watcher, free.as_str()).await;
    let owner = backend.read(&free).await.unwrap().owner;
    assert_eq!(owner, None, "broken: a take that is too late takes nothing");
}

/// Alone, and together with others in one statement.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_without_a_token_raises_the_token_of_a_free_mutex() {
    let (store, admin) = (Store::shared(), Store::shared().admin().await);
    let backend = store.backend().await;
    for many in [1, 8] {
        let (mut sessions, mut tokens) = (Vec::new(), Vec::new());
        for _ in 0..many {
            let mutex = name("raises");
            let mut session = open(&backend, &mutex).await;
            let token = take(&mut *session).await;
            session.release(Holding::Under(token)).await.unwrap();
            sessions.push(session);
            tokens.push((mutex, token));
        }
        let released = sessions.iter_mut().map(|session| session.release(Holding::Unknown));
        for released in futures_util::future::join_all(released).await {
            released.unwrap();
        }
        for (mutex, token) in tokens {
            let now = "SELECT token FROM simba_mutex WHERE mutex = $1";
            let now: i64 = admin.query_one(now, &[&mutex.as_str()]).await.unwrap().get(0);
            assert!(now as u64 > token.get(), "broken: a take that still waits for the row finds its token");
        }
    }
}

/// A server that keeps what is not synced in memory for ten seconds.
async fn forgetful() -> Private {
    let setup = Setup::postgres().with_arg("-c").with_arg("wal_writer_delay=10s");
    Private::start(setup).await
}

/// Crashes the server, and checks that the mutex is still held.
async fn survives_a_crash(private: &Private, mutex: &MutexName, token: simba_core::FencingToken) {
    tokio::task::block_in_place(|| {
        let mut server = private.server();
        server.kill().unwrap();
        server.restart().unwrap();
    });
    let held = private.store.backend().await.read(mutex).await.unwrap();
    assert_eq!(held.token, Some(token), "broken: what was acquired survives a crash of the server");
}

const OFF: &str = "ALTER SYSTEM SET synchronous_commit = off";

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_is_synced_where_nothing_of_a_session_can_be_set() {
    let private = forgetful().await;
    let admin = private.store.admin().await;
    admin.batch_execute(OFF).await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let backend = private.store.clone().with_keys("pooler=true").backend().await;
    let mutex = name("synced");
    let token = take(&mut *open(&backend, &mutex).await).await;
    survives_a_crash(&private, &mutex, token).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_acquisition_after_a_reconnect_is_synced() {
    let private = forgetful().await;
    let (admin, backend) = (private.store.admin().await, private.store.backend().await);
    admin.batch_execute(&format!("ALTER ROLE {USER} SET synchronous_commit = off")).await.unwrap();
    // A new mutex, so that the first call makes its row.
    let mutex = name("synced");
    let mut session = open(&backend, &mutex).await;
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = $1";
    admin.execute(end, &[&USER]).await.unwrap();
    let token = loop {
        if let Ok(Answer::Ours(ours)) = session.contend(Prior::Unknown).await {
            break ours.token.unwrap();
        }
    };
    survives_a_crash(&private, &mutex, token).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_is_synced_after_the_server_s_default_was_changed() {
    let private = forgetful().await;
    let (admin, backend) = (private.store.admin().await, private.store.backend().await);
    let (mutex, seen) = (name("synced"), "SELECT current_setting('synchronous_commit')");
    let mut session = open(&backend, &mutex).await;
    take(&mut *open(&backend, &name("before")).await).await;
    admin.batch_execute(OFF).await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let reloaded = async {
        while admin.query_one(seen, &[]).await.unwrap().get::<_, &str>(0) != "off" {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the server reads its configuration", reloaded).await;
    // Every session reads it before its next statement once the signal has reached it.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let token = take(&mut *session).await;
    survives_a_crash(&private, &mutex, token).await;
}
