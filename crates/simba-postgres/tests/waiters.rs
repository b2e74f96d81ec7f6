//! Waiters that die, lose their connection, or cannot be notified. Polls are so long that none explains a hand-over.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

use common::{Private, Store, USER, freeze, name, open, open_as, soon, take, until};
use simba_core::{Answer, Backend, Guard, Holding, Intent, Lease, MutexName, Observer, Prior, Simba, View};

use simba_servers::Setup;

/// A lease, poll and queue entry that outlast every test.
fn long() -> Lease {
    let lease = Lease::new(Duration::from_secs(40), Duration::from_secs(20)).unwrap();
    lease.with_poll(Duration::from_secs(40)).unwrap()
}

async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).lease(long()).build()
}

/// Waits until that many waiters are queued whose handles hold the lock that shows that they live.
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

/// Keeps the user from opening more connections than it has, less `fewer`.
async fn limit_connections(admin: &tokio_postgres::Client, fewer: i64) {
    let count = "SELECT count(*) FROM pg_stat_activity WHERE usename = $1";
    let limit = admin.query_one(count, &[&USER]).await.unwrap().get::<_, i64>(0) - fewer;
    admin.batch_execute(&format!("ALTER ROLE {USER} CONNECTION LIMIT {limit}")).await.unwrap();
}

/// Waiters on a runtime of their own, which stand still like a stopped process, and end like a killed one.
struct Doomed {
    orders: mpsc::Sender<&'static str>,
    thread: JoinHandle<()>,
}

impl Doomed {
    /// Lets a contender wait for the mutex at this place of the queue.
    async fn waits_for(store: &Store, mutex: &MutexName, place: i64) -> Self {
        Self::wait_for(store, mutex, place..=place).await
    }

    /// Lets one contender wait for the mutex at each of these places of the queue.
    async fn wait_for(store: &Store, mutex: &MutexName, places: std::ops::RangeInclusive<i64>) -> Self {
        let (orders, to_do) = mpsc::channel();
        let (its_store, its_mutex, last) = (store.clone(), mutex.clone(), *places.end());
        let thread = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let (simba, waiting) = runtime.block_on(async {
                let simba = simba(&its_store).await;
                let waiting: Vec<_> = places.map(|_| simba.contend(its_mutex.clone())).collect();
                waiting.iter().for_each(|waiting| waiting.start().unwrap());
                (simba, waiting)
            });
            // The runtime only works within `block_on`.
            while let Err(mpsc::TryRecvError::Empty) = to_do.try_recv() {
                runtime.block_on(async { tokio::time::sleep(Duration::from_millis(10)).await });
            }
            to_do.recv().unwrap();
            runtime.shutdown_background();
            std::mem::forget((simba, waiting));
        });
        subscribed(store, mutex, last).await;
        Self { orders, thread }
    }

    /// Lets it stand still: it neither answers nor breaks a connection.
    fn stop(&self) {
        self.orders.send("stop").unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }

    /// Ends it without a word to the server; the system closes its connections.
    fn kill(self) {
        self.orders.send("kill").unwrap();
        self.thread.join().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_waiters_are_passed_over() {
    let (store, mutex) = (Store::shared(), name("killed"));
    let (one, two) = (simba(&store).await, simba(&store).await);
    let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
    let mut doomed = Vec::new();
    for place in 1..=3 {
        doomed.push(Doomed::waits_for(&store, &mutex, place).await);
    }
    let waiting = two.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, 4).await;
    for waiter in doomed {
        waiter.stop();
        waiter.kill();
    }
    let operate = one.operate().unwrap();
    let counted = async {
        while operate.read(&mutex).await.unwrap().waiters != Some(1) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the killed ones are not counted", counted).await;
    guard.release().await.unwrap();
    soon("the live one is notified", waiting.acquired()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_is_killed_when_it_is_its_turn_is_passed_over() {
    process_killed_on_its_turn_is_passed_over(1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_waiters_of_a_process_that_is_killed_on_its_turn_are_passed_over() {
    process_killed_on_its_turn_is_passed_over(2).await;
}

/// The mutex is free and promised to the first of several waiters of a process that never takes it. No client is left to
/// notify the next one.
async fn process_killed_on_its_turn_is_passed_over(waiters: i64) {
    let (store, mutex) = (Store::shared(), name("killed"));
    let (one, two) = (simba(&store).await, simba(&store).await);
    let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
    let doomed = Doomed::wait_for(&store, &mutex, 1..=waiters).await;
    let waiting = two.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, waiters + 1).await;
    doomed.stop();
    guard.release().await.unwrap();
    one.shutdown().await;
    // Longer than the first pauses between the polls of a waiter whose turn it is not.
    tokio::time::sleep(Duration::from_secs(4)).await;
    assert!(!waiting.is_owner(), "broken: a waiter that lives is not passed over");
    doomed.kill();
    let killed = tokio::time::Instant::now();
    soon("the next one polls", waiting.acquired()).await.unwrap();
    let took = killed.elapsed();
    assert!(took < Duration::from_secs(10), "broken: the next one polls within a second, not after {took:?}");
}

/// A connection that breaks costs a waiter its place only until the next one is there.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_keeps_its_place_when_its_connections_break() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("cut"));
    let handles = [simba(store).await, simba(store).await, simba(store).await];
    let guard = soon("a lock", handles[0].locker(mutex.clone()).lock()).await.unwrap();
    let mut waiting = Vec::new();
    for (place, handle) in (1..).zip(&handles[1..]) {
        let contention = handle.contend(mutex.clone());
        contention.start().unwrap();
        subscribed(store, &mutex, place).await;
        waiting.push(contention);
    }
    let admin = store.admin().await;
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = $1";
    admin.execute(end, &[&USER]).await.unwrap();
    let operate = handles[0].operate().unwrap();
    let back = async {
        while operate.read(&mutex).await.ok().and_then(|read| read.waiters) != Some(2) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("both live again", back).await;
    soon("a release", guard.release()).await.unwrap();
    soon("the first one is first", waiting[0].acquired()).await.unwrap();
    assert!(!waiting[1].is_owner());
}

/// The advisory lock of a waiter ends with its connection for wake-ups, although the waiter lives.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_is_not_passed_over_while_its_wake_up_connection_is_down() {
    let private = Private::start(Setup::postgres()).await;
    let (store, mutex) = (&private.store, name("cut"));
    let handles = [simba(store).await, simba(store).await, simba(store).await];
    let guard = soon("a lock", handles[0].locker(mutex.clone()).lock()).await.unwrap();
    let mut waiting = Vec::new();
    for (place, handle) in (1..).zip(&handles[1..]) {
        let contention = handle.contend(mutex.clone());
        contention.start().unwrap();
        subscribed(store, &mutex, place).await;
        waiting.push(contention);
    }
    let admin = store.admin().await;
    // The connection that is cut cannot be opened again.
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
    soon("the entry of the first waiter needs no lock any more", renewed).await;
    soon("a release", guard.release()).await.unwrap();
    // Longer than the second waiter takes to poll.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert!(!waiting[1].is_owner(), "broken: a waiter that lives is not passed over");
    admin.batch_execute(&format!("ALTER ROLE {USER} CONNECTION LIMIT -1")).await.unwrap();
    soon("the first waiter is served first", waiting[0].acquired()).await.unwrap();
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
    // How long the entry still lasts, and whether a lock shows that its waiter lives.
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

/// A waiter of an older version, or one behind a pooler, holds no lock: its entry's lease decides.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_without_a_lock_is_not_passed_over() {
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
    assert_eq!(other.contend(Prior::Nothing).await.unwrap(), Answer::Vacant, "broken: it is promised");
    let leave = "DELETE FROM simba_waiter WHERE session = 'older-1' AND mutex = $1";
    admin.execute(leave, &[&mutex.as_str()]).await.unwrap();
    take(&mut *other).await;
}

/// Lets every notification of the user fail with this code. The stand-in is found before the server's own function.
async fn break_notifications(private: &Private, code: &str) {
    let admin = private.store.admin().await;
    let stand_in = format!(
        "CREATE SCHEMA stand_in; \
         CREATE FUNCTION stand_in.pg_notify(text, text) RETURNS void LANGUAGE plpgsql AS \
         $$ BEGIN RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '{code}'; END $$; \
         GRANT USAGE ON SCHEMA stand_in TO {USER}; \
         ALTER ROLE {USER} SET search_path = stand_in, pg_catalog"
    );
    admin.batch_execute(&stand_in).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_of_notifications_fails_no_release() {
    let private = Private::start(Setup::postgres()).await;
    break_notifications(&private, "54000").await;
    // Known to be direct, so that no message to itself is needed.
    let store = private.store.clone().with_keys("pooler=false");
    let (backend, poll) = (store.backend().await, Duration::from_millis(500));
    let simba = Simba::builder(Arc::new(backend) as Arc<dyn Backend>);
    let simba = simba.lease(Lease::default().with_poll(poll).unwrap()).build();
    let mutex = name("full");
    let guard = soon("a lock", simba.locker(mutex.clone()).lock()).await.unwrap();
    let waiting = simba.contend(mutex.clone());
    waiting.start().unwrap();
    subscribed(&store, &mutex, 1).await;
    soon("a release", guard.release()).await.expect("broken: a release needs no notification");
    soon("a waiter polls", waiting.acquired()).await.unwrap();
    // Leaving the queue, and a change that is watched.
    let another = simba.contend(mutex.clone());
    another.start().unwrap();
    subscribed(&store, &mutex, 1).await;
    soon("a waiter leaves", another.stop()).await.unwrap();
    soon("a stop", waiting.stop()).await.unwrap();
    assert!(soon("a try", simba.locker(mutex).try_lock()).await.unwrap().is_some());
}

/// Two statements are sent alone, the third is gathered and goes out as a batch of one.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_of_notifications_fails_no_release_of_several_at_once() {
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

/// A notification takes a lock that the whole server shares: none is sent where nobody listens.
#[tokio::test(flavor = "multi_thread")]
async fn a_waiter_that_cannot_be_notified_costs_no_notification() {
    let private = Private::start(Setup::postgres()).await;
    break_notifications(&private, "P0001").await;
    let backend = private.store.clone().with_keys("pooler=true").backend().await;
    let mutex = name("polled");
    let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
    let token = take(&mut *holder).await;
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    holder.release(Holding::Under(token)).await.expect("broken: nobody is notified");
    take(&mut *waiter).await;
}

fn sees(observer: &Observer, guard: &Guard) -> bool {
    matches!(observer.view(), View::Owned(owner) if owner.is_owner(guard.tenure().contender()))
}

/// One row that stays locked keeps no other mutex from being watched.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_keeps_no_other_from_being_watched() {
    let store = Store::shared();
    let (one, two) = (simba(&store).await, simba(&store).await);
    let (stuck, free) = (name("watch-stuck"), name("watch-free"));
    for mutex in [&stuck, &free] {
        soon("a lock", two.locker(mutex.clone()).lock()).await.unwrap().release().await.unwrap();
    }
    let mut admin = store.admin().await;
    let frozen = freeze(&mut admin, &stuck).await;
    let observers = [&stuck, &free].map(|mutex| one.observe(mutex.clone()).unwrap());
    let watched = "SELECT EXISTS (SELECT FROM simba_waiter WHERE mutex = $1 AND watches)";
    let watcher = store.admin().await;
    let looks = async {
        while !watcher.query_one(watched, &[&free.as_str()]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    soon("the free one is watched", looks).await;
    let guard = soon("a lock", two.locker(free.clone()).lock()).await.unwrap();
    until("its owner is seen", || sees(&observers[1], &guard)).await;
    frozen.rollback().await.unwrap();
    let guard = soon("a lock", two.locker(stuck.clone()).lock()).await.unwrap();
    until("the other is watched too", || sees(&observers[0], &guard)).await;
}

/// Waiters that leave the queue of a locked row keep no other waiter from being notified.
#[tokio::test(flavor = "multi_thread")]
async fn a_locked_row_delays_no_wake_up_of_another_mutex() {
    let store = Store::shared();
    let backend = Arc::new(store.backend().await);
    let simba = Simba::builder(Arc::clone(&backend) as Arc<dyn Backend>).lease(long()).build();
    let (stuck, other) = (name("errands-stuck"), name("errands-other"));
    let mut holder = open(&backend, &stuck).await;
    take(&mut *holder).await;
    let mut leaving = Vec::new();
    for _ in 0..60 {
        let mut session = open(&backend, &stuck).await;
        assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        leaving.push(session);
    }
    let mut first = open(&backend, &other).await;
    let token = take(&mut *first).await;
    let mut second = open(&backend, &other).await;
    assert!(matches!(second.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let third = simba.contend(other.clone());
    third.start().unwrap();
    subscribed(&store, &other, 1).await;
    let mut admin = store.admin().await;
    let frozen = freeze(&mut admin, &stuck).await;
    drop(leaving);
    // The mutex is promised to the second one, which goes away: the third one is notified in the background.
    first.release(Holding::Under(token)).await.unwrap();
    drop(second);
    soon("the third one is notified", third.acquired()).await.unwrap();
    frozen.rollback().await.unwrap();
}
