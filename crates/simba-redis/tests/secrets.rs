//! Row 64: no output contains a secret.

#![allow(clippy::unwrap_used, reason = "test code")]

mod common;

use common::{SILENCE, Store, long, name, simba, soon};
use simba_core::spi::ConnectUrl;
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use simba_test_support::{Logs, error_text};

const CANARY: &str = "canary-7f3a0c";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_64_no_error_debug_or_log_output_contains_a_password() {
    let logs = Logs::capture();
    let mut texts = Vec::new();
    let store = Store::private(Setup::redis());
    let mut admin = store.admin();
    admin.call(&["ACL", "SETUSER", "app", "on", &format!(">{CANARY}"), "~*", "&*", "+@all"]);
    let address = store.address;
    let urls = [
        format!("redis://app:{CANARY}@{address}"),
        format!("redis://app:{CANARY}-wrong@{address}"),
        format!("redis://:{CANARY}@{address}"),
        format!("redis://app:{CANARY}@{address}/99"),
        format!("redis://app:{CANARY}@127.0.0.1:1"),
        format!("rediss://app:{CANARY}@{address}"),
        format!("redis+cluster://app:{CANARY}@{address}"),
        format!("redis+sentinel://app:{CANARY}@{address}/m?sentinel_password={CANARY}"),
        format!("redis://app:{CANARY}@{address}?unknown={CANARY}"),
        format!("redis://{CANARY}@{address}/{CANARY}"),
    ];
    for url in urls {
        let url: ConnectUrl = url.parse().unwrap();
        texts.push(
            format!("{url} {url:?}").replace(&format!("{CANARY}@"), "").replace(&format!("/{CANARY}"), ""),
        );
        let config = match RedisConfig::from_url(&url) {
            Ok(config) => config,
            Err(error) => {
                texts.push(error_text(&error));
                continue;
            }
        };
        texts.push(format!("{config:?} {config:#?}"));
        match soon("connect completes", RedisBackend::connect(config.with_timeout(SILENCE))).await {
            Ok(backend) => {
                texts.push(format!("{backend:?}"));
                let simba = simba(backend, long());
                let guard = simba.locker(name()).lock().await.unwrap();
                store.admin().call(&["CLIENT", "KILL", "TYPE", "normal"]);
                let _ = guard.release().await;
                simba.shutdown().await;
            }
            Err(error) => texts.push(error_text(&error)),
        }
    }
    assert!(logs.text().contains("connected"), "the log was written");
    // The value of an unknown key is not a secret, and is not repeated either.
    let texts: Vec<_> =
        texts.iter().map(|text: &String| text.replace(&format!("unknown={CANARY}"), "")).collect();
    logs.assert_without(CANARY, &texts);
}
