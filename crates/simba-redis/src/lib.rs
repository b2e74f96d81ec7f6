//! Simba on Redis and Valkey: a key with a lease, a fair queue, and wake-ups, in scripts that run in the server.
//!
//! ```no_run
//! # async fn example() -> simba_core::Result<()> {
//! use simba_core::Simba;
//! use simba_redis::{RedisBackend, RedisConfig};
//!
//! let config = RedisConfig::from_url(&"redis://app:secret@cache.internal/0".parse()?)?;
//! let simba = Simba::new(RedisBackend::connect(config).await?);
//! let guard = simba.locker("orders").lock().await?;
//! println!("ours, with token {}", guard.token());
//! # Ok(())
//! # }
//! ```
//!
//! # What it promises, and what not
//!
//! - At most one valid holder, as long as the server keeps its writes. A server with `appendonly yes` and
//!   `appendfsync always` does, through a crash too. Any other one may forget who holds when it restarts; the
//!   holder learns of it at its next renewal, and until then two may hold.
//! - A failover, by sentinels or in a cluster, may lose the last writes of the old master, so the same holds for
//!   it. [`wait_replicas`](RedisConfig::with_wait_replicas) makes that rarer. It is no promise.
//! - A token is the server's time in microseconds, or one more than the last. Tokens go back only if writes are lost
//!   and the clock of the server that serves next is behind the last token.
//! - Redis ends leases by its wall clock. A clock that is set forward, or a promoted replica whose clock is ahead, ends
//!   them early: then two may hold. A step is warned of, and found by a probe.
//! - Fair: waiters get the mutex in the order in which they came, and nobody passes a live waiter. A waiter that
//!   is gone is skipped at once on a standalone server. One that stands still or dies just after it was woken, or that
//!   is gone behind sentinels or in a cluster, delays the next by a second; by its poll at the most if the next one is
//!   gone as well.
//! - Hints are hints: nothing that is published changes who holds.
//!
//! # Beside JVM Simba
//!
//! The key, the queue and the events are those of JVM Simba 3.0.2 and later, so both may contend for one mutex. A
//! JVM holder has no fencing token, and one that hangs may work on past its lease: the promise covers the holders
//! of this library. JVM peers take a free mutex whoever waits.
//!
//! | key | what |
//! |---|---|
//! | `simba:{<mutex>}` | the holder's id, for as long as its lease lasts; also the channel of `acquired@@<id>` |
//! | `simba:{<mutex>}:contender` | the queue; the channel `simba:{<mutex>}:<id>` tells a waiter `released@@<id>` |
//! | `simba:{<mutex>}:fence` | the last token, and which session it was given to, or whom the mutex is promised to for up to a second; kept for `fence_retention` after the last use |
//! | `simba:{<mutex>}:alive` | until when the places of our waiters last |
//!
//! The channel `simba:{<mutex>}:owner` tells of releases, where somebody observes.
//!
//! # URLs
//!
//! | URL | what |
//! |---|---|
//! | `redis://[user:password@]host[:6379][/db]` | one server |
//! | `rediss://…` | the same through TLS |
//! | `redis+unix:/path/to.sock?db=0` | one server on this machine |
//! | `redis+sentinel://h1[:26379],h2,h3/master[/db]` | whoever the sentinels say is the master; `rediss+sentinel` |
//! | `redis+cluster://h1[:6379],h2` | a cluster, by any of its nodes; `rediss+cluster` |
//!
//! | key | default | what |
//! |---|---|---|
//! | `timeout` | `1s` | how long a reply may be overdue before the connection counts as broken |
//! | `connect_timeout` | `2s` | how long a connection may take |
//! | `ping` | `5s` | how often a connection reads the server's clock, which is also the sign of life of an idle connection |
//! | `wait_replicas`, `wait_timeout` | `0`, `500ms` | how many replicas must have an acquisition, and how long they may take: at most a sixth of the ttl |
//! | `fence_retention` | `1day` | how long the last token of a mutex is kept after its last use |
//! | `db` | `0` | the database, where the path does not tell |
//! | `sentinel_user`, `sentinel_password` | none | the login at the sentinels |
//! | `tls_ca` | public authorities | PEM file with the authorities to trust |
//! | `tls_cert`, `tls_key` | none | PEM files with a client's certificate and key |
//! | `tls_server_name` | the host | the name that the certificate must be for |
//! | `tls_verify` | `full` | `full`, `ca` for any host, `none` for no check at all |
//!
//! # Rights
//!
//! [`ACL`] is all that a user needs. No schema is needed.
//!
//! # Connections
//!
//! One for the commands of all mutexes and, once somebody waits or observes, one for wake-ups. In a cluster, one
//! for commands to each node that has a mutex. A silent connection is broken off and made again; then everyone
//! who waits looks again.

mod backend;
mod batch;
mod cluster;
mod config;
mod error;
mod health;
mod node;
mod operate;
mod pipe;
mod resp;
#[cfg(test)]
mod resp_tests;
mod route;
mod scripts;
mod sentinel;
mod session;
mod spread_probe;
mod stream;
mod subscriber;
mod wire;

pub use backend::RedisBackend;
pub use config::RedisConfig;

/// The backend's name in logs and errors.
pub(crate) const NAME: &str = "redis";

/// The rights that a user needs, and no more, as the words of `ACL SETUSER <user> ><password> …`.
pub const ACL: &str = "on resetkeys ~simba:{*}* resetchannels &simba:{*}* -@all +eval +evalsha +script|load +get +mget \
                       +set +setrange +del +pttl +pexpire +zadd +zrem +zrange +zscore +exists +publish +subscribe +unsubscribe +time \
                       +ping +select +auth +wait +info +role +scan +cluster|slots +asking";
