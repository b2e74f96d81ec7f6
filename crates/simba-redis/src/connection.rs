//! Connection with one user at a time: connects, logs in, calls one command after the other, and receives messages.

use std::io;
use std::os::fd::AsFd;

use simba_core::spi::{Password, within};
use simba_core::{Clock, Error, Result};
use simba_net::Socket;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::UnixStream;
use tokio_rustls::TlsConnector;

use crate::config::{Address, Login, Settings};
use crate::error;
use crate::resp::{self, Reply};
use crate::supervisor::Context;

/// Bytes in both directions, with or without TLS.
pub(crate) trait Duplex: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Duplex for T {}

/// An open connection, and what a pipeline needs besides its bytes.
pub(crate) struct Transport {
    pub(crate) stream: Box<dyn Duplex>,
    /// For a reset and for direct writes. `None` if the process had no file descriptor left.
    pub(crate) socket: Option<Socket>,
    /// Whether TLS must encrypt what is written, so that direct writes are impossible.
    pub(crate) encrypted: bool,
}

pub(crate) struct Connection {
    transport: Transport,
    buffer: Vec<u8>,
}

impl Connection {
    /// Connects, logs in and sends the commands, in one round trip after the handshake. Returns the replies to the
    /// commands. Fails on any error reply.
    pub(crate) async fn open(
        address: &Address,
        context: &Context,
        login: &Login,
        commands: &[Vec<&str>],
    ) -> Result<(Self, Vec<Reply>)> {
        let (clock, settings) = (&*context.clock, &context.settings);
        let connected =
            within(clock, settings.connect_timeout, Self::connect(address, settings, clock)).await;
        let timed_out = || Err(error::unreachable(address, io::ErrorKind::TimedOut.into()));
        let mut connection = connected.unwrap_or_else(timed_out)?;
        let logged_in = within(clock, settings.timeout, connection.log_in(login, commands)).await;
        let replies = logged_in.unwrap_or_else(|| Err(error::silent(settings.timeout)))?;
        Ok((connection, replies))
    }

    async fn connect(address: &Address, settings: &Settings, clock: &dyn Clock) -> Result<Self> {
        let failed = |cause| error::unreachable(address, cause);
        let (host, port) = match address {
            Address::Unix(path) => return Ok(Self::plain(UnixStream::connect(path).await.map_err(failed)?)),
            Address::Tcp { host, port } => (host, *port),
        };
        let stream = simba_net::dial(host, port, settings.connect_timeout, clock).await.map_err(failed)?;
        let Some(tls) = &settings.tls else { return Ok(Self::plain(stream)) };
        let socket = Socket::of(&stream).ok();
        let secured = TlsConnector::from(tls.client_config()?).connect(tls.server_name(host)?, stream).await;
        let stream = secured.map_err(|cause| tls_error(address, cause))?;
        Ok(Self::new(Transport { stream: Box::new(stream), socket, encrypted: true }))
    }

    fn plain(stream: impl Duplex + AsFd + 'static) -> Self {
        let socket = Socket::of(&stream).ok();
        Self::new(Transport { stream: Box::new(stream), socket, encrypted: false })
    }

    fn new(transport: Transport) -> Self {
        Self { transport, buffer: Vec::new() }
    }

    async fn log_in(&mut self, login: &Login, commands: &[Vec<&str>]) -> Result<Vec<Reply>> {
        let (mut bytes, database) = (Vec::new(), login.database.to_string());
        let password = login.password.as_ref().map(Password::read).transpose()?;
        if let Some(password) = &password {
            let words = ["AUTH"].into_iter().chain(login.user.as_deref()).chain([password.as_str()]);
            resp::write_command(&mut bytes, &words.collect::<Vec<_>>());
        }
        // `PING` shows that the server speaks the protocol of Redis and that the login may use it.
        let mut first = vec![vec!["SELECT", &database], vec!["PING"]];
        first.drain(..usize::from(login.database == 0));
        first.iter().chain(commands).for_each(|command| resp::write_command(&mut bytes, command));
        self.send(&bytes).await?;
        if password.is_some()
            && let Reply::Error(message) = self.reply().await?
        {
            return Err(error::login(&message));
        }
        let mut replies = Vec::new();
        for _ in first.iter().chain(commands) {
            replies.push(self.reply().await?.into_result()?);
        }
        Ok(replies.split_off(first.len()))
    }

    /// Sends one command and returns its reply. Fails on an error reply, and after the timeout.
    pub(crate) async fn call(&mut self, context: &Context, command: &[&str]) -> Result<Reply> {
        let call = async {
            self.send(&resp::command(command)).await?;
            self.reply().await?.into_result()
        };
        let limit = context.settings.timeout;
        within(&*context.clock, limit, call).await.unwrap_or_else(|| Err(error::silent(limit)))
    }

    pub(crate) async fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.transport.stream.write_all(bytes).await.map_err(error::io)?;
        self.transport.stream.flush().await.map_err(error::io)
    }

    /// Returns the next reply.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: bytes that were read are kept for the next call.
    pub(crate) async fn reply(&mut self) -> Result<Reply> {
        loop {
            if let Some((reply, length)) = resp::parse(&self.buffer).map_err(error::malformed)? {
                self.buffer.drain(..length);
                return Ok(reply);
            }
            match self.transport.stream.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(error::io(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(cause) => return Err(error::io(cause)),
            }
        }
    }

    /// Returns the transport. Fails if unread bytes are left, since no reply is outstanding.
    pub(crate) fn into_transport(self) -> Result<Transport> {
        match self.buffer.is_empty() {
            true => Ok(self.transport),
            false => Err(error::unexpected_reply()),
        }
    }
}

fn tls_error(address: &Address, cause: io::Error) -> Error {
    // A refused certificate is reported as invalid data. All other errors come from the network.
    match cause.kind() {
        io::ErrorKind::InvalidData => error::untrusted(address, cause),
        _ => error::unreachable(address, cause),
    }
}
