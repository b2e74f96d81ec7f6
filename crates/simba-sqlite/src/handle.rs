//! The caller's end of the worker: what a backend and its sessions share.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::thread;

use simba_core::{Clock, Error, ErrorKind, Hub, Result};
use tokio::sync::oneshot::error::TryRecvError;

use crate::error::{NAME, closed};
use crate::job::{Job, Reply};
use crate::worker::{Topic, Worker};

/// How often a caller that is alone looks for its answer before it sleeps: the answer takes microseconds, and a
/// wake-up takes more.
const GLANCES: u32 = 32;

/// Asks the worker. When the last one is dropped, the worker ends.
#[derive(Debug)]
pub(crate) struct Handle {
    jobs: Sender<Job>,
    hub: Hub<Topic>,
    /// How many calls are under way.
    calls: AtomicUsize,
}

/// A call under way.
struct Call<'a>(&'a AtomicUsize);

impl<'a> Call<'a> {
    fn begin(calls: &'a AtomicUsize) -> Self {
        calls.fetch_add(1, Ordering::Relaxed);
        Self(calls)
    }

    fn is_alone(&self) -> bool {
        self.0.load(Ordering::Relaxed) == 1
    }
}

impl Drop for Call<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Handle {
    /// Starts a worker, which opens the file.
    ///
    /// # Cancel safety
    ///
    /// A dropped call lets the worker end as soon as it is through.
    pub(crate) async fn start(path: &Path, clock: Arc<dyn Clock>) -> Result<Arc<Self>> {
        let (jobs, asked) = mpsc::channel();
        let hub = Hub::local();
        let handle = Arc::new(Self { jobs: jobs.clone(), hub: hub.clone(), calls: AtomicUsize::new(0) });
        let (reply, opened) = Reply::pair();
        let path = path.to_owned();
        let work = move || match Worker::open(&path, clock, hub, jobs) {
            Ok(worker) => {
                reply.send(Ok(()));
                worker.run(&asked);
            }
            Err(error) => reply.send(Err(error.with_backend(NAME))),
        };
        thread::Builder::new().name("simba-sqlite".into()).spawn(work).map_err(|error| {
            Error::new(ErrorKind::Unavailable, "the system gives no thread: raise its limit")
                .with_backend(NAME)
                .with_source(error)
        })?;
        opened.await.unwrap_or_else(|_| Err(closed()))?;
        Ok(handle)
    }

    pub(crate) fn hub(&self) -> &Hub<Topic> {
        &self.hub
    }

    /// Asks for something and waits for the answer.
    ///
    /// # Cancel safety
    ///
    /// A dropped call that has not begun never does.
    pub(crate) async fn ask<T>(&self, job: impl FnOnce(Reply<T>) -> Job) -> Result<T> {
        let (reply, mut answer) = Reply::pair();
        let call = Call::begin(&self.calls);
        self.jobs.send(job(reply)).map_err(|_| closed())?;
        for _ in 0..GLANCES {
            match answer.try_recv() {
                Ok(answer) => return answer,
                Err(TryRecvError::Closed) => return Err(closed()),
                Err(TryRecvError::Empty) if call.is_alone() => tokio::task::yield_now().await,
                Err(TryRecvError::Empty) => break,
            }
        }
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    /// Asks for something that nobody waits for.
    pub(crate) fn tell(&self, job: Job) {
        let _ = self.jobs.send(job);
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.tell(Job::End(None));
    }
}
