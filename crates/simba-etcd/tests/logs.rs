//! Secrets in errors and logs. A program of its own, because it captures the logs of the whole process.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use common::EtcdStore;
use common::login::{PASSWORD, server_with_auth};
use simba_servers::shared;
use simba_test_support::{Logs, queue};

#[tokio::test]
async fn row_64_no_error_or_log_line_shows_the_password() {
    let logs = Logs::capture();
    let server = server_with_auth().await;
    let (address, plain) = (server.address(), shared("SIMBA_TCK_ETCD"));
    let plain = plain.strip_prefix("etcd://").unwrap();
    let shown = queue::shown::<EtcdStore>([
        format!("etcd://tck:{PASSWORD}@{address}/teams"),
        format!("etcd://wrong:{PASSWORD}@{address}/teams"),
        format!("etcd://tck:{PASSWORD}@{address}/elsewhere"),
        format!("etcd://wrong:{PASSWORD}@{plain}"),
        format!("etcd://wrong:{PASSWORD}@127.0.0.1:1"),
        format!("etcds://wrong:{PASSWORD}@{plain}"),
        format!("etcd://wrong:{PASSWORD}@{plain}?auth=other"),
    ]);
    logs.assert_without(PASSWORD, &shown.await);
}
