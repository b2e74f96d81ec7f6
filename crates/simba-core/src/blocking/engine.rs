use std::future::Future;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

use crate::error::{Error, ErrorKind, Result};
use crate::park;

/// The thread that runs everything for the handles that share it.
///
/// # Drop
///
/// The last handle's drop lets the thread shut down in order, and does not wait for it.
#[derive(Debug)]
pub(super) struct Engine {
    handle: Handle,
    ending: CancellationToken,
}

impl Engine {
    /// Starts the thread. When the engine is dropped, `farewell` runs as its last task.
    pub(super) fn start() -> Result<(Self, tokio::sync::oneshot::Sender<crate::Simba>)> {
        let refused = |error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, "the system starts no engine thread").with_source(error)
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(refused)?;
        let engine = Self { handle: runtime.handle().clone(), ending: CancellationToken::new() };
        let ending = engine.ending.clone();
        let (served, serves) = tokio::sync::oneshot::channel::<crate::Simba>();
        let serve = move || {
            runtime.block_on(async {
                ending.cancelled().await;
                if let Ok(simba) = serves.await {
                    simba.shutdown().await;
                }
            });
        };
        thread::Builder::new().name("simba-engine".into()).spawn(serve).map_err(refused)?;
        Ok((engine, served))
    }

    pub(super) fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Runs `future` on the engine's thread and waits for it on this one.
    pub(super) fn run<F>(&self, future: F) -> Result<F::Output>
    where
        F: Future + Send + 'static,
        F::Output: Send + 'static,
    {
        park::block_on(self.handle.spawn(future))
            .map_err(|error| Error::new(ErrorKind::Closed, "the engine thread ended").with_source(error))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.ending.cancel();
    }
}
