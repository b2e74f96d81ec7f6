//! What is done in the background: leaving queues, and wake-ups that need another look.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt};
use simba_core::{MutexName, Result, within};
use tokio::sync::{Semaphore, mpsc};

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
    Leave { mutex: MutexName, session: Arc<str> },
    /// The queue of a mutex changed while it was freed or taken: wake whose turn it is by a fresh look.
    Wake(MutexName),
    /// Forget what crashed clients left behind.
    Sweep,
}

/// How many statements of errands are on their way at once: the connection is shared with renewals.
const ABREAST: usize = 4;

/// The errands that wait, and those under way. They are independent: one whose row is locked pauses between its tries,
/// and delays no other.
pub(crate) struct Errands {
    queue: mpsc::UnboundedReceiver<Errand>,
    under_way: FuturesUnordered<Pin<Box<dyn Future<Output = ()> + Send>>>,
    room: Arc<Semaphore>,
}

impl Errands {
    pub(crate) fn new(queue: mpsc::UnboundedReceiver<Errand>) -> Self {
        Self { queue, under_way: FuturesUnordered::new(), room: Arc::new(Semaphore::new(ABREAST)) }
    }

    /// Runs errands as they come.
    ///
    /// # Cancel safety
    ///
    /// A dropped run loses nothing: the next one goes on.
    pub(crate) async fn run(&mut self, handle: &Arc<Handle>) {
        loop {
            tokio::select! {
                errand = self.queue.recv() => match errand {
                    Some(errand) => self.begin(handle, errand),
                    None => return,
                },
                Some(()) = self.under_way.next(), if !self.under_way.is_empty() => {}
            }
        }
    }

    /// Runs those that are there already.
    pub(crate) async fn finish(&mut self, handle: &Arc<Handle>) {
        while let Ok(errand) = self.queue.try_recv() {
            self.begin(handle, errand);
        }
        while self.under_way.next().await.is_some() {}
    }

    fn begin(&self, handle: &Arc<Handle>, errand: Errand) {
        let (handle, room) = (Arc::clone(handle), Arc::clone(&self.room));
        self.under_way.push(Box::pin(async move { insist(&handle, &room, &errand).await }));
    }
}

/// Tries an errand a few times.
async fn insist(handle: &Handle, room: &Semaphore, errand: &Errand) {
    for tried in 0..TRIES {
        let done = {
            // The semaphore is never closed.
            let _permit = room.acquire().await;
            within(&*handle.clock, handle.config.silence(), perform(handle, errand)).await
        };
        match done {
            Some(Err(error)) if error.is_transient() => tracing::debug!(%error, "an errand is tried again"),
            Some(Err(error)) => return tracing::debug!(%error, "an errand is left undone"),
            Some(Ok(())) => return,
            None => {}
        }
        handle.clock.sleep_until(handle.clock.now() + PAUSE * 2u32.pow(tried)).await;
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
