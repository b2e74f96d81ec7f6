//! Leases when statements are slow, arrive late, or the server crashes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::net::SocketAddr;
use std::time::{Duration, SystemTime};

use common::{Delay, Private, Store, USER, alter_system, lock_row, name, open, open_as, soon, take};
use simba_core::spi::{Answer, Holding, Intent, Operate as _, Prior, Session};
use simba_core::{FencingToken, MutexName};
use simba_postgres::PostgresBackend;
use simba_servers::Setup;
use simba_tck::FaultProxy;
use tokio_postgres::Client;

/// A part of the statements that acquire or renew.
const TAKES: &str = "due.lapsed";

/// Connects with long timeouts, under an application name of its own.
async fn connect(store: &Store, application: &str) -> PostgresBackend {
    connect_at(store, application, store.address()).await
}

/// Does the same with another address of the server.
async fn connect_at(store: &Store, application: &str, address: SocketAddr) -> PostgresBackend {
    store.set_up().await;
    let store = store.clone().with_keys(&format!("application_name={application}"));
    let config = store.config(address).with_lock_timeout(Duration::from_secs(30));
    PostgresBackend::connect(config.with_statement_timeout(Duration::from_secs(60))).await.unwrap()
}

async fn end_of_lease(admin: &Client, mutex: &MutexName) -> SystemTime {
    let until = "SELECT until FROM simba_mutex WHERE mutex = $1";
    admin.query_one(until, &[&mutex.as_str()]).await.unwrap().get(0)
}

/// Contends, and renews the lease after the statement has read the row and before it locks the row. Returns the answer
/// and the end of the renewed lease.
async fn contend_during_renewal(
    session: &mut dyn Session,
    prior: Prior,
    delay: &Delay,
    (store, mutex, application): (&Store, &MutexName, &str),
) -> (Answer, SystemTime) {
    let admin = store.admin().await;
    delay.begin().await;
    let renewal = async {
        delay.is_reached(application).await;
        // A lease that is renewed now ends this much later than one that is counted from the start of the statement.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let renew = "UPDATE simba_mutex SET renewed_at = clock_timestamp(), \
                     until = clock_timestamp() + (until - renewed_at) WHERE mutex = $1 RETURNING until";
        let until = admin.query_one(renew, &[&mutex.as_str()]).await.unwrap().get(0);
        delay.end().await;
        until
    };
    let (answer, until) = tokio::join!(session.contend(prior), renewal);
    (answer.unwrap(), until)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_does_not_shorten_a_lease_renewed_while_it_joined_the_queue() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("shortened"));
    // A part of the statement that joins the queue.
    let delay = Delay::install(store, "placed AS").await;
    let application = mutex.as_str().to_owned();
    let (holders, waiters) = (connect(store, "holder").await, connect(store, &application).await);
    let (mut holder, mut waiter) = (open(&holders, &mutex).await, open(&waiters, &mutex).await);
    take(&mut *holder).await;
    let at = (store, &mutex, &*application);
    let (answer, renewed) = contend_during_renewal(&mut *waiter, Prior::Nothing, &delay, at).await;
    assert!(matches!(answer, Answer::Held(_)));
    let until = end_of_lease(&store.admin().await, &mutex).await;
    assert_eq!(until, renewed, "broken: a waiter does not change the lease of the holder");
}

/// A renewal whose connection broke may be executed after its successor.
#[tokio::test(flavor = "multi_thread")]
async fn a_late_renewal_does_not_shorten_the_lease() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("late"));
    let delay = Delay::install(store, TAKES).await;
    let application = mutex.as_str().to_owned();
    let backend = connect(store, &application).await;
    let mut holder = open(&backend, &mutex).await;
    take(&mut *holder).await;
    let at = (store, &mutex, &*application);
    let (answer, renewed) = contend_during_renewal(&mut *holder, Prior::Held, &delay, at).await;
    assert!(matches!(answer, Answer::Ours(_)));
    let until = end_of_lease(&store.admin().await, &mutex).await;
    assert!(until >= renewed, "broken: the lease ends no earlier than after the earlier renewal");
}

/// A renewal may arrive after the release that followed it. It must not acquire the mutex again.
#[tokio::test(flavor = "multi_thread")]
async fn a_renewal_after_a_release_acquires_nothing() {
    let (store, mutex) = (Store::shared(), name("released"));
    let backend = store.backend().await;
    let mut holder = open(&backend, &mutex).await;
    let token = take(&mut *holder).await;
    assert!(matches!(holder.contend(Prior::Held).await.unwrap(), Answer::Ours(_)));
    holder.release(Holding::Under(token)).await.unwrap();
    // Sent alone, and in a batch.
    let answer = holder.contend(Prior::Held).await.unwrap();
    assert_eq!(answer, Answer::Vacant, "broken: renewal acquires nothing");
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
        assert_eq!(answer.unwrap(), Answer::Vacant, "broken: renewal acquires nothing");
    }
    let mut next = open_as(&backend, &mutex, Intent::Try).await;
    take(&mut *next).await;
}

/// The take finds its row locked, and the statement that joins the queue does not: it must not adopt the lapsed hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_lapsed_hold_is_replaced_under_a_greater_token_after_its_row_was_locked() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("lapsed"));
    let delay = Delay::install(store, "placed AS").await;
    let application = mutex.as_str().to_owned();
    let backend = connect(store, &application).await;
    let mut holder = open(&backend, &mutex).await;
    let token = take(&mut *holder).await;
    let mut admin = store.admin().await;
    let locked = lock_row(&mut admin, &mutex).await;
    delay.begin().await;
    let unlock = async {
        delay.is_reached(&application).await;
        locked.rollback().await.unwrap();
        delay.end().await;
    };
    let (answer, ()) = tokio::join!(soon("an answer", holder.contend(Prior::Lapsed(token))), unlock);
    let Answer::Ours(ours) = answer.unwrap() else { panic!("broken: the mutex is acquired again") };
    assert!(ours.token.unwrap() > token, "broken: the token of a lapsed hold is not used again");
}

/// Waits until the server executes no statement of this application.
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

/// A change of a row that keeps all its values.
const CHANGE: &str = "UPDATE simba_mutex SET watched = watched WHERE mutex = $1";

/// What a take in doubt finds when it reads the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Found {
    Free,
    /// The mutex is free, and the session is in the queue.
    Queued,
    /// The session holds the mutex, and is still in the queue.
    Held,
}

/// A take that is still executed, and whose connection is closed. It has read the row, and not locked it yet.
struct InDoubt {
    session: Box<dyn Session>,
    /// The token of the row.
    token: FencingToken,
    /// Kept open for the connections.
    _proxy: FaultProxy,
    backend: PostgresBackend,
    application: String,
}

impl InDoubt {
    /// Starts a take that is delayed, and cuts the connection.
    async fn begin(store: &Store, mutex: &MutexName, found: Found, delay: &Delay) -> Self {
        let application = mutex.as_str().to_owned();
        let proxy = FaultProxy::start(store.address()).await.unwrap();
        let backend = connect_at(store, &application, proxy.address()).await;
        let others = connect(store, "others").await;
        let (mut holder, mut session) = (open(&others, mutex).await, open(&backend, mutex).await);
        let token = take(&mut *holder).await;
        if found != Found::Free {
            assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        }
        holder.release(Holding::Under(token)).await.unwrap();
        if found == Found::Held {
            // As after an acquisition whose reply was lost.
            let hold = "UPDATE simba_mutex m SET owner = w.contender, session = w.session, \
                        until = clock_timestamp() + interval '1h' FROM simba_waiter w \
                        WHERE m.mutex = $1 AND w.mutex = $1";
            assert_eq!(store.admin().await.execute(hold, &[&mutex.as_str()]).await.unwrap(), 1);
        }
        delay.begin().await;
        let cut = async {
            delay.is_reached(&application).await;
            proxy.cut();
        };
        let (answer, ()) = tokio::join!(session.contend(Prior::Nothing), cut);
        answer.expect_err("the connection is closed");
        Self { session, token, _proxy: proxy, backend, application }
    }

    /// Lets the take continue, and checks that it acquires nothing.
    async fn acquires_nothing(&mut self, mutex: &MutexName, delay: &Delay, watcher: &Client) {
        delay.end().await;
        is_done(watcher, &self.application).await;
        let owner = self.backend.read(mutex).await.unwrap().owner;
        assert_eq!(owner, None, "broken: nothing is held after a release");
    }
}

/// A take whose connection broke may still be executed. After a confirmed release it must acquire nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_in_doubt_acquires_nothing_after_a_release() {
    let private = Private::start(Setup::postgres()).await;
    let (store, watcher) = (&private.store, private.store.admin().await);
    let delay = Delay::install(store, TAKES).await;
    for found in [Found::Free, Found::Queued, Found::Held] {
        let mutex = name("doubt");
        let mut doubt = InDoubt::begin(store, &mutex, found, &delay).await;
        let holding = if found == Found::Held { Holding::Under(doubt.token) } else { Holding::Unknown };
        doubt.session.release(holding).await.unwrap();
        doubt.acquires_nothing(&mutex, &delay, &watcher).await;
    }
}

/// The same for a take that has to create its row.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_in_doubt_of_a_new_mutex_acquires_nothing_after_a_release() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex, watcher) = (&private.store, name("doubt"), private.store.admin().await);
    // A part of the statement that creates rows.
    let delay = Delay::install(store, "INSERT INTO simba_tck.simba_mutex").await;
    let proxy = FaultProxy::start(store.address()).await.unwrap();
    let backend = connect_at(store, mutex.as_str(), proxy.address()).await;
    let mut session = open_as(&backend, &mutex, Intent::Try).await;
    delay.begin().await;
    let cut = async {
        delay.is_reached(mutex.as_str()).await;
        proxy.cut();
    };
    let (answer, ()) = tokio::join!(session.contend(Prior::Nothing), cut);
    answer.expect_err("the connection is closed");
    session.release(Holding::Unknown).await.unwrap();
    delay.end().await;
    is_done(&watcher, mutex.as_str()).await;
    let owner = backend.read(&mutex).await.unwrap().owner;
    assert_eq!(owner, None, "broken: nothing is held after a release");
}

/// A release may change the row before a take locks it that has read it already.
#[tokio::test(flavor = "multi_thread")]
async fn a_take_acquires_nothing_if_the_row_changed_before_it_locked_the_row() {
    let private = Private::start(Setup::postgres()).await;
    let (store, watcher) = (&private.store, private.store.admin().await);
    let delay = Delay::install(store, TAKES).await;
    for found in [Found::Free, Found::Queued] {
        let mutex = name("changed");
        let mut doubt = InDoubt::begin(store, &mutex, found, &delay).await;
        watcher.execute(CHANGE, &[&mutex.as_str()]).await.unwrap();
        doubt.acquires_nothing(&mutex, &delay, &watcher).await;
    }
}

/// The same for takes in a batch, of which one has no row. On one thread, so that the third and fourth call are
/// always in one batch.
#[tokio::test]
async fn takes_in_a_batch_acquire_nothing_if_the_row_changed_before_they_locked_the_row() {
    let private = Private::start(Setup::postgres()).await;
    let (store, free, new) = (&private.store, name("changed"), name("changed"));
    // A part of the statement for batches.
    let delay = Delay::install(store, "lapsed, takes)").await;
    let proxy = FaultProxy::start(store.address()).await.unwrap();
    let backend = connect_at(store, free.as_str(), proxy.address()).await;
    let others = connect(store, "others").await;
    let mut holder = open(&others, &free).await;
    let token = take(&mut *holder).await;
    holder.release(Holding::Under(token)).await.unwrap();
    let mut sessions = Vec::new();
    for mutex in [&name("changed"), &name("changed"), &free, &new] {
        sessions.push(open_as(&backend, mutex, Intent::Try).await);
    }
    // The first two calls find their rows immediately.
    for session in &mut sessions[..2] {
        take(&mut **session).await;
    }
    delay.begin().await;
    let cut = async {
        delay.is_reached(free.as_str()).await;
        proxy.cut();
    };
    let taken = sessions.iter_mut().map(|session| session.contend(Prior::Unknown));
    let (answers, ()) = tokio::join!(futures_util::future::join_all(taken), cut);
    assert!(answers[2].is_err() && answers[3].is_err(), "the connection is closed");
    let watcher = store.admin().await;
    watcher.execute(CHANGE, &[&free.as_str()]).await.unwrap();
    delay.end().await;
    is_done(&watcher, free.as_str()).await;
    let owner = backend.read(&free).await.unwrap().owner;
    assert_eq!(owner, None, "broken: a late take acquires nothing");
}

/// Starts a server that keeps unsynced writes in memory for ten seconds.
async fn with_slow_wal_writer() -> Private {
    let setup = Setup::postgres().with_arg("-c").with_arg("wal_writer_delay=10s");
    Private::start(setup).await
}

/// Crashes the server, and checks that the mutex is still held.
async fn survives_a_crash(private: &Private, mutex: &MutexName, token: FencingToken) {
    tokio::task::block_in_place(|| {
        let mut server = private.server();
        server.kill().unwrap();
        server.restart().unwrap();
    });
    let held = private.store.backend().await.read(mutex).await.unwrap();
    assert_eq!(held.token, Some(token), "broken: an acquisition survives a crash of the server");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_acquisition_is_synced_without_session_settings() {
    let private = with_slow_wal_writer().await;
    let admin = private.store.admin().await;
    alter_system(&admin, "synchronous_commit", "off").await;
    let backend = private.store.clone().with_keys("pooler=true").backend().await;
    let mutex = name("synced");
    let token = take(&mut *open(&backend, &mutex).await).await;
    survives_a_crash(&private, &mutex, token).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_first_acquisition_after_a_reconnect_is_synced() {
    let private = with_slow_wal_writer().await;
    let (admin, backend) = (private.store.admin().await, private.store.backend().await);
    admin.batch_execute(&format!("ALTER ROLE {USER} SET synchronous_commit = off")).await.unwrap();
    // A new mutex, so that the first call inserts its row.
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
async fn an_acquisition_is_synced_after_a_change_of_the_server_default() {
    let private = with_slow_wal_writer().await;
    let (admin, backend) = (private.store.admin().await, private.store.backend().await);
    let mutex = name("synced");
    let mut session = open(&backend, &mutex).await;
    take(&mut *open(&backend, &name("before")).await).await;
    alter_system(&admin, "synchronous_commit", "off").await;
    // A session reads the setting before its next statement, once the signal has arrived.
    tokio::time::sleep(Duration::from_millis(500)).await;
    let token = take(&mut *session).await;
    survives_a_crash(&private, &mutex, token).await;
}
