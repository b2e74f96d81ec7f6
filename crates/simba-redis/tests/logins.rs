//! Logins and certificates: at sentinels with another login than the servers, and after a change of the files.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use std::net::SocketAddr;

use common::resp::Reply;
use common::{Admin, ELECTION, Encrypted, Group, PASSWORD, SILENCE, Store, USER};
use common::{lead, lease, name, simba, soon, until_within};
use simba_core::spi::Operate as _;
use simba_core::{Error, ErrorKind};
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_tck::FaultProxy;
use simba_test_support::follows_password_file;

const WATCHER: &str = "simba-watcher";
const SECRET: &str = "simba-watcher-secret";
/// Password that the sentinels use among each other.
const INNER: &str = "among-sentinels";

/// Starts sentinels that require a login.
fn guarded() -> Group {
    // A requested failover is not retried, so its timeout is longer than a pause of the machine.
    let group = Group::private(Setup::redis_sentinel().with_env("FAILOVER_TIMEOUT", "30000"));
    let sentinels: Vec<SocketAddr> =
        group.url.hosts().iter().map(|host| host.to_string().parse().unwrap()).collect();
    for sentinel in sentinels {
        let mut admin = Admin::at(sentinel);
        let mut call = |command: &[&str]| {
            let reply = admin.call(command);
            assert_eq!(reply, Reply::Status("OK".into()), "{command:?}");
        };
        call(&["ACL", "SETUSER", WATCHER, "on", &format!(">{SECRET}"), "&*", "+@all"]);
        call(&["SENTINEL", "CONFIG", "SET", "sentinel-pass", INNER]);
        call(&["ACL", "SETUSER", "default", "resetpass", &format!(">{INNER}")]);
    }
    group
}

async fn refused(group: &Group, keys: &str) -> Error {
    let config = group.config(keys).with_timeout(SILENCE);
    soon("connect completes", RedisBackend::connect(config)).await.map(drop).unwrap_err()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_login_at_a_sentinel_names_the_sentinel() {
    let group = guarded();
    for keys in ["", "?sentinel_password=wrong", "?sentinel_user=nobody&sentinel_password=wrong"] {
        let error = refused(&group, keys).await;
        assert_eq!(error.kind(), ErrorKind::Denied, "{keys}: {error:?}");
        assert!(!format!("{error:?}").contains("wrong"), "{error:?}");
        assert!(error.to_string().contains("sentinel"), "broken: the error names the sentinel: {error}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_of_sentinels_that_require_a_login_is_followed() {
    let group = guarded();
    let keys = format!("?sentinel_user={WATCHER}&sentinel_password={SECRET}");
    let call = |command: &[&str]| {
        let mut admin = Admin::at(group.url.hosts()[0].to_string().parse().unwrap());
        assert_eq!(admin.call(&["AUTH", WATCHER, SECRET]), Reply::Status("OK".into()));
        admin.call(command)
    };
    let master = || {
        let reply = call(&["SENTINEL", "get-master-addr-by-name", "mymaster"]);
        reply.array().and_then(|parts| parts[1].text().map(str::to_owned)).unwrap()
    };
    let backend = RedisBackend::connect(group.config(&keys).with_timeout(SILENCE)).await.unwrap();
    let (simba, mutex) = (simba(backend, lease()), name());
    let (leader, tenure) = lead(&simba, &mutex).await;
    let (first, old) = (tenure.token(), master());
    leader.stop().await.unwrap();
    assert_eq!(call(&["SENTINEL", "FAILOVER", "mymaster"]), Reply::Status("OK".into()));
    until_within(ELECTION, "there is another master", || master() != old).await;
    let (_leader, tenure) = lead(&simba, &mutex).await;
    assert!(tenure.token() > first, "broken: tokens grow through a failover");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn password_file_is_read_at_every_connection() {
    let store = Store::private(Setup::redis());
    let mut admin = store.admin();
    let change = |password: &'static str| {
        let rules = format!("ACL SETUSER rotated resetpass >{password} {}", simba_redis::ACL);
        let reply = admin.call(&rules.split(' ').collect::<Vec<_>>());
        assert_eq!(reply, Reply::Status("OK".into()));
        std::future::ready(())
    };
    let connect = |url| RedisBackend::connect(RedisConfig::from_url(&url).unwrap().with_timeout(SILENCE));
    let url = |address| format!("redis://rotated@{address}");
    follows_password_file(store.address, url, change, connect).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_are_read_at_every_connection() {
    let (store, dir) = (Encrypted::shared(), tempfile::tempdir().unwrap());
    store.0.admin().create_user();
    let ca = dir.path().join("ca.pem");
    let trust =
        |name| std::fs::copy(format!("{}/{name}", simba_servers::shared("SIMBA_TCK_TLS")), &ca).unwrap();
    trust("ca.pem");
    let proxy = FaultProxy::start(store.address()).await.unwrap();
    let keys = format!("tls_server_name=localhost&connect_timeout=10s&tls_ca={}", ca.display());
    let url = format!("rediss://{USER}:{PASSWORD}@{}?{keys}", proxy.address()).parse().unwrap();
    let config = RedisConfig::from_url(&url).unwrap().with_timeout(SILENCE);
    let backend = RedisBackend::connect(config).await.unwrap();
    for (file, trusted) in [("other-ca.pem", false), ("ca.pem", true)] {
        trust(file);
        proxy.cut();
        let followed = async {
            // The first calls may still find the old connection, or its error.
            while match backend.read(&name()).await {
                Ok(_) => !trusted,
                Err(error) => trusted || error.kind() != ErrorKind::Denied,
            } {
                tokio::task::yield_now().await;
            }
        };
        soon("the next connection uses the new file", followed).await;
    }
}
