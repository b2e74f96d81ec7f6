//! Simba core.

pub mod backend;
pub mod blocking;
pub mod clock;
mod contention;
mod engine;
mod error;
mod hub;
mod locker;
mod memory;
mod observer;
pub mod operate;
mod park;
mod scheduler;
#[cfg(simba_bugs)]
pub mod seeded;
#[cfg(not(simba_bugs))]
mod seeded;
mod simba;
mod tenure;
mod types;
mod url;
mod watched;

pub use async_trait::async_trait;
pub use backend::{Answer, Backend, Claim, Intent, Ownership, Prior, Session};
pub use clock::{Clock, Moment, SystemClock, TokioClock};
pub use contention::{Contender, Contention, Status};
pub use error::{Error, ErrorKind, Result};
pub use hub::{Demand, Hub, Listener};
pub use locker::{Guard, Locker};
pub use memory::MemoryBackend;
pub use observer::{Observer, View};
pub use operate::Operate;
pub use scheduler::{Job, Progress, Schedule, Scheduler};
pub use simba::{Simba, SimbaBuilder};
pub use tenure::{Loss, Tenure};
pub use types::{ContenderId, FencingToken, Lease, MutexName, MutexOwner, MutexState};
pub use url::{ConnectUrl, Host};
