//! Waiters that die, lose their connection, or cannot be notified. Poll intervals are too long to explain a hand-over.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use common::{
    PASSWORD, Private, SCHEMA, Store, USER, alter_system, lock_row, name, open, open_as, soon, take, until,
};
use simba_core::operate::{EvictIf, Eviction};
use simba_core::spi::{Answer, Backend, Holding, Intent, Operate as _, Prior};
use simba_core::{Contention, Guard, Lease, MutexName, Observer, Simba, View};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;
use simba_tck::FaultProxy;

/// Returns a lease whose ttl, poll interval and queue entry outlast every test.
fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(40), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(40)).unwrap()
}

async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).with_lease(long()).build()
}

/// Waits until `many` waiters are queued whose handles hold the advisory lock that marks them as alive.
async fn subscribed(store: &Store, mutex: &MutexName, many: i64) {
    let count = "SELECT count(*) FROM simba_waiter WHERE mutex = $1 AND NOT watches AND starts_with(channel, 'simba_live_')";
    let admin = store.admin().await;
    let queued = async {
        while admin.query_one(count, &[&mutex.as_str()]).await.unwrap().get::<_, i64>(0) < many {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("all waiters are subscribed", queued).await;
}

/// Limits the connections of the user to the current number minus `fewer`.
async fn limit_connections(admin: &tokio_postgres::Client, fewer: i64) {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1";
    let limit = admin.query_one(count, &[&USER]).await.unwrap().get::<_, i64>(0) - fewer;
    admin.batch_execute(&format!("ALTER ROLE {USER} CONNECTION LIMIT {limit}")).await.unwrap();
}

/// Waiters on a runtime of their own, which can be paused like a stopped process, and end like a killed one.
struct Killable {
    commands: mpsc::Sender<&'static str>,
    /// Receives once they are paused.
    paused: mpsc::Receiver<()>,
    thread: JoinHandle<()>,
}

impl Killable {
    /// Starts a waiter at this position of the queue.
    async fn waits_for(store: &Store, mutex: &MutexName, position: i64) -> Self {
        Self::wait_for(store, mutex, position..=position).await
    }

    /// Starts a waiter at each of these positions of the queue.
    async fn wait_for(store: &Store, mutex: &MutexName, positions: std::ops::RangeInclusive<i64>) -> Self {
        let ((commands, received), (pause, paused)) = (mpsc::channel(), mpsc::channel());
        let (its_store, its_mutex, last) = (store.clone(), mutex.clone(), *positions.end());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (simba, waiting) = runtime.block_on(async {
                let simba = simba(&its_store).await;
                let waiting: Vec<_> = positions.map(|_| simba.contend(its_mutex.clone())).collect();
                waiting.iter().for_each(|waiting| waiting.start().unwrap());
                (simba, waiting)
            });
            // The runtime makes progress only in `block_on`.
            while let Err(mpsc::TryRecvError::Empty) = received.try_recv() {
                runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
            }
            pause.send(()).unwrap();
            received.recv().unwrap();
            runtime.shutdown_background();
            std::mem::forget((simba, waiting));
        });
        subscribed(store, mutex, last).await;
        Self { commands, paused, thread }
    }

    /// Pauses the waiters: they neither answer nor close a connection.
    fn pause(&self) {
        self.commands.send("pause").unwrap();
        self.paused.recv().unwrap();
    }

    /// Ends the waiters without a message to the server; the kernel closes their connections.
    fn kill(self) {
        self.commands.send("kill").unwrap();
        self.thread.join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_waiters_are_skipped() {
    let (store, mutex) = (Store::shared(), name("killed"));
    let (one, two) = (simba(&store).await, simba(&store).await);
    let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
    let mut killed = Vec::new();
    for position in 1..=3 {
        killed.push(Killable::waits_for(&store, &mutex, position).await);
    }
    let waiting = two.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, 4).await;
    for waiter in killed {
        waiter.pause();
        waiter.kill();
    }
    let operate = one.operate().unwrap();
    let counted = async {
        while operate.read(&mutex).await.unwrap().waiters != Some(1) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("killed waiters are not counted", counted).await;
    guard.release().await.unwrap();
    soon("the live waiter is notified", waiting.acquired()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_killed_on_its_turn_is_skipped() {
    process_killed_on_its_turn_is_skipped(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_waiters_of_a_process_that_is_killed_on_its_turn_are_skipped() {
    process_killed_on_its_turn_is_skipped(2).await;
}

/// The mutex is free and promised to the first of several waiters of a process that never acquires it. No client is
/// left to notify the next waiter.
async fn process_killed_on_its_turn_is_skipped(waiters: i64) {
    let (store, mutex) = (Store::shared(), name("killed"));
    let (one, two) = (simba(&store).await, simba(&store).await);
    let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
    let killable = Killable::wait_for(&store, &mutex, 1..=waiters).await;
    let waiting = two.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, waiters + 1).await;
    killable.pause();
    guard.release().await.unwrap();
    one.shutdown().await;
    // Longer than the first pauses between the polls of the next waiter.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!waiting.is_owner(), "broken: a live waiter is not skipped");
    killable.kill();
    let killed = tokio::time::Instant::now();
    soon("the next waiter polls", waiting.acquired()).await.unwrap();
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(10), "broken: the next waiter polls within 1 s, not after {took:?}");
}

/// Acquires the mutex in one handle, and waits for it in two others, in their order.
async fn held_with_two_waiters(store: &Store, mutex: &MutexName) -> ([Simba; 3], Guard, Vec<Contention>) {
    let handles = [simba(store).await, simba(store).await, simba(store).await];
    let guard = soon("a lock", handles[0].locker(mutex.clone()).lock()).await.unwrap();
    let mut waiting = Vec::new();
    for (position, handle) in (1..).zip(&handles[1..]) {
        let contention = handle.contend(mutex.clone());
        contention.start().unwrap();
        subscribed(store, mutex, position).await;
        waiting.push(contention);
    }
    (handles, guard, waiting)
}

/// A waiter whose connection breaks gets its place back with the next connection.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_keeps_its_place_after_its_connections_break() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("cut"));
    let (handles, guard, waiting) = held_with_two_waiters(store, &mutex).await;
    let admin = store.admin().await;
    // Waits until they have ended.
    let end = "SELECT bool_and(pg_terminate_backend(pid, 20000)) FROM pg_stat_activity WHERE usename = $1";
    assert!(admin.query_one(end, &[&USER]).await.unwrap().get::<_, bool>(0), "all connections end");
    let operate = handles[0].operate().unwrap();
    let back = async {
        while operate.read(&mutex).await.ok().and_then(|read| read.waiters) != Some(2) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("both waiters count as alive again", back).await;
    soon("a release", guard.release()).await.unwrap();
    soon("the first waiter acquires first", waiting[0].acquired()).await.unwrap();
    assert!(!waiting[1].is_owner());
}

/// The advisory lock of a waiter ends with its wakeup connection, although the waiter is alive.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_not_skipped_while_its_wakeup_connection_is_down() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("cut"));
    let (_handles, guard, waiting) = held_with_two_waiters(store, &mutex).await;
    let admin = store.admin().await;
    // The cut connection cannot be reopened.
    limit_connections(&admin, 1).await;
    let cut = "SELECT pg_terminate_backend(l.pid) FROM simba_waiter w \
               JOIN pg_locks l ON l.locktype = 'advisory' \
                   AND l.objid::bigint = hashtext(w.channel)::bigint & 4294967295 \
               WHERE w.mutex = $1 ORDER BY w.place LIMIT 1";
    assert!(admin.query_one(cut, &[&mutex.as_str()]).await.unwrap().get::<_, bool>(0));
    let unlocked = "SELECT NOT starts_with(channel, 'simba_live_') FROM simba_waiter \
                    WHERE mutex = $1 ORDER BY place LIMIT 1";
    let renewed = async {
        while !admin.query_one(unlocked, &[&mutex.as_str()]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the entry of the first waiter needs no lock", renewed).await;
    soon("a release", guard.release()).await.unwrap();
    // Longer than the second waiter needs for a poll.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!waiting[1].is_owner(), "broken: a live waiter is not skipped");
    admin.batch_execute(&format!("ALTER ROLE {USER} CONNECTION LIMIT -1")).await.unwrap();
    soon("the first waiter acquires first", waiting[0].acquired()).await.unwrap();
}

/// No connection breaks when a server becomes read-only: the commands move to another server, and the wakeups follow.
#[tokio::test(flavor = "multi_thread")]
async fn wakeups_follow_the_commands_to_another_server() {
    let (old, new) = (Private::start(Setup::postgres()).await, Private::start(Setup::postgres()).await);
    let hosts = format!("{},{}", old.store.address(), new.store.address());
    let url = format!("postgres://{USER}:{PASSWORD}@{hosts}/postgres?schema={SCHEMA}");
    let config = PostgresConfig::from_url(&url.parse().unwrap()).unwrap();
    let limit = Duration::from_secs(20);
    let config = config.with_connect_timeout(limit).with_statement_timeout(limit);
    let backend = Arc::new(PostgresBackend::connect(config).await.unwrap());
    let simba = Simba::builder(backend as Arc<dyn Backend>).with_lease(long()).build();
    let wait_on = async |store: &Store| {
        let mutex = name("moved");
        let guard = soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap();
        let waiting = simba.contend(mutex.clone());
        waiting.start().unwrap();
        subscribed(store, &mutex, 1).await;
        (guard, waiting)
    };
    let (_guard, _waiting) = wait_on(&old.store).await;
    alter_system(&old.store.admin().await, "default_transaction_read_only", "on").await;
    let (guard, waiting) = wait_on(&new.store).await;
    soon("a release", guard.release()).await.unwrap();
    soon("the waiter is notified by the new server", waiting.acquired()).await.unwrap();
}

/// A busy machine can deliver the notification that a handle sends to itself too late.
#[tokio::test(flavor = "multi_thread")]
async fn one_notification_that_does_not_arrive_shows_no_pooler() {
    let private = Private::start(Setup::postgres()).await;
    let lose_first = "IF nextval('replacement.calls') > 1 THEN PERFORM pg_catalog.pg_notify($1, $2); END IF;";
    replace_notify(&private, lose_first).await;
    let store = private.store.clone().with_keys("pooler=auto&statement_timeout=20s");
    let (backend, _proxy) = store.proxied().await;
    let simba = Simba::builder(Arc::new(backend) as Arc<dyn Backend>).with_lease(long()).build();
    let mutex = name("echo");
    let _guard = soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap();
    let waiting = simba.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, 1).await;
}

/// The handle subscribes on a server that the commands leave before they send the notification that tests for a pooler.
#[tokio::test(flavor = "multi_thread")]
async fn commands_that_move_during_the_test_for_a_pooler_show_no_pooler() {
    let (old, new) = (Private::start(Setup::postgres()).await, Private::start(Setup::postgres()).await);
    let (to_old, to_new) = (
        FaultProxy::start(old.store.address()).await.unwrap(),
        FaultProxy::start(new.store.address()).await.unwrap(),
    );
    let hosts = format!("{},{}", to_old.address(), to_new.address());
    let url = format!("postgres://{USER}:{PASSWORD}@{hosts}/postgres?schema={SCHEMA}&pooler=auto");
    let config = PostgresConfig::from_url(&url.parse().unwrap()).unwrap();
    let limit = Duration::from_secs(20);
    let config = config.with_connect_timeout(limit).with_statement_timeout(limit);
    let mut subscribing = to_old.hold_next_request_with(&["LISTEN"]);
    let backend = PostgresBackend::connect(config).await.unwrap();
    soon("the handle subscribes", subscribing.caught()).await;
    alter_system(&old.store.admin().await, "default_transaction_read_only", "on").await;
    let simba = Simba::builder(Arc::new(backend) as Arc<dyn Backend>).with_lease(long()).build();
    let mutex = name("moved");
    let _guard = soon("a lock on the new server", simba.locker(mutex.clone()).lock()).await.unwrap();
    subscribing.deliver();
    let waiting = simba.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&new.store, &mutex, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_entry_of_a_waiter_that_cannot_subscribe_is_renewed() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("unsubscribed"));
    let (one, two) = (simba(store).await, simba(store).await);
    let _guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
    let admin = store.admin().await;
    limit_connections(&admin, 0).await;
    // The entry ends after two seconds unless it is renewed, and the next poll comes after forty.
    let waiting = two.contend(mutex.clone());
    waiting.start().unwrap();
    // The remaining time of the entry, and whether an advisory lock marks its waiter as alive.
    let entry = "SELECT extract(epoch FROM until - clock_timestamp())::float8, starts_with(channel, 'simba_live_') \
                 FROM simba_waiter WHERE mutex = $1";
    let renewed = async {
        loop {
            if let Some(row) = admin.query_opt(entry, &[&mutex.as_str()]).await.unwrap() {
                assert!(!row.get::<_, bool>(1), "the handle cannot subscribe");
                let left: f64 = row.get(0);
                if left > 20.0 {
                    return;
                }
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the entry is renewed", renewed).await;
}

/// A waiter of an older version, or behind a pooler, holds no lock: it is alive until its entry ends.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_without_a_lock_is_not_skipped() {
    let (store, mutex) = (Store::shared(), name("older"));
    let (backend, admin) = (store.backend().await, store.admin().await);
    let mut holder = open(&backend, &mutex).await;
    let token = take(&mut *holder).await;
    let queue = "INSERT INTO simba_waiter (mutex, session, contender, channel, watches, until) \
                 VALUES ($1, 'older-1', 'older', 'simba_abcdefghijklmnopqrst', false, now() + interval '30s')";
    admin.execute(queue, &[&mutex.as_str()]).await.unwrap();
    admin.execute("UPDATE simba_mutex SET waited = 1 WHERE mutex = $1", &[&mutex.as_str()]).await.unwrap();
    holder.release(Holding::Under(token)).await.unwrap();
    let mut other = open_as(&backend, &mutex, Intent::Try).await;
    assert_eq!(other.contend(Prior::Nothing).await.unwrap(), Answer::Vacant, "broken: the mutex is promised");
    let leave = "DELETE FROM simba_waiter WHERE session = 'older-1' AND mutex = $1";
    admin.execute(leave, &[&mutex.as_str()]).await.unwrap();
    take(&mut *other).await;
}

/// Makes every notification of the user fail with this code.
async fn break_notifications(private: &Private, code: &str) {
    let fail = "RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE =";
    replace_notify(private, &format!("{fail} '{code}';")).await;
}

/// Replaces the notifications of the user: the replacement shadows the server's function.
async fn replace_notify(private: &Private, body: &str) {
    let admin = private.store.admin().await;
    let replacement = format!(
        "CREATE SCHEMA replacement; CREATE SEQUENCE replacement.calls; \
         CREATE FUNCTION replacement.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS $$ BEGIN {body} END $$; \
         GRANT USAGE ON SCHEMA replacement TO {USER}; GRANT USAGE ON SEQUENCE replacement.calls TO {USER}; \
         ALTER ROLE {USER} SET search_path = replacement, pg_catalog"
    );
    admin.batch_execute(&replacement).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_notify_queue_fails_no_release() {
    let private = Private::start(Setup::postgres()).await;
    break_notifications(&private, "54000").await;
    // No test for a pooler, which needs a notification.
    let store = private.store.clone().with_keys("pooler=false");
    let (backend, poll) = (store.backend().await, Duration::from_millis(500));
    let simba = Simba::builder(Arc::new(backend) as Arc<dyn Backend>);
    let simba = simba.with_lease(Lease::default().with_poll(poll).unwrap()).build();
    let mutex = name("full");
    let guard = soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap();
    let waiting = simba.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, 1).await;
    soon("a release", guard.release()).await.expect("broken: a release needs no notification");
    soon("a waiter polls", waiting.acquired()).await.unwrap();
    // Leave the queue, and change an owner that is watched.
    let another = simba.contend(mutex.clone());
    another.start().unwrap();
    subscribed(&store, &mutex, 1).await;
    soon("a waiter leaves", another.stop()).await.unwrap();
    soon("a stop", waiting.stop()).await.unwrap();
    assert!(soon("a try", simba.locker(mutex).try_lock()).await.unwrap().is_some());
}

/// The mutex is free when the notification is refused: the next waiter is notified in the background.
#[tokio::test(flavor = "multi_thread")]
async fn an_eviction_that_cannot_notify_the_next_waiter_is_reported_as_freed() {
    let private = Private::start(Setup::postgres()).await;
    // The code of a lock that another transaction holds.
    break_notifications(&private, "55P03").await;
    let (backend, mutex) = (private.store.backend().await, name("evicted"));
    let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
    take(&mut *holder).await;
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let evicted = soon("an eviction", backend.evict(&mutex, EvictIf::Any)).await;
    let evicted = evicted.expect("broken: an eviction needs no notification");
    assert!(matches!(evicted, Eviction::Freed { .. }), "{evicted:?}");
    take(&mut *waiter).await;
}

/// Two statements are sent alone, the third one is sent as a batch of one.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_notify_queue_fails_no_concurrent_release() {
    let private = Private::start(Setup::postgres()).await;
    break_notifications(&private, "54000").await;
    let backend = private.store.clone().with_keys("pooler=false").backend().await;
    for releases in [3, 8] {
        let (mut holders, mut waiters) = (Vec::new(), Vec::new());
        for _ in 0..releases {
            let mutex = name("full");
            let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
            let token = take(&mut *holder).await;
            assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
            holders.push((holder, token));
            waiters.push(waiter);
        }
        let released = holders.iter_mut().map(|(holder, token)| holder.release(Holding::Under(*token)));
        for released in soon("all releases", futures_util::future::join_all(released)).await {
            released.expect("broken: a release needs no notification");
        }
        for waiter in &mut waiters {
            take(&mut **waiter).await;
        }
    }
}

/// A notification takes a lock that the whole server shares: none is sent to a waiter that cannot listen.
#[tokio::test(flavor = "multi_thread")]
async fn no_notification_is_sent_to_a_waiter_that_cannot_listen() {
    let private = Private::start(Setup::postgres()).await;
    break_notifications(&private, "P0001").await;
    let backend = private.store.clone().with_keys("pooler=true").backend().await;
    let mutex = name("polled");
    let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
    let token = take(&mut *holder).await;
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    holder.release(Holding::Under(token)).await.expect("broken: no notification is sent");
    take(&mut *waiter).await;
}

/// A notification takes a lock that the whole server shares. Another program holds it while it waits for a standby.
#[tokio::test(flavor = "multi_thread")]
async fn a_release_needs_no_lock_that_another_program_holds() {
    releases_need_no_lock_that_another_program_holds("pooler=auto").await;
}

/// Behind a pooler one statement is in flight at a time, and the session has no `lock_timeout`.
#[tokio::test(flavor = "multi_thread")]
async fn behind_a_pooler_no_lock_that_another_program_holds_delays_a_renewal() {
    releases_need_no_lock_that_another_program_holds("pooler=true").await;
}

/// Releases mutexes with waiters and renews another one, over a handle with these keys.
async fn releases_need_no_lock_that_another_program_holds(keys: &str) {
    let private = Private::start(Setup::postgres()).await;
    let admin = private.store.admin().await;
    admin.batch_execute(&format!("ALTER ROLE {USER} SET synchronous_commit = local")).await.unwrap();
    let (holding, waiting) =
        (private.store.clone().with_keys(keys).backend().await, private.store.backend().await);
    let mut renewed = open(&holding, &name("renewed")).await;
    take(&mut *renewed).await;
    let (mut holders, mut waiters) = (Vec::new(), Vec::new());
    for _ in 0..8 {
        let mutex = name("standby");
        let (mut holder, mut waiter) = (open(&holding, &mutex).await, open(&waiting, &mutex).await);
        let token = take(&mut *holder).await;
        assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        soon("a subscription", waiter.changed()).await.unwrap();
        holders.push((holder, token));
        waiters.push(waiter);
    }
    alter_system(&admin, "synchronous_standby_names", "nobody").await;
    let other = private.store.admin().await;
    let is_stuck = Arc::new(AtomicBool::new(false));
    let ends = Arc::clone(&is_stuck);
    let notifying = tokio::spawn(async move {
        // The server's checkpointer may apply the setting later than this session sees it. Until then no commit waits.
        while !ends.load(Ordering::Relaxed) {
            let notify = "DROP TABLE IF EXISTS another_program; CREATE TABLE another_program (); NOTIFY another_program";
            other.batch_execute(notify).await.unwrap();
        }
    });
    let waits = "SELECT pid FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
    let stuck = async {
        loop {
            match admin.query_opt(waits, &[]).await.unwrap() {
                Some(row) => return row.get::<_, i32>(0),
                None => tokio::time::sleep(Duration::from_millis(10)).await,
            }
        }
    };
    let stuck = soon("the other program waits for a standby", stuck).await;
    is_stuck.store(true, Ordering::Relaxed);
    let released = holders.iter_mut().map(|(holder, token)| holder.release(Holding::Under(*token)));
    for released in soon("all releases", futures_util::future::join_all(released)).await {
        released.expect("broken: a release needs no notification");
    }
    // The background tasks that notify the waiters run meanwhile.
    for _ in 0..20 {
        let renewal = soon("a renewal", renewed.contend(Prior::Held)).await;
        assert!(matches!(renewal.expect("broken: a renewal is answered"), Answer::Ours(_)));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    admin.execute("SELECT pg_cancel_backend($1)", &[&stuck]).await.unwrap();
    soon("the other program continues", notifying).await.unwrap();
    for waiter in &mut waiters {
        soon("the waiter is notified later", waiter.changed()).await.unwrap();
        take(&mut **waiter).await;
    }
}

fn sees(observer: &Observer, guard: &Guard) -> bool {
    matches!(observer.view(), View::Owned(owner) if owner.is_owner(guard.tenure().contender()))
}

/// A row that stays locked does not prevent watching another mutex.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_does_not_prevent_watching_another_mutex() {
    let store = Store::shared();
    let (one, two) = (simba(&store).await, simba(&store).await);
    let (stuck, free) = (name("watch-stuck"), name("watch-free"));
    for mutex in [&stuck, &free] {
        soon("a lock", two.locker(mutex.clone()).lock()).await.unwrap().release().await.unwrap();
    }
    let mut admin = store.admin().await;
    let locked = lock_row(&mut admin, &stuck).await;
    let observers = [&stuck, &free].map(|mutex| one.observe(mutex.clone()).unwrap());
    let watched = "SELECT EXISTS (SELECT FROM simba_waiter WHERE mutex = $1 AND watches)";
    let watcher = store.admin().await;
    let poll = async {
        while !watcher.query_one(watched, &[&free.as_str()]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the free mutex is watched", poll).await;
    let guard = soon("a lock", two.locker(free.clone()).lock()).await.unwrap();
    until("the observer sees the owner", || sees(&observers[1], &guard)).await;
    locked.rollback().await.unwrap();
    let guard = soon("a lock", two.locker(stuck.clone()).lock()).await.unwrap();
    until("the other mutex is watched too", || sees(&observers[0], &guard)).await;
}

/// Waiters that leave the queue of a locked row do not delay the notification of another waiter.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_delays_no_wakeup_of_another_mutex() {
    let store = Store::shared();
    let backend = Arc::new(store.backend().await);
    let simba = Simba::builder(Arc::clone(&backend) as Arc<dyn Backend>).with_lease(long()).build();
    let (stuck, other) = (name("leave-stuck"), name("leave-other"));
    let mut holder = open(&backend, &stuck).await;
    take(&mut *holder).await;
    let mut leaving = Vec::new();
    for _ in 0..60 {
        let mut session = open(&backend, &stuck).await;
        assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        leaving.push(session);
        assert!(matches!(holder.contend(Prior::Held).await.unwrap(), Answer::Ours(_)));
    }
    let mut first = open(&backend, &other).await;
    let token = take(&mut *first).await;
    let mut second = open(&backend, &other).await;
    assert!(matches!(second.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let third = simba.contend(other.clone());
    third.start().unwrap();
    subscribed(&store, &other, 1).await;
    let mut admin = store.admin().await;
    let locked = lock_row(&mut admin, &stuck).await;
    drop(leaving);
    // The mutex is promised to the second session, which is dropped: the third one is notified in the background.
    first.release(Holding::Under(token)).await.unwrap();
    drop(second);
    soon("the third session is notified", third.acquired()).await.unwrap();
    locked.rollback().await.unwrap();
}
