use std::future::Future;
use std::thread;

use tokio::runtime::{Builder, Handle};
use tokio_util::sync::CancellationToken;

use super::wait;
use crate::error::{Error, ErrorKind, Result};

/// The thread that runs the engine of the handles that share it.
///
/// # Drop
///
/// Dropping it starts a graceful shutdown on the thread, and does not wait for it.
#[derive(Debug)]
pub(super) struct Engine {
    handle: Handle,
    ending: CancellationToken,
}

impl Engine {
    /// Starts the thread. Returns a sender for the handle that the thread shuts down after the engine is dropped.
    pub(super) fn start() -> Result<(Self, tokio::sync::oneshot::Sender<crate::Simba>)> {
        let failed = |error: std::io::Error| {
            Error::new(ErrorKind::Unavailable, "the system cannot start the engine thread").with_source(error)
        };
        let runtime = Builder::new_current_thread().enable_all().build().map_err(failed)?;
        let engine = Self { handle: runtime.handle().clone(), ending: CancellationToken::new() };
        let ending = engine.ending.clone();
        let (sender, handle) = tokio::sync::oneshot::channel::<crate::Simba>();
        let serve = move || {
            runtime.block_on(async {
                ending.cancelled().await;
                if let Ok(simba) = handle.await {
                    simba.shutdown().await;
                }
            });
        };
        thread::Builder::new().name("simba-engine".into()).spawn(serve).map_err(failed)?;
        Ok((engine, sender))
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
        wait(self.handle.spawn(future))
            .map_err(|error| Error::new(ErrorKind::Closed, "the engine thread ended").with_source(error))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.ending.cancel();
    }
}
