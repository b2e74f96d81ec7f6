//! Stores whose mutexes are queues of entries, each tied to a session with the server: ZooKeeper and etcd.
//!
//! A store implements [`QueueStore`] and gets a fixture, [`QueueServer`], the connection of one process, [`Peer`], and
//! by [`queue_rows!`](crate::queue_rows) the rows that are the same for both.

pub mod rows;

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::{Answer, Backend, Claim, ConnectUrl, Holding, Prior, Session};
use simba_core::{
    Clock as _, ContenderId, Contention, FencingToken, Lease, MutexName, Result, Simba, SystemClock, Tenure,
};
use simba_servers::{Server, Setup, shared};
use simba_tck::{Connection, Fixture, Profile, Proxies, Shared, async_trait};
use tokio::time::sleep;

use crate::{SOON, contend, error_text, long, name, soon, within};

/// A store whose mutexes are queues.
pub trait QueueStore: Send + Sync + 'static {
    /// The backend under test.
    type Backend: Backend;

    /// The scheme of its URLs.
    const SCHEME: &'static str;
    /// The variable with the URL of the server that all tests share.
    const SHARED: &'static str;
    /// Whether its clients speak HTTP/2.
    const HTTP2: bool = false;
    /// The limit for an acquisition, which may have to wait for the end of a [`short`](Self::short) lease.
    const ACQUISITION: Duration = SOON;

    /// Returns the set-up of a server that is private to a test.
    fn setup() -> Setup;

    /// Connects to the servers of a URL.
    fn connect(url: &ConnectUrl) -> impl Future<Output = Result<Self::Backend>> + Send;

    /// Returns a lease that ends within a test, and survives a machine that pauses for two seconds.
    fn short() -> Lease;

    /// Returns how long a mutex with this lease is granted at most.
    fn granted(lease: &Lease) -> Duration;

    /// Returns the names of the entries of a mutex on the shared server, in no particular order.
    fn entries(mutex: &MutexName) -> impl Future<Output = Vec<String>> + Send;

    /// Deletes the only entry of a mutex on the shared server, as an operator does.
    fn delete_entry(mutex: &MutexName) -> impl Future<Output = ()> + Send;

    /// Returns the token of the last entry of a mutex on the shared server.
    fn last_token(mutex: &MutexName) -> impl Future<Output = FencingToken> + Send;

    /// Returns the number of requests that a server has received.
    fn received(server: &Server) -> usize;
}

/// A running server, or a running group of servers.
pub struct QueueServer<S> {
    url: String,
    store: PhantomData<S>,
}

impl<S: QueueStore> QueueServer<S> {
    /// Returns the server that all tests share.
    #[must_use]
    pub fn single() -> Self {
        Self::at(shared(S::SHARED))
    }

    /// Returns the servers at this URL.
    pub fn at(url: impl Into<String>) -> Self {
        Self { url: url.into(), store: PhantomData }
    }

    /// Connects through proxies, and returns them.
    pub async fn proxied(&self) -> (S::Backend, Arc<Proxies>) {
        let proxies = Proxies::start(&self.url.parse().unwrap()).await.unwrap();
        let proxies = if S::HTTP2 { proxies.for_http2() } else { proxies };
        let backend = S::connect(proxies.url()).await;
        (backend.unwrap_or_else(|error| panic!("{error:?}")), Arc::new(proxies))
    }
}

impl<S> fmt::Debug for QueueServer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("QueueServer").field("url", &self.url).finish_non_exhaustive()
    }
}

#[async_trait]
impl<S: QueueStore> Fixture for QueueServer<S> {
    async fn connect(&self) -> Connection {
        let (backend, network) = self.proxied().await;
        Connection::new(backend, network)
    }

    /// Returns a lease that survives a pause of two seconds: the store grants two thirds of it, and a call comes after a
    /// third of the grant.
    fn lease(&self) -> Lease {
        Lease::new(Duration::from_millis(3_000), Duration::from_millis(4_500)).unwrap()
    }

    fn profile(&self) -> Profile {
        Profile::default().with_dead_waiter(None)
    }
}

impl<S: QueueStore> Shared for QueueServer<S> {
    fn start() -> Self {
        Self::single()
    }

    fn address(&self) -> String {
        self.url.clone()
    }

    fn attach(address: &str) -> Self {
        Self::at(address)
    }
}

/// The connection of one process, with the [`long`] lease, and its network.
pub struct Peer<S> {
    /// The handle.
    pub simba: Simba,
    /// The network to the servers.
    pub network: Arc<Proxies>,
    store: PhantomData<S>,
}

impl<S: QueueStore> Peer<S> {
    /// Connects to the shared server.
    pub async fn connect() -> Self {
        Self::at(&QueueServer::single()).await
    }

    /// Connects to a server.
    pub async fn at(server: &QueueServer<S>) -> Self {
        simba_tck::explain_failures();
        let (backend, network) = server.proxied().await;
        let simba = Simba::builder(Arc::new(backend)).with_lease(long()).build();
        Self { simba, network, store: PhantomData }
    }

    /// Starts a contention.
    pub fn contend(&self, mutex: &MutexName, lease: Lease) -> Contention {
        contend(&self.simba, mutex, lease)
    }
}

impl<S> fmt::Debug for Peer<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Peer").field("network", &self.network).finish_non_exhaustive()
    }
}

/// Connects to the servers of a URL, without proxies.
///
/// # Errors
///
/// The URL is invalid, or the servers cannot be used.
pub async fn connect<S: QueueStore>(url: &str) -> Result<S::Backend> {
    S::connect(&url.parse()?).await
}

/// Waits until a contender leads.
pub async fn leads<S: QueueStore>(contention: &Contention) -> Tenure {
    within(S::ACQUISITION, "a contender acquires the mutex", contention.acquired()).await.unwrap()
}

/// Contends until there is an answer. Repeats a transient error: a server that pauses for two seconds breaks the
/// connection and its calls.
pub async fn answered(session: &mut dyn Session, prior: Prior) -> Answer {
    let answer = async {
        loop {
            match session.contend(prior).await {
                Ok(answer) => break answer,
                Err(error) => assert!(error.is_transient(), "broken: {error}"),
            }
        }
    };
    soon("a call is answered", answer).await
}

/// The grant of a waiter after a hand-over.
#[derive(Clone, Copy, Debug)]
#[allow(clippy::exhaustive_structs)]
pub struct HandOver {
    /// The granted time.
    pub granted: Duration,
    /// The time since the waiter joined the queue.
    pub age: Duration,
    /// Whether its entry is the one that it joined with.
    pub same_entry: bool,
}

/// Waits this long in one handle behind a holder in another, until the holder releases the mutex.
pub async fn handed_over_after<S: QueueStore>(lease: Lease, wait: Duration) -> HandOver {
    let (one, _network) = QueueServer::<S>::single().proxied().await;
    let (two, _other_network) = QueueServer::<S>::single().proxied().await;
    let mutex = name();
    let claim = || Claim::new(mutex.clone(), ContenderId::generate(), lease);
    let (mut holder, mut waiter) = (one.open(claim()).await.unwrap(), two.open(claim()).await.unwrap());
    assert!(matches!(answered(&mut *holder, Prior::Nothing).await, Answer::Ours(_)));
    assert!(matches!(answered(&mut *waiter, Prior::Nothing).await, Answer::Held(_)));
    let joined = SystemClock.now();
    let entry = S::last_token(&mutex).await;
    // A session's first wake-up is immediate.
    waiter.changed().await.unwrap();
    sleep(wait).await;
    holder.release(Holding::Unknown).await.unwrap();
    soon("a release wakes the next waiter", waiter.changed()).await.unwrap();
    let sent = SystemClock.now();
    let Answer::Ours(ours) = answered(&mut *waiter, Prior::Nothing).await else {
        panic!("broken: the waiter that was woken acquires")
    };
    HandOver { granted: ours.remaining, age: sent - joined, same_entry: ours.token == Some(entry) }
}

/// Connects to each URL and locks a mutex if that succeeds. Returns everything that a user sees in that time.
pub async fn shown<S: QueueStore>(
    urls: impl IntoIterator<Item = String, IntoIter: Send> + Send,
) -> Vec<String> {
    let mut shown = Vec::new();
    for url in urls {
        match connect::<S>(&url).await {
            Err(error) => shown.push(error_text(&error)),
            Ok(backend) => {
                shown.push(format!("{backend:?}"));
                let simba = Simba::new(backend);
                shown.extend(simba.locker("secret").lock().await.err().map(|error| error_text(&error)));
                simba.shutdown().await;
            }
        }
    }
    shown
}
