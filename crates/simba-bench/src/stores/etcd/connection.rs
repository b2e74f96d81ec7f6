//! Raw gRPC: one connection, and the minimal messages of a lock.
//!
//! Written by hand, since a build must not need `protoc`.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

use anyhow::{Context as _, Result};
use http::uri::PathAndQuery;
use http::{Request, Response, Uri};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use prost::{Message, Oneof};
use simba_core::spi::ConnectUrl;
use tokio::net::TcpStream;
use tokio::sync::mpsc;
use tonic::Streaming;
use tonic::body::Body;
use tonic::client::Grpc;
use tonic_prost::ProstCodec;
use tower_service::Service;

/// One connection with many requests in flight.
#[derive(Clone)]
pub(super) struct RawConnection {
    grpc: Grpc<Channel>,
}

impl RawConnection {
    pub(super) async fn connect(url: &ConnectUrl) -> Result<Self> {
        let host = url.hosts().first().context("the URL names no server")?;
        let port = host.port.unwrap_or(2379);
        let stream = TcpStream::connect((&*host.name, port)).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = Builder::new(TokioExecutor::new()).handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        let origin = Uri::builder().scheme("http").authority(format!("{}:{port}", host.name));
        Ok(Self { grpc: Grpc::with_origin(Channel { sender }, origin.path_and_query("/").build()?) })
    }

    pub(super) async fn txn(&mut self, txn: Txn) -> Result<TxnAnswer> {
        self.call("/etcdserverpb.KV/Txn", txn).await
    }

    pub(super) async fn range(&mut self, range: Range) -> Result<RangeAnswer> {
        self.call("/etcdserverpb.KV/Range", range).await
    }

    pub(super) async fn delete(&mut self, key: Vec<u8>) -> Result<()> {
        let Ignored {} = self.call("/etcdserverpb.KV/DeleteRange", Delete { key }).await?;
        Ok(())
    }

    /// Creates a lease of that many seconds. Returns its id.
    pub(super) async fn grant(&mut self, seconds: i64) -> Result<i64> {
        let granted: Granted = self.call("/etcdserverpb.Lease/LeaseGrant", Grant { seconds }).await?;
        Ok(granted.id)
    }

    /// Acquires a lock of the lock service, which waits within the server. Returns its key.
    pub(super) async fn lock(&mut self, name: &str, lease: i64) -> Result<Vec<u8>> {
        let lock = Lock { name: name.as_bytes().to_vec(), lease };
        let locked: Locked = self.call("/v3lockpb.Lock/Lock", lock).await?;
        Ok(locked.key)
    }

    pub(super) async fn unlock(&mut self, key: Vec<u8>) -> Result<()> {
        let Ignored {} = self.call("/v3lockpb.Lock/Unlock", Unlock { key }).await?;
        Ok(())
    }

    async fn call<Q, A>(&mut self, path: &'static str, request: Q) -> Result<A>
    where
        Q: Message + 'static,
        A: Message + Default + 'static,
    {
        self.grpc.ready().await?;
        let (request, codec) = (tonic::Request::new(request), ProstCodec::<Q, A>::default());
        Ok(self.grpc.unary(request, PathAndQuery::from_static(path), codec).await?.into_inner())
    }
}

/// A stream of watches. Its caller watches one key at a time.
pub(super) struct Watch {
    requests: mpsc::UnboundedSender<WatchRequest>,
    responses: Streaming<WatchResponse>,
    count: i64,
}

impl Watch {
    /// Starts to watch for the deletion of a key, from a revision on.
    pub(super) async fn open(connection: &mut RawConnection, key: Vec<u8>, from: i64) -> Result<Self> {
        let (requests, mut inbox) = mpsc::unbounded_channel();
        // Send a request first: before it, the server does not answer the headers either.
        requests.send(create(1, key, from))?;
        connection.grpc.ready().await?;
        let stream = futures_util::stream::poll_fn(move |context| inbox.poll_recv(context));
        let (request, codec) = (tonic::Request::new(stream), ProstCodec::default());
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let responses = connection.grpc.streaming(request, path, codec).await?.into_inner();
        Ok(Self { requests, responses, count: 1 })
    }

    /// Starts to watch for the deletion of another key.
    pub(super) fn add(&mut self, key: Vec<u8>, from: i64) -> Result<()> {
        self.count += 1;
        Ok(self.requests.send(create(self.count, key, from))?)
    }

    /// Waits until the watched key is deleted.
    pub(super) async fn deleted(&mut self) -> Result<()> {
        loop {
            let response = self.responses.message().await?.context("the stream of watches ended")?;
            if response.id == self.count && !response.events.is_empty() {
                let cancel = WatchCancel { id: response.id };
                // Otherwise the server keeps the watch for ever.
                self.requests.send(WatchRequest { kind: Some(WatchKind::Cancel(cancel)) })?;
                return Ok(());
            }
        }
    }
}

fn create(id: i64, key: Vec<u8>, from: i64) -> WatchRequest {
    const NO_PUT: i32 = 0;
    let create = WatchCreate { key, from, filters: vec![NO_PUT], id };
    WatchRequest { kind: Some(WatchKind::Create(create)) }
}

#[derive(Clone)]
struct Channel {
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

// ===== messages =====

/// A response whose fields are not used.
#[derive(Clone, PartialEq, Message)]
struct Ignored {}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Header {
    #[prost(int64, tag = "3")]
    pub(super) revision: i64,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(super) key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Range {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    end: Vec<u8>,
    #[prost(int64, tag = "3")]
    limit: i64,
    #[prost(int32, tag = "5")]
    order: i32,
    #[prost(int32, tag = "6")]
    by: i32,
    #[prost(bool, tag = "8")]
    keys_only: bool,
}

impl Range {
    /// Requests the first created key of those with this prefix, which ends with a slash.
    pub(super) fn first(prefix: &str) -> Self {
        const ASCENDING: i32 = 1;
        Self::one(prefix, ASCENDING)
    }

    /// Requests the last created key of those with this prefix.
    pub(super) fn last(prefix: &str) -> Self {
        const DESCENDING: i32 = 2;
        Self::one(prefix, DESCENDING)
    }

    fn one(prefix: &str, order: i32) -> Self {
        const CREATION: i32 = 2;
        let end = format!("{}0", prefix.trim_end_matches('/')).into_bytes();
        Self { key: prefix.as_bytes().to_vec(), end, limit: 1, order, by: CREATION, keys_only: true }
    }
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct RangeAnswer {
    #[prost(message, repeated, tag = "2")]
    pub(super) kvs: Vec<KeyValue>,
}

#[derive(Clone, PartialEq, Message)]
struct Put {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
    #[prost(int64, tag = "3")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Delete {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct Txn {
    #[prost(message, repeated, tag = "1")]
    compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    success: Vec<Step>,
}

impl Txn {
    /// Creates a key that does not exist.
    pub(super) fn create(key: &[u8], lease: i64) -> Self {
        let put = Put { key: key.to_vec(), value: b"raw".to_vec(), lease };
        let compare =
            Compare { target: Compare::CREATION, key: key.to_vec(), value: Some(Compared::Created(0)) };
        Self { compare: vec![compare], success: vec![Step { op: Some(Op::Put(put)) }] }
    }

    /// Reads a range before the creation.
    pub(super) fn after(mut self, range: Range) -> Self {
        self.success.insert(0, Step { op: Some(Op::Range(range)) });
        self
    }
}

#[derive(Clone, PartialEq, Message)]
struct Compare {
    #[prost(int32, tag = "2")]
    target: i32,
    #[prost(bytes = "vec", tag = "3")]
    key: Vec<u8>,
    #[prost(oneof = "Compared", tags = "5")]
    value: Option<Compared>,
}

impl Compare {
    const CREATION: i32 = 1;
}

/// A `oneof`, so that a zero is sent.
#[derive(Clone, PartialEq, Oneof)]
enum Compared {
    #[prost(int64, tag = "5")]
    Created(i64),
}

#[derive(Clone, PartialEq, Message)]
struct Step {
    #[prost(oneof = "Op", tags = "1, 2")]
    op: Option<Op>,
}

#[derive(Clone, PartialEq, Oneof)]
enum Op {
    #[prost(message, tag = "1")]
    Range(Range),
    #[prost(message, tag = "2")]
    Put(Put),
}

#[derive(Clone, PartialEq, Message)]
pub(super) struct TxnAnswer {
    #[prost(message, optional, tag = "1")]
    pub(super) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(super) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    steps: Vec<StepAnswer>,
}

impl TxnAnswer {
    /// Returns the key that the range found.
    pub(super) fn found(self) -> Option<Vec<u8>> {
        let kvs = self.steps.into_iter().find_map(|step| step.range)?.kvs;
        kvs.into_iter().next().map(|kv| kv.key)
    }
}

#[derive(Clone, PartialEq, Message)]
struct StepAnswer {
    #[prost(message, optional, tag = "1")]
    range: Option<RangeAnswer>,
}

#[derive(Clone, PartialEq, Message)]
struct Grant {
    #[prost(int64, tag = "1")]
    seconds: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Granted {
    #[prost(int64, tag = "2")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WatchRequest {
    #[prost(oneof = "WatchKind", tags = "1, 2")]
    kind: Option<WatchKind>,
}

#[derive(Clone, PartialEq, Oneof)]
enum WatchKind {
    #[prost(message, tag = "1")]
    Create(WatchCreate),
    #[prost(message, tag = "2")]
    Cancel(WatchCancel),
}

#[derive(Clone, PartialEq, Message)]
struct WatchCreate {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
    #[prost(int64, tag = "3")]
    from: i64,
    #[prost(int32, repeated, tag = "5")]
    filters: Vec<i32>,
    #[prost(int64, tag = "7")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WatchCancel {
    #[prost(int64, tag = "1")]
    id: i64,
}

#[derive(Clone, PartialEq, Message)]
struct WatchResponse {
    #[prost(int64, tag = "2")]
    id: i64,
    #[prost(message, repeated, tag = "11")]
    events: Vec<Ignored>,
}

#[derive(Clone, PartialEq, Message)]
struct Lock {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(int64, tag = "2")]
    lease: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Locked {
    #[prost(bytes = "vec", tag = "2")]
    key: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Unlock {
    #[prost(bytes = "vec", tag = "1")]
    key: Vec<u8>,
}
