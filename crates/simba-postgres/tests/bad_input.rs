//! Problems with the server, its tables or the URL are reported with cause and fix.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{LONG_TIMEOUT, PASSWORD, Private, SCHEMA, Store, USER, alter_system, connect, name, soon};
use futures_util::future::BoxFuture;
use simba_core::spi::{Answer, Backend, Claim, Operate, Prior, Session};
use simba_core::{ContenderId, Error, ErrorKind, Lease, Simba};
use simba_net::{Tls, Verify};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;
use simba_tck::FaultProxy;
use simba_test_support::follows_password_file;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

/// Returns the error of an attempt to acquire.
async fn contend(backend: &PostgresBackend) -> Error {
    let mut session = open(backend).await;
    soon("a call ends", session.contend(Prior::Nothing)).await.unwrap_err()
}

async fn open(backend: &PostgresBackend) -> Box<dyn Session> {
    let claim = Claim::new(name("bad"), ContenderId::generate(), Lease::default());
    backend.open(claim).await.unwrap()
}

#[track_caller]
fn assert_error(error: &Error, kind: ErrorKind, texts: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert_eq!(error.backend(), Some("postgres"), "{text}");
    assert!(!format!("{text} {error:?}").contains(PASSWORD), "the password is shown: {error:?}");
    for part in texts {
        assert!(text.contains(part), "`{part}` is not in: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_database_is_reported() {
    let store = Store::shared();
    store.set_up().await;
    let url = format!("postgres://{USER}:simba-app@{}/nowhere", store.address());
    assert_error(
        &connect(&url).await.unwrap_err(),
        ErrorKind::Config,
        &["no database `nowhere`", "create it"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_reported() {
    let store = Store::shared();
    store.set_up().await;
    let url = format!("postgres://{USER}:wrong@{}/postgres", store.address());
    let error = connect(&url).await.unwrap_err();
    assert_error(&error, ErrorKind::Denied, &["wrong password", USER]);
    let url = format!("postgres://{USER}@{}/postgres", store.address());
    assert_error(&connect(&url).await.unwrap_err(), ErrorKind::Denied, &["the URL has none"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_run_is_reported() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = connect(&format!("postgres://a:b@{address}/c")).await.unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["no connection to", "check the host"]);
    assert!(error.is_transient());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_answer_is_reported() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let error = connect(&format!("postgres://a:b@{address}/c?connect_timeout=4s")).await.unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["did not answer a login within 4s"]);
}

/// A pooler accepts the login while its server hangs. The driver of the connection would wait for an answer for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_whose_check_is_not_answered_is_closed() {
    const LOGGED_IN: &[u8] = b"R\0\0\0\x08\0\0\0\0Z\0\0\0\x05I";
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    // The second host makes the backend check the first one. The limit leaves a machine that pauses time for the login.
    let url = format!("postgres://a:b@{address},{address}/c?connect_timeout=10s");
    let connecting = tokio::spawn(async move { connect(&url).await });
    let (mut client, _) = soon("a connection is opened", listener.accept()).await.unwrap();
    client.write_all(LOGGED_IN).await.unwrap();
    let mut received = Vec::new();
    let ended = soon("broken: the connection is closed", client.read_to_end(&mut received)).await;
    assert_eq!(ended.unwrap_err().kind(), std::io::ErrorKind::ConnectionReset);
    assert!(received.windows(11).any(|bytes| bytes == b"pg_is_in_re"), "the check was sent");
    connecting.abort();
}

/// A server stops after the login of an operator. The driver of the connection would wait for an answer for ever.
#[tokio::test(flavor = "multi_thread")]
async fn a_connection_whose_operator_gives_up_is_closed() {
    let store = Store::shared();
    store.set_up().await;
    let network = FaultProxy::start(store.address()).await.unwrap();
    // With two hosts a probe reads the clock of each. The connection for commands stays open: it sends no ping, and its
    // statements may take longer than the test waits.
    let (host, application) = (network.address(), name("operator"));
    let keys = format!("pooler=false&ping=10min&statement_timeout=1min&application_name={application}");
    let url = format!("postgres://{USER}:{PASSWORD}@{host},{host}/postgres?schema={SCHEMA}&{keys}");
    let backend = connect(&url).await.unwrap();
    let admin = store.admin().await;
    let only_commands = async || {
        let count = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
        while admin.query_one(count, &[&application.as_str()]).await.unwrap().get::<_, i64>(0) != 1 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let list = async || drop(backend.list().await);
    let probe = async || drop(backend.probe().await);
    let calls: [(&str, BoxFuture<'_, ()>); 3] = [
        ("coalesce(q.waiters, 0)", Box::pin(list())),
        ("pg_stat_replication", Box::pin(probe())),
        ("SELECT clock_timestamp()\0", Box::pin(probe())),
    ];
    for (statement, mut call) in calls {
        soon("the connection for commands is open", only_commands()).await;
        let mut held = network.hold_next_request_with(&[statement]);
        let sent = async {
            tokio::select! {
                biased;
                () = held.caught() => {}
                () = &mut call => panic!("{statement:?} is not sent"),
            }
        };
        soon("a statement is sent", sent).await;
        network.stall_replies();
        held.deliver();
        drop(call);
        soon(&format!("broken: the connection is closed after {statement:?}"), only_commands()).await;
        network.pass();
    }
}

/// Creates an empty schema, and returns a URL of the superuser for it.
async fn empty_schema(what: &str) -> (Store, String) {
    let store = Store::shared();
    store.set_up().await;
    let schema = name(what).as_str().replace('-', "_");
    store.admin().await.batch_execute(&format!("CREATE SCHEMA {schema}")).await.unwrap();
    let (user, password) = (store.admin.user().unwrap(), store.admin_password());
    let url = format!("postgres://{user}:{password}@{}/postgres?schema={schema}", store.address());
    (store, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_tables_are_reported_and_created() {
    let (_, url) = empty_schema("missing").await;
    let backend = connect(&url).await.unwrap();
    assert_error(&contend(&backend).await, ErrorKind::Config, &["no table", "simba schema --apply"]);
    let probe = backend.probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.fix.contains("simba schema --apply")), "{probe:?}");
    backend.apply_schema().await.unwrap();
    backend.apply_schema().await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    assert!(backend.probe().await.unwrap().findings.is_empty());
    assert!(backend.schema().unwrap().contains("CREATE TABLE IF NOT EXISTS"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_schema_is_reported() {
    let (_, url) = empty_schema("gone").await;
    let backend = connect(&format!("{url}_no_more")).await.unwrap();
    assert_error(&contend(&backend).await, ErrorKind::Config, &["name their schema in the URL"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_column_is_reported() {
    let (store, url) = empty_schema("column").await;
    let schema = url.split_once("schema=").unwrap().1.to_owned();
    let backend = connect(&url).await.unwrap();
    backend.apply_schema().await.unwrap();
    let admin = store.admin().await;
    admin.batch_execute(&format!("ALTER TABLE {schema}.simba_mutex DROP COLUMN token")).await.unwrap();
    // The prepared statements are invalid. A new connection returns the reason.
    let reported = async {
        loop {
            let error = contend(&backend).await;
            if !error.is_transient() {
                return error;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let error = soon("a missing column is reported", reported).await;
    assert_error(&error, ErrorKind::Config, &["not created by this version", "another prefix"]);
    let error = backend.apply_schema().await.unwrap_err();
    assert_error(&error, ErrorKind::Config, &["no column `token` of type bigint"]);
    let probe = backend.probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.problem.contains("`token`")), "{probe:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_with_other_columns_is_reported_and_not_changed() {
    let (store, url) = empty_schema("mismatch").await;
    let schema = url.split_once("schema=").unwrap().1.to_owned();
    let admin = store.admin().await;
    let create = format!(
        "CREATE TABLE {schema}.simba_mutex (mutex int, owner int, session int, token text, acquired_at text, \
         renewed_at text, ttl_at text, until text, waited text, watched text); \
         INSERT INTO {schema}.simba_mutex (mutex) VALUES (7)"
    );
    admin.batch_execute(&create).await.unwrap();
    let backend = connect(&url).await.unwrap();
    assert_error(&contend(&backend).await, ErrorKind::Config, &["not created by this", "another prefix"]);
    let error = backend.apply_schema().await.unwrap_err();
    assert_error(&error, ErrorKind::Config, &["rename it"]);
    let kept: i32 =
        admin.query_one(&format!("SELECT mutex FROM {schema}.simba_mutex"), &[]).await.unwrap().get(0);
    assert_eq!(kept, 7);
}

/// An invalid row of another program is reported, not used.
#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_row_is_reported() {
    let (store, mutex) = (Store::shared(), name("row"));
    let backend = store.backend().await;
    let write =
        "INSERT INTO simba_mutex VALUES ($1, $2, 'x', -5, now(), now(), now(), now() + interval '1h')";
    let admin = store.admin().await;
    admin.execute(write, &[&mutex.as_str(), &"o".repeat(600)]).await.unwrap();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
    let mut session = backend.open(claim).await.unwrap();
    let error = session.contend(Prior::Nothing).await.unwrap_err();
    assert_error(&error, ErrorKind::Protocol, &["not from Simba"]);
    assert_error(&backend.read(&mutex).await.unwrap_err(), ErrorKind::Protocol, &["not from Simba"]);
    admin.execute("DELETE FROM simba_mutex WHERE mutex = $1", &[&mutex.as_str()]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn row_65_the_documented_privileges_suffice_and_allow_no_more() {
    let store = Store::shared();
    let backend = store.backend().await;
    assert!(backend.probe().await.unwrap().findings.is_empty());
    let url = format!(
        "host={} port={} user={USER} password=simba-app dbname=postgres",
        store.address().ip(),
        store.address().port()
    );
    let (client, connection) = tokio_postgres::connect(&url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    for forbidden in [
        "DELETE FROM simba_mutex",
        "TRUNCATE simba_waiter",
        "DROP TABLE simba_mutex",
        "ALTER TABLE simba_waiter ADD x int",
        "CREATE TABLE more (x int)",
    ] {
        let statement = format!("SET search_path = {SCHEMA}; {forbidden}");
        let refused = client.batch_execute(&statement).await.unwrap_err();
        assert_eq!(refused.code().unwrap().code(), "42501", "{forbidden}: {refused}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_privilege_is_reported_with_the_grant() {
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let grants = [
        "UPDATE ON simba_mutex",
        "INSERT ON simba_mutex",
        "SELECT ON simba_mutex",
        "USAGE ON SCHEMA simba_tck",
    ];
    for privilege in grants {
        let backend = store.backend().await;
        admin.batch_execute(&format!("REVOKE {privilege} FROM {USER}")).await.unwrap();
        // Without the schema, the tables are not visible either.
        let (kind, text) = if privilege.starts_with("USAGE") {
            (ErrorKind::Denied, "GRANT USAGE")
        } else {
            (ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE")
        };
        assert_error(&contend(&backend).await, kind, &[text]);
        let found = backend.probe().await;
        let reported = found.map_or_else(
            |error| error.kind() == ErrorKind::Denied,
            |probe| {
                probe
                    .findings
                    .iter()
                    .any(|finding| finding.fix.contains("GRANT") || finding.problem.contains("no table"))
            },
        );
        assert!(reported, "a probe reports that {privilege} is missing");
        admin.batch_execute(&format!("GRANT {privilege} TO {USER}")).await.unwrap();
    }
    let backend = store.backend().await;
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_server_is_reported() {
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let backend = store.backend().await;
    alter_system(&admin, "default_transaction_read_only", "on").await;
    let error = PostgresBackend::connect(store.config(store.address())).await.unwrap_err();
    assert_error(&error, ErrorKind::Unavailable, &["takes no writes", "name the primary"]);
    // A ping can find that first, and end the connection during the call.
    let reported = async {
        loop {
            match contend(&backend).await {
                error if error.to_string().contains("is lost") => {}
                error => return error,
            }
        }
    };
    let error = soon("a read-only server is reported", reported).await;
    assert_error(&error, ErrorKind::Unavailable, &["takes no writes", "name the primary"]);
}

/// On a full disk an acquisition fails with a clear error. Held mutexes stay held. Once there is space, acquisitions
/// succeed without a restart.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_reported_and_held_mutexes_stay_held() {
    let private = Private::start(Setup::postgres().with_disk_of(96)).await;
    let store = &private.store;
    let long = Lease::new(Duration::from_secs(40), Duration::from_secs(20)).unwrap();
    let simba = |backend| Simba::builder(Arc::new(backend)).with_lease(long).build();
    let (one, two) = (simba(store.backend().await), simba(store.backend().await));
    let held = name("held");
    let guard = soon("a lock", one.locker(held.clone()).lock()).await.unwrap();
    private.server().disk().fill().unwrap();
    let error = first_error(&two).await;
    assert_error(&error, ErrorKind::Unavailable, &["disk is full", "make room"]);
    assert!(guard.is_held(), "the mutex stays held");
    let seen = two.operate().unwrap().read(&held).await.unwrap();
    assert_eq!(seen.owner.as_ref(), Some(guard.tenure().contender()), "other handles see the holder");

    private.server().disk().make_room().unwrap();
    assert!(two.locker(held.clone()).try_lock().await.unwrap().is_none(), "the mutex is still held");
    let new = soon("a lock after the disk has space", two.locker(name("new")).lock()).await.unwrap();
    new.release().await.unwrap();
    let token = guard.token();
    soon("a release", guard.release()).await.unwrap();
    assert!(soon("a lock", two.locker(held).lock()).await.unwrap().token() > token);
}

/// Acquires new mutexes until that fails. The files of the tables have some free space.
async fn first_error(simba: &Simba) -> Error {
    for _ in 0..20_000 {
        match soon("a try ends", simba.locker(name("new")).try_lock()).await {
            Ok(guard) => guard.expect("a new mutex is free").release().await.unwrap(),
            Err(error) => return error,
        }
    }
    panic!("a full disk is an error");
}

/// Several hosts are tried in order. Those that are down or accept no writes are skipped.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_host_that_accepts_writes_is_used() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let down = listener.local_addr().unwrap();
    drop(listener);
    let standby = Private::start(Setup::postgres()).await;
    let admin = standby.store.admin().await;
    alter_system(&admin, "default_transaction_read_only", "on").await;
    drop(admin);
    let store = Store::shared();
    store.set_up().await;
    let url = format!(
        "postgres://{USER}:simba-app@{down},{},{}/postgres?schema={SCHEMA}",
        standby.store.address(),
        store.address()
    );
    let backend = connect(&url).await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_local_socket_works() {
    let private = Private::start(Setup::postgres()).await;
    let (directory, port) = (private.server().dir().display().to_string(), private.store.address().port());
    let url = format!("postgres:///postgres?host={directory}&port={port}&user={USER}&schema={SCHEMA}");
    let config = PostgresConfig::from_url(&url.parse().unwrap()).unwrap().with_password("simba-app");
    let config = config.with_connect_timeout(LONG_TIMEOUT).with_statement_timeout(LONG_TIMEOUT);
    let backend = PostgresBackend::connect(config).await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

// ===== TLS =====

fn tls(file: &str) -> String {
    format!("{}/{file}", simba_servers::shared("SIMBA_TCK_TLS"))
}

/// Returns a URL with a host name and these keys.
fn secure(host: &str, port: u16, keys: &str) -> String {
    format!("postgres://{USER}:simba-app@{host}:{port}/postgres?schema={SCHEMA}&{keys}")
}

#[tokio::test(flavor = "multi_thread")]
async fn row_66_a_server_with_an_untrusted_certificate_is_refused() {
    let store = Store::shared();
    store.set_up().await;
    let port = store.address().port();
    let (trusted_ca, other_ca) = (tls("ca.pem"), tls("other-ca.pem"));
    let refused = [
        secure("localhost", port, &format!("sslmode=verify-full&sslrootcert={other_ca}")),
        secure("localhost", port, &format!("sslmode=verify-ca&sslrootcert={other_ca}")),
        secure("127.0.0.1", port, &format!("sslmode=verify-full&sslrootcert={trusted_ca}")),
        // No public CA has signed the certificate.
        secure("localhost", port, "sslmode=verify-full"),
    ];
    for url in refused {
        let error = connect(&url).await.unwrap_err();
        assert_ne!(error.kind(), ErrorKind::Protocol, "{url}: {error}");
        assert!(error.to_string().contains("sslrootcert"), "{url}: {error}");
    }
    let trusted = [
        secure("localhost", port, &format!("sslmode=verify-full&sslrootcert={trusted_ca}")),
        secure("127.0.0.1", port, &format!("sslmode=verify-ca&sslrootcert={trusted_ca}")),
        secure("127.0.0.1", port, "sslmode=require"),
        secure(
            "localhost",
            port,
            &format!(
                "sslmode=verify-full&sslrootcert={trusted_ca}&sslcert={}&sslkey={}",
                tls("client.pem"),
                tls("client.key")
            ),
        ),
    ];
    for (at, url) in trusted.iter().enumerate() {
        // Another test uses TLS at the same time.
        let application = format!("row-66-{at}");
        let backend = connect(&format!("{url}&application_name={application}")).await;
        let backend = backend.unwrap_or_else(|error| panic!("{url}: {error:?}"));
        let mut session = open(&backend).await;
        assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
        assert!(uses_tls(&store, &application).await, "{url}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn row_66_the_certificate_must_have_the_configured_server_name() {
    let store = Store::shared();
    store.set_up().await;
    let connect = async |host, server_name| {
        let url = secure(host, store.address().port(), "sslmode=verify-full").parse().unwrap();
        let tls = Tls::new(Verify::Full).with_ca(tls("ca.pem")).with_server_name(server_name);
        let config = PostgresConfig::from_url(&url).unwrap().with_tls(Some(tls));
        let config = config.with_connect_timeout(LONG_TIMEOUT).with_statement_timeout(LONG_TIMEOUT);
        soon("a connect ends", PostgresBackend::connect(config)).await
    };
    let error = connect("localhost", "elsewhere").await.expect_err("broken: another name is refused");
    assert_error(&error, ErrorKind::Denied, &["host name"]);
    let backend = connect("127.0.0.1", "localhost").await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

async fn uses_tls(store: &Store, application: &str) -> bool {
    let count = "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) \
                 WHERE ssl AND application_name = $1";
    store.admin().await.query_one(count, &[&application]).await.unwrap().get::<_, i64>(0) > 0
}

#[tokio::test(flavor = "multi_thread")]
async fn row_66_a_server_without_tls_is_refused_if_tls_is_requested() {
    let private = Private::start(Setup::postgres()).await;
    let port = private.store.address().port();
    for keys in ["sslmode=require", "sslmode=verify-full"] {
        let error = connect(&secure("localhost", port, keys)).await.unwrap_err();
        assert_error(&error, ErrorKind::Denied, &["does not support TLS"]);
    }
}

/// Runs some cases of the conformance suite through TLS.
#[tokio::test(flavor = "multi_thread")]
async fn the_suite_passes_through_tls() {
    struct Secure;
    #[simba_tck::async_trait]
    impl simba_tck::Fixture for Secure {
        async fn connect(&self) -> simba_tck::Connection {
            let store = Store::shared();
            store.set_up().await;
            let proxy = Arc::new(FaultProxy::start(store.address()).await.unwrap());
            // A call of the suite ends within the default timeout.
            let keys = "pooler=false&statement_timeout=2s&sslmode=verify-full";
            let keys = format!("{keys}&sslrootcert={}", tls("ca.pem"));
            let backend = connect(&secure("localhost", proxy.address().port(), &keys)).await.unwrap();
            simba_tck::Connection::new(backend, proxy)
        }

        /// An unoptimised handshake takes long.
        fn lease(&self) -> Lease {
            Lease::new(Duration::from_secs(4), Duration::from_secs(6)).unwrap()
        }
    }
    let names = [
        "a_release_wakes_the_next",
        "waiters_are_served_in_order",
        "a_tenure_survives_short_cuts",
        "a_lost_reply_leaves_no_hold",
        "an_unknown_outcome_is_adopted",
        "is_woken_by_a_change",
        "an_unreachable_store_is_an_error",
    ];
    for case in simba_tck::cases().iter().filter(|case| names.contains(&case.name)) {
        let ended = tokio::time::timeout(simba_tck::CASE_LIMIT, case.run(&Secure)).await;
        assert!(ended.is_ok(), "the case hangs: {case:?}");
    }
}

// ===== secrets =====

#[tokio::test(flavor = "multi_thread")]
async fn password_file_is_read_at_every_connection() {
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let grants = store.config(store.address()).grants().replace(USER, "rotated");
    admin.batch_execute(&format!("CREATE ROLE rotated LOGIN; {grants}")).await.unwrap();
    let change = async |password: &str| {
        admin.batch_execute(&format!("ALTER ROLE rotated PASSWORD '{password}'")).await.unwrap();
    };
    let url = |address| format!("postgres://rotated@{address}/postgres?schema={SCHEMA}");
    let connect = |url| {
        let config = PostgresConfig::from_url(&url).unwrap();
        PostgresBackend::connect(config.with_connect_timeout(LONG_TIMEOUT))
    };
    follows_password_file(store.address(), url, change, connect).await;
}
