//! Secrets in errors and logs. A program of its own, because it captures the logs of the whole process.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::ZookeeperStore;
use common::sasl::{SASL_PASSWORD, sasl_server};
use simba_servers::shared;
use simba_test_support::{Logs, queue};

#[tokio::test]
async fn row_64_no_text_shows_the_password() {
    let logs = Logs::capture();
    let dir = tempfile::tempdir().unwrap();
    let sasl = sasl_server(dir.path());
    let plain = shared("SIMBA_TCK_ZOOKEEPER");
    let plain = plain.strip_prefix("zookeeper://").unwrap();
    let shown = queue::shown::<ZookeeperStore>([
        format!("zookeeper://tck:{SASL_PASSWORD}@{}?auth=sasl", sasl.address()),
        format!("zookeeper://wrong:{SASL_PASSWORD}@{}?auth=sasl", sasl.address()),
        format!("zookeeper://wrong:{SASL_PASSWORD}@{plain}/least-rights"),
        format!("zookeeper://wrong:{SASL_PASSWORD}@{plain}/no/such"),
        format!("zookeeper://wrong:{SASL_PASSWORD}@127.0.0.1:1"),
        format!("zookeepers://wrong:{SASL_PASSWORD}@{plain}"),
        format!("zookeeper://wrong:{SASL_PASSWORD}@{plain}?auth=other"),
    ]);
    logs.assert_without(SASL_PASSWORD, &shown.await);
}
