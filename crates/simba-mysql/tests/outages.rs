//! Servers that end connections, accept no more of them, accept no writes, or restart.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use common::Product;
use common::calls::token;
use common::{SECOND, lead, ms, simba};
use mysql_async::prelude::Queryable;
use mysql_async::{Opts, Pool, PoolConstraints, PoolOpts};
use simba_core::spi::{Backend, Claim, Prior};
use simba_core::{ContenderId, Lease, Simba};
use simba_servers::{Server, Setup};
use simba_tck::{Connection, Fixture, Profile, async_trait, rounds};
use tokio::time::{sleep, timeout};

on_both_servers! {
    row_40_killed_connections_end_no_tenure
    an_idle_connection_with_slow_commits_is_pinged
    a_restart_of_the_server_is_survived
    a_killed_server_keeps_confirmed_writes
    a_waiter_survives_a_temporarily_read_only_server
}

/// Row 40: an operator kills every connection of the handle, and again after every renewal.
async fn row_40_killed_connections_end_no_tenure(on: Product) {
    let address = on.shared().await;
    let mut admin = common::admin(&on.admin_url()).await;
    // A separate user, so that the other tests keep their connections.
    for statement in [
        "CREATE USER IF NOT EXISTS 'row40'@'%' IDENTIFIED BY 'row40'",
        "GRANT SELECT, INSERT, UPDATE ON simba.simba_mutex TO 'row40'@'%'",
    ] {
        admin.query_drop(statement).await.unwrap();
    }
    // On a busy machine a new connection may be killed before it has carried the renewal.
    let lease = Lease::new(3 * SECOND, 9 * SECOND).unwrap();
    let simba = simba(&format!("mysql://row40:row40@{address}/simba")).await.with_lease(lease);
    let (_contention, tenure) = lead(&simba, &common::name("row40")).await;
    let (mut killed, find) = (0, "SELECT id FROM information_schema.processlist WHERE user = 'row40'");
    let killing = async {
        // A connection that was not needed since the last round is not there to be killed.
        while killed < rounds() * 5 {
            let deadline = tenure.deadline();
            let ids: Vec<u64> = admin.query(find).await.unwrap();
            for id in ids {
                killed += u32::from(admin.query_drop(format!("KILL CONNECTION {id}")).await.is_ok());
            }
            common::until("it is renewed", || tenure.loss().is_some() || tenure.deadline() > deadline).await;
            assert_eq!(tenure.loss(), None, "killed connections end no tenure");
        }
    };
    timeout(30 * SECOND * rounds(), killing).await.expect("connections are killed");
    simba.shutdown().await;
}

/// The last commit took long, as with replicas far away. A firewall may forget the connection while it is idle: unless
/// a ping keeps or replaces it, the next renewal is sent on a dead connection.
async fn an_idle_connection_with_slow_commits_is_pinged(on: Product) {
    let connection = on.fixture().with_keys("connections=1").connect().await;
    // Nothing is renewed: the session has no driver.
    let lease = Lease::new(3 * SECOND, 90 * SECOND).unwrap();
    let claim = Claim::new(common::name("idle"), ContenderId::generate(), lease);
    let mut session = connection.backend.open(claim).await.unwrap();
    connection.network.delay(ms(20), ms(0));
    token(session.contend(Prior::Nothing).await.unwrap()).unwrap();
    let before = connection.network.requests();
    common::until("it is pinged", || connection.network.requests() > before).await;
}

/// Row 41: the application has used up its own pool and every connection that the server has left. The handle
/// has its own, and keeps them.
#[tokio::test(flavor = "multi_thread")]
async fn row_41_an_application_that_uses_all_connections_ends_no_tenure() {
    let server = common::private(Setup::mariadb().with_arg("--max-connections=20")).await;
    let url = common::least_url(server.address());
    let simba = simba(&url).await;
    let mutex = common::name("row41");
    let (leader, tenure) = lead(&simba, &mutex).await;
    let successor = simba.contend(mutex);
    successor.start().unwrap();
    common::until("the successor sees the leader", || successor.owner().is_owner(tenure.contender())).await;
    let opts = mysql_async::OptsBuilder::from_opts(Opts::from_url(&url).unwrap())
        .prefer_socket(false)
        .pool_opts(PoolOpts::default().with_constraints(PoolConstraints::new(0, 100).unwrap()));
    let (pool, mut taken) = (Pool::new(opts), Vec::new());
    while let Ok(Ok(conn)) = timeout(30 * SECOND, pool.get_conn()).await {
        taken.push(conn);
    }
    assert!(taken.len() >= 10, "the application took all free connections");
    for _ in 0..rounds() {
        let deadline = tenure.deadline();
        common::until("it is renewed", || tenure.loss().is_some() || tenure.deadline() > deadline).await;
        assert_eq!(tenure.loss(), None, "an application without connections ends no tenure");
    }
    let refused = simba_mysql::MySqlBackend::connect(common::config(&url)).await.err().unwrap();
    assert!(refused.is_transient() && refused.to_string().contains("max_connections"), "{refused}");
    timeout(20 * SECOND, leader.stop()).await.unwrap().unwrap();
    timeout(20 * SECOND, successor.acquired()).await.unwrap().unwrap();
}

/// A planned failover makes the old primary read-only first. A waiter keeps waiting, and acquires afterwards.
async fn a_waiter_survives_a_temporarily_read_only_server(on: Product) {
    let server = common::private(on.setup()).await;
    let url = common::least_url(server.address());
    let long = Lease::new(30 * SECOND, 30 * SECOND).unwrap().with_poll(30 * SECOND).unwrap();
    let handle =
        async || Simba::builder(std::sync::Arc::new(common::connect(&url).await)).with_lease(long).build();
    let (one, two) = (handle().await, handle().await);
    let mutex = common::name("failover");
    let guard = one.locker(mutex.clone()).lock().await.unwrap();
    let waiter = two.locker(mutex.clone());
    let waiting = tokio::spawn(async move { waiter.lock().await });
    let mut admin = common::admin(&server.url()).await;
    // A handle reconnects after a refusal: the name may lead to the new primary then.
    let connections = "SHOW GLOBAL STATUS LIKE 'Connections'";
    let count = |row: Option<(String, String)>| row.unwrap().1.parse::<u64>().unwrap();
    admin.query_drop("SET GLOBAL read_only = 1").await.unwrap();
    // An administrator can write in spite of it.
    let free = "UPDATE simba_mutex SET acquired_at = 0, ttl_at = 0, transition_at = 0, owner_id = '', \
                version = version + 1 WHERE mutex = ?";
    admin.exec_drop(free, (mutex.as_str(),)).await.unwrap();
    let before = count(admin.query_first(connections).await.unwrap());
    let refused = async {
        while count(admin.query_first(connections).await.unwrap()) < before + 2 {
            sleep(ms(20)).await;
        }
    };
    timeout(20 * SECOND, refused).await.expect("the waiter tries to take the free mutex more than once");
    assert!(!waiting.is_finished(), "a temporarily read-only server ends no wait");
    admin.query_drop("SET GLOBAL read_only = 0").await.unwrap();
    let next = timeout(20 * SECOND, waiting).await.unwrap().unwrap().unwrap();
    assert!(next.token() > guard.token());
}

/// A private server that can be restarted.
struct Private(std::sync::Arc<std::sync::Mutex<Server>>);

#[async_trait]
impl Fixture for Private {
    async fn connect(&self) -> Connection {
        let address = self.0.lock().unwrap().address();
        common::MySql::at(address).connect().await
    }

    fn profile(&self) -> Profile {
        common::profile()
    }

    async fn restart(&self) -> bool {
        let server = std::sync::Arc::clone(&self.0);
        tokio::task::spawn_blocking(move || server.lock().unwrap().restart().unwrap()).await.unwrap();
        true
    }
}

async fn a_restart_of_the_server_is_survived(on: Product) {
    let server = common::private(on.setup()).await;
    let fixture = Private(std::sync::Arc::new(std::sync::Mutex::new(server)));
    let case = simba_tck::cases().iter().find(|case| case.name == "a_restart_of_the_store_is_survived");
    case.unwrap().run(&fixture).await;
}

/// A server that is killed and restarted has the writes that it confirmed.
async fn a_killed_server_keeps_confirmed_writes(on: Product) {
    let mut server = common::private(on.setup()).await;
    let url = common::least_url(server.address());
    let simba = simba(&url).await;
    let mutex = common::name("killed");
    let mut last = 0;
    for _ in 0..rounds() {
        let guard = simba.locker(mutex.clone()).lock().await.unwrap();
        assert!(guard.token().get() > last);
        last = guard.token().get();
        server = tokio::task::spawn_blocking(move || {
            server.kill().unwrap();
            server.restart().unwrap();
            server
        })
        .await
        .unwrap();
        drop(guard);
        let locked = async {
            loop {
                match simba.locker(mutex.clone()).lock().await {
                    Ok(guard) => return guard,
                    Err(error) => assert!(error.is_transient(), "{error}"),
                }
            }
        };
        let guard = timeout(60 * SECOND, locked).await.unwrap();
        assert!(guard.token().get() > last, "tokens survive a power cut");
        last = guard.token().get();
        guard.release().await.unwrap();
    }
}
