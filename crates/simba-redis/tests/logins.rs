//! Sentinels that want a login of their own, another than the servers'.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::net::SocketAddr;

use common::resp::Reply;
use common::{Admin, Group, lead, lease, name, simba, soon, until};
use simba_core::{Error, ErrorKind};
use simba_redis::RedisBackend;
use simba_servers::Setup;

const WATCHER: &str = "simba-watcher";
const SECRET: &str = "simba-watcher-secret";
/// What the sentinels ask of each other.
const INNER: &str = "among-sentinels";

/// Sentinels that let nobody ask who has not logged in.
fn guarded() -> Group {
    let group = Group::private(Setup::redis_sentinel());
    let sentinels: Vec<SocketAddr> =
        group.url.hosts().iter().map(|host| host.to_string().parse().unwrap()).collect();
    for sentinel in sentinels {
        let mut admin = Admin::at(sentinel);
        let mut tell = |words: &[&str]| {
            let reply = admin.ask(words);
            assert_eq!(reply, Reply::Status("OK".into()), "{words:?}");
        };
        tell(&["ACL", "SETUSER", WATCHER, "on", &format!(">{SECRET}"), "&*", "+@all"]);
        tell(&["SENTINEL", "CONFIG", "SET", "sentinel-pass", INNER]);
        tell(&["ACL", "SETUSER", "default", "resetpass", &format!(">{INNER}")]);
    }
    group
}

async fn refused(group: &Group, keys: &str) -> Error {
    soon("an answer comes", RedisBackend::connect(group.config(keys))).await.map(drop).unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_want_a_login_are_told_from_servers_that_do() {
    let group = guarded();
    for keys in ["", "?sentinel_password=wrong", "?sentinel_user=nobody&sentinel_password=wrong"] {
        let error = refused(&group, keys).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{keys}: {error:?}");
        assert!(!format!("{error:?}").contains("wrong"), "{error:?}");
        assert!(error.to_string().contains("sentinel"), "broken: it says who refused: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sentinels_that_want_a_login_are_followed_through_a_failover() {
    let group = guarded();
    let keys = format!("?sentinel_user={WATCHER}&sentinel_password={SECRET}");
    let ask = |words: &[&str]| {
        let mut admin = Admin::at(group.url.hosts()[0].to_string().parse().unwrap());
        assert_eq!(admin.ask(&["AUTH", WATCHER, SECRET]), Reply::Status("OK".into()));
        admin.ask(words)
    };
    let master = || {
        let reply = ask(&["SENTINEL", "get-master-addr-by-name", "mymaster"]);
        reply.array().and_then(|parts| parts[1].text().map(str::to_owned)).unwrap()
    };
    let backend = RedisBackend::connect(group.config(&keys)).await.unwrap();
    let (simba, mutex) = (simba(backend, lease()), name());
    let (leader, tenure) = lead(&simba, &mutex).await;
    let (first, old) = (tenure.token(), master());
    leader.stop().await.unwrap();
    assert_eq!(ask(&["SENTINEL", "FAILOVER", "mymaster"]), Reply::Status("OK".into()));
    until("there is another master", || master() != old).await;
    let (_leader, tenure) = lead(&simba, &mutex).await;
    assert!(tenure.token() > first, "broken: tokens grow through a failover");
}
