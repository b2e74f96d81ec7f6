//! Errors about a server, a schema or a right name the cause and the fix.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use simba_core::operate::{Operate, Probe};
use simba_core::spi::{Answer, Backend, Claim, ConnectUrl, Holding, Prior};
use simba_core::{ContenderId, Error, ErrorKind, Lease, Simba};
use simba_mysql::{MySqlBackend, MySqlConfig};
use simba_servers::Setup;
use simba_test_support::{follows_password_file, name_for};

async fn connect(url: &str) -> Result<MySqlBackend, Error> {
    MySqlBackend::connect(common::config(url)).await
}

fn assert_error(error: &Error, kind: ErrorKind, fix: &str) {
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(fix), "{error}");
    assert_eq!(error.backend(), Some("mysql"), "{error}");
    assert!(!format!("{error} {error:?}").contains(common::PASSWORD), "a secret is shown: {error:?}");
}

/// Returns the error of the first lock.
async fn first_lock(url: &str) -> Error {
    let simba = Simba::builder(Arc::new(connect(url).await.unwrap())).build();
    simba.locker(common::name("bad")).lock().await.err().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_server_is_unavailable() {
    let (refusing, _socket) = common::refusing_address();
    let error = connect(&common::least_url(refusing)).await.err().unwrap();
    assert_error(&error, ErrorKind::Unavailable, "check the host");
    // A server that accepts connections and sends nothing.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("{}?connect-timeout=200ms", common::least_url(silent.local_addr().unwrap()));
    assert_error(&connect(&url).await.err().unwrap(), ErrorKind::Unavailable, "200ms");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_of_another_protocol_is_an_error() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            use tokio::io::AsyncWriteExt;
            let _ = stream.write_all(b"SSH-2.0-OpenSSH_9.2\r\n").await;
            tokio::time::sleep(Duration::from_secs(5)).await;
        }
    });
    // Its first bytes look like the header of a long packet.
    let url = format!("{}?connect-timeout=1s", common::least_url(address));
    let error = connect(&url).await.err().unwrap();
    assert!(
        matches!(error.kind(), ErrorKind::Protocol | ErrorKind::Unavailable | ErrorKind::Config),
        "{error}"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_denied() {
    let address = common::shared().await;
    let url = format!("mysql://{}:wrong@{address}/simba", common::USER);
    assert_error(&connect(&url).await.err().unwrap(), ErrorKind::Denied, "password");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_database_is_reported() {
    let url = common::admin_url().replace("/simba", "/no_such_database");
    assert_error(&connect(&url).await.err().unwrap(), ErrorKind::Config, "create it");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_table_is_reported_and_can_be_created() {
    let table = format!("made_{}", std::process::id());
    let url = format!("{}?table={table}", common::admin_url());
    let error = first_lock(&url).await;
    assert_error(&error, ErrorKind::Config, "simba schema --apply");
    // The same handle works once the schema exists.
    let backend: Arc<dyn Backend> = Arc::new(connect(&url).await.unwrap());
    let simba = Simba::builder(Arc::clone(&backend)).build();
    assert!(simba.locker(common::name("bad")).lock().await.is_err());
    let operate = backend.operate().unwrap();
    assert!(operate.schema().unwrap().contains(&format!("`{table}`")));
    for _ in 0..2 {
        operate.apply_schema().await.unwrap();
    }
    simba.locker(common::name("bad")).lock().await.unwrap().release().await.unwrap();
    common::admin(&common::admin_url()).await.query_drop(format!("DROP TABLE {table}")).await.unwrap();
}

/// Creates a table by this statement and returns its URL for the least-privilege user.
async fn with_table(table: &str, create: &str, rights: &str) -> String {
    let address = common::shared().await;
    let mut admin = common::admin(&common::admin_url()).await;
    for statement in [
        format!("DROP TABLE IF EXISTS {table}"),
        format!("CREATE TABLE {table} {create}"),
        format!("GRANT {rights} ON simba.{table} TO '{}'@'%'", common::USER),
    ] {
        admin.query_drop(statement).await.unwrap();
    }
    format!("{}?table={table}", common::least_url(address))
}

const JVM_TABLE: &str = "(mutex VARCHAR(66) NOT NULL PRIMARY KEY COMMENT 'mutex name', acquired_at BIGINT UNSIGNED NOT NULL, \
    ttl_at BIGINT UNSIGNED NOT NULL, transition_at BIGINT UNSIGNED NOT NULL, owner_id CHAR(32) NOT NULL, \
    version INT UNSIGNED NOT NULL)";

#[tokio::test(flavor = "multi_thread")]
async fn the_table_of_jvm_simba_works_unchanged() {
    let url = with_table("of_jvm_simba", JVM_TABLE, "SELECT, INSERT, UPDATE").await;
    let simba = Simba::builder(Arc::new(connect(&url).await.unwrap())).build();
    let mutex = common::name("jvm");
    let first = simba.locker(mutex.clone()).lock().await.unwrap();
    assert!(simba.locker(mutex.clone()).try_lock().await.unwrap().is_none());
    let token = first.token();
    first.release().await.unwrap();
    assert!(simba.locker(mutex).lock().await.unwrap().token() > token);
    simba.shutdown().await;
}

/// MySQL has unique keys of expressions, which have no column.
#[tokio::test(flavor = "multi_thread")]
async fn a_table_with_a_unique_key_of_an_expression_works() {
    let on = common::Product::MySql;
    let address = on.shared().await;
    let mut admin = common::admin(&on.admin_url()).await;
    let table = "unique_expression";
    let create =
        JVM_TABLE.replace("NOT NULL)", "NOT NULL, UNIQUE KEY both_names ((CONCAT(mutex, owner_id))))");
    for statement in [format!("DROP TABLE IF EXISTS {table}"), format!("CREATE TABLE {table} {create}")] {
        admin.query_drop(statement).await.unwrap();
    }
    for grant in common::grants(table) {
        admin.query_drop(grant).await.unwrap();
    }
    let url = format!("{}?table={table}", common::least_url(address));
    let simba = Simba::builder(Arc::new(connect(&url).await.unwrap())).build();
    simba.locker(common::name("unique")).lock().await.unwrap().release().await.unwrap();
    simba.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_column_is_reported() {
    let url =
        with_table("no_version", &JVM_TABLE.replace("version", "versions"), "SELECT, INSERT, UPDATE").await;
    assert_error(&first_lock(&url).await, ErrorKind::Config, "lacks a column");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_another_shape_is_reported() {
    for (table, create) in [
        ("other_shape_a", JVM_TABLE.replace("CHAR(32)", "DATETIME")),
        ("other_shape_b", JVM_TABLE.replace("INT UNSIGNED NOT NULL)", "VARCHAR(9) NOT NULL)")),
        ("other_shape_c", JVM_TABLE.replace("PRIMARY KEY", "")),
        // Two rows of one mutex would be two mutexes.
        (
            "other_shape_d",
            JVM_TABLE
                .replace("PRIMARY KEY", "")
                .replace("NOT NULL)", "NOT NULL, PRIMARY KEY (mutex, owner_id))"),
        ),
        (
            "other_shape_e",
            JVM_TABLE.replace("PRIMARY KEY", "").replace("NOT NULL)", "NOT NULL, UNIQUE (mutex(8)))"),
        ),
    ] {
        let url = with_table(table, &create, "SELECT, INSERT, UPDATE").await;
        assert_error(&first_lock(&url).await, ErrorKind::Config, "name another with `table`");
    }
}

/// A row with values that only another program writes is an error for its own mutex. Others are read by the same
/// statements: they are acquired and listed, and their waiters are notified.
#[tokio::test(flavor = "multi_thread")]
async fn a_foreign_row_affects_only_its_own_mutex() {
    let signed = JVM_TABLE.replace("acquired_at BIGINT UNSIGNED", "acquired_at BIGINT");
    assert_ne!(signed, JVM_TABLE);
    let url = with_table("foreign_row", &signed, "SELECT, INSERT, UPDATE").await;
    let names = ["first", "foreign", "good"].map(common::name);
    let mut admin = common::admin(&common::admin_url()).await;
    let insert = "INSERT INTO foreign_row VALUES (?, -1, 0, 0, '', 1)";
    admin.exec_drop(insert, (names[1].as_str(),)).await.unwrap();
    let backend = connect(&format!("{url}&connections=1")).await.unwrap();
    let mut sessions = Vec::new();
    for name in &names {
        let claim = Claim::new(name.clone(), ContenderId::generate(), Lease::default());
        sessions.push(backend.open(claim).await.unwrap());
    }
    let [first, foreign, good] = sessions.as_mut_slice() else { unreachable!("there are three") };
    // The first call is sent alone, the others together behind it.
    let (_, refused, acquired) = tokio::join!(
        first.contend(Prior::Nothing),
        foreign.contend(Prior::Nothing),
        good.contend(Prior::Nothing)
    );
    assert_error(&refused.unwrap_err(), ErrorKind::Config, "another shape");
    let Answer::Ours(ours) = acquired.unwrap() else { panic!("it is free") };
    let listed: Vec<_> = backend.list().await.unwrap().into_iter().map(|record| record.mutex).collect();
    assert_eq!(listed, [names[0].clone(), names[2].clone()]);

    let other = connect(&url).await.unwrap();
    let claim = Claim::new(names[2].clone(), ContenderId::generate(), Lease::default());
    let mut waiter = other.open(claim).await.unwrap();
    let claim = Claim::new(names[1].clone(), ContenderId::generate(), Lease::default());
    let mut foreign = other.open(claim).await.unwrap();
    for session in [&mut foreign, &mut waiter] {
        session.changed().await.unwrap();
    }
    good.release(Holding::Under(ours.token.unwrap())).await.unwrap();
    let notified = tokio::time::timeout(Duration::from_secs(30), waiter.changed()).await;
    notified.expect("a poll finds the mutex free").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_right_is_reported() {
    let mut admin = common::admin(&common::admin_url()).await;
    for (table, rights) in
        [("no_insert", "SELECT, UPDATE"), ("no_update", "SELECT, INSERT"), ("no_select", "INSERT, UPDATE")]
    {
        let _ = admin.query_drop(format!("REVOKE ALL ON simba.{table} FROM '{}'@'%'", common::USER)).await;
        let url = with_table(table, JVM_TABLE, rights).await;
        assert_error(&first_lock(&url).await, ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE");
    }
    let error = {
        let url = format!("{}?table=nothing_at_all", common::least_url(common::shared().await));
        let backend = connect(&url).await.unwrap();
        backend.operate().unwrap().apply_schema().await.unwrap_err()
    };
    assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_server_is_reported() {
    let server = common::private(Setup::mariadb()).await;
    let mut admin = common::admin(&server.url()).await;
    admin.query_drop("SET GLOBAL read_only = 1").await.unwrap();
    let url = common::least_url(server.address());
    let simba = Simba::builder(Arc::new(connect(&url).await.unwrap())).build();
    // `lock` would wait for the end of a failover.
    let error = simba.locker(common::name("bad")).try_lock().await.err().unwrap();
    assert_error(&error, ErrorKind::Unavailable, "primary");
    let probe = connect(&url).await.unwrap().operate().unwrap().probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.problem.contains("read-only")), "{probe:?}");
    // The handle works again once the server accepts writes.
    let simba = Simba::builder(Arc::new(connect(&url).await.unwrap())).build();
    admin.query_drop("SET GLOBAL read_only = 0").await.unwrap();
    simba.locker(common::name("bad")).lock().await.unwrap().release().await.unwrap();
}

/// On a full disk no new mutex can be taken, and the error says so. Held mutexes are renewed in place; once
/// there is space, everything recovers without a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_and_held_mutexes_stay_held() {
    let server = common::private(Setup::mariadb().with_disk_of(192)).await;
    let url = common::least_url(server.address());
    // A call of the other handle has five seconds, so that its error is the full disk and not a timeout.
    let long = Lease::new(Duration::from_secs(15), Duration::from_secs(15)).unwrap();
    let simba = Simba::builder(Arc::new(connect(&url).await.unwrap())).with_lease(common::lease()).build();
    let other = Simba::builder(Arc::new(connect(&url).await.unwrap())).with_lease(long).build();
    let name = common::name("held");
    let held = simba.locker(name.clone()).lock().await.unwrap();
    server.disk().fill().unwrap();
    let error = first_refusal(&other).await;
    assert_error(&error, ErrorKind::Unavailable, "no room left to write: make room");
    let (token, deadline) = (held.token(), held.deadline());
    common::until("the held mutex is renewed", || held.deadline() > deadline).await;
    assert!(other.locker(name.clone()).try_lock().await.unwrap().is_none(), "it is held for others too");

    server.disk().make_room().unwrap();
    let new = other.locker(common::name("new")).lock().await.expect("it recovers without a restart");
    new.release().await.unwrap();
    assert!(held.is_held(), "the held mutex was not lost");
    held.release().await.unwrap();
    assert!(other.locker(name).lock().await.unwrap().token() > token);
}

/// Takes new mutexes until one is refused: the table's file has some space of its own.
async fn first_refusal(simba: &Simba) -> Error {
    for _ in 0..20_000 {
        match simba.locker(common::name("new")).try_lock().await {
            Ok(guard) => guard.expect("no other contender").release().await.unwrap(),
            Err(error) => return error,
        }
    }
    panic!("a full disk is an error");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_finds_dangerous_settings() {
    let myisam = format!("{JVM_TABLE} ENGINE = MyISAM");
    let url = with_table("not_innodb", &myisam, "SELECT, INSERT").await;
    let probe = connect(&url).await.unwrap().operate().unwrap().probe().await.unwrap();
    let problems: Vec<_> = probe.findings.iter().map(|finding| finding.problem.as_str()).collect();
    for word in ["MyISAM", "lacks UPDATE"] {
        assert!(problems.iter().any(|problem| problem.contains(word)), "{word}: {problems:?}");
    }
    let zone = common::address_of(&simba_servers::shared("SIMBA_TCK_MARIADB_ZONE"));
    common::prepare(&simba_servers::shared("SIMBA_TCK_MARIADB_ZONE")).await;
    let probe = connect(&common::least_url(zone)).await.unwrap().operate().unwrap().probe().await.unwrap();
    assert!(
        probe.findings.iter().any(|finding| finding.problem.contains("America/Los_Angeles")),
        "{probe:?}"
    );
    assert!(probe.server.contains("MariaDB"), "{probe:?}");
}

fn problems(probe: &Probe) -> Vec<&str> {
    probe.findings.iter().map(|finding| finding.problem.as_str()).collect()
}

/// Where several servers take writes, leases are counted by several clocks.
#[tokio::test(flavor = "multi_thread")]
async fn a_probe_finds_servers_with_several_writers() {
    let listen = simba_servers::free_address().unwrap();
    let galera = Setup::mariadb()
        .with_arg("--wsrep-on=ON")
        .with_arg("--wsrep-provider=/usr/lib/galera/libgalera_smm.so")
        .with_arg("--wsrep-cluster-address=gcomm://")
        .with_arg("--wsrep-node-address=127.0.0.1")
        .with_arg(format!("--wsrep-provider-options=gmcast.listen_addr=tcp://{listen}"))
        .with_arg("--binlog-format=ROW");
    let server = common::private(galera).await;
    let backend = connect(&common::least_url(server.address())).await.unwrap();
    let probe = backend.operate().unwrap().probe().await.unwrap();
    assert!(problems(&probe).iter().any(|problem| problem.contains("Galera")), "{probe:?}");

    let group = Setup::mysql()
        .with_arg("--plugin-load-add=group_replication.so")
        .with_arg("--group-replication-single-primary-mode=OFF");
    let server = common::private(group).await;
    let backend = connect(&common::least_url(server.address())).await.unwrap();
    let probe = backend.operate().unwrap().probe().await.unwrap();
    assert!(problems(&probe).iter().any(|problem| problem.contains("several writers")), "{probe:?}");
    assert!(!probe.server.contains("MariaDB"), "{probe:?}");
}

/// Row 65: the user of all these tests has three rights on one table, and no other.
#[tokio::test(flavor = "multi_thread")]
async fn row_65_three_rights_on_one_table_are_enough() {
    let server = common::private(Setup::mariadb()).await;
    let mut admin = common::admin(&server.url()).await;
    let grants: Vec<String> = admin.query(format!("SHOW GRANTS FOR '{}'@'%'", common::USER)).await.unwrap();
    let grants: Vec<_> = grants.iter().filter(|grant| !grant.starts_with("GRANT USAGE")).collect();
    assert_eq!(
        grants,
        [&format!("GRANT SELECT, INSERT, UPDATE ON `simba`.`simba_mutex` TO `{}`@`%`", common::USER)]
    );
    let fixture = common::MySql::at(server.address());
    for name in [
        "multi_contend",
        "a_counter_loses_no_step",
        "an_eviction_respects_its_condition",
        "a_schema_is_applied_again",
    ] {
        simba_tck::cases().iter().find(|case| case.name == name).unwrap().run(&fixture).await;
    }
    let mut user = common::admin(&common::least_url(server.address())).await;
    assert!(user.query_drop("DELETE FROM simba_mutex").await.is_err(), "the user cannot delete");
}

#[tokio::test(flavor = "multi_thread")]
async fn password_file_is_read_at_every_connection() {
    let address = common::shared().await;
    let mut admin = common::admin(&common::admin_url()).await;
    let user = name_for("rotated").as_str()[..20].to_owned();
    let grant = format!("GRANT SELECT, INSERT, UPDATE ON simba.simba_mutex TO '{user}'@'%'");
    admin.query_drop(format!("CREATE USER '{user}'@'%'")).await.unwrap();
    admin.query_drop(grant).await.unwrap();
    let change = |password: &'static str| {
        let (url, statement) =
            (common::admin_url(), format!("ALTER USER '{user}'@'%' IDENTIFIED BY '{password}'"));
        async move { common::admin(&url).await.query_drop(statement).await.unwrap() }
    };
    let connect = |url: ConnectUrl| {
        let config = MySqlConfig::from_url(&url).unwrap();
        MySqlBackend::connect(config.with_connect_timeout(Duration::from_secs(30)).unwrap())
    };
    let url = |address| format!("mysql://{user}@{address}/simba");
    follows_password_file(address, url, change, connect).await;
    admin.query_drop(format!("DROP USER '{user}'@'%'")).await.unwrap();
}
