//! The operators' interface to a store.

use std::time::{Duration, SystemTime};

use async_trait::async_trait;

use crate::error::Result;
use crate::types::{ContenderId, FencingToken, MutexName};

/// The operators' calls of a backend: list holders, free a stuck mutex, check health, set up the schema.
#[async_trait]
pub trait Operate: Send + Sync {
    /// Returns every mutex that the store has, ordered by name.
    ///
    /// # Errors
    ///
    /// The call to the store failed.
    async fn list(&self) -> Result<Vec<MutexRecord>>;

    /// Returns one mutex. A mutex that the store does not have is free.
    ///
    /// # Errors
    ///
    /// The call to the store failed.
    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord>;

    /// Frees a mutex without its holder and wakes the next waiter.
    ///
    /// The old holder keeps running until its next renewal fails, so two contenders may work at once until then.
    /// [`Eviction::Freed`] says for how long. `condition` guards against evicting the wrong holder.
    ///
    /// # Errors
    ///
    /// The outcome is unknown.
    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction>;

    /// Checks that the store answers, and looks for settings that endanger mutexes on it.
    ///
    /// # Errors
    ///
    /// The store cannot be reached or denies access.
    async fn probe(&self) -> Result<Probe>;

    /// Returns the statements that set the store up; `None` if none are needed.
    fn schema(&self) -> Option<&str> {
        None
    }

    /// Executes the [`schema`](Self::schema). Idempotent.
    ///
    /// # Errors
    ///
    /// The store rejected a statement.
    async fn apply_schema(&self) -> Result<()> {
        Ok(())
    }
}

/// The state of one mutex. Values that the store does not have are `None`.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MutexRecord {
    /// The mutex.
    pub mutex: MutexName,
    /// The holder; `None` if the mutex is free.
    pub owner: Option<ContenderId>,
    /// The holder's fencing token.
    pub token: Option<FencingToken>,
    /// The wall-clock time of the acquisition.
    pub acquired_at: Option<SystemTime>,
    /// The time until the lease ends without a renewal.
    pub remaining: Option<Duration>,
    /// Whether the holder is past its `ttl`.
    pub in_transition: Option<bool>,
    /// The number of waiters.
    pub waiters: Option<usize>,
}

impl MutexRecord {
    /// Creates the record of a free mutex, without any other value.
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

/// The condition under which a holder is evicted.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum EvictIf {
    /// The holder has this token.
    Token(FencingToken),
    /// The holder has this id.
    Owner(ContenderId),
    /// Always.
    Any,
}

impl EvictIf {
    /// Returns whether the condition holds for this holder.
    #[must_use]
    pub fn holds_for(&self, owner: &ContenderId, token: Option<FencingToken>) -> bool {
        match self {
            Self::Token(wanted) => token == Some(*wanted),
            Self::Owner(wanted) => owner == wanted,
            Self::Any => true,
        }
    }
}

/// The result of an eviction.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Eviction {
    /// The mutex was freed. The old holder may keep running for at most `window`.
    Freed {
        /// The old holder.
        owner: ContenderId,
        /// The time until its next renewal fails, at most.
        window: Duration,
    },
    /// Nothing was changed: this holder does not meet the condition.
    Other(ContenderId),
    /// The mutex was free.
    Vacant,
}

/// The result of a health check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// Product and version, as the store reports them.
    pub server: String,
    /// The duration of one call.
    pub round_trip: Duration,
    /// The settings that endanger mutexes on this store.
    pub findings: Vec<Finding>,
}

/// A problem of the store that an operator should fix.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Finding {
    /// What is wrong.
    pub problem: String,
    /// How to fix it.
    pub fix: String,
}

impl Finding {
    /// Creates a finding from a problem and its fix.
    pub fn new(problem: impl Into<String>, fix: impl Into<String>) -> Self {
        Self { problem: problem.into(), fix: fix.into() }
    }
}
