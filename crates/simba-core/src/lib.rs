//! Distributed mutex, leader election and scheduled jobs on the leader, on the store that a team already runs.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use simba_core::{MemoryBackend, Simba};
//!
//! let simba = Simba::new(MemoryBackend::new());
//! let guard = simba.locker("orders").lock().await?;
//! println!("acquired with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees and their limits
//!
//! At most one *valid* holder of a mutex at any instant, as long as clocks run at the same rate within a margin
//! and the store keeps its writes. Validity is a deadline: [`Guard::is_held`] and [`Tenure::is_held`] read a
//! clock that does not stop in suspend. A holder is notified of a loss before another can hold, in two steps:
//! [`Tenure::expiring`], then [`Tenure::lost`], both on time while the store hangs.
//!
//! No lease covers a pause between the check and the write. Every tenure has a [`FencingToken`] for that, which
//! increases with every acquisition: pass it to the resource, which rejects smaller ones.
//!
//! # Which type to use
//!
//! | task | types |
//! |---|---|
//! | run code on one machine at a time | [`Simba::locker`] → [`Locker`] → [`Guard`] |
//! | lead, and be notified of gain and loss | [`Simba::contend`] → [`Contention`], [`Contender`], [`Tenure`] |
//! | run a job on the leader only | [`Simba::scheduler`] → [`Scheduler`], [`Schedule`], [`Job`] |
//! | observe the leader without contending | [`Simba::observe`] → [`Observer`], [`View`] |
//! | the same without async | [`blocking`] |
//! | list, read, evict, probe | [`Simba::operate`] → [`Operate`](spi::Operate) |
//! | implement a backend | [`Backend`](spi::Backend) and [`Session`](spi::Session) |
//!
//! # Runtime
//!
//! The engine runs on tokio: on the runtime of the caller, or on the one given to [`SimbaBuilder::with_runtime`]. Dropping a
//! future neither leaks a mutex nor frees one that is in use. Most futures only wait for the engine. Two also make
//! calls while they are polled: a lock makes its first call to the store in the caller's task, and [`Guard::release`]
//! of a short hold its last one. If such a future is dropped, the call continues in a task of the engine.
//!
//! # Features
//!
//! | feature | default | contents |
//! |---|---|---|
//! | `cron` | yes | `Schedule::cron`, with time zones |
//! | `metrics` | no | counters and histograms through the `metrics` facade, see below |
//!
//! # Tracing and metrics
//!
//! Events of `tracing` have the fields `mutex`, `contender`, `token`, `loss` and `error`. The feature
//! `metrics` adds these metrics, each with a label `backend`:
//!
//! | name | meaning |
//! |---|---|
//! | `simba_wait_seconds` | wait time of lockers |
//! | `simba_hold_seconds` | duration of tenures |
//! | `simba_renewal_seconds` | duration of renewals |
//! | `simba_renewal_slack_seconds` | time left to the deadline when a renewal was answered |
//! | `simba_acquisitions_total` | tenures that began |
//! | `simba_losses_total` | tenures that ended, by `reason` |
//! | `simba_store_errors_total` | calls to the store that failed, by `kind` |

mod backend;
mod block;
pub mod blocking;
pub mod clock;
mod contention;
mod delegate;
mod engine;
mod error;
mod locker;
mod memory;
mod observer;
pub mod operate;
mod scheduler;
#[cfg(simba_bugs)]
pub mod seeded;
#[cfg(not(simba_bugs))]
mod seeded;
mod simba;
pub mod spi;
mod telemetry;
mod tenure;
mod types;
mod url;
mod wakeups;
mod watched;

pub use clock::{Clock, Moment, SystemClock, TokioClock};
pub use contention::{Contender, Contention, Status};
pub use error::{Error, ErrorKind, Result};
pub use locker::{Guard, Locker};
pub use memory::MemoryBackend;
pub use observer::{Observer, View};
pub use scheduler::{Job, Progress, Schedule, Scheduler};
pub use simba::{Simba, SimbaBuilder};
pub use tenure::Tenure;
pub use types::{ContenderId, FencingToken, Lease, Loss, MutexName, MutexOwner, MutexState};
