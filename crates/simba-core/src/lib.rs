//! A distributed mutex, leader election and leader-gated scheduling, on the store that a team already runs.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use simba_core::{MemoryBackend, Simba};
//!
//! let simba = Simba::new(MemoryBackend::new());
//! let guard = simba.locker("orders").lock().await?;
//! println!("ours, with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises, and what not
//!
//! At most one *valid* holder of a mutex at any instant, as long as clocks run at the same rate within a margin
//! and the store keeps its writes. Validity is a deadline: [`Guard::is_held`] and [`Tenure::is_held`] read a
//! clock that goes on through suspend. A holder learns of a loss before another can hold, in two steps:
//! [`Tenure::expiring`], then [`Tenure::lost`], on time while the store hangs.
//!
//! No lease covers a pause between the check and the write. For that there is a [`FencingToken`] with every
//! tenure, which grows with every acquisition: hand it to the resource, and let that refuse smaller ones.
//!
//! # What to use when
//!
//! | you want to | use |
//! |---|---|
//! | run code on one machine at a time | [`Simba::locker`] → [`Locker`] → [`Guard`] |
//! | lead, and be told when you do not | [`Simba::contend`] → [`Contention`], [`Contender`], [`Tenure`] |
//! | run a job on the leader only | [`Simba::scheduler`] → [`Scheduler`], [`Schedule`], [`Job`] |
//! | know who leads without taking part | [`Simba::observe`] → [`Observer`], [`View`] |
//! | the same without async | [`blocking`] |
//! | list, read, evict, probe | [`Simba::operate`] → [`Operate`] |
//! | bring your own store | [`Backend`] and [`Session`] |
//!
//! # Runtime
//!
//! The engine runs on tokio: on the runtime of the caller, or on one given to [`SimbaBuilder::runtime`]. Dropping a
//! future neither leaks a mutex nor frees one that is in use. Most futures only listen to the engine. Two also do
//! work while they are polled: a lock makes its first call to the store in the task of its caller, and
//! [`Guard::release`] its last one. A dropped one continues in a task of the engine.
//!
//! # Features
//!
//! | feature | default | what |
//! |---|---|---|
//! | `cron` | yes | `Schedule::cron`, with time zones |
//! | `metrics` | no | counters and histograms through the `metrics` facade, see below |
//!
//! # What can be observed
//!
//! Events of `tracing` have the fields `mutex`, `contender`, `token`, `loss` and `error`. With the feature
//! `metrics` there are, each with a label `backend`:
//!
//! | name | what |
//! |---|---|
//! | `simba_wait_seconds` | how long lockers waited |
//! | `simba_hold_seconds` | how long tenures lasted |
//! | `simba_renewal_seconds` | how long renewals took |
//! | `simba_renewal_slack_seconds` | how much of the lease was left when a renewal was answered |
//! | `simba_acquisitions_total` | tenures that began |
//! | `simba_losses_total` | tenures that ended, by `reason` |
//! | `simba_store_errors_total` | calls to the store that failed, by `kind` |

pub mod backend;
pub mod blocking;
pub mod clock;
mod closing;
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
mod telemetry;
mod tenure;
mod types;
mod url;
mod watched;

pub use async_trait::async_trait;
pub use backend::{Answer, Backend, Claim, Holding, Intent, Ownership, Prior, Session};
pub use clock::{Clock, Moment, SystemClock, TokioClock, within};
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
