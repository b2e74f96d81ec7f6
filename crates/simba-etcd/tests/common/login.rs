//! Servers with users and passwords.

use simba_servers::{Server, Setup};

use super::ctl;

pub(crate) const PASSWORD: &str = "canary-etcd";

/// Starts a server that requires a login, with a user that has only the permissions that Simba needs, under a prefix.
pub(crate) async fn server_with_auth() -> Server {
    let server = server_without_auth().await;
    ctl(&server.url(), &["auth", "enable"]).await;
    server
}

/// Starts a server that has the user and does not require a login yet.
pub(crate) async fn server_without_auth() -> Server {
    let server = tokio::task::spawn_blocking(|| Setup::etcd().start().unwrap()).await.unwrap();
    let url = server.url();
    for line in [
        "user add root:root",
        "user grant-role root root",
        "role add simba",
        "role grant-permission --prefix=true simba readwrite teams/simba/",
        &format!("user add tck:{PASSWORD}"),
        "user grant-role tck simba",
    ] {
        ctl(&url, &line.split(' ').collect::<Vec<_>>()).await;
    }
    server
}
