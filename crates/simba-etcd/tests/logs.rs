//! What must never be told. In a program of its own: it hears all that is logged.

#![allow(clippy::unwrap_used, clippy::print_stdout)]

mod common;

use std::sync::{Arc, Mutex};

use common::connect;
use common::login::{PASSWORD, guarded};
use simba_core::{Error, Simba};
use simba_servers::shared;

/// All that is logged, as one text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn texts(error: &Error) -> String {
    let mut text = format!("{error} {error:?}");
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text += &format!(" {cause} {cause:?}");
        source = cause.source();
    }
    text
}

#[tokio::test]
async fn row_64_no_text_shows_the_password() {
    let log = Log::default();
    let writer = log.clone();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing_subscriber::filter::LevelFilter::TRACE)
        .with_writer(move || writer.clone())
        .finish();
    // For all threads: what the others log meanwhile may not show it either.
    tracing::subscriber::set_global_default(subscriber).unwrap();
    let server = guarded().await;
    let (guarded, plain) = (server.address(), shared("SIMBA_TCK_ETCD"));
    let plain = plain.strip_prefix("etcd://").unwrap();
    let mut shown = String::new();
    for url in [
        format!("etcd://tck:{PASSWORD}@{guarded}/teams"),
        format!("etcd://wrong:{PASSWORD}@{guarded}/teams"),
        format!("etcd://tck:{PASSWORD}@{guarded}/elsewhere"),
        format!("etcd://wrong:{PASSWORD}@{plain}"),
        format!("etcd://wrong:{PASSWORD}@127.0.0.1:1"),
        format!("etcds://wrong:{PASSWORD}@{plain}"),
        format!("etcd://wrong:{PASSWORD}@{plain}?auth=other"),
    ] {
        match connect(&url).await {
            Err(error) => shown += &texts(&error),
            Ok(backend) => {
                shown += &format!("{backend:?}");
                let simba = Simba::new(backend);
                let locked = simba.locker("secret").lock().await;
                shown += &locked.map_or_else(|error| texts(&error), |_| String::new());
                simba.shutdown().await;
            }
        }
    }
    let logged = String::from_utf8(log.0.lock().unwrap().clone()).unwrap();
    assert!(logged.contains("simba_"), "something was logged");
    assert!(!shown.contains(PASSWORD) && !logged.contains(PASSWORD));
}
