//! Simba on Redis and Valkey: a key with a lease, a FIFO queue and wake-ups, implemented by scripts in the server.
//!
//! ```no_run
//! # async fn example() -> simba_core::Result<()> {
//! use simba_core::Simba;
//! use simba_redis::{RedisBackend, RedisConfig};
//!
//! let config = RedisConfig::from_url(&"redis://app:secret@cache.internal/0".parse()?)?;
//! let simba = Simba::new(RedisBackend::connect(config).await?);
//! let guard = simba.locker("orders").lock().await?;
//! println!("acquired with token {}", guard.token());
//! # Ok(())
//! # }
//! ```
//!
//! # Guarantees and limits
//!
//! - At most one valid holder, as long as the server keeps its writes. A server with `appendonly yes` and
//!   `appendfsync always` keeps them even in a crash. Any other server may lose the holder at a restart. The old holder
//!   notices it at its next renewal; until then there may be two holders.
//! - A failover by sentinels or in a cluster may lose the last writes of the old master, with the same effect.
//!   [`wait_replicas`](RedisConfig::with_wait_replicas) makes that less likely but does not exclude it.
//! - A token is the server's time in microseconds, or the last token plus one. Tokens decrease only if writes are lost
//!   and the clock of the next server is behind the last token.
//! - Redis ends leases by its wall clock. If the clock is set forward, or a promoted replica's clock is ahead, leases
//!   end early and there may be two holders. A step is logged as a warning and reported by a probe.
//! - Waiters acquire in FIFO order, and no contender overtakes a live waiter. On a standalone server a dead waiter is
//!   skipped immediately. A waiter that is paused or dies just after it was woken, or that is dead behind sentinels or
//!   in a cluster, delays the next one by a second. If the next waiter is dead as well, the delay is at most one poll
//!   interval.
//! - Published messages are hints: no message changes the holder.
//!
//! # Beside JVM Simba
//!
//! The key, the queue and the events are those of JVM Simba 3.0.2 and later, so both can contend for one mutex. A JVM
//! holder has no fencing token, and one that hangs may keep working after its lease: the guarantees cover the holders
//! of this library. JVM peers acquire a free mutex regardless of waiters.
//!
//! | key | content |
//! |---|---|
//! | `simba:{<mutex>}` | the holder's id, for the duration of its lease; also the channel of `acquired@@<id>` |
//! | `simba:{<mutex>}:contender` | the queue; on the channel `simba:{<mutex>}:<id>` a waiter receives `released@@<id>` |
//! | `simba:{<mutex>}:fence` | the last token and its session, or the waiter that the mutex is reserved for, for up to a second; kept for `fence_retention` after the last use |
//! | `simba:{<mutex>}:alive` | the expiry times of our waiters' queue entries |
//!
//! Releases are published on the channel `simba:{<mutex>}:owner` if there are observers.
//!
//! # URLs
//!
//! | URL | meaning |
//! |---|---|
//! | `redis://[user:password@]host[:6379][/db]` | one server |
//! | `rediss://…` | the same with TLS |
//! | `redis+unix:/path/to.sock?db=0` | one server on this machine |
//! | `redis+sentinel://h1[:26379],h2,h3/master[/db]` | the master that the sentinels name; with TLS `rediss+sentinel` |
//! | `redis+cluster://h1[:6379],h2` | a cluster, by any of its nodes; with TLS `rediss+cluster` |
//!
//! | key | default | meaning |
//! |---|---|---|
//! | `timeout` | `1s` | time without a reply after which a connection counts as broken |
//! | `connect_timeout` | `2s` | time limit for connecting |
//! | `ping` | `5s` | interval at which a connection reads the server's clock, also the keep-alive of an idle connection |
//! | `wait_replicas`, `wait_timeout` | `0`, `500ms` | number of replicas that must have an acquisition, and the time limit for it: at most a seventh of the ttl, and at most `2250ms` |
//! | `fence_retention` | `1day` | time for which the last token of a mutex is kept after its last use |
//! | `db` | `0` | the database, if the path does not name it |
//! | `password_file` | none | file with the password, read at every connection |
//! | `sentinel_user`, `sentinel_password`, `sentinel_password_file` | none | the login at the sentinels |
//! | `tls_ca` | public authorities | PEM file with the trusted authorities |
//! | `tls_cert`, `tls_key` | none | PEM files with the client's certificate and key |
//! | `tls_server_name` | the host | the name that the certificate must have |
//! | `tls_verify` | `full` | `full`; `ca` accepts any host name; `none` checks nothing |
//!
//! # Rights
//!
//! [`ACL`] contains all rights that the user needs. No schema is needed.
//!
//! # Connections
//!
//! A handle uses one connection for the commands of all mutexes, with `wait_replicas` another one for acquisitions and,
//! after the first session waits or observes, one for wake-ups. In a cluster it uses one command connection to each
//! node that has a mutex. A silent connection is reset and replaced; then all waiters are woken and contend again.

mod backend;
mod cluster;
mod config;
mod connection;
mod error;
mod operate;
mod pipeline;
mod probe;
mod resp;
#[cfg(test)]
#[path = "tests/resp.rs"]
mod resp_tests;
mod route;
mod scripts;
mod sentinel;
mod session;
mod supervisor;
mod wakeups;

pub use backend::RedisBackend;
pub use config::RedisConfig;

/// Name of the backend in logs and errors.
pub(crate) const NAME: &str = "redis";

/// The minimum rights of the user, as arguments of `ACL SETUSER <user> ><password> …`.
pub const ACL: &str = "on resetkeys ~simba:{*}* resetchannels &simba:{*}* -@all +eval +evalsha +script|load +get +mget \
                       +set +setrange +del +pttl +pexpire +zadd +zrem +zrange +zscore +exists +publish +subscribe +unsubscribe +time \
                       +ping +select +auth +wait +info +role +scan +cluster|slots +asking";
