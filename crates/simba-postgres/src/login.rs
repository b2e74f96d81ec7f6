//! Opens a socket to a server and logs in, with or without TLS.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use simba_core::{Error, ErrorKind, Result};
use simba_net::{Socket, dial};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_postgres::tls::{MakeTlsConnect, NoTls, TlsConnect};
use tokio_postgres::{AsyncMessage, Client};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::config::{Endpoint, PostgresConfig};
use crate::error::{from_dial, from_driver};
use crate::settings::Settings;

/// Receives the payload of each notification; a handle needs no more, since its channel is its own.
pub(crate) type OnNotify = Arc<dyn Fn(&str) + Send + Sync>;

type DriverFuture = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A new connection.
pub(crate) struct Login {
    pub(crate) client: Client,
    /// Drives the connection until it ends.
    pub(crate) driver: DriverFuture,
    /// The local and the remote address, as this process sees them.
    pub(crate) addresses: Option<(SocketAddr, SocketAddr)>,
    /// Can reset the connection; `None` for a local socket.
    pub(crate) socket: Option<Socket>,
}

impl Login {
    /// Connects to an endpoint and logs in. The caller limits the time.
    pub(crate) async fn open(
        settings: &Settings,
        endpoint: &Endpoint,
        on_notify: Option<OnNotify>,
    ) -> Result<Self> {
        let config = &settings.config;
        let Endpoint::Tcp(simba_net::Endpoint { host, port }) = endpoint else {
            let (client, driver) = log_in_unix(config, endpoint, on_notify).await?;
            return Ok(Self { client, driver, addresses: None, socket: None });
        };
        let stream = dial(host, *port, config.connect_timeout, &*settings.clock).await;
        let stream = stream.map_err(|error| from_dial(error, endpoint))?;
        let addresses = stream.local_addr().and_then(|local| Ok((local, stream.peer_addr()?))).ok();
        let socket = Some(Socket::of(&stream).map_err(|error| from_dial(error, endpoint))?);
        let (client, driver) = log_in_tcp(config, host, stream, on_notify).await?;
        Ok(Self { client, driver, addresses, socket })
    }
}

async fn log_in_unix(
    config: &PostgresConfig,
    endpoint: &Endpoint,
    on_notify: Option<OnNotify>,
) -> Result<(Client, DriverFuture)> {
    if config.tls.is_some() {
        let message = "a local socket does not support TLS: remove sslmode from the URL";
        return Err(Error::new(ErrorKind::Config, message).with_backend(crate::NAME));
    }
    let stream = UnixStream::connect(endpoint.to_string()).await;
    log_in(config, stream.map_err(|error| from_dial(error, endpoint))?, NoTls, on_notify).await
}

async fn log_in_tcp(
    config: &PostgresConfig,
    host: &str,
    stream: TcpStream,
    on_notify: Option<OnNotify>,
) -> Result<(Client, DriverFuture)> {
    let Some(tls) = &config.tls else { return log_in(config, stream, NoTls, on_notify).await };
    let rustls = tls.client_config().map_err(|error| error.with_backend(crate::NAME))?;
    let name = tls.server_name(host).map_err(|error| error.with_backend(crate::NAME))?;
    let mut make = MakeRustlsConnect::new(Arc::unwrap_or_clone(rustls));
    let Ok(connect) = MakeTlsConnect::<TcpStream>::make_tls_connect(&mut make, &name.to_str());
    log_in(config, stream, connect, on_notify).await
}

async fn log_in<S, T>(
    config: &PostgresConfig,
    stream: S,
    tls: T,
    on_notify: Option<OnNotify>,
) -> Result<(Client, DriverFuture)>
where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    T: TlsConnect<S> + Send,
    T::Stream: Send + 'static,
    T::Future: Send,
{
    let connected = config.login()?.connect_raw(stream, tls).await;
    let (client, connection) = connected.map_err(|error| from_driver(error, config))?;
    Ok((client, Box::pin(drive(connection, on_notify))))
}

/// Drives the connection until it ends.
async fn drive<S, T>(mut connection: tokio_postgres::Connection<S, T>, on_notify: Option<OnNotify>)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
    T: AsyncRead + AsyncWrite + Unpin + Send,
{
    while let Some(message) = poll_fn(|context| connection.poll_message(context)).await {
        match (message, &on_notify) {
            (Ok(AsyncMessage::Notification(message)), Some(on_notify)) => on_notify(message.payload()),
            (Ok(_), _) => {}
            (Err(error), _) => {
                tracing::debug!(%error, "a connection to PostgreSQL ended");
                return;
            }
        }
    }
}
