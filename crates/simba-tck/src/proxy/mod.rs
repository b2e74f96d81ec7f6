//! A bad network between a client library and a real server: TCP connections that stall, lag, break, and lose
//! what they carry.

mod conditions;
mod connection;
mod group;
mod host;
mod http2;
mod lane;
mod shared;
#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use conditions::{Latency, Stall};
pub use group::Proxies;
use host::Host;
pub use shared::Counts;
use shared::Shared;

use crate::held::Held;

/// A TCP proxy between a client and a real server that breaks on demand.
///
/// Everything passes until told otherwise. The standing conditions hold for all present and future connections
/// and add up until [`pass`](Self::pass), but of the three stalls the last one counts. The single events befall
/// one connection each, or with [`cut`](Self::cut) all that are open.
///
/// The proxy has a thread of its own, so it works for async and blocking clients on any runtime, with or without
/// virtual time. Dropping it closes its port and all its connections before the drop returns.
///
/// A chunk is what one read yields: for a client that waits for each reply, a small request or a small reply.
/// What has left the proxy is in the hands of the system: a condition does not call it back.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> std::io::Result<()> {
/// use simba_tck::FaultProxy;
/// use tokio::io::{AsyncReadExt, AsyncWriteExt};
/// use tokio::net::{TcpListener, TcpStream};
///
/// let server = TcpListener::bind("127.0.0.1:0").await?;
/// let proxy = FaultProxy::start(server.local_addr()?).await?;
/// tokio::spawn(async move {
///     let (mut stream, _) = server.accept().await?;
///     let (mut requests, mut replies) = stream.split();
///     tokio::io::copy(&mut requests, &mut replies).await
/// });
///
/// let mut client = TcpStream::connect(proxy.address()).await?;
/// let mut reply = [0; 5];
/// proxy.stall();
/// client.write_all(b"hello").await?;
/// proxy.pass();
/// client.read_exact(&mut reply).await?;
/// assert_eq!(&reply, b"hello");
///
/// proxy.cut();
/// let error = client.read_exact(&mut reply).await.unwrap_err();
/// assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
/// # Ok(())
/// # }
/// ```
pub struct FaultProxy {
    host: Host,
    address: SocketAddr,
    seed: u64,
}

impl FaultProxy {
    /// Starts a proxy in front of `upstream`, a `host:port`, on a free port of the loopback interface. Its jitter
    /// is random; `Debug` shows the seed.
    ///
    /// # Errors
    ///
    /// When the system gives it no port or no thread. Whether the server is there shows on the connections.
    pub async fn start(upstream: impl ToString + Send) -> io::Result<Self> {
        Self::with_seed(upstream, fastrand::u64(..)).await
    }

    /// Starts a proxy, as [`start`](Self::start) does, whose n-th connection always has the same jitter.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn with_seed(upstream: impl ToString + Send, seed: u64) -> io::Result<Self> {
        let (host, address) = Host::start(upstream.to_string(), seed)?;
        let address = address.await.map_err(|_| io::Error::other("the proxy's thread has died"))??;
        Ok(Self { host, address, seed })
    }

    /// Takes no chunk for a request in which a client of HTTP/2 only answers a ping, confirms settings or makes room:
    /// how often it does is up to the server.
    #[must_use]
    pub fn for_http2(self) -> Self {
        self.shared().expect_http2();
        self
    }

    /// Where clients connect to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Heals the network: everything flows again, and what was stalled or is late arrives at once, in order.
    ///
    /// It takes back a [`drop_next_reply`](Self::drop_next_reply) that has not struck yet. What is
    /// [`Held`] stays held.
    pub fn pass(&self) {
        self.shared().events().lost_replies = 0;
        self.shared().change(|conditions| conditions.heal());
    }

    /// Lets nothing through in either direction, without an error: connections stay open, new ones are accepted
    /// but do not reach the server, and who sends too much is blocked.
    pub fn stall(&self) {
        self.shared().change(|conditions| conditions.stall = Stall::Both);
    }

    /// Lets no request and no connect through; replies still arrive.
    pub fn stall_requests(&self) {
        self.shared().change(|conditions| conditions.stall = Stall::Requests);
    }

    /// Lets no reply through; requests and connects still arrive.
    pub fn stall_replies(&self) {
        self.shared().change(|conditions| conditions.stall = Stall::Replies);
    }

    /// Lets every chunk arrive later by `each` and a random part of `jitter`, in either direction. They stay in
    /// order, and do not wait for each other.
    pub fn delay(&self, each: Duration, jitter: Duration) {
        self.shared().change(|conditions| conditions.latency = Some(Latency { each, jitter }));
    }

    /// Resets new connections; those that are open live on.
    pub fn refuse(&self) {
        self.shared().change(|conditions| conditions.refusing = true);
    }

    /// Resets all open connections at both ends, stalled or not. A request that is [`Held`] is lost with its
    /// connection.
    ///
    /// A connection is open once it counts as [`accepted`](Self::accepted). For a client, that is soon after its
    /// connect, and certainly before the first reply.
    pub fn cut(&self) {
        self.shared().change(|conditions| conditions.cuts += 1);
    }

    /// Loses a reply: the next request that reaches the server chooses the connection, the next chunk that the
    /// server sends on it is swallowed, and the connection is reset, for TCP does not lose bytes otherwise.
    pub fn drop_next_reply(&self) {
        self.shared().events().lost_replies += 1;
    }

    /// Keeps back the next chunk that a client sends, and all that follow on its connection.
    #[must_use = "the request is discarded when this is dropped"]
    pub fn hold_next_request(&self) -> Held {
        self.hold_next_request_with(&[""])
    }

    /// Keeps back the next chunk that a client sends and that contains one of `texts`, and all that follow on its
    /// connection.
    #[must_use = "the request is discarded when this is dropped"]
    pub fn hold_next_request_with(&self, texts: &[&str]) -> Held {
        let (held, trap) = Held::pair();
        let texts = texts.iter().map(|text| (*text).to_owned()).collect();
        self.shared().events().traps.push((texts, trap));
        held
    }

    /// How many connections are open now. One that its client closed is open until the server closed it too.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared().counts().connections
    }

    /// How often a client connected so far, including those that were reset at once.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.shared().counts().accepted
    }

    /// How many chunks with requests came from clients so far, whatever became of them.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.shared().counts().requests
    }

    /// Waits until the counters are as wanted.
    ///
    /// # Cancel safety
    ///
    /// A dropped call changes nothing.
    pub async fn until(&self, wanted: impl FnMut(&Counts) -> bool + Send) {
        self.shared().counted(wanted).await;
    }

    fn shared(&self) -> &Shared {
        &self.host.shared
    }
}

impl fmt::Debug for FaultProxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FaultProxy")
            .field("address", &self.address)
            .field("upstream", &self.shared().upstream)
            .field("seed", &self.seed)
            .field("counts", &self.shared().counts())
            .finish_non_exhaustive()
    }
}
