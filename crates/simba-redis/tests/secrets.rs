//! Row 64: no text holds a secret.

#![allow(clippy::unwrap_used, reason = "a test fails by it")]

mod common;

use std::io;
use std::sync::{Arc, Mutex};

use common::{Store, lease, name, simba, soon};
use simba_core::ConnectUrl;
use simba_redis::{RedisBackend, RedisConfig};
use simba_servers::Setup;
use tracing_subscriber::fmt::MakeWriter;

const CANARY: &str = "canary-7f3a0c";

/// All that was ever logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = Self;

    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_64_no_error_no_debug_and_no_log_holds_a_password() {
    let log = Log::default();
    let subscriber =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(log.clone()).finish();
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let mut texts = Vec::new();
    let store = Store::private(Setup::redis());
    let mut admin = store.admin();
    admin.ask(&["ACL", "SETUSER", "app", "on", &format!(">{CANARY}"), "~*", "&*", "+@all"]);
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
                texts.push(format!("{error} {error:?}"));
                continue;
            }
        };
        texts.push(format!("{config:?} {config:#?}"));
        match soon("an answer comes", RedisBackend::connect(config)).await {
            Ok(backend) => {
                texts.push(format!("{backend:?}"));
                let simba = simba(backend, lease());
                let guard = simba.locker(name()).lock().await.unwrap();
                store.admin().ask(&["CLIENT", "KILL", "TYPE", "normal"]);
                let _ = guard.release().await;
                simba.shutdown().await;
            }
            Err(error) => texts.push(format!("{error} {error:?} {error:#?}")),
        }
    }
    texts.push(String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned());
    assert!(texts.last().is_some_and(|log| log.contains("connected")), "the log was written");
    for text in texts {
        // Keys that nobody reads are not secrets; their values are not repeated either.
        assert!(
            !text.replace(&format!("unknown={CANARY}"), "").contains(CANARY),
            "broken: a secret in {text}"
        );
    }
}
