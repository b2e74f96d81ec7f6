//! A store that violates its contract.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use simba_core::spi::async_trait;
use simba_core::spi::{Answer, Backend, Claim, Holding, Ownership, Prior, Session};
use simba_core::{FencingToken, MemoryBackend, Result};

/// The kinds of violations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StoreBug {
    /// Grants the mutex to a second contender in some calls.
    GrantsTwice,
    /// Returns a longer lease than the real one.
    OverstatesRemaining,
    /// Treats a hint as an acquisition.
    TrustsHints,
    /// Returns the reply to an abandoned call for the next one.
    MixesUpReplies,
    /// Releases the hold of any contender.
    FreesAnotherHolder,
    /// Answers a renewal without executing it.
    RenewsNothing,
    /// Restarts the tokens repeatedly.
    TokenRestarts,
    /// Gives every tenure the same token.
    TokenNeverGrows,
    /// Keeps the entry of a waiter that has left.
    KeepsItsEntry,
    /// Confirms a release and never frees the mutex.
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
        &mut **self.inner.as_mut().expect("only taken in drop")
    }

    /// Returns an answer that claims the mutex.
    fn claim_mutex(&self, ownership: &Ownership) -> Answer {
        let token = ownership.token.map(|token| FencingToken::new(token.get() + 1));
        Answer::Ours(Ownership::new(self.claim.contender.clone(), token, self.claim.lease.total()))
    }

    fn inject_bug(&mut self, prior: Prior, answer: Answer) -> Answer {
        let call = self.calls.fetch_add(1, Ordering::Relaxed);
        let hinted = std::mem::take(&mut self.hinted);
        match (self.bug, answer) {
            (StoreBug::GrantsTwice, Answer::Held(held)) if call.is_multiple_of(50) => self.claim_mutex(&held),
            (StoreBug::TrustsHints, Answer::Held(held)) if hinted => self.claim_mutex(&held),
            (StoreBug::OverstatesRemaining, Answer::Ours(ours)) => {
                let remaining = ours.remaining + Duration::from_millis(200);
                Answer::Ours(Ownership::new(ours.owner, ours.token, remaining))
            }
            (StoreBug::TokenRestarts, Answer::Ours(ours)) => {
                let token = ours.token.map(|token| FencingToken::new(token.get() % 1_000_000));
                Answer::Ours(Ownership::new(ours.owner, token, ours.remaining))
            }
            (StoreBug::TokenNeverGrows, Answer::Ours(ours)) => {
                Answer::Ours(Ownership::new(ours.owner, Some(FencingToken::new(1)), ours.remaining))
            }
            (StoreBug::MixesUpReplies, answer) => match self.last.replace(answer.clone()) {
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
        Ok(self.inject_bug(prior, answer))
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        self.inner().inspect().await
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        match self.bug {
            StoreBug::FreesAnotherHolder => {
                let operate = self.store.operate().expect("the memory backend has operations");
                operate.evict(&self.claim.mutex, simba_core::operate::EvictIf::Any).await?;
                self.inner().release(holding).await
            }
            StoreBug::FreesNothing | StoreBug::KeepsItsEntry => Ok(()),
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
        if self.bug == StoreBug::KeepsItsEntry {
            std::mem::forget(self.inner.take());
        }
    }
}
