use std::sync::Arc;

use async_trait::async_trait;
use simba_core::Result;
use simba_core::spi::{Answer, Claim, Holding, Ownership, Prior, Session};

use crate::calls::{Calls, Request, SessionState};
use crate::shared::Shared;
use crate::wakeups::Subscription;

/// One contender or observer of a mutex.
pub(crate) struct MySqlSession {
    shared: Arc<Shared>,
    calls: Arc<Calls>,
    state: Arc<SessionState>,
    holds: bool,
    /// Boxed: a holder has none.
    subscription: Option<Box<Subscription>>,
}

impl MySqlSession {
    pub(crate) fn new(shared: Arc<Shared>, calls: Arc<Calls>, claim: Claim) -> Self {
        let state = Arc::new(SessionState::new(claim, &shared));
        Self { shared, calls, state, holds: false, subscription: None }
    }

    async fn call(&self, request: Request) -> Result<Answer> {
        if let Some(subscription) = &self.subscription {
            subscription.mark_used();
        }
        self.calls.call(&self.state, request).await
    }
}

#[async_trait]
impl Session for MySqlSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let answer = self.call(Request::Contend(prior)).await?;
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // A holder needs no wake-ups: its next renewal reads the same row.
            self.subscription = None;
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        match self.call(Request::Inspect).await? {
            Answer::Held(owner) | Answer::Ours(owner) => Ok(Some(owner)),
            Answer::Vacant => Ok(None),
        }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        self.subscription = None;
        if holding == Holding::Nothing {
            return Ok(());
        }
        self.call(Request::Release(holding)).await.map(drop)
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        match &self.subscription {
            // Boxed: a holder waits here for its whole tenure and does not need this state.
            Some(subscription) => Box::pin(subscription.notified()).await,
            None => {
                let (Claim { mutex, intent, .. }, now) = (&self.state.claim, self.shared.clock.now());
                self.subscription = Some(Box::new(self.shared.wakeups.subscribe(mutex, *intent, now)));
            }
        }
        Ok(())
    }
}
