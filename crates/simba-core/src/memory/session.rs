use std::sync::Arc;

use async_trait::async_trait;

use super::store::{SessionId, Store, Topic};
use crate::backend::{Answer, Claim, Holding, Intent, Ownership, Prior, Session};
use crate::error::Result;
use crate::hub::Listener;

/// One contender or observer at the store.
pub(super) struct MemorySession {
    store: Arc<Store>,
    id: SessionId,
    claim: Claim,
    holds: bool,
    listener: Option<Listener<Topic>>,
}

impl MemorySession {
    pub(super) fn new(store: Arc<Store>, claim: Claim) -> Self {
        Self { id: store.open(), store, claim, holds: false, listener: None }
    }

    fn topic(&self) -> Topic {
        match self.claim.intent {
            Intent::Queue => Topic::Turn(self.id),
            Intent::Try | Intent::Observe => Topic::Owner(self.claim.mutex.clone()),
        }
    }
}

#[async_trait]
impl Session for MemorySession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let answer = self.store.contend(self.id, &self.claim, prior);
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // A holder has nothing to be told: the store forgets nobody.
            self.listener = None;
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        Ok(self.store.inspect(&self.claim.mutex))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        self.store.release(self.id, &self.claim, holding);
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        match &mut self.listener {
            Some(listener) => listener.rung().await,
            // What was missed before this line, the next look finds.
            None => self.listener = Some(self.store.hub().listen(self.topic())),
        }
        Ok(())
    }
}

impl Drop for MemorySession {
    fn drop(&mut self) {
        self.store.leave(self.id, &self.claim.mutex);
    }
}
