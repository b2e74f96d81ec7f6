//! A pooler in front of the server.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use common::{Store, contend, long, name, soon, until};
use simba_core::Simba;
use simba_core::spi::{Backend, Operate as _};
use simba_postgres::{Pooler, PostgresBackend};
use simba_tck::rounds;
use simba_test_support::Logs;

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
