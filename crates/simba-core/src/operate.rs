//! What operators do with a store beyond contending.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::Result;
use crate::types::{ContenderId, FencingToken, MutexName};

/// The operator's side of a backend: who holds what, freeing a stuck mutex, health and schema.
#[async_trait]
pub trait Operate: Send + Sync {
    /// Every mutex that the store knows of, in the order of their names.
    ///
    /// # Errors
    ///
    /// The store cannot be asked.
    async fn list(&self) -> Result<Vec<MutexRecord>>;

    /// One mutex; a mutex that the store does not know is free.
    ///
    /// # Errors
    ///
    /// The store cannot be asked.
    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord>;

    /// Frees a mutex out of band and wakes the next waiter.
    ///
    /// The old holder believes that it holds until its next renewal, so two may work at once until then:
    /// [`Eviction::Freed`] says for how long. `condition` only guards against freeing the wrong holder.
    ///
    /// # Errors
    ///
    /// The outcome is unknown.
    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction>;

    /// Asks the store for a sign of life and for what endangers mutexes on it.
    ///
    /// # Errors
    ///
    /// The store cannot be reached or refuses.
    async fn probe(&self) -> Result<Probe>;

    /// The statements that set the store up; `None` where none are needed.
    fn schema(&self) -> Option<&str> {
        None
    }

    /// Carries the [`schema`](Self::schema) out. Idempotent.
    ///
    /// # Errors
    ///
    /// The store refused a statement.
    async fn apply_schema(&self) -> Result<()> {
        Ok(())
    }
}

/// What a store tells about one mutex. What it cannot tell is `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MutexRecord {
    /// The mutex.
    pub mutex: MutexName,
    /// Who holds it; `None` if it is free.
    pub owner: Option<ContenderId>,
    /// The holder's fencing token.
    pub token: Option<FencingToken>,
    /// When it was acquired, by the wall clock.
    pub acquired_at: Option<SystemTime>,
    /// For how much longer the holder keeps others out without a renewal.
    pub remaining: Option<Duration>,
    /// Whether the holder is past its `ttl`.
    pub in_transition: Option<bool>,
    /// How many wait for it.
    pub waiters: Option<usize>,
}

impl MutexRecord {
    /// A free mutex of which nothing else is known.
    #[must_use]
    pub const fn free(mutex: MutexName) -> Self {
        Self {
            mutex,
            owner: None,
            token: None,
            acquired_at: None,
            remaining: None,
            in_transition: None,
            waiters: None,
        }
    }
}

/// Which holder to evict.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictIf {
    /// The one with this token.
    Token(FencingToken),
    /// The one with this id.
    Owner(ContenderId),
    /// Whoever it is.
    Any,
}

impl EvictIf {
    /// Whether the condition holds for this holder.
    #[must_use]
    pub fn holds_for(&self, owner: &ContenderId, token: Option<FencingToken>) -> bool {
        match self {
            Self::Token(wanted) => token == Some(*wanted),
            Self::Owner(wanted) => owner == wanted,
            Self::Any => true,
        }
    }
}

/// What became of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// Freed. The old holder may believe that it holds for at most `window`.
    Freed {
        /// Who held it.
        owner: ContenderId,
        /// How much longer it may work in good faith.
        window: Duration,
    },
    /// Left alone: the holder is another one than the condition names.
    Other(ContenderId),
    /// It was free.
    Vacant,
}

/// A store's sign of life.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// Product and version, as the store names itself.
    pub server: String,
    /// How long one call takes.
    pub round_trip: Duration,
    /// What endangers mutexes on this store.
    pub findings: Vec<Finding>,
}

/// Something about the store that a person should mend.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What is wrong.
    pub problem: String,
    /// What to do about it.
    pub cure: String,
}

impl Finding {
    /// A problem with its cure.
    pub fn new(problem: impl Into<String>, cure: impl Into<String>) -> Self {
        Self { problem: problem.into(), cure: cure.into() }
    }
}
