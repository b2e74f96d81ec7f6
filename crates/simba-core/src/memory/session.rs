use std::sync::Arc;

use async_trait::async_trait;

use super::store::{SessionId, Store, Topic};
use crate::backend::{Answer, Claim, Holding, Intent, Ownership, Prior, Session};
use crate::error::Result;
use crate::wakeups::Subscription;

/// One contender or observer at the store.
pub(super) struct MemorySession {
    store: Arc<Store>,
    id: SessionId,
    claim: Claim,
    holds: bool,
    subscription: Option<Subscription<Topic>>,
}

impl MemorySession {
    pub(super) fn new(store: Arc<Store>, claim: Claim) -> Self {
        Self { id: store.open(), store, claim, holds: false, subscription: None }
    }

    fn topic(&self) -> Topic {
        match self.claim.intent {
            Intent::Queue => Topic::Waiter(self.id),
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
            // A holder needs no hints: this store does not lose holds.
            self.subscription = None;
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        Ok(self.store.inspect(&self.claim.mutex))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        self.store.release(self.id, &self.claim.mutex, holding);
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        match &mut self.subscription {
            Some(subscription) => subscription.notified().await,
            // Completes at once: the next call finds what changed before the subscription.
            None => self.subscription = Some(self.store.wakeups.subscribe(self.topic())),
        }
        Ok(())
    }
}

impl Drop for MemorySession {
    fn drop(&mut self) {
        self.store.leave(self.id, &self.claim.mutex);
    }
}
