//! One contender on one mutex, through Simba or raw, behind one interface.

use std::sync::Arc;

use anyhow::{Result, bail};
use simba_core::spi::{Answer, Backend, Claim, Holding, Prior, Session, async_trait};
use simba_core::{Clock, ContenderId, FencingToken, Guard, Lease, Locker, Moment, MutexName, SystemClock};

/// Acquires and releases one mutex repeatedly.
#[async_trait]
pub trait Caller: Send {
    /// Runs `count` uncontended lock/unlock cycles as fast as possible.
    async fn pairs(&mut self, count: u32) -> Result<()>;

    /// Waits for the mutex. Returns the end of the hand-over: when the call of Simba returned, or when a raw caller was
    /// woken.
    async fn acquire(&mut self) -> Result<Moment>;

    /// Releases the mutex.
    async fn release(&mut self) -> Result<()>;
}

/// A locker of Simba.
#[derive(Debug)]
pub struct LockerCaller {
    locker: Locker,
    guard: Option<Guard>,
}

impl LockerCaller {
    /// Returns a caller that uses the locker.
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

/// A session of the backend without the engine: no task, no timer, no deadline.
#[expect(missing_debug_implementations, reason = "sessions do not implement Debug")]
pub struct SessionCaller {
    backend: Arc<dyn Backend>,
    claim: Claim,
    held: Option<(Box<dyn Session>, Option<FencingToken>)>,
}

impl SessionCaller {
    /// Returns a caller that uses sessions of the backend.
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

/// The number of attempts after transient errors, which the engine retries as well.
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

/// Returns the argument of the release for a hold with this token.
fn holding(token: Option<FencingToken>) -> Holding {
    token.map_or(Holding::Unknown, Holding::Under)
}
