//! One connection to one member.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{self, Builder, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use simba_core::{Clock, Error};
use simba_net::{Endpoint, dial, supervise};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::AsciiMetadataValue;
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::failure::Failure;
use super::protocol::{AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse};
use crate::config::EtcdConfig;
use crate::error::{disconnected, failed};

/// The flow-control window: large enough for a list of many mutexes in one round trip.
const WINDOW: u32 = 1 << 20;
/// The largest message that is accepted. Memory for a message is reserved as soon as its header arrives.
///
/// Servers accept requests of 1.5 MiB by default, so no value is larger; lists are read in pages.
const MAX_BYTES: usize = 4 << 20;

/// The HTTP/2 channel that requests are sent on.
#[derive(Clone, Debug)]
pub(super) struct Channel {
    sender: SendRequest<Body>,
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.sender.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.sender.send_request(request))
    }
}

/// The token of the last login, shared by all connections of a client. `None` before the first login, and if the
/// servers require no login.
#[derive(Clone, Debug, Default)]
pub(super) struct Token(Arc<Mutex<Option<AsciiMetadataValue>>>);

impl Token {
    pub(super) fn get(&self) -> Option<AsciiMetadataValue> {
        self.value().clone()
    }

    fn set(&self, token: Option<AsciiMetadataValue>) {
        *self.value() = token;
    }

    fn value(&self) -> MutexGuard<'_, Option<AsciiMetadataValue>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// An authenticated connection.
#[derive(Clone, Debug)]
pub(super) struct Connection {
    grpc: Grpc<Channel>,
    token: Token,
    /// Grows with each connection of a client.
    number: u64,
    /// Cancelled when the connection ends, or has to.
    ended: CancellationToken,
}

impl supervise::Connection for Connection {
    fn is_open(&self) -> bool {
        !self.ended.is_cancelled()
    }
}

impl Connection {
    /// Connects, logs in unless the token of an earlier login is accepted, and sends a read that needs a quorum: a
    /// member without a connection to the others cannot serve any call.
    ///
    /// # Errors
    ///
    /// The member cannot be reached, ends the connection, or refuses the login or the read.
    pub(super) async fn open(
        config: &EtcdConfig,
        endpoint: &Endpoint,
        limit: Duration,
        clock: &Arc<dyn Clock>,
        token: Token,
        number: u64,
    ) -> Result<Self, Error> {
        let ended = CancellationToken::new();
        let unless_greeted = ended.clone().drop_guard();
        let channel = connect(config, endpoint, limit, clock, &ended).await?;
        let grpc = Grpc::with_origin(channel, origin(config, endpoint)).max_decoding_message_size(MAX_BYTES);
        let connection = Self { grpc, token, number, ended };
        let greeted = connection.ended.run_until_cancelled(connection.greet(config, endpoint)).await;
        greeted.unwrap_or_else(|| Err(disconnected(endpoint)))?;
        unless_greeted.disarm();
        Ok(connection)
    }

    pub(super) const fn number(&self) -> u64 {
        self.number
    }

    /// Ends the connection, so that it is replaced. Pending calls fail.
    pub(super) fn end(&self) {
        self.ended.cancel();
    }

    /// Ends the connection when the result is dropped.
    pub(super) fn end_on_drop(&self) -> DropGuard {
        self.ended.clone().drop_guard()
    }

    /// Completes when the connection has ended.
    pub(super) async fn ended(&self) {
        self.ended.cancelled().await;
    }

    async fn greet(&self, config: &EtcdConfig, endpoint: &Endpoint) -> Result<(), Error> {
        let log_in =
            async || self.log_in(config).await.map_err(|failure| refused(endpoint, "log in to", failure));
        // A login costs the server a deliberately slow password hash, so all connections share one.
        if self.token.get().is_none() {
            log_in().await?;
        }
        let mut reached = self.check_quorum(config).await;
        if self.token.get().is_some() && reached.as_ref().is_err_and(Failure::is_logged_out) {
            log_in().await?;
            reached = self.check_quorum(config).await;
        }
        reached.map_err(|failure| refused(endpoint, "reach", failure))
    }

    /// Returns a read that changes nothing and needs a quorum.
    pub(super) fn quorum_read(config: &EtcdConfig) -> RangeRequest {
        RangeRequest::of_key(&config.keys().root())
    }

    /// Sends such a read.
    pub(super) async fn check_quorum(&self, config: &EtcdConfig) -> Result<(), Failure> {
        let RangeResponse { .. } = self.unary("/etcdserverpb.KV/Range", Self::quorum_read(config)).await?;
        Ok(())
    }

    /// Returns the token that is sent with calls.
    pub(super) fn token(&self) -> Option<AsciiMetadataValue> {
        self.token.get()
    }

    /// Logs in with the configured credentials, if any, and stores the token. Calls in flight continue.
    pub(super) async fn log_in(&self, config: &EtcdConfig) -> Result<(), Failure> {
        let Some(login) = &config.login else { return Ok(()) };
        let password = login.password.read().map_err(Failure::Unsent)?;
        let credentials = AuthenticateRequest { name: login.user.clone(), password };
        let answer = self.unary_as(None, "/etcdserverpb.Auth/Authenticate", credentials).await;
        let answer: AuthenticateResponse = match answer {
            Err(failure) if failure.is_auth_disabled() => {
                tracing::warn!(
                    "authentication is not enabled on the server: any client can change the mutexes"
                );
                self.token.set(None);
                return Ok(());
            }
            answer => answer?,
        };
        let mut token = AsciiMetadataValue::try_from(answer.token)
            .map_err(|_| Failure::Refused(tonic::Status::internal("the login returned a malformed token")))?;
        token.set_sensitive(true);
        self.token.set(Some(token));
        Ok(())
    }

    /// Sends one request and waits for its answer.
    pub(super) async fn unary<Q, A>(&self, path: &'static str, message: Q) -> Result<A, Failure>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.unary_as(self.token(), path, message).await
    }

    async fn unary_as<Q, A>(
        &self,
        token: Option<AsciiMetadataValue>,
        path: &'static str,
        message: Q,
    ) -> Result<A, Failure>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.ready().await?;
        let request = request(token, message);
        let codec = ProstCodec::<Q, A>::default();
        let answer = grpc.unary(request, PathAndQuery::from_static(path), codec).await;
        answer.map(tonic::Response::into_inner).map_err(Failure::of)
    }

    /// Opens a stream of requests and answers.
    ///
    /// Servers send nothing, not even the headers, before the first request.
    pub(super) async fn stream<S, Q, A>(
        &self,
        path: &'static str,
        messages: S,
    ) -> Result<tonic::Streaming<A>, Failure>
    where
        S: futures_util::Stream<Item = Q> + Send + 'static,
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.ready().await?;
        let mut request = request(self.token(), messages);
        // Makes a member without a leader end the stream; by default it would send nothing.
        request.metadata_mut().insert("hasleader", AsciiMetadataValue::from_static("true"));
        let codec = ProstCodec::<Q, A>::default();
        let answers = grpc.streaming(request, PathAndQuery::from_static(path), codec).await;
        answers.map(tonic::Response::into_inner).map_err(Failure::of)
    }

    async fn ready(&self) -> Result<Grpc<Channel>, Failure> {
        let mut grpc = self.grpc.clone();
        grpc.ready().await.map_err(|error| Failure::of(tonic::Status::from_error(Box::new(error))))?;
        Ok(grpc)
    }
}

fn request<T>(token: Option<AsciiMetadataValue>, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    if let Some(token) = token {
        request.metadata_mut().insert("token", token);
    }
    request
}

async fn connect(
    config: &EtcdConfig,
    endpoint: &Endpoint,
    limit: Duration,
    clock: &Arc<dyn Clock>,
    ended: &CancellationToken,
) -> Result<Channel, Error> {
    let tcp = dial(&endpoint.host, endpoint.port, limit, &**clock).await;
    let tcp = tcp.map_err(|error| endpoint.unreachable(error))?;
    let Some(tls) = &config.tls else { return handshake(endpoint, tcp, ended).await };
    let mut rustls = simba_net::rustls::ClientConfig::clone(&*tls.client_config()?);
    rustls.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(rustls));
    let name = tls.server_name(&endpoint.host)?;
    let stream = connector.connect(name, tcp).await.map_err(|error| endpoint.tls_failed(error))?;
    handshake(endpoint, stream, ended).await
}

/// Spawns the tasks of a connection and cancels them with it, so that pending calls fail. Otherwise a task would live
/// for as long as an answer is outstanding.
#[derive(Clone, Debug)]
struct Tasks(CancellationToken);

impl<F> Executor<F> for Tasks
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        let cancel = self.0.clone();
        tokio::spawn(async move { drop(cancel.run_until_cancelled(task).await) });
    }
}

async fn handshake<T>(endpoint: &Endpoint, stream: T, ended: &CancellationToken) -> Result<Channel, Error>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let mut builder = Builder::new(Tasks(ended.clone()));
    builder.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let connected = builder.handshake(TokioIo::new(stream)).await;
    let (sender, connection): (SendRequest<Body>, http2::Connection<_, _, _>) =
        connected.map_err(|error| endpoint.unreachable(std::io::Error::other(error)))?;
    let ended = ended.clone();
    tokio::spawn(async move {
        if let Some(Err(error)) = ended.run_until_cancelled(connection).await {
            tracing::debug!(%error, "the connection broke");
        }
        ended.cancel();
    });
    Ok(Channel { sender })
}

/// Returns the error of a greeting. A server that breaks the connection here most likely does not speak this protocol.
fn refused(endpoint: &Endpoint, action: &str, failure: Failure) -> Error {
    match failure {
        Failure::Lost(status) => disconnected(endpoint).with_source(status),
        failure => failed(&format!("{action} {endpoint}"), failure),
    }
}

/// Returns the origin of requests: scheme and authority of the server.
fn origin(config: &EtcdConfig, endpoint: &Endpoint) -> Uri {
    let scheme = if config.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
    let host = Authority::try_from(endpoint.to_string()).unwrap_or_else(|_| Authority::from_static("etcd"));
    let parts = Uri::builder().scheme(scheme).authority(host).path_and_query("/").build();
    parts.unwrap_or_default()
}
