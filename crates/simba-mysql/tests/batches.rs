//! Statements and polls that serve several mutexes.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeMap;
use std::time::Duration;

use common::Product;
use common::calls::{contend_all, owner_on, token};
use common::injector::Injector;
use common::{SECOND, ms};
use mysql_async::prelude::Queryable;
use simba_core::spi::{Answer, Backend, Claim, Holding, Prior};
use simba_core::{ContenderId, Contention, Lease, MutexName, Simba, Tenure};
use simba_servers::{Server, Setup};
use simba_tck::Fixture;
use tokio::time::sleep;

on_both_servers! {
    a_name_that_the_table_spells_differently_is_found_in_a_batch
    takes_of_names_that_differ_by_case_have_one_winner
    takes_of_names_that_differ_by_accents_have_one_winner
    a_limit_on_joins_limits_no_list
}

/// Names that differ by accents only are one row in the usual collations. A read of many rows finds it too.
async fn a_name_that_the_table_spells_differently_is_found_in_a_batch(on: Product) {
    let backend = common::connect(&format!("{}?connections=1", common::least_url(on.shared().await))).await;
    let open = async |mutex: MutexName| {
        let claim = Claim::new(mutex, ContenderId::generate(), Lease::default());
        backend.open(claim).await.unwrap()
    };
    let plain = common::name("cafe");
    let accented = MutexName::legacy(plain.as_str().replacen('e', "é", 1)).unwrap();
    let mut holder = open(plain.clone()).await;
    let held = token(holder.contend(Prior::Nothing).await.unwrap()).unwrap();
    // The first call is sent alone, the others share statements.
    let mut sessions =
        [open(common::name("first")).await, open(accented).await, open(common::name("other")).await];
    let answers = contend_all(&mut sessions, Prior::Nothing).await;
    assert!(matches!(answers[0], Ok(Answer::Ours(_))) && matches!(answers[2], Ok(Answer::Ours(_))));
    assert!(matches!(answers[1], Ok(Answer::Held(_))), "{:?}", answers[1]);

    holder.release(Holding::Under(held)).await.unwrap();
    let [first, accented, other] = &mut sessions;
    assert!(token(accented.contend(Prior::Nothing).await.unwrap()).is_some());
    let (_, inspected, _) = tokio::join!(first.inspect(), accented.inspect(), other.inspect());
    assert!(inspected.unwrap().is_some(), "the mutex is held");
    let (_, released, _) = tokio::join!(first.inspect(), accented.release(Holding::Unknown), other.inspect());
    released.unwrap();
    assert_eq!(owner_on(on, &plain).await, "", "a release of an unknown hold frees the row");
}

async fn takes_of_names_that_differ_by_case_have_one_winner(on: Product) {
    let lower = common::name("job");
    let upper = MutexName::new(lower.as_str().replacen('j', "J", 1)).unwrap();
    takes_have_one_winner(on, [upper, lower]).await;
}

/// The usual collations ignore accents too.
async fn takes_of_names_that_differ_by_accents_have_one_winner(on: Product) {
    let plain = common::name("cafe");
    let accented = MutexName::legacy(plain.as_str().replacen('e', "é", 1)).unwrap();
    takes_have_one_winner(on, [accented, plain]).await;
}

/// Both names are one row. The handle remembers the version at which each was free, and only the second one is current:
/// a batch with both must not give the row to the first, which cannot know that it acquired.
async fn takes_have_one_winner(on: Product, [stale, current]: [MutexName; 2]) {
    let backend = common::connect(&format!("{}?connections=1", common::least_url(on.shared().await))).await;
    let mut sessions = Vec::new();
    for mutex in [common::name("first"), stale, current] {
        let claim = Claim::new(mutex, ContenderId::generate(), Lease::default());
        sessions.push(backend.open(claim).await.unwrap());
    }
    for session in &mut sessions[1..] {
        let token = token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
        session.release(Holding::Under(token)).await.unwrap();
    }
    // The first call is sent alone, the others share statements.
    let answers = contend_all(&mut sessions, Prior::Nothing).await;
    let acquired = answers[1..].iter().filter(|answer| matches!(answer, Ok(Answer::Ours(_)))).count();
    assert_eq!(acquired, 1, "{answers:?}");
}

/// The limit on joins counts the rows of a single table too: the server refuses a read of more rows with error 1104.
async fn a_limit_on_joins_limits_no_list(on: Product) {
    let server = common::private(on.setup().with_arg("--max-join-size=1")).await;
    let backend = common::connect(&common::least_url(server.address())).await;
    let names: Vec<MutexName> = (0..20).map(|_| common::name("joins")).collect();
    for mutex in &names {
        let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
        token(backend.open(claim).await.unwrap().contend(Prior::Nothing).await.unwrap());
    }
    let operate = backend.operate().unwrap();
    assert_eq!(operate.list().await.unwrap().len(), names.len());
    assert!(operate.read(&names[0]).await.unwrap().owner.is_some());
}

/// Renewals that are due together share statements, and a handle has the configured number of connections.
#[tokio::test(flavor = "multi_thread")]
async fn renewals_share_statements_and_connections() {
    let connection = common::MySql::shared().with_keys("connections=2").connect().await;
    let simba = Simba::builder(connection.backend).build();
    let lease = Lease::new(3 * SECOND, 9 * SECOND).unwrap();
    let contentions: Vec<Contention> =
        (0..200).map(|_| simba.contend(common::name("batch")).with_lease(lease)).collect();
    contentions.iter().for_each(|contention| contention.start().unwrap());
    common::until("all lead", || contentions.iter().all(Contention::is_owner)).await;
    // Calls that arrive during a statement are sent with the next.
    connection.network.delay(ms(4), Duration::ZERO);
    let before = connection.network.requests();
    for _ in 0..2 {
        let tenures: Vec<Tenure> = contentions.iter().filter_map(Contention::tenure).collect();
        assert_eq!(tenures.len(), contentions.len(), "all still lead");
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
    assert!(version >= 3, "every renewal increases the version");
    simba.shutdown().await;
}

fn owner(contention: &Contention) -> String {
    contention.tenure().unwrap().contender().to_string()
}

/// Without waiters there are no polls. Many waiters share one statement, sent at most ten times a second.
#[tokio::test(flavor = "multi_thread")]
async fn one_poll_serves_everyone_who_waits() {
    let one = common::MySql::shared().connect().await;
    let long = Lease::new(30 * SECOND, 20 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let holder = Simba::builder(one.backend).with_lease(long).build();
    let names: Vec<MutexName> = (0..40).map(|_| common::name("poll")).collect();
    let mut guards = Vec::new();
    for name in &names {
        guards.push(holder.locker(name.clone()).lock().await.unwrap());
    }
    // Only now: a connection that is idle for 5 seconds is pinged.
    let two = common::MySql::shared().connect().await;
    let waiting = Simba::builder(two.backend).with_lease(long).build();
    let quiet = two.network.requests();
    sleep(SECOND).await;
    assert_eq!(two.network.requests(), quiet, "no polls without waiters");
    let waiters: Vec<Contention> = names.iter().map(|name| waiting.contend(name.clone())).collect();
    waiters.iter().for_each(|waiter| waiter.start().unwrap());
    common::until("all see the holder", || {
        waiters.iter().all(|waiter| waiter.owner() != simba_core::MutexOwner::none())
    })
    .await;
    sleep(2 * SECOND).await;
    let (began, before) = (tokio::time::Instant::now(), two.network.requests());
    sleep(5 * SECOND).await;
    let requests = two.network.requests() - before;
    // A busy machine may have slept for longer than five seconds.
    let most = (12.0 * began.elapsed().as_secs_f64()).ceil() as usize;
    assert!((2..=most).contains(&requests), "{requests} requests for forty waiters, at most {most}");
    drop(guards);
    common::until("all acquire", || waiters.iter().all(Contention::is_owner)).await;
    waiting.shutdown().await;
    holder.shutdown().await;
}

/// However often mutexes change hands, a handle polls at most a hundred times in ten seconds.
#[tokio::test(flavor = "multi_thread")]
async fn a_poll_keeps_to_its_budget_while_mutexes_go_round() {
    let setup = Setup::mariadb().with_arg("--general-log").with_arg("--general-log-file=general.log");
    let server = common::private(setup).await;
    let url = common::least_url(server.address());
    let long = Lease::new(30 * SECOND, 20 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let handle =
        async || Simba::builder(std::sync::Arc::new(common::connect(&url).await)).with_lease(long).build();
    let (one, two) = (handle().await, handle().await);
    let names: Vec<MutexName> = (0..8).map(|_| common::name("budget")).collect();
    let cycle = |simba: &Simba, name: &MutexName| {
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
    let tasks: Vec<_> = names.iter().flat_map(|name| [cycle(&one, name), cycle(&two, name)]).collect();
    sleep(SECOND).await;
    let (began, before) = (tokio::time::Instant::now(), polls(&server));
    sleep(10 * SECOND).await;
    let after = polls(&server);
    // A busy machine may have slept for longer: forty polls that were saved up, and six a second, of each
    // handle.
    let most = 2 * (41 + (6.0 * began.elapsed().as_secs_f64()).ceil() as usize);
    tasks.iter().for_each(tokio::task::JoinHandle::abort);
    assert!((20..=most).contains(&(after - before)), "at most {most} polls, not {}", after - before);
    one.shutdown().await;
    two.shutdown().await;
}

/// Returns the number of polls in the server's log. A handle polls over one connection at a time, and over a
/// new one if the server does not answer.
fn polls(server: &Server) -> usize {
    let log = std::fs::read_to_string(server.dir().join("data/general.log")).unwrap();
    let mut polls = BTreeMap::<String, usize>::new();
    for line in log.lines() {
        let logged = ["Execute", "Query"].iter().find_map(|word| line.split_once(word));
        let Some((before, statement)) = logged else { continue };
        let connection = before.split_whitespace().last().unwrap().to_owned();
        if statement.contains("max_statement_time = 5 ") {
            polls.insert(connection.clone(), 0);
        }
        if let Some(count) = polls.get_mut(&connection).filter(|_| statement.contains("WHERE mutex IN (")) {
            *count += 1;
        }
    }
    polls.into_values().sum()
}

/// A list of all mutexes that the server does not answer delays no notification.
#[tokio::test(flavor = "multi_thread")]
async fn a_list_that_hangs_delays_no_waiter() {
    let address = common::shared().await;
    let (injector, between) = Injector::start(address).await;
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let holder = Simba::builder(std::sync::Arc::new(common::connect(&common::least_url(address)).await))
        .with_lease(long)
        .build();
    let backend: std::sync::Arc<dyn Backend> =
        std::sync::Arc::new(common::connect(&common::least_url(between)).await);
    let waiting = Simba::builder(std::sync::Arc::clone(&backend)).with_lease(long).build();
    let mutex = common::name("list");
    injector.hang("ORDER BY mutex");
    // A list ends after five seconds. On a busy machine an acquisition may take as long, but not every time.
    for round in 1..=10 {
        let guard = holder.locker(mutex.clone()).lock().await.unwrap();
        let waiter = waiting.contend(mutex.clone());
        waiter.start().unwrap();
        common::until("the waiter sees the holder", || waiter.owner().is_owner(guard.tenure().contender()))
            .await;
        let backend = std::sync::Arc::clone(&backend);
        let mut list = tokio::spawn(async move { backend.operate().unwrap().list().await.map(drop) });
        common::until("the list hangs", || injector.injected() == round).await;
        guard.release().await.unwrap();
        tokio::select! {
            biased;
            tenure = waiter.acquired() => {
                drop(tenure.unwrap());
                list.abort();
                waiting.shutdown().await;
                return;
            }
            ended = &mut list => assert!(ended.unwrap().is_err(), "the list hangs"),
        }
        waiter.stop().await.unwrap();
    }
    panic!("no waiter is notified while a list hangs");
}
