//! Simba on MySQL and MariaDB: the table of JVM Simba, shared with JVM peers.
//!
//! One table, `simba_mutex`, with a row for each mutex. A Rust service and a JVM service that contend for the
//! same name contend for the same row: the columns, what they mean and what each side writes are the same.
//!
//! # Example
//!
//! ```no_run
//! # async fn run() -> simba_core::Result<()> {
//! use simba_core::{Backend, Simba};
//! use simba_mysql::{MySqlBackend, MySqlConfig};
//!
//! let url = "mysql://app:secret@db.example/app?ssl-mode=VERIFY_IDENTITY".parse()?;
//! let backend = MySqlBackend::connect(MySqlConfig::from_url(&url)?).await?;
//! // Once, by a user who may create tables; or run what `simba schema` prints.
//! backend.operate().expect("it has a schema").apply_schema().await?;
//!
//! let simba = Simba::new(backend);
//! let guard = simba.locker("orders").lock().await?;
//! println!("hand {} to whatever must not be written to by a stale holder", guard.token());
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```
//!
//! # URL
//!
//! `mysql://user:password@host:port/database?key=value`; `mariadb://` means the same.
//!
//! | key | default | what |
//! |---|---|---|
//! | `table` | `simba_mutex` | the table, by a plain name |
//! | `connections` | 4 | connections for calls, 1 to 64; one more polls for the waiters, and an operator's call opens its own |
//! | `poll` | 250ms | how often that one looks while someone waits, 10ms to 60s |
//! | `connect-timeout` | 2s | how long one try to connect may take |
//! | `socket` | | a Unix socket in place of the host |
//! | `ssl-mode` | `DISABLED` | `REQUIRED` encrypts, `VERIFY_CA` checks who signed, `VERIFY_IDENTITY` checks the host too |
//! | `ssl-ca` | public authorities | a PEM file with the authority that signed the server's certificate |
//! | `ssl-cert`, `ssl-key` | | PEM files with what to show the server |
//!
//! `PREFERRED` is refused: it falls back to plain text whenever somebody in between wants it to. Whoever asks for
//! TLS gets it or an error.
//!
//! # Rights
//!
//! `GRANT SELECT, INSERT, UPDATE ON app.simba_mutex TO 'app'@'%'` is all that it takes, and all that the tests
//! have. Rows are never deleted: their versions are the fencing tokens.
//!
//! # What it promises
//!
//! - At most one valid holder, as long as the server's clock does not step forward by more than the margin and
//!   the server keeps what it confirmed. A step is logged as a warning.
//! - A token that grows with every acquisition, through release, restart, renewals and JVM peers: the `version`
//!   that the first answered write of the tenure made. Asynchronous failover and a restored backup can set it
//!   back.
//! - Every write names the version that it is about, so it does nothing if it arrives late or twice. No transaction
//!   is ever left open.
//! - Time is the server's, in UTC, whatever its zone.
//! - A constant number of connections, whatever the number of mutexes. Renewals that fall due together share a
//!   statement; a row that a stuck peer has locked is left out of it.
//!
//! # What it does not
//!
//! - It cannot wake anyone: waiters of one process are found by one poll, adaptive between 25 ms and `poll`, at
//!   most ten a second over any ten seconds. Within a process a release wakes the next at once. There is no
//!   order between processes.
//! - Only the holder sees its token: a row does not tell which version began the tenure. An eviction by token frees
//!   only a hold that was not renewed yet, and is an error where the row does not tell.
//! - Several servers that take writes have several clocks: a server that is ahead gives mutexes away too early. The
//!   probe finds Galera and group replication with several writers.
//! - The table knows ids, not sessions: of two contenders with the same chosen id, one whose call was lost takes
//!   the other's hold for its own. Ids that are not chosen are unique.
//! - Names that differ by case only are one row in the usual collations. That is logged once.
//! - A JVM peer that hangs may work on past its lease; in the hour in which clocks are set back it disagrees with
//!   us unless its JDBC URL has `sessionVariables=time_zone='+00:00'`.
//!
//! # Tables of other versions
//!
//! The table of the seeds (`owner_id CHAR(32)`, `version INT UNSIGNED`) and later ones (`VARCHAR(128)`, `BIGINT`)
//! work as they are. A version at the end of its column is an error that says how to widen it, never a wrap; from
//! 2147483648 on JVM peers cannot read it.

mod backend;
mod call;
mod config;
mod control;
mod courtesy;
mod decide;
mod error;
mod link;
mod operate;
mod pace;
mod poller;
mod probe;
mod releases;
mod renewals;
mod row;
mod schema;
mod server_clock;
mod session;
mod shape;
mod site;
mod spell;
mod standing;
mod statements;
mod table;
mod takes;
mod waiters;
mod worker;

pub use backend::MySqlBackend;
pub use config::{MySqlConfig, SslMode};
