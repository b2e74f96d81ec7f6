//! The rows of the fault matrix that concern PostgreSQL, against real servers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{
    Delay, LONG_TIMEOUT, Private, Store, USER, lease, lock_row, lock_waits, long, name, open, open_as,
    sends_statement, soon, take, until,
};
use simba_core::spi::{Answer, Backend, Holding, Intent, Operate, Prior};
use simba_core::{Contention, FencingToken, Lease, Moment, MutexName, Simba, Tenure};
use simba_postgres::{Pooler, PostgresBackend};
use simba_servers::Setup;
use simba_tck::rounds;
use simba_test_support::{Logs, set_server_clock, with_server_clock};
use tokio_postgres::Client;

simba_tck::rows!(Store::shared());

/// Connects directly to the server.
async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).with_lease(lease()).build()
}

fn contend(simba: &Simba, mutex: &MutexName) -> Contention {
    let contention = simba.contend(mutex.clone());
    contention.start().unwrap();
    contention
}

async fn leads(contention: &Contention) -> Tenure {
    soon("a leader", contention.acquired()).await.unwrap()
}

/// Returns a lease that is renewed as often, and is not lost while the machine pauses.
fn unpaused() -> Lease {
    Lease::new(lease().ttl(), Duration::from_secs(30)).unwrap()
}

/// Checks for a duration that leaders keep their mutexes.
async fn stays(tenures: &[Tenure], length: Duration) {
    let end = tokio::time::Instant::now() + length;
    while tokio::time::Instant::now() < end {
        for tenure in tenures {
            assert_eq!(tenure.loss(), None, "broken: {} keeps its leader", tenure.mutex());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

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

/// Leads for some seconds around a change of daylight saving time in Los Angeles, at a time in seconds since 1970.
/// Before and after it the offset from UTC is `before` and `after` hours.
async fn leads_through(time: u64, before: i32, after: i32) {
    let clock = clock();
    // A server takes long to start on a busy machine, and so does an acquisition.
    set_server_clock(clock.path(), time - 600);
    let zone =
        Setup::postgres().with_arg("-c").with_arg("timezone=America/Los_Angeles").with_env("TZ", "UTC");
    let private = Private::start(with_server_clock(zone, clock.path(), false)).await;
    // The steps of the clock end no lease, and a lease with an hour more or less is out of its bounds.
    let lease = Lease::new(Duration::from_secs(2), Duration::from_secs(20 * 60)).unwrap();
    let simba = simba(&private.store).await.with_lease(lease);
    let (mutex, admin) = (name("row-42"), private.store.admin().await);
    let leader = contend(&simba, &mutex);
    let tenure = leads(&leader).await;
    let _waiter = contend(&simba, &mutex);
    let operate = simba.operate().unwrap();
    let offset = "SELECT extract(timezone FROM clock_timestamp())::int / 3600";
    let seen: i32 = admin.query_one(offset, &[]).await.unwrap().get(0);
    assert_eq!(seen, before, "the test starts before the change");
    set_server_clock(clock.path(), time - 3);
    let keeps_leading = async {
        let mut more = 20;
        while more > 0 {
            stays(std::slice::from_ref(&tenure), Duration::from_millis(50)).await;
            let left = operate.read(&mutex).await.unwrap().remaining.expect("it is held");
            assert!(left <= lease.total(), "broken: no lease gets an hour longer: {left:?}");
            let seen: i32 = admin.query_one(offset, &[]).await.unwrap().get(0);
            more -= i32::from(seen == after);
        }
    };
    tokio::time::timeout(Duration::from_secs(60), keeps_leading).await.expect("the offset changes");
}

#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_end_of_daylight_saving_time_costs_no_leader() {
    // 2026-11-01 09:00:00
    leads_through(1_793_523_600, -7, -8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_start_of_daylight_saving_time_costs_no_leader() {
    // 2027-03-14 10:00:00
    leads_through(1_805_018_400, -8, -7).await;
}

/// Creates a file with the offset of a server's clock. The server can read it.
fn clock() -> tempfile::NamedTempFile {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "+0").unwrap();
    std::fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    file
}

#[tokio::test]
async fn row_43_a_step_of_the_server_clock_is_logged_and_tokens_increase() {
    let (logs, _guard) = Logs::capture_thread();
    let clock = clock();
    let set = |offset: &str| std::fs::write(clock.path(), offset).unwrap();
    let private = Private::start(with_server_clock(Setup::postgres(), clock.path(), false)).await;
    let store = private.store.clone().with_keys("ping=200ms");
    let (one, two) = (simba(&store).await, simba(&store).await);
    let mutex = name("row-43");
    let mut last = FencingToken::new(0);
    for (round, offset) in ["+1h", "+0", "-1h", "+0"].iter().cycle().take(rounds() as usize * 4).enumerate() {
        // The clock was read at least once since the last step.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (guard, before) = (
            soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap(),
            logs.count("clock of the server was set"),
        );
        assert!(guard.token() > last, "broken: tokens increase in round {round}");
        last = guard.token();
        set(offset);
        let locker = two.locker(mutex.clone());
        let logged = || logs.count("clock of the server was set") > before;
        until("a step of the server's clock is logged", logged).await;
        // Whether the holder lost the mutex or not, the next one acquires in bounded time under a greater token.
        drop(guard);
        let next = soon("the store recovers", locker.lock()).await.unwrap();
        assert!(next.token() > last, "broken: tokens increase in round {round}");
        last = next.token();
        next.release().await.unwrap();
    }
}

/// A holder that died before a backward step of the clock blocks others for one more lease, not for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_the_lease_of_a_dead_holder_ends_after_a_backward_step() {
    let store = Store::shared();
    let (backend, mutex) = (store.backend().await, name("row-43-dead"));
    let mut dead = open(&backend, &mutex).await;
    let token = take(&mut *dead).await;
    let admin = store.admin().await;
    // Equivalent to a step of the clock: all times are an hour in the future.
    let step = "UPDATE simba_mutex SET acquired_at = acquired_at + interval '1h', \
                renewed_at = renewed_at + interval '1h', ttl_at = renewed_at + interval '1h 600ms', \
                until = renewed_at + interval '1h 1s' WHERE mutex = $1";
    admin.execute(step, &[&mutex.as_str()]).await.unwrap();
    let next = simba(&store).await;
    let guard = soon("the lease of the dead holder ends", next.locker(mutex).lock()).await.unwrap();
    assert!(guard.token() > token);
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

/// The client's wall clock has no effect.
#[tokio::test(flavor = "multi_thread")]
async fn row_45_jumps_of_the_client_s_wall_clock_cost_no_leader() {
    #[derive(Debug)]
    struct Jumping(simba_core::SystemClock);
    impl simba_core::Clock for Jumping {
        fn now(&self) -> simba_core::Moment {
            self.0.now()
        }
        fn sleep_until(&self, at: simba_core::Moment) -> simba_core::clock::Sleep {
            self.0.sleep_until(at)
        }
        fn wall(&self) -> std::time::SystemTime {
            let jump = Duration::from_secs(fastrand::u64(0..7200));
            self.0.wall() + jump - Duration::from_secs(3600)
        }
    }
    let store = Store::shared();
    store.set_up().await;
    let clock = Arc::new(Jumping(simba_core::SystemClock));
    let config = store.config(store.address()).with_statement_timeout(LONG_TIMEOUT);
    let backend = PostgresBackend::connect_with_clock(config, clock).await.unwrap();
    let backend: Arc<dyn Backend> = Arc::new(backend);
    let simba = Simba::builder(Arc::clone(&backend))
        .with_clock(Jumping(simba_core::SystemClock))
        .with_lease(unpaused())
        .build();
    let mutex = name("row-45");
    let leader = contend(&simba, &mutex);
    let tenure = leads(&leader).await;
    let _waiter = contend(&simba, &mutex);
    stays(&[tenure], Duration::from_secs(1) * rounds()).await;
}

/// Returns the pooler in front of the shared server.
fn pooled() -> Store {
    Store::at(&simba_servers::shared("SIMBA_TCK_PGBOUNCER"))
}

async fn behind_the_pooler(pooler: Pooler) -> PostgresBackend {
    Store::shared().set_up().await;
    PostgresBackend::connect(pooled().owner_config().with_pooler(pooler)).await.unwrap()
}

#[tokio::test]
async fn row_54_behind_a_transaction_pooler_waiters_poll_and_a_warning_is_logged() {
    let (logs, _guard) = Logs::capture_thread();
    // Only the poll explains a hand-over.
    let polled = long().with_poll(Duration::from_millis(300)).unwrap();
    let backends = [behind_the_pooler(Pooler::Auto).await, behind_the_pooler(Pooler::Auto).await];
    for backend in &backends {
        let poll = async {
            loop {
                let findings = backend.probe().await.unwrap().findings;
                if findings.iter().any(|finding| finding.problem.contains("pooler")) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        soon("a probe reports the pooler", poll).await;
    }
    assert_eq!(logs.count("a transaction pooler is in front"), 2, "each handle logs it once");
    let [one, two] =
        backends.map(|one| Simba::builder(Arc::new(one) as Arc<dyn Backend>).with_lease(polled).build());
    let mutex = name("row-54");
    for _ in 0..rounds() * 3 {
        let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
        let waiting = contend(&two, &mutex);
        until("a waiter waits", || waiting.owner().is_owner(guard.tenure().contender())).await;
        guard.release().await.unwrap();
        soon("a poll finds the release", waiting.acquired()).await.unwrap();
        waiting.stop().await.unwrap();
    }
}

/// Many clients share a few server processes: no client uses the session state of another one.
#[tokio::test(flavor = "multi_thread")]
async fn row_54_no_session_state_is_used_behind_a_pooler() {
    let mut tasks = Vec::new();
    let (mutex, counter) = (name("row-54"), Arc::new(std::sync::atomic::AtomicU32::new(0)));
    for at in 0..6 {
        // Some are configured, some detect the pooler while they work.
        let pooler = if at % 2 == 0 { Pooler::Yes } else { Pooler::Auto };
        let backend: Arc<dyn Backend> = Arc::new(behind_the_pooler(pooler).await);
        let polled = long().with_poll(Duration::from_millis(50)).unwrap();
        let simba = Simba::builder(backend).with_lease(polled).build();
        let (locker, counter) = (simba.locker(mutex.clone()), Arc::clone(&counter));
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds() * 3 {
                let guard = locker.lock().await.unwrap();
                let before = counter.load(Ordering::SeqCst);
                tokio::task::yield_now().await;
                counter.store(before + 1, Ordering::SeqCst);
                guard.release().await.unwrap();
            }
            drop(simba);
        }));
    }
    for task in tasks {
        tokio::time::timeout(Duration::from_secs(300), task).await.expect("each task completes").unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 6 * rounds() * 3, "broken: the counter loses no increment");
}

/// Runs the cases of the conformance suite about sessions behind the pooler.
#[tokio::test(flavor = "multi_thread")]
async fn row_54_the_suite_passes_behind_a_pooler() {
    struct Pooled;
    #[simba_tck::async_trait]
    impl simba_tck::Fixture for Pooled {
        async fn connect(&self) -> simba_tck::Connection {
            Store::shared().set_up().await;
            let pooled = pooled();
            let proxy = Arc::new(simba_tck::FaultProxy::start(pooled.address()).await.unwrap());
            let (user, address) = (pooled.admin.user().unwrap().to_owned(), proxy.address());
            let keys = format!("schema={}&pooler=true&connect_timeout=20s", common::SCHEMA);
            let url = format!("postgres://{user}@{address}/postgres?{keys}");
            let config = simba_postgres::PostgresConfig::from_url(&url.parse().unwrap()).unwrap();
            simba_tck::Connection::new(PostgresBackend::connect(config).await.unwrap(), proxy)
        }

        fn profile(&self) -> simba_tck::Profile {
            simba_tck::Profile::default().with_push(false)
        }
    }
    let groups = ["session", "exclusion", "tokens", "handover", "faults", "operate"];
    let cases = simba_tck::cases().iter().filter(|case| groups.contains(&case.group));
    for case in cases {
        let ended = tokio::time::timeout(simba_tck::CASE_LIMIT, case.run(&Pooled)).await;
        assert!(ended.is_ok(), "the case hangs: {case:?}");
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
