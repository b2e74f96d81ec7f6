//! Simba on PostgreSQL: a table, a queue and NOTIFY.
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use simba_core::spi::Operate;
//! use simba_core::Simba;
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
//! # Guarantees
//!
//! - **Exclusion** holds if the server keeps what it acknowledged and its clock is not set forward by more than a
//!   lease's margin. A failover is a change of clock. Each acquisition and each renewal is one statement, decided
//!   under the lock of the mutex's row. Leases are counted by the server's clock, read after that lock was acquired.
//! - **Tokens** increase with every acquisition, across restarts and crashes: each is the greater of the last one
//!   plus one and the server's time in microseconds. After a failover to a standby that missed the last writes, or
//!   after restoring a backup, tokens can decrease only if the server's clock is behind as well.
//! - **FIFO order** among waiters, each woken by a notification. No contender overtakes a live waiter. A waiter is
//!   alive while its handle's connection holds an advisory lock: a killed waiter delays the next one by at most a
//!   second. Behind a transaction pooler it does so for at most twice its poll interval or its ttl, whichever is
//!   longer. A crash of the server empties the queue; the waiters join it again.
//! - **No wakeup is lost** between joining the queue and a release. After a broken connection is restored, its
//!   waiters poll.
//! - A release is confirmed before it is on the disk. A crash of the server at that moment leaves the mutex held
//!   until its lease ends. Acquisitions and renewals always wait for the disk, whatever `synchronous_commit` is.
//!
//! # Connections
//!
//! A handle has one connection for commands, shared by all its mutexes, and one for wakeups, opened when the first
//! contender has to wait. Concurrent calls are combined into one statement. Both connections are checked with a ping
//! every two seconds, and reopened if there is no answer. An operator's call that reads uses a connection of its own.
//!
//! No statement waits for a row. A row that another transaction keeps locked blocks its own mutex only: calls for it
//! are repeated for at most `lock_timeout` and then fail.
//!
//! # URL
//!
//! `postgres://user:password@host:port,host:port/database?key=value`, or
//! `postgres:///database?host=/run/postgresql&user=app` for a local socket. Of several hosts, the first one that
//! accepts writes is used.
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `sslmode` | `verify-full`; `disable` if every host is local | `disable`, `require`, `verify-ca` or `verify-full`. `prefer` and `allow` can silently fall back to plain text and are refused |
//! | `sslrootcert` | the public CAs | file with the CA of the server's certificate |
//! | `sslcert`, `sslkey` | – | client certificate and its key |
//! | `schema` | the search path | schema of the tables |
//! | `prefix` | `simba` | the tables are `<prefix>_mutex` and `<prefix>_waiter` |
//! | `pooler` | `auto` | whether a transaction pooler is in front of the server: `true`, `false`, or detect it |
//! | `connect_timeout` | `5s` | for a new connection |
//! | `lock_timeout` | `100ms` | how long a call is repeated while another transaction has locked its row |
//! | `statement_timeout` | `2s` | for one statement |
//! | `ping` | `2s` | interval between pings of a connection |
//! | `application_name` | `simba` | shown in `pg_stat_activity` |
//! | `host`, `port`, `user` | – | for a local socket |
//!
//! # Privileges
//!
//! [`PostgresConfig::grants`] returns the exact statements: `USAGE` on the schema, `SELECT, INSERT, UPDATE` on
//! `simba_mutex`, and additionally `DELETE` on `simba_waiter`. Only
//! [`apply_schema`](simba_core::spi::Operate::apply_schema) on a database without the tables needs more.
//!
//! # Behind a transaction pooler
//!
//! PgBouncer in transaction mode assigns a server process per transaction: notifications do not arrive, and a session
//! can have neither prepared statements nor settings. The backend detects this with a notification to itself, before
//! it prepares a statement. Then waiters poll, a warning is logged once, and
//! [`probe`](simba_core::spi::Operate::probe) reports it.

mod backend;
mod batch;
mod config;
mod connection;
mod error;
mod listener;
mod login;
mod operate;
mod probe;
mod schema;
mod session;
mod settings;
mod statements;
mod supervisor;
mod wakeups;

pub use backend::PostgresBackend;
pub use config::{Pooler, PostgresConfig};

/// The backend's name in errors and logs.
const NAME: &str = "postgres";
