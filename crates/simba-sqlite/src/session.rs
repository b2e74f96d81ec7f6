use std::sync::Arc;

use async_trait::async_trait;
use simba_core::backend::{Answer, Claim, Holding, Intent, Ownership, Prior, Session};
use simba_core::{Listener, MutexName, Result};
use tokio::sync::oneshot;

use crate::error::closed;
use crate::handle::Handle;
use crate::job::{Job, Read, Reply, Write};
use crate::table::SessionId;
use crate::worker::Topic;

/// One contender or observer at the file.
pub(crate) struct SqliteSession {
    handle: Arc<Handle>,
    id: SessionId,
    claim: Claim,
    holds: bool,
    /// There may be a place in the queue, also by a call that nobody waited for.
    queued: bool,
    /// Boxed: most sessions hold, and need none.
    ear: Option<Box<Ear>>,
}

impl SqliteSession {
    pub(crate) fn new(handle: Arc<Handle>, claim: Claim) -> Self {
        Self { handle, id: SessionId::draw(), claim, holds: false, queued: false, ear: None }
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
        let contend = |reply| Job::Write(Write::Contend { session, claim, prior, reply });
        let answer = self.handle.ask(contend).await?;
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // Whoever holds has left the queue, and has nothing to be told: the file forgets nobody.
            (self.queued, self.ear) = (false, None);
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let mutex = self.claim.mutex.clone();
        self.handle.ask(|reply| Job::Read(Read::Inspect(mutex, reply))).await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        let (session, claim, queued) = (self.id, self.claim.clone(), self.queued);
        let release = |reply| Job::Write(Write::Release { session, claim, holding, queued, reply });
        self.handle.ask(release).await?;
        self.queued = false;
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        let (handle, topic, mutex) = (&self.handle, self.topic(), &self.claim.mutex);
        self.ear.get_or_insert_with(|| Box::new(Ear::open(handle, topic, mutex))).hear().await
    }
}

impl Drop for SqliteSession {
    fn drop(&mut self) {
        if self.queued {
            let (session, mutex) = (self.id, self.claim.mutex.clone());
            self.handle.tell(Job::Write(Write::Leave { session, mutex }));
        }
    }
}

/// A session's ear: what it listens to, and whether that has begun.
struct Ear {
    handle: Arc<Handle>,
    mutex: MutexName,
    listener: Listener<Topic>,
    /// Completes when nothing can be missed any more.
    ready: Option<oneshot::Receiver<Result<()>>>,
}

impl Ear {
    fn open(handle: &Arc<Handle>, topic: Topic, mutex: &MutexName) -> Self {
        let listener = handle.hub().listen(topic);
        let (reply, ready) = Reply::pair();
        handle.tell(Job::Listen(mutex.clone(), reply));
        Self { handle: Arc::clone(handle), mutex: mutex.clone(), listener, ready: Some(ready) }
    }

    /// Completes once when it has begun to listen, and then at every ring.
    async fn hear(&mut self) -> Result<()> {
        match &mut self.ready {
            Some(ready) => {
                let begun = ready.await.unwrap_or_else(|_| Err(closed()));
                self.ready = None;
                begun
            }
            None => {
                self.listener.rung().await;
                Ok(())
            }
        }
    }
}

impl Drop for Ear {
    fn drop(&mut self) {
        self.handle.tell(Job::Unlisten(self.mutex.clone()));
    }
}
