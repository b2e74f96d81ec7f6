//! One connection to one member.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, Connection, SendRequest};
use hyper::rt::Executor;
use hyper_util::rt::TokioIo;
use simba_core::{Clock, Error};
use simba_net::{Place, dial};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic::metadata::AsciiMetadataValue;
use tonic_prost::ProstCodec;
use tower_service::Service;

use super::failure::Failure;
use super::proto::{AuthenticateRequest, AuthenticateResponse, RangeRequest, RangeResponse};
use crate::config::EtcdConfig;
use crate::error::{disconnected, failed, not_tls, unreachable};

/// Room for what is on its way to us: a list of many mutexes in one go.
const WINDOW: u32 = 1 << 20;
/// The largest message that is accepted: room for it is reserved as soon as its header arrives.
///
/// Servers take requests of 1.5 MiB by default, so no value is larger; lists are read in pages.
const LARGEST: usize = 4 << 20;

/// What requests are sent through.
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

/// The token of the last login, shared by all connections of a client. Without a value before the first login, and where
/// servers ask for none.
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

/// A connection that is logged in.
#[derive(Clone, Debug)]
pub(super) struct Line {
    grpc: Grpc<Channel>,
    token: Token,
}

/// Drives the connection; ends with it.
pub(super) type Driver = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Line {
    /// Connects, logs in unless a token of an earlier login is accepted, and asks something that takes a quorum: a
    /// member that is cut off from the others is of no use.
    pub(super) async fn open(
        config: &EtcdConfig,
        place: &Place,
        limit: Duration,
        clock: &Arc<dyn Clock>,
        token: Token,
    ) -> Result<(Self, Driver), Error> {
        let (channel, driver) = connect(config, place, limit, clock).await?;
        let grpc = Grpc::with_origin(channel, origin(config, place)).max_decoding_message_size(LARGEST);
        let line = Self { grpc, token };
        // Nothing is answered unless somebody drives it.
        let greeted = {
            let greeting = line.greet(config, place);
            tokio::pin!(greeting);
            let mut driver = driver;
            tokio::select! {
                biased;
                greeted = &mut greeting => greeted.map(|()| driver),
                () = &mut driver => Err(disconnected(place)),
            }
        };
        let driver = greeted?;
        Ok((line, driver))
    }

    async fn greet(&self, config: &EtcdConfig, place: &Place) -> Result<(), Error> {
        let log_in =
            async || self.log_in(config).await.map_err(|failure| refused(place, "log in to", failure));
        // A login costs a server the hash of a password, on purpose much: one for all connections is enough.
        if self.token.get().is_none() {
            log_in().await?;
        }
        let mut seen = self.look_at(Self::look(config)).await;
        if self.token.get().is_some() && seen.as_ref().is_err_and(Failure::is_logged_out) {
            log_in().await?;
            seen = self.look_at(Self::look(config)).await;
        }
        seen.map_err(|failure| refused(place, "reach", failure))
    }

    /// A question that changes nothing and takes a quorum.
    pub(super) fn look(config: &EtcdConfig) -> RangeRequest {
        RangeRequest::of_key(&config.keys().root())
    }

    pub(super) async fn look_at(&self, look: RangeRequest) -> Result<(), Failure> {
        let RangeResponse { .. } = self.unary("/etcdserverpb.KV/Range", look).await?;
        Ok(())
    }

    /// Returns the token that calls are made with.
    pub(super) fn token(&self) -> Option<AsciiMetadataValue> {
        self.token.get()
    }

    /// Logs in with the configured credentials, if there are any, and keeps the token. Calls that are under way go on.
    pub(super) async fn log_in(&self, config: &EtcdConfig) -> Result<(), Failure> {
        let Some(login) = &config.login else { return Ok(()) };
        let credentials = AuthenticateRequest { name: login.user.clone(), password: login.password.clone() };
        let said = self.unary_as(None, "/etcdserverpb.Auth/Authenticate", credentials).await;
        let said: AuthenticateResponse = match said {
            Err(failure) if failure.is_open_to_all() => {
                tracing::warn!("authentication is not enabled: everybody may touch the mutexes");
                self.token.set(None);
                return Ok(());
            }
            said => said?,
        };
        let mut token = AsciiMetadataValue::try_from(said.token)
            .map_err(|_| Failure::Refused(tonic::Status::internal("the login gave a malformed token")))?;
        token.set_sensitive(true);
        self.token.set(Some(token));
        Ok(())
    }

    /// One question, one answer.
    pub(super) async fn unary<Q, A>(&self, path: &'static str, question: Q) -> Result<A, Failure>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        self.unary_as(self.token(), path, question).await
    }

    async fn unary_as<Q, A>(
        &self,
        token: Option<AsciiMetadataValue>,
        path: &'static str,
        question: Q,
    ) -> Result<A, Failure>
    where
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.ready().await?;
        let request = request(token, question);
        let codec = ProstCodec::<Q, A>::default();
        let answer = grpc.unary(request, PathAndQuery::from_static(path), codec).await;
        answer.map(tonic::Response::into_inner).map_err(Failure::of)
    }

    /// Questions and answers, each whenever there is one.
    ///
    /// Servers answer nothing, not even that they listen, before there is a first question.
    pub(super) async fn stream<S, Q, A>(
        &self,
        path: &'static str,
        questions: S,
    ) -> Result<tonic::Streaming<A>, Failure>
    where
        S: futures_util::Stream<Item = Q> + Send + 'static,
        Q: prost::Message + 'static,
        A: prost::Message + Default + 'static,
    {
        let mut grpc = self.ready().await?;
        let mut request = request(self.token(), questions);
        // A member that has lost the others ends the stream instead of keeping silent.
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
    place: &Place,
    limit: Duration,
    clock: &Arc<dyn Clock>,
) -> Result<(Channel, Driver), Error> {
    let tcp =
        dial(&place.host, place.port, limit, &**clock).await.map_err(|error| unreachable(place, error))?;
    let Some(tls) = &config.tls else { return shake(place, tcp).await };
    let mut rustls = simba_net::rustls::ClientConfig::clone(&*tls.client_config()?);
    rustls.alpn_protocols = vec![b"h2".to_vec()];
    let connector = TlsConnector::from(Arc::new(rustls));
    let name = tls.server_name(&place.host)?;
    let stream = connector.connect(name, tcp).await.map_err(|error| not_tls(place, error))?;
    shake(place, stream).await
}

/// The tasks of a connection. They end with it, and whoever waits for an answer is told: by itself it would live on for as
/// long as there is one to come.
#[derive(Clone, Debug)]
struct Tasks(CancellationToken);

impl<F> Executor<F> for Tasks
where
    F: Future<Output: Send> + Send + 'static,
{
    fn execute(&self, task: F) {
        let ends = self.0.clone();
        tokio::spawn(async move { drop(ends.run_until_cancelled(task).await) });
    }
}

async fn shake<T>(place: &Place, stream: T) -> Result<(Channel, Driver), Error>
where
    T: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let ends = CancellationToken::new();
    let mut builder = Builder::new(Tasks(ends.clone()));
    builder.initial_stream_window_size(WINDOW).initial_connection_window_size(WINDOW);
    let shaken = builder.handshake(TokioIo::new(stream)).await;
    let (sender, connection): (SendRequest<Body>, Connection<_, _, _>) =
        shaken.map_err(|error| unreachable(place, std::io::Error::other(error)))?;
    let ends = ends.drop_guard();
    let driver = async move {
        let _ends = ends;
        if let Err(error) = connection.await {
            tracing::debug!(%error, "the connection broke");
        }
    };
    Ok((Channel { sender }, Box::pin(driver)))
}

/// Who breaks off the first conversation is of another kind, most likely.
fn refused(place: &Place, doing: &str, failure: Failure) -> Error {
    match failure {
        Failure::Lost(status) => disconnected(place).with_source(status),
        failure => failed(&format!("{doing} {place}"), failure),
    }
}

/// What the server is called in requests.
fn origin(config: &EtcdConfig, place: &Place) -> Uri {
    let scheme = if config.tls.is_some() { Scheme::HTTPS } else { Scheme::HTTP };
    let authority = Authority::try_from(place.to_string()).unwrap_or_else(|_| Authority::from_static("etcd"));
    let parts = Uri::builder().scheme(scheme).authority(authority).path_and_query("/").build();
    parts.unwrap_or_default()
}
