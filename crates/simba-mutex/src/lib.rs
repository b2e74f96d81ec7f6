//! A distributed mutex, leader election and leader-gated scheduling, on the store that a team already runs.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_mutex::Result<()> {
//! let simba = simba_mutex::connect("memory:").await?;   // or sqlite:, mysql://, postgres://, …
//! let guard = simba.locker("orders").lock().await?;
//! println!("ours, with token {}", guard.token());
//! guard.release().await?;                               // or drop it
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees and limits
//!
//! - **At most one valid holder** of a mutex at any instant, as long as clock rates agree within a margin and the store
//!   keeps its writes. Validity is a deadline on a clock that also runs during suspend: check [`Guard::is_held`] before
//!   every critical step.
//! - **A holder is notified of a loss before another can hold**: first [`Guard::expiring`] (stop your work), then
//!   [`Guard::lost`], with the reason. Both are on time even while the store hangs.
//! - **A [`FencingToken`] with every tenure**, which grows with every acquisition.
//! - **No leak**: a dropped future, a dropped guard or a cancelled wait leaves no mutex held and no waiter queued.
//!
//! A lock alone does *not* make your writes safe: a process can pause between its check and its write for longer than
//! any lease. Pass the token to the resource, and let the resource refuse a smaller one.
//!
//! # What to use when
//!
//! | task | use |
//! |---|---|
//! | run code on one machine at a time | [`Simba::locker`] → [`Locker`] → [`Guard`] |
//! | elect a leader, with callbacks | [`Simba::contend`] → [`Contention`], [`Contender`], [`Tenure`] |
//! | run a job on the leader only | [`Simba::scheduler`] → [`Scheduler`], [`Schedule`], [`Job`] |
//! | observe the leader without contending | [`Simba::observe`] → [`Observer`], [`View`] |
//! | the same without async | [`blocking`] |
//! | list, read, evict, probe | [`Simba::operate`] → [`Operate`](spi::Operate) |
//! | settings from files and the environment | `Config` |
//! | implement another store | [`Backend`](spi::Backend) and [`Session`](spi::Session) |
//!
//! ## Work that ends with the mutex
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_mutex::Result<()> {
//! # let simba = simba_mutex::connect("memory:").await?;
//! # async fn import(_: simba_mutex::FencingToken) -> usize { 3 }
//! let guard = simba.locker("import").lock().await?;
//! // If the mutex is lost, the future is dropped before another can hold it.
//! let rows = guard.run(import(guard.token())).await?;
//! assert_eq!(rows, 3);
//! # Ok(())
//! # }
//! ```
//!
//! ## A leader
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_mutex::Result<()> {
//! # let simba = simba_mutex::connect("memory:").await?;
//! let contention = simba.contend("cleaner");
//! contention.start()?;
//! let tenure = contention.acquired().await?;
//! assert!(tenure.is_held() && contention.is_owner());
//! contention.stop().await?;
//! # Ok(())
//! # }
//! ```
//!
//! ## A job on the leader only
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_mutex::Result<()> {
//! # use std::time::Duration;
//! use simba_mutex::Schedule;
//! # let simba = simba_mutex::connect("memory:").await?;
//! let every = Schedule::fixed_rate(Duration::from_millis(5))?;
//! let job = simba.scheduler("report").start(every, |tenure| async move {
//!     println!("under token {}", tenure.token());
//!     Ok::<_, std::convert::Infallible>(())
//! })?;
//! # job.acquired().await?;
//! job.stop().await?;
//! # Ok(())
//! # }
//! ```
//!
//! ## Observing the leader
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_mutex::Result<()> {
//! use simba_mutex::View;
//! # let simba = simba_mutex::connect("memory:").await?;
//! let mut observer = simba.observe("cleaner")?;
//! match observer.changed().await? {
//!     View::Owned(owner) => println!("{:?} leads", owner.id),
//!     View::Vacant => println!("no leader"),
//!     _ => println!("unknown"),
//! }
//! # Ok(())
//! # }
//! ```
//!
//! ## Without async
//!
//! ```
//! # fn main() -> simba_mutex::Result<()> {
//! use simba_mutex::{MemoryBackend, blocking};
//!
//! let simba = blocking::Simba::new(MemoryBackend::new())?;
//! let guard = simba.locker("orders").lock()?;
//! guard.release()?;
//! # Ok(())
//! # }
//! ```
//!
//! Complete programs are in the crate's `examples/`: `axum_leader`, `scheduler`, `fenced_table`, `without_async`.
//!
//! # Stores and features
//!
//! | URL | feature | default | crate |
//! |---|---|---|---|
//! | `memory:` | | always | in the core: one process |
//! | `sqlite:PATH` | `sqlite` | yes | `simba-sqlite`: the processes of one host, no server |
//! | `mysql://`, `mariadb://` | `mysql` | no | `simba-mysql`: the table of JVM Simba |
//! | `postgres://` | `postgres` | no | `simba-postgres`: with wake-ups by NOTIFY |
//! | `redis://`, `rediss://`, `redis+sentinel://`, `redis+cluster://` | `redis` | no | `simba-redis`: the keys of JVM Simba |
//! | `zookeeper://` | `zookeeper` | no | `simba-zookeeper`: the nodes of Curator's `LeaderLatch` |
//! | `etcd://`, `etcds://` | `etcd` | no | `simba-etcd`: the keys of `etcdctl lock` |
//!
//! | feature | default | what |
//! |---|---|---|
//! | `config` | yes | `Config`: settings from files, the environment and code |
//! | `cron` | yes | `Schedule::cron`, with time zones |
//! | `metrics` | no | counters and histograms through the `metrics` facade |

#[cfg(feature = "config")]
mod config;
mod connect;

#[cfg(feature = "config")]
pub use config::{Config, Settings};
pub use connect::{backend, connect};
pub use simba_core::*;

#[cfg(feature = "etcd")]
pub use simba_etcd as etcd;
#[cfg(feature = "mysql")]
pub use simba_mysql as mysql;
#[cfg(feature = "postgres")]
pub use simba_postgres as postgres;
#[cfg(feature = "redis")]
pub use simba_redis as redis;
#[cfg(feature = "sqlite")]
pub use simba_sqlite as sqlite;
#[cfg(feature = "zookeeper")]
pub use simba_zookeeper as zookeeper;
