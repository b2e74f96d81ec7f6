//! A socket to one server, plain or encrypted.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use simba_core::{Clock, Error, Result};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf, ReadHalf, WriteHalf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::config::{Address, Settings};
use crate::error;

#[derive(Debug)]
pub(crate) enum Stream {
    Tcp(TcpStream),
    Tls(Box<TlsStream<TcpStream>>),
    Unix(UnixStream),
}

impl Stream {
    /// Connects within the limit of the settings.
    pub(crate) async fn open(address: &Address, settings: &Settings, clock: &dyn Clock) -> Result<Self> {
        let limit = settings.connect_timeout;
        let opened = simba_core::within(clock, limit, Self::connect(address, settings, clock)).await;
        opened.unwrap_or_else(|| Err(error::unreachable(address, io::ErrorKind::TimedOut.into())))
    }

    async fn connect(address: &Address, settings: &Settings, clock: &dyn Clock) -> Result<Self> {
        let failed = |cause| error::unreachable(address, cause);
        match (address, &settings.tls) {
            (Address::Unix(path), _) => UnixStream::connect(path).await.map(Self::Unix).map_err(failed),
            (Address::Tcp { host, port }, None) => {
                dial(host, *port, settings, clock).await.map(Self::Tcp).map_err(failed)
            }
            (Address::Tcp { host, port }, Some(tls)) => {
                let stream = dial(host, *port, settings, clock).await.map_err(failed)?;
                let name = tls.server_name(host)?;
                let secured = TlsConnector::from(settings.rustls()?).connect(name, stream).await;
                secured.map(|stream| Self::Tls(Box::new(stream))).map_err(|cause| tls_error(address, cause))
            }
        }
    }
}

impl Stream {
    /// Both directions; and the socket itself, if bytes may go into it as they are.
    pub(crate) fn split(self) -> (Reader, Writer, Option<Arc<Socket>>) {
        let socket = match self {
            Self::Tcp(stream) => Arc::new(Socket::Tcp(stream)),
            Self::Unix(stream) => Arc::new(Socket::Unix(stream)),
            Self::Tls(_) => {
                let (reader, writer) = tokio::io::split(self);
                return (Reader::Secured(reader), Writer::Secured(writer), None);
            }
        };
        (Reader::Plain(Arc::clone(&socket)), Writer::Plain(Arc::clone(&socket)), Some(socket))
    }
}

/// A socket that several parties use at once.
#[derive(Debug)]
pub(crate) enum Socket {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl Socket {
    async fn readable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.readable().await,
            Self::Unix(stream) => stream.readable().await,
        }
    }

    fn try_read(&self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_read_buf(buffer),
            Self::Unix(stream) => stream.try_read_buf(buffer),
        }
    }

    async fn writable(&self) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.writable().await,
            Self::Unix(stream) => stream.writable().await,
        }
    }

    /// Writes what it takes at once.
    pub(crate) fn try_write(&self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(stream) => stream.try_write(bytes),
            Self::Unix(stream) => stream.try_write(bytes),
        }
    }
}

/// What comes from the server.
pub(crate) enum Reader {
    Plain(Arc<Socket>),
    Secured(ReadHalf<Stream>),
}

impl Reader {
    /// Reads what there is; 0 at the end.
    pub(crate) async fn read_buf(&mut self, buffer: &mut Vec<u8>) -> io::Result<usize> {
        match self {
            Self::Secured(half) => half.read_buf(buffer).await,
            Self::Plain(socket) => loop {
                // Room for it, or nothing that comes would look like the end.
                buffer.reserve(1);
                socket.readable().await?;
                match socket.try_read(buffer) {
                    Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                    read => return read,
                }
            },
        }
    }
}

/// What goes to the server.
pub(crate) enum Writer {
    Plain(Arc<Socket>),
    Secured(WriteHalf<Stream>),
}

impl Writer {
    pub(crate) async fn write_all(&mut self, mut bytes: &[u8]) -> io::Result<()> {
        match self {
            // Encryption keeps back what is not flushed.
            Self::Secured(half) => half.write_all(bytes).await.and(half.flush().await),
            Self::Plain(socket) => {
                while !bytes.is_empty() {
                    socket.writable().await?;
                    match socket.try_write(bytes) {
                        Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                        Ok(written) => bytes = &bytes[written..],
                        Err(cause) if cause.kind() == io::ErrorKind::WouldBlock => {}
                        Err(cause) => return Err(cause),
                    }
                }
                Ok(())
            }
        }
    }
}

async fn dial(host: &str, port: u16, settings: &Settings, clock: &dyn Clock) -> io::Result<TcpStream> {
    simba_net::dial(host, port, settings.connect_timeout, clock).await
}

fn tls_error(address: &Address, cause: io::Error) -> Error {
    // A refusal of the certificate comes as invalid data, everything else is the network's.
    match cause.kind() {
        io::ErrorKind::InvalidData => error::untrusted(address, cause),
        _ => error::unreachable(address, cause),
    }
}

impl AsyncRead for Stream {
    fn poll_read(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(context, buffer),
            Self::Unix(stream) => Pin::new(stream).poll_read(context, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(context, bytes),
            Self::Unix(stream) => Pin::new(stream).poll_write(context, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_flush(context),
            Self::Tls(stream) => Pin::new(stream).poll_flush(context),
            Self::Unix(stream) => Pin::new(stream).poll_flush(context),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Tcp(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(context),
            Self::Unix(stream) => Pin::new(stream).poll_shutdown(context),
        }
    }
}
