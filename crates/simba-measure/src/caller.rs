//! One contender on one mutex, ours or raw, behind one interface.

use std::sync::Arc;

use anyhow::{Result, bail};
use simba_core::{
    Answer, Backend, Claim, Clock, ContenderId, FencingToken, Guard, Holding, Lease, Locker, Moment,
    MutexName, Prior, Session, SystemClock, async_trait,
};

/// Takes and frees one mutex, again and again.
#[async_trait]
pub trait Caller: Send {
    /// Takes and frees it `count` times, uncontended, and as fast as it can.
    async fn pairs(&mut self, count: u32) -> Result<()>;

    /// Waits for it. The moment that counts: ours when the call returned, raw when the wake-up came.
    async fn acquire(&mut self) -> Result<Moment>;

    /// Frees it.
    async fn release(&mut self) -> Result<()>;
}

/// Ours.
#[derive(Debug)]
pub struct LockerCaller {
    locker: Locker,
    guard: Option<Guard>,
}

impl LockerCaller {
    /// A caller that locks and releases.
    #[must_use]
    pub fn new(locker: Locker) -> Self {
        Self { locker, guard: None }
    }
}

#[async_trait]
impl Caller for LockerCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            self.locker.lock().await?.release().await?;
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        self.guard = Some(self.locker.lock().await?);
        Ok(SystemClock.now())
    }

    async fn release(&mut self) -> Result<()> {
        if let Some(guard) = self.guard.take() {
            guard.release().await?;
        }
        Ok(())
    }
}

/// The backend's session without the engine: no task, no timer, no deadline.
#[expect(missing_debug_implementations, reason = "a session shows nothing of itself")]
pub struct SessionCaller {
    backend: Arc<dyn Backend>,
    claim: Claim,
    held: Option<(Box<dyn Session>, Option<FencingToken>)>,
}

impl SessionCaller {
    /// A caller of the backend's own verbs.
    pub fn new(backend: Arc<dyn Backend>, mutex: MutexName) -> Self {
        let claim = Claim::new(mutex, ContenderId::generate(), Lease::default());
        Self { backend, claim, held: None }
    }
}

#[async_trait]
impl Caller for SessionCaller {
    async fn pairs(&mut self, count: u32) -> Result<()> {
        for _ in 0..count {
            let mut session = self.backend.open(self.claim.clone()).await?;
            match contend(&mut *session).await? {
                Answer::Ours(ours) => release(&mut *session, holding(ours.token)).await?,
                other => bail!("an uncontended mutex was refused: {other:?}"),
            }
        }
        Ok(())
    }

    async fn acquire(&mut self) -> Result<Moment> {
        let mut session = self.backend.open(self.claim.clone()).await?;
        let mut woken = SystemClock.now();
        loop {
            if let Answer::Ours(ours) = contend(&mut *session).await? {
                self.held = Some((session, ours.token));
                return Ok(woken);
            }
            session.changed().await?;
            woken = SystemClock.now();
        }
    }

    async fn release(&mut self) -> Result<()> {
        if let Some((mut session, token)) = self.held.take() {
            release(&mut *session, holding(token)).await?;
        }
        Ok(())
    }
}

/// How often a store that was busy for a moment is asked again: the engine would, too.
const TRIES: u32 = 5;

async fn contend(session: &mut dyn Session) -> simba_core::Result<Answer> {
    let (mut prior, mut tries) = (Prior::Nothing, 1..TRIES);
    loop {
        match session.contend(prior).await {
            Err(error) if error.is_transient() && tries.next().is_some() => prior = Prior::Unknown,
            answer => return answer,
        }
    }
}

async fn release(session: &mut dyn Session, holding: Holding) -> simba_core::Result<()> {
    let mut tries = 1..TRIES;
    loop {
        match session.release(holding).await {
            Err(error) if error.is_transient() && tries.next().is_some() => {}
            released => return released,
        }
    }
}

/// What there is to release under this token.
fn holding(token: Option<FencingToken>) -> Holding {
    token.map_or(Holding::Unknown, Holding::Under)
}
