//! One connection to the server, from the socket up.
//!
//! A connection that is given up is reset. Otherwise the system would go on sending what is in its buffer, and a server
//! that comes back minutes later would carry out a statement whose session has ended long ago.

use std::future::{Future, poll_fn};
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use simba_core::{Clock, Error, ErrorKind, Result, within};
use simba_net::dial;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{OnceCell, watch};
use tokio::task::AbortHandle;
use tokio_postgres::tls::{MakeTlsConnect, NoTls, TlsConnect};
use tokio_postgres::{AsyncMessage, Client, Connection};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::{Place, PostgresConfig};
use crate::error::{of_dial, of_fault, protocol, read_only, unavailable};

/// Hears the messages of other sessions: the payload alone, since a handle has one channel.
pub(crate) type Ear = Arc<dyn Fn(&str) + Send + Sync>;

/// A connection that stands, and what is known about it.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) client: Client,
    abort: AbortHandle,
    aborted: Arc<AtomicBool>,
    /// Its sender goes with the connection.
    end: watch::Receiver<()>,
    place: Place,
    config: PostgresConfig,
    /// Ours and the server's, as we see them.
    ends: Option<(SocketAddr, SocketAddr)>,
    /// Whether nothing stands between us and the server, or why it is not to be used.
    checked: OnceCell<Result<bool>>,
}

/// Asks for what must be known before the first use.
const CHECK: &str = "SELECT pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean, \
     host(inet_client_addr()), inet_client_port(), host(inet_server_addr()), inet_server_port()";

type Driven = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Opens a connection to the first of the places that takes writes, beginning with `first`.
pub(crate) async fn open_any(
    config: &PostgresConfig,
    clock: &dyn Clock,
    first: usize,
    ear: Option<&Ear>,
) -> Result<(usize, Line)> {
    let mut refusal = None;
    for at in 0..config.places.len() {
        let at = (first + at) % config.places.len();
        match open_checked(config, clock, &config.places[at], ear).await {
            Ok(line) => return Ok((at, line)),
            // The first one says more than the last: it is the one that was meant.
            Err(error) => refusal = refusal.or(Some(error)),
        }
    }
    Err(refusal.unwrap_or_else(|| unavailable("the URL names no host")))
}

/// Opens a connection, and leaves it to the caller to [check](Line::check) the server.
pub(crate) async fn open(config: &PostgresConfig, clock: &dyn Clock, place: &Place) -> Result<Line> {
    in_time(config, clock, place, greet(config, clock, place, None)).await
}

async fn open_checked(
    config: &PostgresConfig,
    clock: &dyn Clock,
    place: &Place,
    ear: Option<&Ear>,
) -> Result<Line> {
    let opened = async {
        let line = greet(config, clock, place, ear.cloned()).await?;
        line.check().await?;
        Ok(line)
    };
    in_time(config, clock, place, opened).await
}

async fn in_time(
    config: &PostgresConfig,
    clock: &dyn Clock,
    place: &Place,
    opened: impl Future<Output = Result<Line>> + Send,
) -> Result<Line> {
    let limit = config.connect_timeout;
    let opened = within(clock, limit, Box::pin(opened)).await;
    opened.unwrap_or_else(|| Err(unavailable(format!("{place} did not answer a login within {limit:?}"))))
}

async fn greet(config: &PostgresConfig, clock: &dyn Clock, place: &Place, ear: Option<Ear>) -> Result<Line> {
    let aborted = Arc::new(AtomicBool::new(false));
    let (client, driven, ends) = match place {
        Place::Tcp { host, port } => over_tcp(config, clock, (host, *port), (place, &aborted), ear).await?,
        Place::Unix { .. } => over_socket(config, place, ear).await?,
    };
    let (alive, end) = watch::channel(());
    let task = tokio::spawn(async move {
        driven.await;
        drop(alive);
    });
    let (place, config, checked) = (place.clone(), config.clone(), OnceCell::new());
    Ok(Line { client, abort: task.abort_handle(), aborted, end, place, config, ends, checked })
}

type Opened = (Client, Driven, Option<(SocketAddr, SocketAddr)>);

async fn over_tcp(
    config: &PostgresConfig,
    clock: &dyn Clock,
    (host, port): (&str, u16),
    (place, aborted): (&Place, &Arc<AtomicBool>),
    ear: Option<Ear>,
) -> Result<Opened> {
    let stream = dial(host, port, config.connect_timeout, clock).await;
    let stream = stream.map_err(|error| of_dial(error, place))?;
    let ends = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?))).ok();
    let stream = Resettable { stream, aborted: Arc::clone(aborted) };
    let Some(tls) = &config.tls else {
        let (client, driven) = log_in(config, stream, NoTls, ear).await?;
        return Ok((client, driven, ends));
    };
    let rustls = tls.client_config().map_err(|error| error.with_backend(crate::NAME))?;
    let mut make = MakeRustlsConnect::new(Arc::unwrap_or_clone(rustls));
    let connect = MakeTlsConnect::<Resettable>::make_tls_connect(&mut make, host);
    let Ok(connect) = connect;
    let (client, driven) = log_in(config, stream, connect, ear).await?;
    Ok((client, driven, ends))
}

async fn over_socket(config: &PostgresConfig, place: &Place, ear: Option<Ear>) -> Result<Opened> {
    let stream = UnixStream::connect(place.to_string()).await.map_err(|error| of_dial(error, place))?;
    if config.tls.is_some() {
        let message = "a socket on this machine takes no TLS: leave sslmode out";
        return Err(Error::new(ErrorKind::Config, message).with_backend(crate::NAME));
    }
    let (client, driven) = log_in(config, stream, NoTls, ear).await?;
    Ok((client, driven, None))
}

async fn log_in<S, T>(
    config: &PostgresConfig,
    stream: S,
    tls: T,
    ear: Option<Ear>,
) -> Result<(Client, Driven)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: TlsConnect<S> + Send,
    T::Stream: Send + 'static,
    T::Future: Send,
{
    let connected = config.login().connect_raw(stream, tls).await;
    let (client, connection) = connected.map_err(|fault| of_fault(fault, config))?;
    Ok((client, Box::pin(drive(connection, ear))))
}

/// Moves what is said over a connection until it ends.
async fn drive<S, T>(mut connection: Connection<S, T>, ear: Option<Ear>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send,
{
    while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
        match (message, &ear) {
            (Ok(AsyncMessage::Notification(heard)), Some(ear)) => ear(heard.payload()),
            (Ok(_), _) => {}
            (Err(fault), _) => {
                tracing::debug!(error = %fault, "a connection to PostgreSQL ended");
                return;
            }
        }
    }
}

impl Line {
    /// Completes when the connection has ended.
    pub(crate) async fn ended(&self) {
        while self.end.clone().changed().await.is_ok() {}
    }

    /// Resets the connection; what is not answered yet fails, and what was not sent yet never is. A line that is
    /// dropped ends gracefully.
    pub(crate) fn abort(&self) {
        self.aborted.store(true, Ordering::SeqCst);
        self.abort.abort();
    }

    /// Refuses a server that takes no writes, and finds out whether anything stands in between. It is asked once.
    ///
    /// # Cancel safety
    ///
    /// Whoever waits for the same answer asks anew.
    pub(crate) async fn check(&self) -> Result<()> {
        if let Some(checked) = self.checked.get() {
            return checked.clone().map(drop);
        }
        // Aside, since every statement has room for this, and hardly one needs it.
        Box::pin(self.checked.get_or_init(|| self.look())).await.clone().map(drop)
    }

    /// Whether [`check`](Self::check) has an answer already.
    pub(crate) fn is_checked(&self) -> bool {
        self.checked.get().is_some()
    }

    /// Whether it is known that nothing stands between us and the server.
    pub(crate) fn is_direct(&self) -> bool {
        matches!(self.checked.get(), Some(Ok(true)))
    }

    async fn look(&self) -> Result<bool> {
        let unread = |fault| of_fault(fault, &self.config);
        let rows = self.client.query_typed(CHECK, &[]).await.map_err(unread)?;
        let row = rows.first().ok_or_else(|| protocol("the server does not say what it is"))?;
        if row.try_get::<_, bool>(0).map_err(unread)? {
            return Err(read_only(&self.place));
        }
        let near = (row.try_get(1).map_err(unread)?, row.try_get(2).map_err(unread)?);
        let far = (row.try_get(3).map_err(unread)?, row.try_get(4).map_err(unread)?);
        Ok(self.ends.is_some_and(|(local, peer)| is(local, near) && is(peer, far)))
    }
}

/// Whether the server sees this end of the connection as we do. A pooler, a proxy or a router in between makes
/// two connections of one, with other ends.
fn is(end: SocketAddr, (address, port): (Option<String>, Option<i32>)) -> bool {
    let seen = address.and_then(|address| address.parse::<std::net::IpAddr>().ok());
    seen == Some(end.ip()) && port == Some(i32::from(end.port()))
}

/// A connection that is reset when it is dropped after an abort.
#[derive(Debug)]
struct Resettable {
    stream: TcpStream,
    aborted: Arc<AtomicBool>,
}

impl Drop for Resettable {
    fn drop(&mut self) {
        if self.aborted.load(Ordering::SeqCst) {
            // A connection that cannot be reset is closed.
            let _ = self.stream.set_zero_linger();
        }
    }
}

impl AsyncRead for Resettable {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

impl AsyncWrite for Resettable {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;

    /// What the other end reads when a connection is dropped.
    async fn dropped(aborted: bool) -> io::Result<usize> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let stream = TcpStream::connect(listener.local_addr().unwrap()).await.unwrap();
        let (mut other, _) = listener.accept().await.unwrap();
        let mut stream = Resettable { stream, aborted: Arc::new(AtomicBool::new(false)) };
        stream.write_all(b"sent").await.unwrap();
        assert_eq!(other.read(&mut [0; 16]).await.unwrap(), 4);
        stream.aborted.store(aborted, Ordering::SeqCst);
        drop(stream);
        other.read(&mut [0; 16]).await
    }

    #[tokio::test]
    async fn a_connection_is_reset_after_an_abort_and_else_ends_gracefully() {
        assert_eq!(dropped(false).await.unwrap(), 0);
        assert_eq!(dropped(true).await.unwrap_err().kind(), io::ErrorKind::ConnectionReset);
    }
}
