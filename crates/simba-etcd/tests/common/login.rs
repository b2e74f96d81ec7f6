//! Servers that ask for a user and a password.

use simba_servers::{Server, Setup};

use super::ctl;

pub(crate) const PASSWORD: &str = "canary-etcd";

/// A server that lets nobody in without a password, and a user with no more rights than it takes, under a prefix.
pub(crate) async fn guarded() -> Server {
    let server = open_to_all().await;
    ctl(&server.url(), &["auth", "enable"]).await;
    server
}

/// One that has the user, and does not ask for it yet.
pub(crate) async fn open_to_all() -> Server {
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
