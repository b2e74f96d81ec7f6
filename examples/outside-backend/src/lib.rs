//! A backend for [memcached](https://memcached.org): a store for Simba in a separate crate, written as a tutorial.
//!
//! Three files are a whole backend. [`simba_core::spi`] has the interface, [`simba_net`] the parts that every store
//! with a network needs, and [`simba_tck`](https://docs.rs/simba-tck) the tests. Read them in this order:
//!
//! | file | contents |
//! |---|---|
//! | `lib.rs` | the settings and the [`Backend`]: opens sessions, keeps one connection for all of them |
//! | `session.rs` | the [`Session`]: the requests of one contender, and what their replies mean |
//! | `connection.rs` | the protocol: greets a server, sends requests, matches replies to them |
//! | `tests/tck.rs` | the conformance suite on a real server |
//!
//! # How it works
//!
//! A mutex is the item `simba:<mutex>` while it is held, and no item while it is free. The value is the holder's id. The
//! server expires the item when the lease ends, and numbers every write: the CAS number of an item.
//!
//! | call | requests |
//! |---|---|
//! | acquire | read; if there is no item, `ms … ME` (add) |
//! | renew | read; if the item is ours, `ms … C<number>` (compare and set) with the lease from now |
//! | release | read; if the item is ours, `md … C<number>` (compare and delete) |
//!
//! The fencing token is the number of the write that acquired the mutex, plus the start of the server in seconds times
//! 2^20. A renewal gets another number, so it writes the token behind the id. Numbers grow with every write of any item,
//! so a token outlives its item. After a restart they begin again at 1, and the start of the server is later: tokens
//! still grow if the server made fewer than a million writes per second of its life.
//!
//! # What it guarantees, and what not
//!
//! | what | why |
//! |---|---|
//! | at most one valid holder | the server decides by add and compare-and-set; the lease is longer there by 3 s, since its clock counts whole seconds and may be a second late |
//! | also after a restart | all items are lost, so a server that started less than `longest_lease` ago is refused; holders lose their mutexes at their deadlines |
//! | not if items are evicted, flushed, or moved in memory | a server with such settings is refused: start it with `memcached -M -F -o no_slab_reassign` |
//! | not if another program writes items that begin with `simba:` | use a server for Simba only |
//! | not if the clock of the server's host is set back and the server restarts | tokens may repeat |
//! | no queue, no wake-ups | memcached has neither: waiters poll, and any of them may be next |
//!
//! Do not use it where a restart of the store must not end holds, where waiters must get their turn, or on the server
//! that caches your pages. The stores of this project do all of that.
//!
//! # Examples
//!
//! ```no_run
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> simba_core::Result<()> {
//! use outside_backend::MemcachedBackend;
//! use simba_core::{Simba, SystemClock};
//!
//! let url = "memcached://127.0.0.1:11211?longest_lease=30s".parse()?;
//! let simba = Simba::new(MemcachedBackend::connect(&url, SystemClock).await?);
//! let guard = simba.locker("orders").lock().await?;
//! guard.release().await?;
//! # Ok(())
//! # }
//! ```

mod connection;
mod session;

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::{Backend, Claim, ConnectUrl, Session, async_trait};
use simba_core::{Clock, Error, ErrorKind, Result};
use simba_net::Endpoint;
use simba_net::supervise::{Retry, Supervised};

use connection::{Connection, Server};
use session::MemcachedSession;

const NAME: &str = "memcached";
/// The server interprets a longer time to live as a date.
const MAX_TTL: Duration = Duration::from_secs(30 * 24 * 60 * 60);
/// The time by which an item may expire early. The server's clock counts whole seconds: one is lost when an item is
/// written and one when it expires. A timer sets the clock, and may be late by a third.
const CLOCK_ERROR: Duration = Duration::from_secs(3);

/// Mutexes on a memcached server. See the [crate's documentation](crate).
#[derive(Debug)]
pub struct MemcachedBackend {
    longest_lease: Duration,
    supervised: Arc<Supervised<Connection>>,
}

impl MemcachedBackend {
    /// Connects to the server that a URL names: `memcached://host:port?longest_lease=60s`. A task keeps the connection
    /// open until the backend is closed or dropped.
    ///
    /// No session may have a longer lease than `longest_lease`, and no server is used until it has run for as long. All
    /// contenders need the same value. With `0s` there is no limit, and a restart frees mutexes that are still held.
    ///
    /// # Errors
    ///
    /// [`ErrorKind::Invalid`] if the URL does not name one server: two servers do not share their mutexes;
    /// [`ErrorKind::Unavailable`] if the server does not answer, or started less than `longest_lease` ago;
    /// [`ErrorKind::Config`] if its settings let it forget mutexes.
    pub async fn connect(url: &ConnectUrl, clock: impl Clock) -> Result<Self> {
        url.only_keys(&["longest_lease"])?;
        let longest_lease = url.duration("longest_lease")?.unwrap_or(Duration::from_secs(60));
        let Ok([endpoint]) = <[Endpoint; 1]>::try_from(Endpoint::all(url, 11211)) else {
            return Err(error(ErrorKind::Invalid, "a URL names one server: memcached://host:port"));
        };
        let supervised = Arc::new(Supervised::new());
        let backend = Self { longest_lease, supervised: Arc::clone(&supervised) };
        tokio::spawn(async move {
            let mut server = Server::new(endpoint, longest_lease, &clock);
            supervised.run(&mut server, &clock, Retry::default()).await;
        });
        // Fails with the reason if the first attempt failed. The task ends when the backend is dropped.
        backend.supervised.connection().await?;
        Ok(backend)
    }
}

impl Drop for MemcachedBackend {
    fn drop(&mut self) {
        self.supervised.close();
    }
}

#[async_trait]
impl Backend for MemcachedBackend {
    fn name(&self) -> &'static str {
        NAME
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        let none = self.longest_lease.is_zero();
        let (lease, longest) = (claim.lease.total(), if none { MAX_TTL / 2 } else { self.longest_lease });
        if lease > longest {
            let message = format!("the lease of {lease:?} is longer than the longest_lease, {longest:?}");
            return Err(error(ErrorKind::Invalid, message));
        }
        Ok(Box::new(MemcachedSession::new(Arc::clone(&self.supervised), claim)?))
    }

    async fn close(&self) {
        self.supervised.close();
    }
}

fn error(kind: ErrorKind, message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(kind, message).with_backend(NAME)
}
