//! The rows of the fault matrix that concern PostgreSQL, against real servers.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use common::{Private, Store, USER, freeze, lease, long, name, open, soon, take, until};
use simba_core::{
    Answer, Backend, Contention, FencingToken, Holding, Lease, Moment, MutexName, Operate, Prior, Simba,
    Tenure,
};
use simba_postgres::{Pooler, PostgresBackend};
use simba_servers::Setup;
use simba_tck::rounds;
use tokio_postgres::Client;

simba_tck::rows!(Store::shared());

/// A handle straight at the server.
async fn simba(store: &Store) -> Simba {
    simba_tck::explain_failures();
    Simba::builder(Arc::new(store.backend().await) as Arc<dyn Backend>).lease(lease()).build()
}

fn contend(simba: &Simba, mutex: &MutexName) -> Contention {
    let contention = simba.contend(mutex.clone());
    contention.start().unwrap();
    contention
}

async fn leads(contention: &Contention) -> Tenure {
    soon("somebody leads", contention.acquired()).await.unwrap()
}

/// Checks for a while that a leader stays one.
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
    case.expect("the kit has the case").run(&private).await;
}

/// A crash of the server loses the queue and nothing else: its waiters come again, and tokens grow.
#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_the_server_keeps_holders_and_waiters() {
    let private = Private::start(Setup::postgres()).await;
    let (mutex, long) = (name("crash"), Lease::default());
    let one = Simba::builder(Arc::new(private.store.backend().await) as Arc<dyn Backend>).lease(long).build();
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

/// Row 17 where the mutex has a row: the very statement that takes it is carried out, and its reply is lost.
#[tokio::test(flavor = "multi_thread")]
async fn row_17_a_take_without_a_reply_is_adopted() {
    let (store, long) =
        (Store::shared(), Lease::new(Duration::from_secs(8), Duration::from_secs(8)).unwrap());
    let (backend, network) = store.proxied().await;
    let one = Simba::builder(Arc::new(backend) as Arc<dyn Backend>).lease(long).build();
    let two = simba(&store).await;
    for _ in 0..rounds() {
        let mutex = name("row-17");
        soon("a lock", two.locker(mutex.clone()).lock()).await.unwrap().release().await.unwrap();
        simba_tck::Network::lose_next_reply(&*network);
        let guard = tokio::time::timeout(long.ttl(), one.locker(mutex.clone()).lock()).await;
        let guard = guard.expect("broken: what was won without a reply is adopted").unwrap();
        let seen = two.operate().unwrap().read(&mutex).await.unwrap();
        assert_eq!((seen.owner.as_ref(), seen.waiters), (Some(guard.tenure().contender()), Some(0)));
        guard.release().await.unwrap();
        assert!(two.locker(mutex).try_lock().await.unwrap().is_some(), "broken: nothing is left of it");
    }
}

/// Row 15: a call that waits for a new connection goes out as soon as the login is over, which is three requests. It
/// does not wait for the reply to anything that is sent with it.
#[tokio::test(flavor = "multi_thread")]
async fn row_15_after_a_cut_a_call_goes_out_with_the_fourth_request() {
    let store = Store::shared();
    // One connection, so that all requests are its.
    let (backend, network) = store.clone().with_keys("pooler=false").proxied().await;
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
        // The first one may still go out over the connection that broke.
        while session.contend(Prior::Nothing).await.is_err() {}
    };
    let arrived = async {
        network.until(|counts| counts.requests >= before + 4).await;
        // The reply to the fourth request is still under way, and never arrives.
        network.stall_replies();
        while renewed_at().await == taken_at {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        network.pass();
    };
    soon("a call arrives, and is answered", async { tokio::join!(answered, arrived) }).await;
}

/// What a server that takes no writes answers does not count, however well it reads.
#[tokio::test]
async fn a_server_that_became_read_only_is_not_read() {
    let private = Private::start(Setup::postgres()).await;
    // One connection, so that all requests are its.
    let (backend, network) = private.store.clone().with_keys("pooler=false").proxied().await;
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
    // Three requests to log in. After the next one nothing runs here until all answers have come, so that none is
    // late enough to be lost with the connection.
    let stand_still = async {
        until("the server is asked", || network.requests() >= sent + 4).await;
        std::thread::sleep(Duration::from_millis(300));
    };
    let (read, ()) = soon("a refusal", async { tokio::join!(read, stand_still) }).await;
    let refusal = read.expect_err("broken: it is read").to_string();
    assert!(refusal.contains("takes no writes"), "{refusal}");
}

/// Ends the connections for wake-ups, and tells how many there were.
async fn cut_listeners(admin: &Client) -> i64 {
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity \
               WHERE usename = $1 AND query LIKE 'LISTEN%'";
    admin.query_one(cut, &[&USER]).await.unwrap().get(0)
}

#[tokio::test(flavor = "multi_thread")]
async fn row_20_a_lost_subscription_costs_a_poll_at_the_most() {
    let private = Private::start(Setup::postgres()).await;
    let admin = Arc::new(private.store.admin().await);
    // Only the poll explains a hand-over.
    let polled = long().with_poll(Duration::from_millis(400)).unwrap();
    let one =
        Simba::builder(Arc::new(private.store.backend().await) as Arc<dyn Backend>).lease(polled).build();
    let two =
        Simba::builder(Arc::new(private.store.backend().await) as Arc<dyn Backend>).lease(polled).build();
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
        tokio::time::sleep(Duration::from_millis(150)).await;
        guard.release().await.unwrap();
        let next = soon("a poll finds what no wake-up tells", waiting).await.unwrap().unwrap();
        next.release().await.unwrap();
    }
    cutting.store(false, Ordering::Relaxed);
    assert!(cuts.await.unwrap() > 0, "the subscription was cut");
    // With the subscription back, a wake-up comes again: the poll is too long to explain the hand-over.
    let pushed = long().with_poll(Duration::from_secs(30)).unwrap();
    let guard = soon("a lock", one.locker(mutex.clone()).with_lease(pushed).lock()).await.unwrap();
    let waiting = two.contend(mutex.clone()).with_lease(pushed);
    waiting.start().unwrap();
    until("a waiter waits", || waiting.owner().is_owner(guard.tenure().contender())).await;
    soon("a release", guard.release()).await.unwrap();
    leads(&waiting).await;
}

/// A leader whose renewals are recorded, so that a test that fails says what it did.
struct Recorded<'a> {
    contention: &'a Contention,
    tenure: Tenure,
    /// When each renewal was seen, and the deadline since then.
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

    /// Notes a renewal, and checks that the mutex is not lost.
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

/// The handle sends no call for the stuck row for ten times as long as one waited for it. Without that, the calls for
/// it would keep the connection busy all the time.
#[tokio::test(flavor = "multi_thread")]
async fn row_37_a_stuck_transaction_costs_its_own_mutex_only() {
    let store = Store::shared();
    let lease = Lease::new(Duration::from_secs(3), Duration::from_secs(3)).unwrap();
    let stuck = name("row-37-stuck");
    let backend = store.clone().with_keys(&format!("application_name={stuck}")).backend().await;
    let simba = Simba::builder(Arc::new(backend) as Arc<dyn Backend>).lease(lease).build();
    let leaders: Vec<_> = (0..50).map(|n| contend(&simba, &name(&format!("row-37-{n}")))).collect();
    let mut leaders = Recorded::of(&leaders).await;
    let holder = contend(&simba, &stuck);
    let lost = leads(&holder).await;
    let mut admin = store.admin().await;
    let frozen = freeze(&mut admin, &stuck).await;
    // Each of them needs the row to join the queue. On the same connection they hold nobody up either.
    let waiting: Vec<_> = (0..50).map(|_| contend(&simba, &stuck)).collect();
    let begun = tokio::time::Instant::now();
    let locked = |contention: &Contention| {
        contention.last_error().is_some_and(|error| error.to_string().contains("locked"))
    };
    let waits =
        "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'";
    let watcher = store.admin().await;
    let (mut told, mut looks, mut waited) = (false, 0, 0);
    while begun.elapsed() < lease.total() * 3 / 2 || lost.loss().is_none() {
        leaders.iter_mut().for_each(|leader| leader.check(begun));
        looks += 1;
        waited += watcher.query_one(waits, &[&stuck.as_str()]).await.unwrap().get::<_, i64>(0);
        told |= locked(&holder) || waiting.iter().any(locked);
        assert!(begun.elapsed() < lease.total() * 4, "the mutex of the frozen row is lost");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert!(told, "the error says that the row is locked");
    // A fifth of the time on an idle machine.
    assert!(waited * 2 < looks, "broken: the connection waits for the row in {waited} of {looks} looks");
    frozen.rollback().await.unwrap();
    let leads_again = || holder.is_owner() || waiting.iter().any(Contention::is_owner);
    until("the stuck mutex is led again", leads_again).await;
    leaders.iter_mut().for_each(|leader| leader.check(begun));
}

#[tokio::test(flavor = "multi_thread")]
async fn row_38_a_cold_start_gives_each_mutex_one_leader() {
    let store = Store::shared();
    let mut handles = Vec::new();
    for _ in 0..5 {
        handles.push(simba(&store).await);
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
async fn row_39_rows_that_are_locked_for_a_while_cost_no_leader() {
    let store = Store::shared();
    let (simba, mutex) = (simba(&store).await, name("row-39"));
    let lease = Lease::new(Duration::from_millis(600), Duration::from_secs(2)).unwrap();
    let (leader, mut admin) = (simba.contend(mutex.clone()).with_lease(lease), store.admin().await);
    leader.start().unwrap();
    let tenure = leads(&leader).await;
    for _ in 0..rounds() * 3 {
        let deadline = tenure.deadline();
        until("a leader renews", || tenure.deadline() > deadline).await;
        // From one renewal to well after the next one is due; longer than a statement waits.
        let frozen = freeze(&mut admin, &mutex).await;
        let deadline = tenure.deadline();
        tokio::time::sleep(Duration::from_millis(600)).await;
        assert_eq!(tenure.deadline(), deadline, "the renewal waits for the row");
        frozen.rollback().await.unwrap();
        until("a leader renews", || tenure.deadline() > deadline).await;
        stays(std::slice::from_ref(&tenure), Duration::from_millis(20)).await;
    }
}

/// A statement that the server undoes to resolve a deadlock is sent again at once.
#[tokio::test(flavor = "multi_thread")]
async fn row_39_a_deadlock_is_tried_again_at_once() {
    // A transaction that has waited for this long looks for a deadlock once, and gives way if there is one.
    let private = Private::start(Setup::postgres().with_arg("-c").with_arg("deadlock_timeout=2s")).await;
    let limit = Duration::from_secs(10);
    let config = private.store.config(private.store.address());
    let config = config.with_lock_timeout(limit).with_statement_timeout(limit);
    let backend = PostgresBackend::connect(config).await.unwrap();
    let mut admin = private.store.admin().await;
    admin.batch_execute("SET deadlock_timeout = '30s'").await.unwrap();
    let watcher = private.store.admin().await;
    let mutex = name("row-39");
    for _ in 0..rounds() {
        let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
        let token = take(&mut *holder).await;
        assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
        holder.release(Holding::Under(token)).await.unwrap();
        // It locks the waiter's place; the waiter locks the mutex and waits for its place; then it wants the mutex.
        let transaction = admin.transaction().await.unwrap();
        transaction.batch_execute("SELECT FROM simba_waiter FOR UPDATE").await.unwrap();
        let (taken, wanted) = tokio::join!(soon("a deadlock ends", waiter.contend(Prior::Nothing)), async {
            soon("the waiter waits for its place", waits_for_a_lock(&watcher)).await;
            let lock = "SELECT FROM simba_mutex WHERE mutex = $1 FOR UPDATE";
            transaction.execute(lock, &[&mutex.as_str()]).await.unwrap();
            transaction.commit().await
        });
        wanted.unwrap();
        assert!(matches!(taken.unwrap(), Answer::Ours(_)), "broken: what the server undid is tried again");
        waiter.release(Holding::Unknown).await.unwrap();
    }
    assert!(deadlocks(&admin).await >= i64::from(rounds()), "there were deadlocks");
}

/// Completes when a statement of ours waits for a lock.
async fn waits_for_a_lock(watcher: &Client) {
    let waits =
        "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE usename = $1 AND wait_event_type = 'Lock')";
    while !watcher.query_one(waits, &[&USER]).await.unwrap().get::<_, bool>(0) {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

async fn deadlocks(admin: &Client) -> i64 {
    let count = "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()";
    let look = async {
        loop {
            // Statistics are told with a delay.
            let seen: i64 = admin.query_one(count, &[]).await.unwrap().get(0);
            if seen >= i64::from(rounds()) {
                return seen;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    soon("deadlocks are counted", look).await
}

/// Where a role insists on repeatable reads and nothing of a session may be set, the server undoes a statement whose
/// row changed while it waited: it is sent again at once.
#[tokio::test(flavor = "multi_thread")]
async fn row_39_statements_that_do_not_serialise_are_tried_again_at_once() {
    let private = Private::start(Setup::postgres()).await;
    let mut admin = private.store.admin().await;
    let strict = format!("ALTER ROLE {USER} SET default_transaction_isolation = 'repeatable read'");
    admin.batch_execute(&strict).await.unwrap();
    let store = private.store.clone().with_keys("pooler=true");
    let config = store.config(store.address()).with_lock_timeout(Duration::from_secs(5));
    let (backend, mutex) = (PostgresBackend::connect(config).await.unwrap(), name("row-39"));
    let watcher = private.store.admin().await;
    for round in 1..=rounds() as usize {
        let mut session = open(&backend, &mutex).await;
        if round == 1 {
            let token = take(&mut *session).await;
            session.release(Holding::Under(token)).await.unwrap();
        }
        // The row changes while the statement waits for it.
        let transaction = freeze(&mut admin, &mutex).await;
        let change = "UPDATE simba_mutex SET watched = watched WHERE mutex = $1";
        transaction.execute(change, &[&mutex.as_str()]).await.unwrap();
        let changed = async {
            waits_for_a_lock(&watcher).await;
            transaction.commit().await
        };
        let (answer, changed) =
            soon("an answer", async { tokio::join!(session.contend(Prior::Nothing), changed) }).await;
        changed.unwrap();
        let Answer::Ours(ours) = answer.expect("broken: what the server undid is tried again") else {
            panic!("broken: a free mutex is taken");
        };
        let log = std::fs::read_to_string(private.server().dir().join("log")).unwrap();
        let undone = log.matches("could not serialize access").count();
        assert!(undone >= round, "the server undid a statement in each round, not {undone} in {round}");
        session.release(Holding::Under(ours.token.unwrap())).await.unwrap();
    }
}

/// The same where many contenders meet.
#[tokio::test(flavor = "multi_thread")]
async fn row_39_a_crowd_that_does_not_serialise_sees_no_error() {
    let private = Private::start(Setup::postgres()).await;
    let admin = private.store.admin().await;
    let strict = format!("ALTER ROLE {USER} SET default_transaction_isolation = 'repeatable read'");
    admin.batch_execute(&strict).await.unwrap();
    // A row that is locked for a while is another matter.
    let store = private.store.clone().with_keys("pooler=true&lock_timeout=5s");
    let mutex = name("row-39");
    let mut tasks = Vec::new();
    for _ in 0..8 {
        let (backend, mutex) = (store.backend().await, mutex.clone());
        tasks.push(tokio::spawn(async move {
            for _ in 0..rounds() * 5 {
                let mut session = open(&backend, &mutex).await;
                // No error comes out, whoever met whom.
                while !matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)) {
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                session.release(Holding::Unknown).await.unwrap();
            }
        }));
    }
    for task in tasks {
        soon("everyone has its turns", task).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_40_a_connection_that_is_ended_again_and_again_costs_no_leader() {
    let private = Private::start(Setup::postgres()).await;
    let (admin, mutex) = (private.store.admin().await, name("row-40"));
    // As the matrix has it: a second to live, two hundred milliseconds between the ends.
    let (one, two) = (simba(&private.store).await, simba(&private.store).await);
    let contentions = [contend(&one, &mutex), contend(&two, &mutex)];
    until("somebody leads", || contentions.iter().any(Contention::is_owner)).await;
    let first = contentions.iter().find(|one| one.is_owner()).unwrap().tenure().unwrap().token();
    let mut changes = 0;
    let mut last = first;
    for _ in 0..rounds() * 15 {
        let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = $1";
        admin.execute(end, &[&USER]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(200)).await;
        let leaders: Vec<_> =
            contentions.iter().filter_map(Contention::tenure).filter(Tenure::is_held).collect();
        assert!(leaders.len() <= 1, "broken: two lead");
        for leader in leaders {
            assert!(leader.token() >= last, "broken: tokens grow");
            changes += u32::from(leader.token() > last);
            last = leader.token();
        }
    }
    assert!(changes <= 1, "broken: there is one change of leader at the most, not {changes}");
}

#[tokio::test(flavor = "multi_thread")]
async fn row_41_an_application_that_uses_all_connections_up_costs_no_leader() {
    let private = Private::start(Setup::postgres().with_arg("-c").with_arg("max_connections=20")).await;
    let (simba, mutex) = (simba(&private.store).await, name("row-41"));
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
    assert!(greedy.len() > 10, "the application took what there was");
    stays(&[tenure], Duration::from_secs(2) * rounds()).await;
    let refused = PostgresBackend::connect(private.store.config(private.store.address())).await.unwrap_err();
    assert!(refused.is_transient() && refused.to_string().contains("max_connections"), "{refused}");
    soon("a stop", leader.stop()).await.unwrap();
    leads(&waiter).await;
}

/// Leads for some seconds in which the clocks of Los Angeles are set.
async fn leads_through(start: &str, before: i32, after: i32) {
    let zone = Setup::postgres().with_arg("-c").with_arg("timezone=America/Los_Angeles");
    let private = Private::start(faked(zone, start).with_env("TZ", "UTC")).await;
    let (simba, mutex, admin) = (simba(&private.store).await, name("row-42"), private.store.admin().await);
    let leader = contend(&simba, &mutex);
    let tenure = leads(&leader).await;
    let _waiter = contend(&simba, &mutex);
    let operate = simba.operate().unwrap();
    let offset = "SELECT extract(timezone FROM clock_timestamp())::int / 3600";
    let seen: i32 = admin.query_one(offset, &[]).await.unwrap().get(0);
    assert_eq!(seen, before, "the test begins before the clocks are set");
    let end = tokio::time::Instant::now() + Duration::from_secs(7);
    while tokio::time::Instant::now() < end {
        stays(std::slice::from_ref(&tenure), Duration::from_millis(20)).await;
        let left = operate.read(&mutex).await.unwrap().remaining.expect("it is held");
        assert!(left <= lease().total(), "broken: a lease gets no longer by an hour: {left:?}");
    }
    let seen: i32 = admin.query_one(offset, &[]).await.unwrap().get(0);
    assert_eq!(seen, after, "the clocks were set");
}

#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_hour_that_comes_twice_costs_no_leader() {
    leads_through("2026-11-01 08:59:55", -7, -8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn row_42_the_hour_that_is_left_out_costs_no_leader() {
    leads_through("2027-03-14 09:59:55", -8, -7).await;
}

/// A server that believes it is another time.
fn faked(setup: Setup, time: &str) -> Setup {
    setup
        .with_env("LD_PRELOAD", simba_servers::faketime_library(false))
        .with_env("FAKETIME", format!("@{time}"))
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1")
}

#[tokio::test]
async fn row_43_a_step_of_the_server_s_clock_keeps_tokens_growing_and_is_told() {
    let (heard, _guard) = common::hear_here();
    let file = tempfile::NamedTempFile::new().unwrap();
    let set = |offset: &str| std::fs::write(file.path(), offset).unwrap();
    set("+0");
    std::fs::set_permissions(file.path(), std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
    let setup = Setup::postgres()
        .with_env("LD_PRELOAD", simba_servers::faketime_library(false))
        .with_env("FAKETIME_TIMESTAMP_FILE", file.path())
        .with_env("FAKETIME_NO_CACHE", "1")
        .with_env("FAKETIME_DONT_FAKE_MONOTONIC", "1");
    let private = Private::start(setup).await;
    let store = private.store.clone().with_keys("ping=200ms");
    let (one, two) = (simba(&store).await, simba(&store).await);
    let mutex = name("row-43");
    let mut last = FencingToken::new(0);
    for (round, offset) in ["+1h", "+0", "-1h", "+0"].iter().cycle().take(rounds() as usize * 4).enumerate() {
        // The clock was read at least once as it is.
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (guard, before) = (
            soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap(),
            heard.count("clock of the server was set"),
        );
        assert!(guard.token() > last, "broken: tokens grow in round {round}");
        last = guard.token();
        set(offset);
        let locker = two.locker(mutex.clone());
        let told = || heard.count("clock of the server was set") > before;
        until("a step of the server's clock is told", told).await;
        // Whatever became of the holder, the next one gets it in a bounded time and under a greater token.
        drop(guard);
        let next = soon("the store recovers", locker.lock()).await.unwrap();
        assert!(next.token() > last, "broken: tokens grow in round {round}");
        last = next.token();
        next.release().await.unwrap();
    }
}

/// A holder that died before the clock was set back keeps others out for one lease more, not for an hour.
#[tokio::test(flavor = "multi_thread")]
async fn row_43_a_dead_holder_of_before_a_step_back_is_succeeded() {
    let store = Store::shared();
    let (backend, mutex) = (store.backend().await, name("row-43-dead"));
    let mut dead = open(&backend, &mutex).await;
    let token = take(&mut *dead).await;
    let admin = store.admin().await;
    // The same as a step of the clock: all that was written lies an hour ahead.
    let step = "UPDATE simba_mutex SET acquired_at = acquired_at + interval '1h', \
                renewed_at = renewed_at + interval '1h', ttl_at = renewed_at + interval '1h 600ms', \
                until = renewed_at + interval '1h 1s' WHERE mutex = $1";
    admin.execute(step, &[&mutex.as_str()]).await.unwrap();
    let next = simba(&store).await;
    let guard = soon("a dead holder is succeeded", next.locker(mutex).lock()).await.unwrap();
    assert!(guard.token() > token);
}

/// Row 44: a token goes past the ends that a version has elsewhere; at the end of its own column it is an error.
#[tokio::test(flavor = "multi_thread")]
async fn row_44_a_token_at_its_end_is_told_and_never_wraps() {
    let store = Store::shared();
    let (backend, admin) = (store.backend().await, store.admin().await);
    for end in [(1 << 31) - 2, (1 << 32) - 2, i64::MAX] {
        let mutex = name("row-44");
        let write = "INSERT INTO simba_mutex VALUES ($1, '', '', $2, now(), now(), now(), now())";
        admin.execute(write, &[&mutex.as_str(), &end]).await.unwrap();
        let mut session = open(&backend, &mutex).await;
        if end < i64::MAX {
            assert!(take(&mut *session).await.get() > end as u64, "broken: tokens grow");
            continue;
        }
        let error = session.contend(Prior::Nothing).await.unwrap_err();
        assert_eq!(error.kind(), simba_core::ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("at its end"), "{error}");
    }
}

/// The client's time of day decides nothing.
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
    let backend = PostgresBackend::connect_with_clock(store.config(store.address()), clock).await.unwrap();
    let backend: Arc<dyn Backend> = Arc::new(backend);
    let simba =
        Simba::builder(Arc::clone(&backend)).clock(Jumping(simba_core::SystemClock)).lease(lease()).build();
    let mutex = name("row-45");
    let leader = contend(&simba, &mutex);
    let tenure = leads(&leader).await;
    let _waiter = contend(&simba, &mutex);
    stays(&[tenure], Duration::from_secs(1) * rounds()).await;
}

/// The pooler in front of the shared server.
fn pooled() -> Store {
    Store::at(&simba_servers::shared("SIMBA_TCK_PGBOUNCER"))
}

async fn behind_the_pooler(pooler: Pooler) -> PostgresBackend {
    Store::shared().set_up().await;
    PostgresBackend::connect(pooled().owner_config().with_pooler(pooler)).await.unwrap()
}

#[tokio::test]
async fn row_54_behind_a_transaction_pooler_waiters_poll_and_it_is_told() {
    let (heard, _guard) = common::hear_here();
    // Only the poll explains a hand-over.
    let polled = long().with_poll(Duration::from_millis(300)).unwrap();
    let backends = [behind_the_pooler(Pooler::Auto).await, behind_the_pooler(Pooler::Auto).await];
    for backend in &backends {
        let look = async {
            loop {
                let findings = backend.probe().await.unwrap().findings;
                if findings.iter().any(|finding| finding.problem.contains("pooler")) {
                    return;
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        soon("a probe finds the pooler", look).await;
    }
    assert_eq!(heard.count("a transaction pooler stands in front"), 2, "each handle tells it once");
    let [one, two] =
        backends.map(|one| Simba::builder(Arc::new(one) as Arc<dyn Backend>).lease(polled).build());
    let mutex = name("row-54");
    for _ in 0..rounds() * 3 {
        let guard = soon("a lock", one.locker(mutex.clone()).lock()).await.unwrap();
        let waiting = contend(&two, &mutex);
        until("a waiter waits", || waiting.owner().is_owner(guard.tenure().contender())).await;
        guard.release().await.unwrap();
        soon("a poll finds what no wake-up tells", waiting.acquired()).await.unwrap();
        waiting.stop().await.unwrap();
    }
}

/// Many clients share a few server processes: no statement of one is ever another's.
#[tokio::test(flavor = "multi_thread")]
async fn row_54_nothing_of_a_session_is_assumed_behind_a_pooler() {
    let mut tasks = Vec::new();
    let (mutex, counter) = (name("row-54"), Arc::new(std::sync::atomic::AtomicU32::new(0)));
    for at in 0..6 {
        // Some are told, some find out while they work.
        let pooler = if at % 2 == 0 { Pooler::Yes } else { Pooler::Auto };
        let backend: Arc<dyn Backend> = Arc::new(behind_the_pooler(pooler).await);
        let short = lease().with_poll(Duration::from_millis(50)).unwrap();
        let simba = Simba::builder(backend).lease(short).build();
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
        tokio::time::timeout(Duration::from_secs(60), task).await.expect("everyone has its turns").unwrap();
    }
    assert_eq!(counter.load(Ordering::SeqCst), 6 * rounds() * 3, "broken: a counter loses no step");
}

/// What the kit says of sessions, behind the pooler.
#[tokio::test(flavor = "multi_thread")]
async fn row_54_the_kit_holds_behind_a_pooler() {
    struct Pooled;
    #[simba_tck::async_trait]
    impl simba_tck::Fixture for Pooled {
        async fn connect(&self) -> simba_tck::Connection {
            Store::shared().set_up().await;
            let pooled = pooled();
            let proxy = Arc::new(simba_tck::FaultProxy::start(pooled.address()).await.unwrap());
            let (user, address) = (pooled.admin.user().unwrap().to_owned(), proxy.address());
            let url = format!("postgres://{user}@{address}/postgres?schema={}&pooler=true", common::SCHEMA);
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

/// A statement that waits for a row decides by what the row is then, not by what it was before.
#[tokio::test(flavor = "multi_thread")]
async fn what_was_taken_from_us_meanwhile_is_not_ours() {
    let store = Store::shared();
    let config = store.config(store.address()).with_lock_timeout(Duration::from_secs(5));
    store.set_up().await;
    let (backend, mutex) = (PostgresBackend::connect(config).await.unwrap(), name("meanwhile"));
    let (mut holder, mut waiter) = (open(&backend, &mutex).await, open(&backend, &mutex).await);
    take(&mut *holder).await;
    assert!(matches!(waiter.contend(Prior::Nothing).await.unwrap(), Answer::Held(_)));
    let mut admin = store.admin().await;
    // As after a call that won and whose reply was lost: the mutex is the waiter's, who is still queued.
    let won = "UPDATE simba_mutex m SET owner = w.contender, session = w.session FROM simba_waiter w \
               WHERE m.mutex = $1 AND w.mutex = $1";
    assert_eq!(admin.execute(won, &[&mutex.as_str()]).await.unwrap(), 1);
    let transaction = admin.transaction().await.unwrap();
    let lost =
        "UPDATE simba_mutex SET owner = 'another', session = 'another', token = token + 1 WHERE mutex = $1";
    transaction.execute(lost, &[&mutex.as_str()]).await.unwrap();
    let (answer, committed) = tokio::join!(waiter.contend(Prior::Unknown), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        transaction.commit().await
    });
    committed.unwrap();
    match answer.unwrap() {
        Answer::Held(other) => assert_eq!(other.owner.as_str(), "another"),
        other => panic!("broken: what was taken meanwhile is another's, not {other:?}"),
    }
}
