//! The connection of a handle: passes calls to the thread that owns the file, and their replies back.

use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{self, Sender};
use std::thread;
use std::time::Duration;

use simba_core::spi::Wakeups;
use simba_core::{Clock, Error, ErrorKind, Result};
use tokio::sync::oneshot::{self, error::TryRecvError};

use crate::error::{NAME, closed};
use crate::tables::{Fault, Tables};
use crate::wakeups::Topic;
use crate::worker::Worker;

/// How often the only caller polls for its reply before it sleeps: a reply takes microseconds, and waking a task takes
/// longer.
const SPINS: u32 = 32;

/// A request to the worker.
pub(crate) enum Request {
    /// Change the file, in one transaction with other changes.
    Write(Box<dyn Write>),
    /// Run this on the worker's thread, outside of a transaction.
    Run(Box<dyn FnOnce(&mut Worker) + Send>),
    /// Close the file and end. The sender is dropped when that is done.
    Close(oneshot::Sender<()>),
}

/// A change of the file, and its caller.
pub(crate) trait Write: Send {
    /// Returns the ttl of the caller's lease, if the caller has one.
    fn ttl(&self) -> Option<Duration>;

    /// Returns whether the caller was dropped, so that the change need not be made.
    fn is_cancelled(&self) -> bool;

    /// Returns whether there never was a caller. The worker repeats such a change until it succeeds.
    fn is_background(&self) -> bool;

    /// Makes the change, within a transaction. It is made again if the transaction fails and the worker repeats it.
    ///
    /// # Errors
    ///
    /// The whole transaction has failed.
    fn apply(&mut self, tables: &mut Tables<'_>) -> Result<(), Fault>;

    /// Sends the outcome to the caller.
    fn reply(self: Box<Self>, committed: Result<()>);
}

pub(crate) struct Change<T, F> {
    pub(crate) ttl: Option<Duration>,
    /// None for a change in the background.
    pub(crate) caller: Option<oneshot::Sender<Result<T>>>,
    pub(crate) apply: F,
    pub(crate) outcome: Option<T>,
}

impl<T, F> Write for Change<T, F>
where
    T: Send,
    F: FnMut(&mut Tables<'_>) -> Result<T, Fault> + Send,
{
    fn ttl(&self) -> Option<Duration> {
        self.ttl
    }

    fn is_cancelled(&self) -> bool {
        self.caller.as_ref().is_some_and(oneshot::Sender::is_closed)
    }

    fn is_background(&self) -> bool {
        self.caller.is_none()
    }

    fn apply(&mut self, tables: &mut Tables<'_>) -> Result<(), Fault> {
        self.outcome = Some((self.apply)(tables)?);
        Ok(())
    }

    fn reply(self: Box<Self>, committed: Result<()>) {
        let Self { caller: Some(caller), outcome, .. } = *self else { return };
        let _ = caller.send(committed.and_then(|()| outcome.ok_or_else(closed)));
    }
}

/// Sends requests to the worker. The worker ends when the last reference is dropped.
#[derive(Debug)]
pub(crate) struct Connection {
    requests: Sender<Request>,
    pub(crate) wakeups: Wakeups<Topic>,
    /// Each call in flight has a clone.
    in_flight: Arc<()>,
}

impl Connection {
    /// Starts a worker and waits until it has opened the file.
    ///
    /// # Cancel safety
    ///
    /// If the call is dropped, the worker ends once it has opened the file.
    pub(crate) async fn open(path: &Path, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let (requests, received) = mpsc::channel();
        let wakeups = Wakeups::local();
        let connection =
            Self { requests: requests.clone(), wakeups: wakeups.clone(), in_flight: Arc::default() };
        let (reply, opened) = oneshot::channel();
        let path = path.to_owned();
        let work = move || match Worker::open(&path, clock, wakeups, requests) {
            Ok(worker) => {
                let _ = reply.send(Ok(()));
                worker.run(&received);
            }
            Err(error) => drop(reply.send(Err(error.with_backend(NAME)))),
        };
        thread::Builder::new().name("simba-sqlite".into()).spawn(work).map_err(|error| {
            Error::new(ErrorKind::Unavailable, "cannot start a thread: raise the limit (ulimit -u)")
                .with_backend(NAME)
                .with_source(error)
        })?;
        opened.await.unwrap_or_else(|_| Err(closed()))?;
        Ok(Arc::new(connection))
    }

    /// Makes a change in a transaction, and waits for its commit. A call with a `ttl` fails in time for its caller to
    /// make another one before the lease ends.
    ///
    /// # Cancel safety
    ///
    /// If the call is dropped before the worker has started it, it is not carried out.
    pub(crate) async fn write<T: Send + 'static>(
        &self,
        ttl: Option<Duration>,
        apply: impl FnMut(&mut Tables<'_>) -> Result<T, Fault> + Send + 'static,
    ) -> Result<T> {
        let (caller, reply) = oneshot::channel();
        let change = Change { ttl, caller: Some(caller), apply, outcome: None };
        self.call(Request::Write(Box::new(change)), reply).await
    }

    /// Makes a change without a caller. The worker repeats it if it fails.
    pub(crate) fn write_in_background(
        &self,
        apply: impl FnMut(&mut Tables<'_>) -> Result<(), Fault> + Send + 'static,
    ) {
        self.send(Request::Write(Box::new(Change { ttl: None, caller: None, apply, outcome: None })));
    }

    /// Runs a read on the worker's thread.
    ///
    /// # Cancel safety
    ///
    /// As [`write`](Self::write).
    pub(crate) async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&mut Worker) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let (caller, reply) = oneshot::channel();
        let run = move |worker: &mut Worker| {
            if !caller.is_closed() {
                let _ = caller.send(read(worker));
            }
        };
        self.call(Request::Run(Box::new(run)), reply).await
    }

    async fn call<T>(&self, request: Request, mut reply: oneshot::Receiver<Result<T>>) -> Result<T> {
        let in_flight = Arc::clone(&self.in_flight);
        self.requests.send(request).map_err(|_| closed())?;
        for _ in 0..SPINS {
            match reply.try_recv() {
                Ok(reply) => return reply,
                Err(TryRecvError::Closed) => return Err(closed()),
                Err(TryRecvError::Empty) if Arc::strong_count(&in_flight) == 2 => {
                    tokio::task::yield_now().await
                }
                Err(TryRecvError::Empty) => break,
            }
        }
        reply.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Sends a request without waiting for it.
    pub(crate) fn send(&self, request: Request) {
        let _ = self.requests.send(request);
    }

    /// Closes the file. Calls fail from then on.
    pub(crate) async fn close(&self) {
        let (closing, closed) = oneshot::channel();
        self.send(Request::Close(closing));
        // The sender is dropped, also if it was closed before.
        let _ = closed.await;
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.send(Request::Close(oneshot::channel().0));
    }
}
