//! Clocks that are set, of the server and of the client.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{
    LONG_TIMEOUT, Private, Store, contend, leads, name, open, simba, soon, stays, take, unpaused, until,
};
use simba_core::spi::Backend;
use simba_core::{FencingToken, Lease, Simba};
use simba_postgres::PostgresBackend;
use simba_servers::Setup;
use simba_tck::rounds;
use simba_test_support::{Logs, set_server_clock, with_server_clock};

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
