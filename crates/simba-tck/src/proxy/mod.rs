//! Fault injection between a client library and a real server: TCP connections that stall, lag, break, and lose data.

mod conditions;
mod connection;
mod group;
mod http2;
mod pipe;
mod shared;
#[cfg(test)]
mod tests;
mod thread;

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use conditions::{Latency, Stall};
pub use group::Proxies;
pub use shared::Counts;
use shared::Shared;
use thread::ProxyThread;

use crate::held::Held;

/// A TCP proxy between a client and a real server that injects faults on demand.
///
/// Everything passes by default. The persistent conditions apply to all present and future connections and add up until
/// [`pass`](Self::pass), but of the three stalls the last one counts. The single events affect one connection each,
/// or with [`cut`](Self::cut) all open ones.
///
/// The proxy has its own thread, so it works for async and blocking clients on any runtime, with or without
/// virtual time. Dropping it closes its port and all its connections before the drop returns.
///
/// A chunk is the result of one read: for a client that waits for each reply, a small request or a small reply.
/// Data that the proxy has written is in the buffers of the system: a condition does not affect it.
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
    thread: ProxyThread,
    address: SocketAddr,
    seed: u64,
}

impl FaultProxy {
    /// Starts a proxy in front of `upstream`, a `host:port`, on a free port of the loopback interface. Its jitter is
    /// random; `Debug` shows the seed.
    ///
    /// # Errors
    ///
    /// There is no free port, or no thread can be started. An unreachable server is not an error.
    pub async fn start(upstream: impl ToString + Send) -> io::Result<Self> {
        Self::with_seed(upstream, fastrand::u64(..)).await
    }

    /// Starts a proxy, as [`start`](Self::start) does, whose n-th connection always has the same jitter.
    ///
    /// # Errors
    ///
    /// As for [`start`](Self::start).
    pub async fn with_seed(upstream: impl ToString + Send, seed: u64) -> io::Result<Self> {
        let (thread, address) = ProxyThread::start(upstream.to_string(), seed)?;
        let address = address.await.map_err(|_| io::Error::other("the proxy's thread has died"))??;
        Ok(Self { thread, address, seed })
    }

    /// Excludes chunks from the number of requests in which an HTTP/2 client only answers a ping, confirms settings or
    /// updates a window: the server decides how often it does.
    #[must_use]
    pub fn for_http2(self) -> Self {
        self.shared().expect_http2();
        self
    }

    /// Returns the address for clients.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Removes all conditions: data flows again, and stalled or delayed data arrives at once, in order.
    ///
    /// Also cancels a [`drop_next_reply`](Self::drop_next_reply) that has not happened yet. A [`Held`] request stays
    /// held.
    pub fn pass(&self) {
        self.shared().events().lost_replies = 0;
        self.shared().change(|conditions| conditions.heal());
    }

    /// Blocks both directions, without an error: connections stay open, new ones are accepted but not forwarded to the
    /// server, and a sender is blocked once the buffers are full.
    pub fn stall(&self) {
        self.shared().change(|conditions| conditions.stall = Stall::Both);
    }

    /// Blocks requests and connects; replies still arrive.
    pub fn stall_requests(&self) {
        self.shared().change(|conditions| conditions.stall = Stall::Requests);
    }

    /// Blocks replies; requests and connects still arrive.
    pub fn stall_replies(&self) {
        self.shared().change(|conditions| conditions.stall = Stall::Replies);
    }

    /// Delays every chunk by `each` and a random part of `jitter`, in both directions. Chunks stay in order, and do not
    /// wait for each other.
    pub fn delay(&self, each: Duration, jitter: Duration) {
        self.shared().change(|conditions| conditions.latency = Some(Latency { each, jitter }));
    }

    /// Resets new connections; open ones are not affected.
    pub fn refuse(&self) {
        self.shared().change(|conditions| conditions.refusing = true);
    }

    /// Resets all open connections at both ends, stalled or not. A [`Held`] request is lost with its connection.
    ///
    /// A connection is open once it counts as [`accepted`](Self::accepted). It counts shortly after the client's
    /// connect, and always before the first reply.
    pub fn cut(&self) {
        self.shared().change(|conditions| conditions.cuts += 1);
    }

    /// Loses a reply: the next request that reaches the server selects the connection, the next chunk that the server
    /// sends on it is dropped, and the connection is reset, because TCP does not lose bytes otherwise.
    pub fn drop_next_reply(&self) {
        self.shared().events().lost_replies += 1;
    }

    /// Holds back the next chunk that a client sends, and all that follow on its connection.
    #[must_use = "the request is discarded when this is dropped"]
    pub fn hold_next_request(&self) -> Held {
        self.hold_next_request_with(&[""])
    }

    /// Holds back the next chunk that a client sends and that contains one of `texts`, and all that follow on its
    /// connection.
    #[must_use = "the request is discarded when this is dropped"]
    pub fn hold_next_request_with(&self, texts: &[&str]) -> Held {
        let (held, trap) = Held::pair();
        let texts = texts.iter().map(|text| (*text).to_owned()).collect();
        self.shared().events().traps.push((texts, trap));
        held
    }

    /// Returns how many connections are open. One that its client closed is open until the server has closed it, too.
    #[must_use]
    pub fn connections(&self) -> usize {
        self.shared().counts().connections
    }

    /// Returns how often a client connected so far, including those that were reset at once.
    #[must_use]
    pub fn accepted(&self) -> usize {
        self.shared().counts().accepted
    }

    /// Returns how many chunks with requests clients sent so far, including those that a fault affected.
    #[must_use]
    pub fn requests(&self) -> usize {
        self.shared().counts().requests
    }

    /// Waits until the counters satisfy the predicate.
    ///
    /// # Cancel safety
    ///
    /// A dropped call changes nothing.
    pub async fn until(&self, wanted: impl FnMut(&Counts) -> bool + Send) {
        self.shared().counted(wanted).await;
    }

    fn shared(&self) -> &Shared {
        &self.thread.shared
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
