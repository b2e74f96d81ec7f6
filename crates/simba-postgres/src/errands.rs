//! What is done in the background, one after the other: leaving queues, and wake-ups that need another look.

use std::time::Duration;

use simba_core::{MutexName, Result, within};
use tokio::sync::mpsc;

use crate::handle::Handle;
use crate::rows::get;
use crate::statements::Query;

/// How often an errand is tried: what it leaves undone ends by itself.
const TRIES: u32 = 4;
/// The pause before the second try; it doubles.
const PAUSE: Duration = Duration::from_millis(50);

/// One thing to do.
#[derive(Clone, Debug)]
pub(crate) enum Errand {
    /// A session is gone: out of the queue with it.
    Leave { mutex: MutexName, session: std::sync::Arc<str> },
    /// The queue of a mutex changed while it was freed or taken: wake whose turn it is by a fresh look.
    Wake(MutexName),
    /// Forget what crashed clients left behind.
    Sweep,
}

/// The errands, and the one under way: a run that is dropped takes it up again.
#[derive(Debug)]
pub(crate) struct Errands {
    queue: mpsc::UnboundedReceiver<Errand>,
    current: Option<Errand>,
}

impl Errands {
    pub(crate) const fn new(queue: mpsc::UnboundedReceiver<Errand>) -> Self {
        Self { queue, current: None }
    }

    /// Runs errands as they come.
    pub(crate) async fn run(&mut self, handle: &Handle) {
        loop {
            if self.current.is_none() {
                self.current = self.queue.recv().await;
            }
            if self.current.is_none() {
                return;
            }
            self.do_current(handle).await;
        }
    }

    /// Runs those that are there already.
    pub(crate) async fn finish(&mut self, handle: &Handle) {
        while let Some(errand) = self.current.take().or_else(|| self.queue.try_recv().ok()) {
            self.current = Some(errand);
            self.do_current(handle).await;
        }
    }

    async fn do_current(&mut self, handle: &Handle) {
        for tried in 0..TRIES {
            let Some(errand) = &self.current else { return };
            let done = within(&*handle.clock, handle.config.silence(), perform(handle, errand)).await;
            match done {
                Some(Err(error)) if error.is_transient() => {
                    tracing::debug!(%error, "an errand is tried again")
                }
                Some(Err(error)) => {
                    tracing::debug!(%error, "an errand is left undone");
                    break;
                }
                Some(Ok(())) => break,
                None => {}
            }
            handle.clock.sleep_until(handle.clock.now() + PAUSE * 2u32.pow(tried)).await;
        }
        self.current = None;
    }
}

async fn perform(handle: &Handle, errand: &Errand) -> Result<()> {
    match errand {
        Errand::Leave { mutex, session } => {
            if leave(handle, mutex, session).await? {
                wake(handle, mutex).await?;
            }
            Ok(())
        }
        Errand::Wake(mutex) => wake(handle, mutex).await,
        Errand::Sweep => handle.ask_all(Query::Sweep, &[]).await.map(drop),
    }
}

/// Leaves the queue; true if the mutex is free and somebody may wait for it.
pub(crate) async fn leave(handle: &Handle, mutex: &MutexName, session: &str) -> Result<bool> {
    let rows = handle.ask(mutex, Query::Leave, &[&mutex.as_str(), &session]).await?;
    rows.first().map_or(Ok(false), |row| get(row, 0))
}

/// Wakes whose turn it is, and notes if nobody is there any more.
pub(crate) async fn wake(handle: &Handle, mutex: &MutexName) -> Result<()> {
    let rows = handle.ask(mutex, Query::Wake, &[&mutex.as_str()]).await?;
    let Some(row) = rows.first() else { return Ok(()) };
    let (waited, waiting): (i64, i64) = (get(row, 0)?, get(row, 1)?);
    let (watched, watching): (i64, i64) = (get(row, 2)?, get(row, 3)?);
    // Zero is no number of a queue that somebody is in.
    let waited = if waiting == 0 { waited.max(0) } else { 0 };
    let watched = if watching == 0 { watched.max(0) } else { 0 };
    if waited > 0 || watched > 0 {
        handle.ask(mutex, Query::Calm, &[&mutex.as_str(), &waited, &watched]).await?;
    }
    Ok(())
}
