//! The messages of etcd's gRPC interface that a mutex needs, as `rpc.proto` of etcd 3.4 numbers them.
//!
//! Written by hand: a build must not need a protocol buffer compiler. Fields that this crate does not read are omitted,
//! as the format allows.

use prost::{Message, Oneof};

/// The header of every response.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Header {
    #[prost(uint64, tag = "2")]
    pub(crate) member_id: u64,
    /// The store's revision when it answered.
    #[prost(int64, tag = "3")]
    pub(crate) revision: i64,
    /// Grows with every election of a leader.
    #[prost(uint64, tag = "4")]
    pub(crate) raft_term: u64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct KeyValue {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(int64, tag = "2")]
    pub(crate) create_revision: i64,
    #[prost(bytes = "vec", tag = "5")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "6")]
    pub(crate) lease: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct RangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) limit: i64,
    #[prost(int32, tag = "5")]
    pub(crate) sort_order: i32,
    #[prost(int32, tag = "6")]
    pub(crate) sort_target: i32,
    #[prost(bool, tag = "8")]
    pub(crate) keys_only: bool,
    #[prost(int64, tag = "13")]
    pub(crate) max_create_revision: i64,
}

impl RangeRequest {
    /// Creates a request for the existence and the creation revision of this key.
    pub(crate) fn of_key(key: &str) -> Self {
        Self { key: key.as_bytes().to_vec(), keys_only: true, ..Self::default() }
    }
}

pub(crate) const ASCENDING: i32 = 1;
pub(crate) const DESCENDING: i32 = 2;
/// Sort by creation revision.
pub(crate) const BY_CREATION: i32 = 2;

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct RangeResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<Header>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) kvs: Vec<KeyValue>,
    /// Whether the limit of the request cut off some keys.
    #[prost(bool, tag = "3")]
    pub(crate) more: bool,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct PutRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) value: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) lease: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct DeleteRangeRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct RequestOp {
    #[prost(oneof = "Op", tags = "1, 2, 3")]
    pub(crate) op: Option<Op>,
}

#[derive(Clone, PartialEq, Eq, Oneof)]
pub(crate) enum Op {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    Delete(DeleteRangeRequest),
}

impl From<Op> for RequestOp {
    fn from(op: Op) -> Self {
        Self { op: Some(op) }
    }
}

/// The result of one operation; without a range for a write.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct ResponseOp {
    #[prost(message, optional, tag = "1")]
    pub(crate) range: Option<RangeResponse>,
}

/// The condition that a key, or all keys up to `range_end`, were created in this revision; zero: that none exists.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Compare {
    #[prost(int32, tag = "1")]
    pub(crate) result: i32,
    #[prost(int32, tag = "2")]
    pub(crate) target: i32,
    #[prost(bytes = "vec", tag = "3")]
    pub(crate) key: Vec<u8>,
    #[prost(oneof = "Target", tags = "5")]
    pub(crate) value: Option<Target>,
    #[prost(bytes = "vec", tag = "64")]
    pub(crate) range_end: Vec<u8>,
}

/// A `oneof` with one variant: as a plain field, a zero would not be sent.
#[derive(Clone, Copy, PartialEq, Eq, Oneof)]
pub(crate) enum Target {
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
}

impl Compare {
    pub(crate) fn created_in(revision: i64, key: Vec<u8>) -> Self {
        const EQUAL: i32 = 0;
        const CREATION: i32 = 1;
        let value = Some(Target::CreateRevision(revision));
        Self { result: EQUAL, target: CREATION, key, value, range_end: Vec::new() }
    }

    pub(crate) fn up_to(self, range_end: Vec<u8>) -> Self {
        Self { range_end, ..self }
    }
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct TxnRequest {
    #[prost(message, repeated, tag = "1")]
    pub(crate) compare: Vec<Compare>,
    #[prost(message, repeated, tag = "2")]
    pub(crate) success: Vec<RequestOp>,
    #[prost(message, repeated, tag = "3")]
    pub(crate) failure: Vec<RequestOp>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct TxnResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<Header>,
    #[prost(bool, tag = "2")]
    pub(crate) succeeded: bool,
    #[prost(message, repeated, tag = "3")]
    pub(crate) responses: Vec<ResponseOp>,
}

impl TxnResponse {
    /// Returns the results of the reads in the transaction, in their order.
    pub(crate) fn ranges(&mut self) -> impl Iterator<Item = Vec<KeyValue>> {
        self.responses.drain(..).filter_map(|response| Some(response.range?.kvs))
    }
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct LeaseGrantRequest {
    /// In seconds.
    #[prost(int64, tag = "1")]
    pub(crate) ttl: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct LeaseRequest {
    #[prost(int64, tag = "1")]
    pub(crate) id: i64,
}

/// The response to a grant, to a keep-alive and to a query of the time to live: all have these fields.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct LeaseResponse {
    #[prost(message, optional, tag = "1")]
    pub(crate) header: Option<Header>,
    #[prost(int64, tag = "2")]
    pub(crate) id: i64,
    /// In seconds; zero or less for a lease that has ended.
    #[prost(int64, tag = "3")]
    pub(crate) ttl: i64,
}

/// Has one of the two.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct WatchRequest {
    #[prost(message, optional, tag = "1")]
    pub(crate) create: Option<WatchCreateRequest>,
    #[prost(message, optional, tag = "2")]
    pub(crate) cancel: Option<WatchCancelRequest>,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct WatchCreateRequest {
    #[prost(bytes = "vec", tag = "1")]
    pub(crate) key: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    pub(crate) range_end: Vec<u8>,
    #[prost(int64, tag = "3")]
    pub(crate) start_revision: i64,
    /// The kinds of events that are not sent.
    #[prost(int32, repeated, tag = "5")]
    pub(crate) filters: Vec<i32>,
    #[prost(int64, tag = "7")]
    pub(crate) watch_id: i64,
}

pub(crate) const NO_PUT: i32 = 0;
pub(crate) const NO_DELETE: i32 = 1;

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct WatchCancelRequest {
    #[prost(int64, tag = "1")]
    pub(crate) watch_id: i64,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct WatchResponse {
    #[prost(int64, tag = "2")]
    pub(crate) watch_id: i64,
    #[prost(bool, tag = "4")]
    pub(crate) canceled: bool,
    /// Above zero if the start revision of the watch was compacted.
    #[prost(int64, tag = "5")]
    pub(crate) compact_revision: i64,
    #[prost(string, tag = "6")]
    pub(crate) cancel_reason: String,
    /// Their fields are not read: a wakeup only says that something changed.
    #[prost(message, repeated, tag = "11")]
    pub(crate) events: Vec<Empty>,
}

/// A message whose fields are not read, or that has none.
#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct Empty {}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct AuthenticateRequest {
    #[prost(string, tag = "1")]
    pub(crate) name: String,
    #[prost(string, tag = "2")]
    pub(crate) password: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct AuthenticateResponse {
    #[prost(string, tag = "2")]
    pub(crate) token: String,
}

#[derive(Clone, PartialEq, Eq, Message)]
pub(crate) struct StatusResponse {
    #[prost(string, tag = "2")]
    pub(crate) version: String,
    /// Problems of the member: `NOSPACE`, corruption, no leader.
    #[prost(string, repeated, tag = "8")]
    pub(crate) errors: Vec<String>,
}
