//! A store that breaks its contract.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use simba_core::async_trait;
use simba_core::{
    Answer, Backend, Claim, FencingToken, Holding, MemoryBackend, Ownership, Prior, Result, Session,
};

/// The ways in which it does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreBug {
    /// Gives the mutex to a second contender now and then.
    GrantsTwice,
    /// Says that a lease lasts longer than it does.
    OverstatesRemaining,
    /// Takes a hint for the mutex itself.
    BelievesHints,
    /// Hands the reply to a call that was given up to the next one.
    MixesRepliesUp,
    /// Frees whoever holds.
    FreesAnothers,
    /// Answers a renewal without carrying it out.
    RenewsNothing,
    /// Counts tokens from the start again and again.
    TokenStartsOver,
    /// Gives every tenure the same token.
    TokenStays,
    /// A waiter that goes stays in the queue.
    LeavesItsPlace,
    /// Says that a mutex is free and frees nothing, ever.
    FreesNothing,
}

#[derive(Debug)]
pub(crate) struct BuggyBackend {
    store: MemoryBackend,
    bug: StoreBug,
    calls: Arc<AtomicU64>,
}

impl BuggyBackend {
    pub(crate) fn new(store: MemoryBackend, bug: StoreBug) -> Self {
        Self { store, bug, calls: Arc::default() }
    }
}

#[async_trait]
impl Backend for BuggyBackend {
    fn name(&self) -> &'static str {
        "buggy"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        let inner = self.store.open(claim.clone()).await?;
        Ok(Box::new(BuggySession {
            store: self.store.clone(),
            inner: Some(inner),
            claim,
            bug: self.bug,
            calls: Arc::clone(&self.calls),
            last: None,
            hinted: false,
        }))
    }
}

struct BuggySession {
    store: MemoryBackend,
    inner: Option<Box<dyn Session>>,
    claim: Claim,
    bug: StoreBug,
    calls: Arc<AtomicU64>,
    last: Option<Answer>,
    hinted: bool,
}

impl BuggySession {
    fn inner(&mut self) -> &mut dyn Session {
        &mut **self.inner.as_mut().expect("taken in drop alone")
    }

    /// Makes the mutex ours, as far as the answer goes.
    fn usurp(&self, ownership: &Ownership) -> Answer {
        let token = ownership.token.map(|token| FencingToken::new(token.get() + 1));
        Answer::Ours(Ownership::new(self.claim.contender.clone(), token, self.claim.lease.total()))
    }

    fn distort(&mut self, prior: Prior, answer: Answer) -> Answer {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let hinted = std::mem::take(&mut self.hinted);
        match (self.bug, answer) {
            (StoreBug::GrantsTwice, Answer::Held(held)) if call.is_multiple_of(50) => self.usurp(&held),
            (StoreBug::BelievesHints, Answer::Held(held)) if hinted => self.usurp(&held),
            (StoreBug::OverstatesRemaining, Answer::Ours(ours)) => {
                let remaining = ours.remaining + Duration::from_millis(200);
                Answer::Ours(Ownership::new(ours.owner, ours.token, remaining))
            }
            (StoreBug::TokenStartsOver, Answer::Ours(ours)) => {
                let token = ours.token.map(|token| FencingToken::new(token.get() % 1_000_000));
                Answer::Ours(Ownership::new(ours.owner, token, ours.remaining))
            }
            (StoreBug::TokenStays, Answer::Ours(ours)) => {
                Answer::Ours(Ownership::new(ours.owner, Some(FencingToken::new(1)), ours.remaining))
            }
            (StoreBug::MixesRepliesUp, answer) => match self.last.replace(answer.clone()) {
                Some(before) if prior != Prior::Nothing => before,
                _ => answer,
            },
            (_, answer) => answer,
        }
    }
}

#[async_trait]
impl Session for BuggySession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        if let (StoreBug::RenewsNothing, Prior::Held, Some(answer)) = (self.bug, prior, &self.last) {
            return Ok(answer.clone());
        }
        let answer = self.inner().contend(prior).await?;
        if self.bug == StoreBug::RenewsNothing {
            self.last = Some(answer.clone());
        }
        Ok(self.distort(prior, answer))
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.inner().inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        match self.bug {
            StoreBug::FreesAnothers => {
                let operate = self.store.operate().expect("memory can be operated");
                operate.evict(&self.claim.mutex, simba_core::operate::EvictIf::Any).await?;
                self.inner().release(holding).await
            }
            StoreBug::FreesNothing | StoreBug::LeavesItsPlace => Ok(()),
            _ => self.inner().release(holding).await,
        }
    }

    async fn changed(&mut self) -> Result<()> {
        self.inner().changed().await?;
        self.hinted = true;
        Ok(())
    }
}

impl Drop for BuggySession {
    fn drop(&mut self) {
        if self.bug == StoreBug::LeavesItsPlace {
            std::mem::forget(self.inner.take());
        }
    }
}
