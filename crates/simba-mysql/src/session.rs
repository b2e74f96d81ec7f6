use std::sync::Arc;

use async_trait::async_trait;
use simba_core::{Answer, Claim, Holding, Intent, Ownership, Prior, Result, Session};
use tokio::sync::oneshot;

use crate::call::Party;
use crate::error::closed;
use crate::site::Site;
use crate::waiters::{Ask, Ear};
use crate::worker::{Request, Way};

/// One contender or observer at the table.
pub(crate) struct MySqlSession {
    site: Arc<Site>,
    worker: Way,
    party: Arc<Party>,
    holds: bool,
    ear: Option<Ear>,
}

impl MySqlSession {
    pub(crate) fn new(site: Arc<Site>, worker: Way, claim: Claim) -> Self {
        Self { site, worker, party: Arc::new(Party::new(claim)), holds: false, ear: None }
    }

    /// Hands a request to the worker. It is carried out whether or not the reply is waited for.
    async fn ask<T>(&self, request: impl FnOnce(oneshot::Sender<Result<T>>) -> Request) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        self.worker.send(Arc::clone(&self.party), request(reply))?;
        answer.await.unwrap_or_else(|_| Err(closed()))
    }

    fn wants(&self) -> Ask {
        match self.party.claim.intent {
            Intent::Queue => Ask::Turn,
            _ => Ask::Changes,
        }
    }
}

#[async_trait]
impl Session for MySqlSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let offer = self.ear.as_ref().and_then(Ear::answer);
        let answer = self.ask(|reply| Request::Contend { prior, offer, reply }).await?;
        self.holds = matches!(answer, Answer::Ours(_));
        if self.holds {
            // The table tells a holder nothing that its next renewal does not.
            self.ear = None;
        }
        Ok(answer)
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        if let Some(ear) = &self.ear {
            ear.answer();
        }
        self.ask(|reply| Request::Inspect { reply }).await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.holds = false;
        self.ear = None;
        if holding == Holding::Nothing {
            return Ok(());
        }
        self.ask(|reply| Request::Release { holding, reply }).await
    }

    async fn changed(&mut self) -> Result<()> {
        if self.holds {
            return std::future::pending().await;
        }
        match &self.ear {
            Some(ear) => ear.rung().await,
            None => {
                let now = self.site.clock.now();
                self.ear = Some(self.site.waiters.listen(&self.party.claim.mutex, self.wants(), now));
            }
        }
        Ok(())
    }
}
