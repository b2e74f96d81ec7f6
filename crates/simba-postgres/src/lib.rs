//! Simba on PostgreSQL: a table, a queue and NOTIFY.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use simba_core::{Operate, Simba};
//! use simba_postgres::{PostgresBackend, PostgresConfig};
//!
//! let config = PostgresConfig::from_url(&"postgres://app:secret@localhost/app".parse()?)?;
//! let backend = PostgresBackend::connect(config).await?;
//! backend.apply_schema().await?;
//! let simba = Simba::new(backend);
//! let guard = simba.locker("orders").lock().await?;
//! println!("ours, with token {}", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises, and what not
//!
//! - **Exclusion** as long as the server keeps what it acknowledged and its clock is not set forward by more
//!   than a lease's margin. A failover is a change of clock. Each acquisition and each renewal is one statement,
//!   decided under the lock of the mutex's row; leases are counted by the server's clock, read after that lock was
//!   had.
//! - **Tokens** grow with every acquisition, through restarts and crashes: the greater of the last one plus one
//!   and the server's time in microseconds. A failover to a standby that missed the last writes, or a restored
//!   backup, can make them go back only if its clock is behind as well.
//! - **First come, first served** among waiters, each woken by a message; nobody passes a live waiter. A
//!   waiter is alive while its handle's connection holds an advisory lock: a killed one keeps a free mutex from the
//!   next one for at most a second. Behind a transaction pooler it does so for at most twice its poll or its ttl,
//!   whichever is longer. A crash of the server empties the queue; the waiters come again.
//! - **No wake-up is lost** between the moment at which a waiter queued and a release; should a connection break,
//!   its waiters look again once it is back.
//! - A release is confirmed before it is on the disk if somebody waits. A crash of the server right then leaves
//!   the mutex to the rest of its lease. Acquisitions and renewals always wait for the disk,
//!   whatever `synchronous_commit` says.
//!
//! # Connections
//!
//! A handle has one connection for commands, shared by all its mutexes, and one for messages, opened when the
//! first contender has to wait. Calls that come together go out together, in one statement. Both connections
//! are asked for a sign of life every two seconds and made anew when they give none.
//!
//! A row that another transaction keeps locked costs its own mutex: everything else on the handle waits for it
//! for `lock_timeout` now and then, and no longer.
//!
//! # URL
//!
//! `postgres://user:password@host:port,host:port/database?key=value`, or
//! `postgres:///database?host=/run/postgresql&user=app` for a socket of this machine. Of several hosts the first
//! that takes writes is used.
//!
//! | key | default | what |
//! |---|---|---|
//! | `sslmode` | `verify-full`; `disable` if every host is this machine | `disable`, `require`, `verify-ca` or `verify-full`. `prefer` and `allow` may end as plain text and are refused |
//! | `sslrootcert` | the authorities of the web | file with the authority that signed the server's certificate |
//! | `sslcert`, `sslkey` | – | our own certificate and its key |
//! | `schema` | the search path | schema of the tables |
//! | `prefix` | `simba` | the tables are `<prefix>_mutex` and `<prefix>_waiter` |
//! | `pooler` | `auto` | whether a transaction pooler stands in front: `true`, `false`, or find out |
//! | `connect_timeout` | `5s` | for a new connection |
//! | `lock_timeout` | `100ms` | for a row that another transaction has locked |
//! | `statement_timeout` | `2s` | for one statement |
//! | `ping` | `2s` | how often a connection is asked for a sign of life |
//! | `application_name` | `simba` | as `pg_stat_activity` shows it |
//! | `host`, `port`, `user` | – | for a socket of this machine |
//!
//! # Rights
//!
//! [`PostgresConfig::grants`] gives the exact statements: `USAGE` on the schema, `SELECT, INSERT, UPDATE` on
//! `simba_mutex`, and `DELETE` too on `simba_waiter`. Only [`apply_schema`](simba_core::Operate::apply_schema) on
//! a database without the tables needs more.
//!
//! # Behind a transaction pooler
//!
//! PgBouncer in transaction mode gives each statement another server process: no message arrives, and nothing
//! may be prepared or set. That is found out by a message to oneself, before anything is prepared; then waiters
//! poll, a warning is logged once, and [`probe`](simba_core::Operate::probe) says so.

mod backend;
mod config;
mod desk;
mod errands;
mod error;
mod gate;
mod handle;
mod hints;
mod line;
mod operate;
mod rows;
mod schema;
mod session;
mod statements;
mod supervisor;
mod wire;

pub use backend::PostgresBackend;
pub use config::{Pooler, PostgresConfig};

/// The name of the backend in errors and logs.
const NAME: &str = "postgres";
