//! A socket to one server, plain or encrypted.

use std::io;
use std::os::fd::AsFd as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use simba_core::{Clock, Error, Result};
use simba_net::Socket;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
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

    /// The bare socket, where what is written is what is sent.
    pub(crate) fn socket(&self) -> Option<Socket> {
        let socket = match self {
            Self::Tcp(stream) => stream.as_fd(),
            Self::Unix(stream) => stream.as_fd(),
            Self::Tls(_) => return None,
        };
        Socket::of(socket).ok()
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
