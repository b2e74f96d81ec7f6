//! The store of a URL, as a target of measurements.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_measure::Target;
use simba_mutex::spi::{Backend, ConnectUrl, async_trait};
use simba_mutex::{Error, MutexName, Simba};

use crate::args::BenchArgs;

/// Returns a mutex name of the benchmark. The names are always the same, because a store keeps an entry for each.
pub(crate) fn mutex(kind: &str, n: usize) -> Result<MutexName, Error> {
    MutexName::new(format!("simba-bench:{kind}:{n}"))
}

/// The store that is measured.
#[derive(Debug)]
pub(crate) struct Subject {
    url: ConnectUrl,
    name: &'static str,
    tasks: usize,
    waiters: usize,
    held: usize,
    /// All open handles, so that an interrupted benchmark can close them.
    handles: Mutex<Vec<Simba>>,
}

impl Subject {
    pub(crate) fn new(url: &ConnectUrl, backend: &dyn Backend, args: &BenchArgs) -> Self {
        Self {
            url: url.clone(),
            name: backend.name(),
            tasks: args.tasks.into(),
            waiters: args.waiters.into(),
            held: args.held.into(),
            handles: Mutex::default(),
        }
    }

    pub(crate) fn url(&self) -> &ConnectUrl {
        &self.url
    }

    /// Returns whether the store is a file, for which flock(1) is the alternative.
    pub(crate) fn is_embedded(&self) -> bool {
        self.url.scheme() == "sqlite"
    }

    /// Releases everything that is still held.
    pub(crate) async fn shut_down(&self) {
        let handles = std::mem::take(&mut *self.handles.lock().unwrap_or_else(PoisonError::into_inner));
        for handle in handles {
            handle.shutdown().await;
        }
    }
}

#[async_trait]
impl Target for Subject {
    fn name(&self) -> &'static str {
        self.name
    }

    async fn connect(&self) -> anyhow::Result<Arc<dyn Backend>> {
        Ok(simba_mutex::backend(&self.url).await?)
    }

    fn handle(&self, backend: &Arc<dyn Backend>) -> Simba {
        let simba = Simba::builder(Arc::clone(backend)).build();
        self.handles.lock().unwrap_or_else(PoisonError::into_inner).push(simba.clone());
        simba
    }

    fn mutex(&self, kind: &str, n: usize) -> anyhow::Result<MutexName> {
        Ok(mutex(kind, n)?)
    }

    /// Returns false: a session without a poll would wait for ever if it missed its notification.
    fn raw_waits(&self) -> bool {
        false
    }

    fn tasks(&self) -> usize {
        self.tasks
    }

    fn waiters(&self) -> usize {
        self.waiters
    }

    fn samples(&self, asked: usize) -> usize {
        match self.url.scheme() {
            "mysql" | "mariadb" => asked.min(60),
            _ => asked,
        }
    }

    fn many(&self) -> usize {
        self.held
    }

    fn requeue(&self) -> Duration {
        Duration::from_millis(5)
    }
}
