//! TLS: the identity of the server, encryption, client certificates.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;

use common::Product;
use mysql_async::prelude::Queryable;
use simba_core::{Error, ErrorKind, Simba};
use simba_mysql::MySqlBackend;
use simba_tck::{Connection, FaultProxy, Fixture, Profile, async_trait};

fn file(name: &str) -> String {
    format!("{}/{name}", simba_servers::shared("SIMBA_TCK_TLS"))
}

on_both_servers! {
    row_66_the_wrong_authority_and_the_wrong_host_are_refused
    row_66_a_server_without_tls_is_refused
    every_connection_is_encrypted
    conformance_cases_pass_through_tls
}

async fn connect(on: Product, host: &str, keys: &str) -> Result<MySqlBackend, Error> {
    let port = on.shared().await.port();
    let url = format!("{}?{keys}", common::least_url(format!("{host}:{port}")));
    MySqlBackend::connect(common::config(&url)).await
}

async fn works(backend: MySqlBackend) {
    let simba = Simba::builder(Arc::new(backend)).build();
    simba.locker(common::name("tls")).lock().await.unwrap().release().await.unwrap();
    simba.shutdown().await;
}

async fn refused(on: Product, host: &str, keys: &str, word: &str) {
    let error = connect(on, host, keys).await.err().unwrap_or_else(|| panic!("{host} with {keys} connects"));
    assert_eq!(error.kind(), ErrorKind::Config, "{host} with {keys}: {error}");
    assert!(error.to_string().contains(word), "{host} with {keys}: {error}");
}

/// Row 66: a connection that requests TLS reaches the right server, or fails.
async fn row_66_the_wrong_authority_and_the_wrong_host_are_refused(on: Product) {
    let (ca, other) = (file("ca.pem"), file("other-ca.pem"));
    works(connect(on, "localhost", &format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={ca}")).await.unwrap()).await;
    works(connect(on, "127.0.0.1", &format!("ssl-mode=VERIFY_CA&ssl-ca={ca}")).await.unwrap()).await;
    works(connect(on, "127.0.0.1", "ssl-mode=REQUIRED").await.unwrap()).await;
    refused(on, "127.0.0.1", &format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={ca}"), "host").await;
    refused(on, "localhost", &format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={other}"), "ssl-ca").await;
    refused(on, "127.0.0.1", &format!("ssl-mode=VERIFY_CA&ssl-ca={other}"), "ssl-ca").await;
    // Without `ssl-ca` the public authorities apply, which did not sign this server's certificate.
    refused(on, "localhost", "ssl-mode=VERIFY_IDENTITY", "ssl-ca").await;
    refused(on, "localhost", "ssl-mode=VERIFY_CA", "ssl-ca").await;
    refused(on, "localhost", "ssl-mode=VERIFY_CA&ssl-ca=/no/such/file", "cannot read `ssl-ca`").await;
}

/// Row 66: a client that requests TLS sends no password to a server without TLS.
async fn row_66_a_server_without_tls_is_refused(on: Product) {
    let without = match on {
        Product::MariaDb => "--skip-ssl",
        // MySQL 9 does not know that option any more.
        Product::MySql => "--tls-version=",
    };
    let server = common::private(on.setup().with_arg(without)).await;
    for mode in ["REQUIRED", "VERIFY_CA", "VERIFY_IDENTITY"] {
        let url = format!("{}?ssl-mode={mode}", common::least_url(server.address()));
        let error = MySqlBackend::connect(common::config(&url)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("the server has none"), "{error}");
    }
}

/// Every connection of a handle that requests TLS is encrypted.
async fn every_connection_is_encrypted(on: Product) {
    let port = on.shared().await.port();
    let mut admin = common::admin(&on.admin_url()).await;
    for statement in [
        "CREATE USER IF NOT EXISTS 'only_tls'@'%' IDENTIFIED BY 'only-tls' REQUIRE X509",
        "GRANT SELECT, INSERT, UPDATE ON simba.simba_mutex TO 'only_tls'@'%'",
    ] {
        admin.query_drop(statement).await.unwrap();
    }
    let base = format!(
        "mysql://only_tls:only-tls@localhost:{port}/simba?ssl-mode=VERIFY_IDENTITY&ssl-ca={}",
        file("ca.pem")
    );
    let with = format!("{base}&ssl-cert={}&ssl-key={}", file("client.pem"), file("client.key"));
    works(common::connect(&with).await).await;
    for url in [base, format!("mysql://only_tls:only-tls@localhost:{port}/simba")] {
        let error = MySqlBackend::connect(common::config(&url)).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Denied, "without a certificate: {error}");
    }
}

/// The shared server through TLS, behind a fault proxy.
struct Encrypted(Product);

#[async_trait]
impl Fixture for Encrypted {
    async fn connect(&self) -> Connection {
        let proxy = Arc::new(FaultProxy::start(self.0.shared().await).await.unwrap());
        let host = format!("localhost:{}", proxy.address().port());
        let keys = format!("ssl-mode=VERIFY_IDENTITY&ssl-ca={}", file("ca.pem"));
        Connection::new(common::connect(&format!("{}?{keys}", common::least_url(host))).await, proxy)
    }

    fn lease(&self) -> simba_core::Lease {
        self.0.fixture().lease()
    }

    fn profile(&self) -> Profile {
        common::profile()
    }
}

/// Some conformance cases pass through TLS as well.
async fn conformance_cases_pass_through_tls(on: Product) {
    let wanted = [
        "a_counter_loses_no_step",
        "a_holder_outlives_its_lease",
        "a_release_wakes_the_next",
        "an_unknown_outcome_is_adopted",
        "a_stalled_holder_is_notified_on_time",
        "a_tenure_survives_short_cuts",
        "a_lost_reply_leaves_no_hold",
        "an_unreachable_store_is_an_error",
    ];
    for name in wanted {
        let case = simba_tck::cases().iter().find(|case| case.name == name).unwrap();
        case.run(&Encrypted(on)).await;
    }
}
