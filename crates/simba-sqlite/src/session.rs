use std::sync::Arc;

use async_trait::async_trait;
use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior, Session, Subscription};
use simba_core::{MutexName, Result};
use tokio::sync::oneshot;

use crate::connection::{Connection, Request};
use crate::error::closed;
use crate::tables::SessionId;
use crate::wakeups::Topic;

/// One contender or observer of a mutex in the file.
pub(crate) struct SqliteSession {
    connection: Arc<Connection>,
    id: SessionId,
    claim: Claim,
    holds: bool,
    /// Whether there may be an entry in the queue, also one made by a call that was dropped.
    queued: bool,
    /// Boxed, since a session that holds has none, and most sessions hold.
    watch: Option<Box<Watch>>,
}

impl SqliteSession {
    pub(crate) fn new(connection: Arc<Connection>, claim: Claim) -> Self {
        Self { connection, id: SessionId::generate(), claim, holds: false, queued: false, watch: None }
    }

    fn topic(&self) -> Topic {
        match self.claim.intent {
            Intent::Queue => Topic::Turn(self.id),
            _ => Topic::Owner(self.claim.mutex.clone()),
        }
    }
}

#[async_trait]
impl Session for SqliteSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let (session, claim) = (self.id, self.claim.clone());
        self.queued |= claim.intent == Intent::Queue;
        let contend = self
            .connection
            .write(Some(claim.lease.ttl()), move |tables| tables.contend(session, &claim, prior));
        let answer = contend.await?;
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // A holder has left the queue. It needs no notifications: a row in the file does not vanish.
            (self.queued, self.watch) = (false, None);
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let mutex = self.claim.mutex.clone();
        self.connection.read(move |worker| worker.database.read(|tables| tables.inspect(&mutex))).await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        let (session, mutex, queued) = (self.id, self.claim.mutex.clone(), self.queued);
        let release = self.connection.write(Some(self.claim.lease.ttl()), move |tables| {
            if queued {
                tables.leave_queue(session, &mutex)?;
            }
            tables.release(session, &mutex, holding)
        });
        release.await?;
        self.queued = false;
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        let (connection, topic, mutex) = (&self.connection, self.topic(), &self.claim.mutex);
        let watch =
            self.watch.get_or_insert_with(|| Box::new(Watch::start(connection, topic, mutex.clone())));
        // Boxed: a holder waits here for its whole tenure and does not need this state.
        Box::pin(watch.changed()).await
    }
}

impl Drop for SqliteSession {
    fn drop(&mut self) {
        if self.queued {
            let (session, mutex) = (self.id, self.claim.mutex.clone());
            self.connection.write_in_background(move |tables| tables.leave(session, &mutex));
        }
    }
}

/// A session's subscription to changes of its mutex.
struct Watch {
    subscription: Subscription<Topic>,
    /// Completes when no change can be missed any more.
    ready: Option<oneshot::Receiver<Arc<()>>>,
    /// Tells the worker that the mutex is watched, until it is dropped.
    watched: Option<Arc<()>>,
}

impl Watch {
    fn start(connection: &Connection, topic: Topic, mutex: MutexName) -> Self {
        let subscription = connection.wakeups.subscribe(topic);
        let (reply, ready) = oneshot::channel();
        connection.send(Request::Run(Box::new(move |worker| {
            let _ = reply.send(worker.notifier.subscribe(&worker.database, mutex));
        })));
        Self { subscription, ready: Some(ready), watched: None }
    }

    /// Completes once when the subscription is active, and then at every notification.
    async fn changed(&mut self) -> Result<()> {
        match &mut self.ready {
            Some(ready) => {
                self.watched = ready.await.ok();
                self.ready = None;
                self.watched.as_ref().map(|_| ()).ok_or_else(closed)
            }
            None => {
                self.subscription.notified().await;
                Ok(())
            }
        }
    }
}
