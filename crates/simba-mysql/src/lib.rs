//! Simba on MySQL and MariaDB: the table of JVM Simba, shared with JVM peers.
//!
//! One table, `simba_mutex`, has a row for each mutex. A Rust service and a JVM service that contend for the
//! same name contend for the same row: both use the same columns with the same meaning.
//!
//! # Example
//!
//! ```no_run
//! # async fn run() -> simba_core::Result<()> {
//! use simba_core::spi::Backend;
//! use simba_core::Simba;
//! use simba_mysql::{MySqlBackend, MySqlConfig};
//!
//! let url = "mysql://app:secret@db.example/app?ssl-mode=VERIFY_IDENTITY".parse()?;
//! let backend = MySqlBackend::connect(MySqlConfig::from_url(&url)?).await?;
//! // Once, by a user with the right to create tables; or run what `simba schema` prints.
//! backend.operate().expect("MySQL has a schema").apply_schema().await?;
//!
//! let simba = Simba::new(backend);
//! let guard = simba.locker("orders").lock().await?;
//! println!("pass token {} with every write, so that writes of a stale holder are rejected", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # URL
//!
//! `mysql://user:password@host:port/database?key=value`; `mariadb://` means the same.
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `table` | `simba_mutex` | table name |
//! | `connections` | 4 | connections for calls, 1 to 64; one more polls for waiters, an operator's call opens its own |
//! | `poll` | 250ms | poll interval while there are waiters, 10ms to 60s |
//! | `connect-timeout` | 2s | timeout of one try to connect |
//! | `socket` | | a Unix socket instead of the host |
//! | `ssl-mode` | `DISABLED` | `REQUIRED` encrypts, `VERIFY_CA` checks the authority, `VERIFY_IDENTITY` also the host |
//! | `ssl-ca` | public authorities | PEM file with the authority that signed the server's certificate |
//! | `ssl-cert`, `ssl-key` | | PEM files with the client certificate and its key |
//!
//! `PREFERRED` is refused: an attacker on the network can force it to fall back to plain text. A connection that
//! requests TLS is encrypted or fails.
//!
//! # Rights
//!
//! `GRANT SELECT, INSERT, UPDATE ON app.simba_mutex TO 'app'@'%'` is sufficient; the tests run with these rights.
//! Rows are never deleted: their versions are the fencing tokens.
//!
//! # Guarantees
//!
//! - At most one valid holder, as long as the server's clock does not step forward by more than the margin and
//!   the server keeps the writes that it confirmed. A step is logged as a warning.
//! - The fencing token grows with every acquisition, through release, restart, renewals and JVM peers. It is the
//!   `version` that the first answered write of the tenure made. Asynchronous failover and a restored backup can
//!   set it back.
//! - Every write is conditional on the expected version, so a late or repeated write has no effect. No transaction
//!   is left open.
//! - Times are the server's, in UTC, whatever its time zone.
//! - The number of connections is constant, whatever the number of mutexes. Renewals that are due together share
//!   a statement; a row that a stuck peer has locked is left out of it.
//!
//! # Limitations
//!
//! - The server sends no wake-ups. One poll finds the waiters of a process, adaptive between 25 ms and `poll`, at
//!   most ten times a second over any ten seconds. Within a process a release wakes the next waiter immediately.
//!   There is no order between processes.
//! - Only the holder knows its token: a row does not record the version that began the tenure. An eviction by
//!   token frees only a hold that was not renewed yet, and is an error where the row does not tell.
//! - Several servers that take writes have several clocks: a server whose clock is ahead frees mutexes too early.
//!   The probe finds Galera and group replication with several writers.
//! - The table has ids, not sessions: of two contenders with the same chosen id, one whose call was lost adopts
//!   the other's hold. Generated ids are unique.
//! - Names that differ only by case are one row in the usual collations. That is logged once.
//! - A JVM peer that hangs may keep working past its lease. In the hour in which clocks are set back it disagrees
//!   with us unless its JDBC URL has `sessionVariables=time_zone='+00:00'`.
//!
//! # Tables of other versions
//!
//! The table of JVM Simba (`owner_id CHAR(32)`, `version INT UNSIGNED`) and later ones (`VARCHAR(128)`, `BIGINT`)
//! work unchanged. A version at the limit of its column is an error that names the fix, it never wraps; from
//! 2147483648 on JVM peers cannot read it.

mod backend;
mod calls;
mod config;
mod connection;
mod error;
mod fairness;
mod limits;
mod operate;
mod own_hold;
mod pending;
mod poll;
mod probe;
mod row;
mod schema;
mod session;
mod shared;
mod statements;
mod supervisor;
mod wakeups;

pub use backend::MySqlBackend;
pub use config::{MySqlConfig, SslMode};
