//! Whatever is wrong with the server, its tables or the URL is told with its cause and its cure.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::time::Duration;

use common::{PASSWORD, Private, SCHEMA, Store, USER, name, soon};
use simba_core::{
    Answer, Backend, Claim, ContenderId, Error, ErrorKind, Lease, Operate, Prior, Result, Session, Simba,
};
use simba_postgres::{PostgresBackend, PostgresConfig};
use simba_servers::Setup;
use simba_tck::FaultProxy;

async fn connect(url: &str) -> Result<PostgresBackend> {
    let config = PostgresConfig::from_url(&url.parse().unwrap())?;
    soon("a connect ends", PostgresBackend::connect(config)).await
}

/// What goes wrong when a mutex is asked for.
async fn contend(backend: &PostgresBackend) -> Error {
    let mut session = open(backend).await;
    soon("a call ends", session.contend(Prior::Nothing)).await.unwrap_err()
}

async fn open(backend: &PostgresBackend) -> Box<dyn Session> {
    let claim = Claim::new(name("bad"), ContenderId::generate(), Lease::default());
    backend.open(claim).await.unwrap()
}

#[track_caller]
fn assert_told(error: &Error, kind: ErrorKind, words: &[&str]) {
    let text = error.to_string();
    assert_eq!(error.kind(), kind, "{text}");
    assert_eq!(error.backend(), Some("postgres"), "{text}");
    assert!(!format!("{text} {error:?}").contains(PASSWORD), "a secret is shown: {error:?}");
    for word in words {
        assert!(text.contains(word), "`{word}` is not in: {text}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_database_is_told() {
    let store = Store::shared();
    store.set_up().await;
    let url = format!("postgres://{USER}:simba-app@{}/nowhere", store.address());
    assert_told(
        &connect(&url).await.unwrap_err(),
        ErrorKind::Config,
        &["no database `nowhere`", "create it"],
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_password_is_told() {
    let store = Store::shared();
    store.set_up().await;
    let url = format!("postgres://{USER}:wrong@{}/postgres", store.address());
    let error = connect(&url).await.unwrap_err();
    assert_told(&error, ErrorKind::Denied, &["wrong password", USER]);
    let url = format!("postgres://{USER}@{}/postgres", store.address());
    assert_told(&connect(&url).await.unwrap_err(), ErrorKind::Denied, &["the URL has none"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_is_not_there_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let error = connect(&format!("postgres://a:b@{address}/c")).await.unwrap_err();
    assert_told(&error, ErrorKind::Unavailable, &["no connection to", "check the host"]);
    assert!(error.is_transient());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_does_not_answer_is_told() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let error = connect(&format!("postgres://a:b@{address}/c?connect_timeout=200ms")).await.unwrap_err();
    assert_told(&error, ErrorKind::Unavailable, &["did not answer a login within 200ms"]);
}

/// The right to do everything in a schema of its own, with nothing in it.
async fn empty_schema(what: &str) -> (Store, String) {
    let store = Store::shared();
    store.set_up().await;
    let schema = name(what).as_str().replace('-', "_");
    store.admin().await.batch_execute(&format!("CREATE SCHEMA {schema}")).await.unwrap();
    let (user, password) = (store.admin.user().unwrap(), store.admin.password().unwrap());
    let url = format!("postgres://{user}:{password}@{}/postgres?schema={schema}", store.address());
    (store, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_tables_are_told_and_made() {
    let (_, url) = empty_schema("missing").await;
    let backend = connect(&url).await.unwrap();
    assert_told(&contend(&backend).await, ErrorKind::Config, &["no table", "simba schema --apply"]);
    let probe = backend.probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.cure.contains("simba schema --apply")), "{probe:?}");
    backend.apply_schema().await.unwrap();
    backend.apply_schema().await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
    assert!(backend.probe().await.unwrap().findings.is_empty());
    assert!(backend.schema().unwrap().contains("CREATE TABLE IF NOT EXISTS"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_schema_is_told() {
    let (_, url) = empty_schema("gone").await;
    let backend = connect(&format!("{url}_no_more")).await.unwrap();
    assert_told(&contend(&backend).await, ErrorKind::Config, &["name their schema in the URL"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_column_is_told() {
    let (store, url) = empty_schema("column").await;
    let schema = url.split_once("schema=").unwrap().1.to_owned();
    let backend = connect(&url).await.unwrap();
    backend.apply_schema().await.unwrap();
    let admin = store.admin().await;
    admin.batch_execute(&format!("ALTER TABLE {schema}.simba_mutex DROP COLUMN token")).await.unwrap();
    // What was prepared before is of no use any more; the connection is made anew, and says why.
    let told = async {
        loop {
            let error = contend(&backend).await;
            if !error.is_transient() {
                return error;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let error = soon("a missing column is told", told).await;
    assert_told(&error, ErrorKind::Config, &["of another version", "another prefix"]);
    let error = backend.apply_schema().await.unwrap_err();
    assert_told(&error, ErrorKind::Config, &["no column `token` of type bigint"]);
    let probe = backend.probe().await.unwrap();
    assert!(probe.findings.iter().any(|finding| finding.problem.contains("`token`")), "{probe:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_table_of_a_foreign_shape_is_told_and_left_as_it_is() {
    let (store, url) = empty_schema("foreign").await;
    let schema = url.split_once("schema=").unwrap().1.to_owned();
    let admin = store.admin().await;
    let foreign = format!(
        "CREATE TABLE {schema}.simba_mutex (mutex int, owner int, session int, token text, acquired_at text, \
         renewed_at text, ttl_at text, until text, waited text, watched text); \
         INSERT INTO {schema}.simba_mutex (mutex) VALUES (7)"
    );
    admin.batch_execute(&foreign).await.unwrap();
    let backend = connect(&url).await.unwrap();
    assert_told(&contend(&backend).await, ErrorKind::Config, &["are not ours", "another prefix"]);
    let error = backend.apply_schema().await.unwrap_err();
    assert_told(&error, ErrorKind::Config, &["move it away"]);
    let kept: i32 =
        admin.query_one(&format!("SELECT mutex FROM {schema}.simba_mutex"), &[]).await.unwrap().get(0);
    assert_eq!(kept, 7);
}

/// A row that another program wrote is told, not believed.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_is_not_ours_is_told() {
    let (store, mutex) = (Store::shared(), name("row"));
    let backend = store.backend().await;
    let write =
        "INSERT INTO simba_mutex VALUES ($1, $2, 'x', -5, now(), now(), now(), now() + interval '1h')";
    let admin = store.admin().await;
    admin.execute(write, &[&mutex.as_str(), &"o".repeat(600)]).await.unwrap();
    let claim = Claim::new(mutex.clone(), ContenderId::generate(), Lease::default());
    let mut session = backend.open(claim).await.unwrap();
    assert_told(&session.contend(Prior::Nothing).await.unwrap_err(), ErrorKind::Protocol, &["not ours"]);
    assert_told(&backend.read(&mutex).await.unwrap_err(), ErrorKind::Protocol, &["not ours"]);
    admin.execute("DELETE FROM simba_mutex WHERE mutex = $1", &[&mutex.as_str()]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn row_65_the_documented_rights_are_enough_and_no_more() {
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
async fn a_missing_right_is_told_with_the_grant() {
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let grants = [
        "UPDATE ON simba_mutex",
        "INSERT ON simba_mutex",
        "SELECT ON simba_mutex",
        "USAGE ON SCHEMA simba_tck",
    ];
    for right in grants {
        let backend = PostgresBackend::connect(store.config(store.address())).await.unwrap();
        admin.batch_execute(&format!("REVOKE {right} FROM {USER}")).await.unwrap();
        // Where the whole schema is out of sight, so is what is in it.
        let (kind, word) = if right.starts_with("USAGE") {
            (ErrorKind::Denied, "GRANT USAGE")
        } else {
            (ErrorKind::Denied, "GRANT SELECT, INSERT, UPDATE")
        };
        assert_told(&contend(&backend).await, kind, &[word]);
        let found = backend.probe().await;
        let told = found.map_or_else(
            |error| error.kind() == ErrorKind::Denied,
            |probe| {
                probe
                    .findings
                    .iter()
                    .any(|finding| finding.cure.contains("GRANT") || finding.problem.contains("no table"))
            },
        );
        assert!(told, "a probe finds that {right} is missing");
        admin.batch_execute(&format!("GRANT {right} TO {USER}")).await.unwrap();
    }
    let backend = PostgresBackend::connect(store.config(store.address())).await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_read_only_server_is_told() {
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let backend = PostgresBackend::connect(store.config(store.address())).await.unwrap();
    admin.batch_execute("ALTER SYSTEM SET default_transaction_read_only = on; ").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    let told = async {
        while PostgresBackend::connect(store.config(store.address())).await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    soon("the server becomes read-only", told).await;
    let error = PostgresBackend::connect(store.config(store.address())).await.unwrap_err();
    assert_told(&error, ErrorKind::Unavailable, &["takes no writes", "name the primary"]);
    assert_told(&contend(&backend).await, ErrorKind::Unavailable, &["takes no writes", "name the primary"]);
}

/// A full disk takes no new mutex, and says so. What is held stays held; once there is room, everything goes on by
/// itself.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_told_and_costs_nothing_that_was_there() {
    let private = Private::start(Setup::postgres().with_disk_of(96)).await;
    let store = &private.store;
    let long = Lease::new(Duration::from_secs(40), Duration::from_secs(20)).unwrap();
    let simba = |backend| Simba::builder(Arc::new(backend)).lease(long).build();
    let (one, two) = (simba(store.backend().await), simba(store.backend().await));
    let held = name("held");
    let guard = soon("a lock", one.locker(held.clone()).lock()).await.unwrap();
    private.server().disk().fill().unwrap();
    let error = first_refusal(&two).await;
    assert_told(&error, ErrorKind::Unavailable, &["disk is full", "make room"]);
    assert!(guard.is_held(), "what is held is held");
    let seen = two.operate().unwrap().read(&held).await.unwrap();
    assert_eq!(seen.owner.as_ref(), Some(guard.tenure().contender()), "for others, too");

    private.server().disk().make_room().unwrap();
    assert!(two.locker(held.clone()).try_lock().await.unwrap().is_none(), "nothing is lost");
    let new = soon("it goes on by itself", two.locker(name("new")).lock()).await.unwrap();
    new.release().await.unwrap();
    let token = guard.token();
    soon("a release", guard.release()).await.unwrap();
    assert!(soon("a lock", two.locker(held).lock()).await.unwrap().token() > token);
}

/// Takes one new mutex after the other, for which the tables' files have some room of their own, until that is
/// refused.
async fn first_refusal(simba: &Simba) -> Error {
    for _ in 0..20_000 {
        match soon("a try ends", simba.locker(name("new")).try_lock()).await {
            Ok(guard) => guard.expect("nobody else wants it").release().await.unwrap(),
            Err(error) => return error,
        }
    }
    panic!("a full disk is an error");
}

/// Several hosts are tried in turn; those that are away, or take no writes, are passed over.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_host_that_takes_writes_is_used() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let away = listener.local_addr().unwrap();
    drop(listener);
    let standby =
        Private::start(Setup::postgres().with_arg("-c").with_arg("default_transaction_read_only=off")).await;
    let admin = standby.store.admin().await;
    admin.batch_execute("ALTER SYSTEM SET default_transaction_read_only = on").await.unwrap();
    admin.batch_execute("SELECT pg_reload_conf()").await.unwrap();
    drop(admin);
    let store = Store::shared();
    store.set_up().await;
    let url = format!(
        "postgres://{USER}:simba-app@{away},{},{}/postgres?schema={SCHEMA}",
        standby.store.address(),
        store.address()
    );
    let backend = connect(&url).await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_socket_on_this_machine_works() {
    let private = Private::start(Setup::postgres()).await;
    let (directory, port) = (private.server().dir().display().to_string(), private.store.address().port());
    let url = format!("postgres:///postgres?host={directory}&port={port}&user={USER}&schema={SCHEMA}");
    let config = PostgresConfig::from_url(&url.parse().unwrap()).unwrap().with_password("simba-app");
    let backend = PostgresBackend::connect(config).await.unwrap();
    let mut session = open(&backend).await;
    assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
}

// ===== TLS =====

fn tls(file: &str) -> String {
    format!("{}/{file}", simba_servers::shared("SIMBA_TCK_TLS"))
}

/// The shared server by a name, and with these keys.
fn secure(host: &str, port: u16, keys: &str) -> String {
    format!("postgres://{USER}:simba-app@{host}:{port}/postgres?schema={SCHEMA}&{keys}")
}

#[tokio::test(flavor = "multi_thread")]
async fn row_66_a_server_that_is_not_the_right_one_is_refused() {
    let store = Store::shared();
    store.set_up().await;
    let port = store.address().port();
    let (ours, strangers) = (tls("ca.pem"), tls("other-ca.pem"));
    let refused = [
        secure("localhost", port, &format!("sslmode=verify-full&sslrootcert={strangers}")),
        secure("localhost", port, &format!("sslmode=verify-ca&sslrootcert={strangers}")),
        secure("127.0.0.1", port, &format!("sslmode=verify-full&sslrootcert={ours}")),
        // Nobody vouches for it.
        secure("localhost", port, "sslmode=verify-full"),
    ];
    for url in refused {
        let error = connect(&url).await.unwrap_err();
        assert_ne!(error.kind(), ErrorKind::Protocol, "{url}: {error}");
        assert!(error.to_string().contains("sslrootcert"), "{url}: {error}");
    }
    let trusted = [
        secure("localhost", port, &format!("sslmode=verify-full&sslrootcert={ours}")),
        secure("127.0.0.1", port, &format!("sslmode=verify-ca&sslrootcert={ours}")),
        secure("127.0.0.1", port, "sslmode=require"),
        secure(
            "localhost",
            port,
            &format!(
                "sslmode=verify-full&sslrootcert={ours}&sslcert={}&sslkey={}",
                tls("client.pem"),
                tls("client.key")
            ),
        ),
    ];
    for url in trusted {
        let backend = connect(&url).await.unwrap_or_else(|error| panic!("{url}: {error:?}"));
        let mut session = open(&backend).await;
        assert!(matches!(session.contend(Prior::Nothing).await.unwrap(), Answer::Ours(_)));
        assert!(uses_tls(&store).await, "{url}");
    }
}

async fn uses_tls(store: &Store) -> bool {
    let count =
        "SELECT count(*) FROM pg_stat_ssl JOIN pg_stat_activity USING (pid) WHERE ssl AND usename = $1";
    store.admin().await.query_one(count, &[&USER]).await.unwrap().get::<_, i64>(0) > 0
}

#[tokio::test(flavor = "multi_thread")]
async fn row_66_a_server_without_tls_is_refused_when_it_is_asked_for() {
    let private = Private::start(Setup::postgres()).await;
    let port = private.store.address().port();
    for keys in ["sslmode=require", "sslmode=verify-full"] {
        let error = connect(&secure("localhost", port, keys)).await.unwrap_err();
        assert_told(&error, ErrorKind::Denied, &["does not speak TLS"]);
    }
}

/// A handful of cases of the kit through TLS.
#[tokio::test(flavor = "multi_thread")]
async fn the_kit_holds_through_tls() {
    struct Secure;
    #[simba_tck::async_trait]
    impl simba_tck::Fixture for Secure {
        async fn connect(&self) -> simba_tck::Connection {
            let store = Store::shared();
            store.set_up().await;
            let proxy = Arc::new(FaultProxy::start(store.address()).await.unwrap());
            let keys = format!("sslmode=verify-full&sslrootcert={}", tls("ca.pem"));
            let backend = connect(&secure("localhost", proxy.address().port(), &keys)).await.unwrap();
            simba_tck::Connection::new(backend, proxy)
        }

        /// A handshake takes long without optimisation.
        fn lease(&self) -> Lease {
            Lease::new(Duration::from_secs(4), Duration::from_secs(6)).unwrap()
        }
    }
    let names = [
        "a_release_wakes_the_next",
        "waiters_are_served_in_order",
        "cuts_are_ridden_out",
        "a_lost_reply_is_no_ghost",
        "an_unknown_outcome_is_adopted",
        "is_woken_by_a_change",
        "out_of_reach_is_an_error",
    ];
    for case in simba_tck::cases().iter().filter(|case| names.contains(&case.name)) {
        let ended = tokio::time::timeout(simba_tck::CASE_LIMIT, case.run(&Secure)).await;
        assert!(ended.is_ok(), "the case hangs: {case:?}");
    }
}

// ===== secrets =====

#[tokio::test(flavor = "multi_thread")]
async fn row_64_no_text_of_any_kind_shows_a_password() {
    const CANARY: &str = "canary-8f3b";
    let private = Private::start(Setup::postgres()).await;
    let (store, admin) = (&private.store, private.store.admin().await);
    let address = store.address();
    let role = format!(
        "CREATE ROLE canary LOGIN PASSWORD '{CANARY}'; {}",
        store.config(address).grants().replace(USER, "canary")
    );
    admin.batch_execute(&role).await.unwrap();
    // From here on: the driver logs the statement that makes the role, as it logs all.
    let heard = common::hear();
    let url = |user: &str, password: &str, place: &str, rest: &str| {
        format!("postgres://{user}:{password}@{place}/postgres?schema={SCHEMA}{rest}")
    };
    let mut texts = Vec::new();
    let mut note = |error: &Error| {
        texts.push(format!("{error} {error:?}"));
        let mut cause = std::error::Error::source(error);
        while let Some(error) = cause {
            texts.push(format!("{error} {error:?}"));
            cause = error.source();
        }
    };
    let near = address.to_string();
    let wrong = [
        url("canary", &format!("{CANARY}-wrong"), &near, ""),
        url("nobody", CANARY, &near, ""),
        url("canary", CANARY, "127.0.0.1:1", ""),
        url("canary", CANARY, "no-such-host.invalid", "&connect_timeout=1s"),
        url("canary", CANARY, &near, "&sslmode=require"),
        url("canary", CANARY, &near, "&sslmode=prefer"),
        url("canary", CANARY, &near, "&nonsense=1"),
    ];
    for url in wrong {
        note(&connect(&url).await.unwrap_err());
    }
    let config = PostgresConfig::from_url(&url("canary", CANARY, &near, "").parse().unwrap()).unwrap();
    let shown = format!("{config:?}");
    let backend = PostgresBackend::connect(config).await.unwrap();
    let shown = format!("{shown} {backend:?} {:?}", backend.probe().await.unwrap());
    let mut session = open(&backend).await;
    session.contend(Prior::Nothing).await.unwrap();
    // Whatever a reconnect says.
    admin
        .execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'canary'", &[])
        .await
        .unwrap();
    admin.batch_execute("REVOKE ALL ON simba_mutex FROM canary").await.unwrap();
    let told = async {
        loop {
            match session.contend(Prior::Unknown).await {
                Err(error) if !error.is_transient() => return error,
                _ => tokio::time::sleep(Duration::from_millis(20)).await,
            }
        }
    };
    note(&soon("a right that is gone is told", told).await);
    backend.close().await;
    let log = heard.text();
    assert!(log.contains("simba_postgres"), "what we write is heard");
    assert!(log.contains(" tokio_postgres::"), "what the driver writes is heard");
    for text in texts.iter().chain([&shown, &log]) {
        assert!(!text.contains(CANARY), "a secret in: {text}");
    }
}
