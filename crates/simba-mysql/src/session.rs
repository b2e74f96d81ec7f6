use std::sync::Arc;

use async_trait::async_trait;
use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior, Session};
use simba_core::{Error, ErrorKind, Result};

use crate::calls::{Calls, Reply, Request, SessionState};
use crate::error::NAME;
use crate::shared::Shared;
use crate::wakeups::{Interest, Subscription};

/// One contender or observer of a mutex.
pub(crate) struct MySqlSession {
    shared: Arc<Shared>,
    calls: Arc<Calls>,
    state: Arc<SessionState>,
    holds: bool,
    subscription: Option<Subscription>,
}

impl MySqlSession {
    pub(crate) fn new(shared: Arc<Shared>, calls: Arc<Calls>, claim: Claim) -> Self {
        Self { shared, calls, state: Arc::new(SessionState::new(claim)), holds: false, subscription: None }
    }

    fn interest(&self) -> Interest {
        match self.state.claim.intent {
            Intent::Queue => Interest::Turn,
            _ => Interest::Changes,
        }
    }
}

#[async_trait]
impl Session for MySqlSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let free_version = self.subscription.as_ref().and_then(Subscription::take_free_version);
        let Reply::Answer(answer) =
            self.calls.call(&self.state, Request::Contend { prior, free_version }).await?
        else {
            return Err(wrong_reply());
        };
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // A holder needs no wake-ups: its next renewal reads the same row.
            self.subscription = None;
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        if let Some(subscription) = &self.subscription {
            subscription.take_free_version();
        }
        match self.calls.call(&self.state, Request::Inspect).await? {
            Reply::Owner(owner) => Ok(owner),
            _ => Err(wrong_reply()),
        }
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        self.subscription = None;
        if holding == Holding::Nothing {
            return Ok(());
        }
        self.calls.call(&self.state, Request::Release(holding)).await.map(drop)
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        match &self.subscription {
            Some(subscription) => subscription.notified().await,
            None => {
                let now = self.shared.clock.now();
                self.subscription =
                    Some(self.shared.wakeups.subscribe(&self.state.claim.mutex, self.interest(), now));
            }
        }
        Ok(())
    }
}

fn wrong_reply() -> Error {
    Error::new(ErrorKind::Protocol, "the reply is to another request").with_backend(NAME)
}
