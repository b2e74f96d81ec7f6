//! Who stands where: the keys of a mutex, in the order in which they were created.

use simba_core::{ContenderId, FencingToken, Result};

use crate::client::{
    ASCENDING, BY_CREATION, Compare, DESCENDING, Header, KeyValue, Op, PutRequest, RangeRequest, RequestOp,
    TxnRequest, TxnResponse,
};
use crate::error::stranger;
use crate::keys::end_of;

/// The first of the queue: whoever it is holds the mutex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) key: String,
    pub(crate) owner: ContenderId,
    pub(crate) token: FencingToken,
    pub(crate) lease: i64,
}

impl Head {
    pub(crate) fn of(kv: &KeyValue) -> Result<Self> {
        let key = text(&kv.key);
        // A lock of etcd's own tools says nothing about itself: the end of its key tells it from others.
        let name = key.rsplit_once('/').map_or(&*key, |(_, name)| name);
        let said = text(&kv.value);
        let owner = ContenderId::foreign(said.trim()).or_else(|_| ContenderId::foreign(name))?;
        Ok(Self { owner, token: token(kv.create_revision), lease: kv.lease, key })
    }
}

/// A revision is never below one.
pub(crate) fn token(revision: i64) -> FencingToken {
    FencingToken::new(u64::try_from(revision).unwrap_or_default())
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn all(prefix: &str) -> RangeRequest {
    RangeRequest { key: prefix.as_bytes().to_vec(), range_end: end_of(prefix), ..RangeRequest::default() }
}

/// The first of all keys with this prefix.
pub(crate) fn first(prefix: &str) -> RangeRequest {
    RangeRequest { limit: 1, sort_order: ASCENDING, sort_target: BY_CREATION, ..all(prefix) }
}

/// All keys with this prefix, the first first.
pub(crate) fn everybody(prefix: &str) -> RangeRequest {
    RangeRequest { limit: 0, ..first(prefix) }
}

/// The last key before this revision; the last of all for zero.
fn last(prefix: &str, before: i64) -> RangeRequest {
    let max_create_revision = if before > 0 { before - 1 } else { 0 };
    let by_creation = RangeRequest { sort_target: BY_CREATION, max_create_revision, ..all(prefix) };
    RangeRequest { limit: 1, sort_order: DESCENDING, keys_only: true, ..by_creation }
}

fn one(key: &str) -> RequestOp {
    Op::Range(RangeRequest::of_key(key)).into()
}

fn put(key: &str, contender: &ContenderId, lease: i64) -> RequestOp {
    let (key, value) = (key.as_bytes().to_vec(), contender.as_str().as_bytes().to_vec());
    Op::Put(PutRequest { key, value, lease }).into()
}

/// Takes a place at the end of the queue, unless it is taken already.
///
/// What is found was there before: the first, and the last, which the new one stands behind.
pub(crate) fn join(prefix: &str, key: &str, contender: &ContenderId, lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![Compare::created_in(0, key.as_bytes().to_vec())],
        success: vec![
            Op::Range(first(prefix)).into(),
            Op::Range(last(prefix, 0)).into(),
            put(key, contender, lease),
        ],
        failure: vec![one(key)],
    }
}

/// Takes a place if there is no other.
pub(crate) fn take(prefix: &str, key: &str, contender: &ContenderId, lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![Compare::created_in(0, prefix.as_bytes().to_vec()).up_to(end_of(prefix))],
        success: vec![put(key, contender, lease)],
        failure: vec![Op::Range(first(prefix)).into()],
    }
}

/// Looks how far a place has come.
pub(crate) fn look(prefix: &str, key: &str, revision: i64) -> TxnRequest {
    TxnRequest {
        compare: Vec::new(),
        success: vec![one(key), Op::Range(first(prefix)).into(), Op::Range(last(prefix, revision)).into()],
        failure: Vec::new(),
    }
}

/// Where a place stands in the queue.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It is not there.
    Missing,
    First,
    Behind {
        first: Head,
        /// The key right before it.
        next: String,
        /// When that was so.
        at: i64,
    },
}

impl Standing {
    /// What an answer to [`look`] says.
    pub(crate) fn of(mut answer: TxnResponse, revision: i64) -> Result<Self> {
        let at = revision_of(answer.header.as_ref())?;
        let mut ranges = answer.ranges();
        let (Some(own), Some(first), Some(next)) = (ranges.next(), ranges.next(), ranges.next()) else {
            return Err(stranger());
        };
        if own.first().is_none_or(|own| own.create_revision != revision) {
            return Ok(Self::Missing);
        }
        match (first.first(), next.first()) {
            (Some(first), Some(next)) if first.create_revision < revision => Self::behind(first, next, at),
            _ => Ok(Self::First),
        }
    }

    /// What an answer to [`join`] says that made the place.
    pub(crate) fn of_new(answer: &mut TxnResponse) -> Result<Self> {
        let at = revision_of(answer.header.as_ref())?;
        let mut ranges = answer.ranges();
        match (ranges.next().as_deref(), ranges.next().as_deref()) {
            (Some([]), Some([])) => Ok(Self::First),
            (Some([first, ..]), Some([next, ..])) => Self::behind(first, next, at),
            _ => Err(stranger()),
        }
    }

    fn behind(first: &KeyValue, next: &KeyValue, at: i64) -> Result<Self> {
        Ok(Self::Behind { first: Head::of(first)?, next: text(&next.key), at })
    }
}

/// The store's revision when it answered. Zero would be the creation of a key that is not there.
pub(crate) fn revision_of(header: Option<&Header>) -> Result<i64> {
    header.map(|header| header.revision).filter(|revision| *revision > 0).ok_or_else(stranger)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kv(key: &str, revision: i64, value: &str) -> KeyValue {
        let (key, value) = (key.as_bytes().to_vec(), value.as_bytes().to_vec());
        KeyValue { key, create_revision: revision, value, lease: 5 }
    }

    #[test]
    fn whoever_says_nothing_is_known_by_the_end_of_its_key() {
        let head = Head::of(&kv("simba/orders/694d8a", 7, "")).unwrap();
        assert_eq!((head.owner.as_str(), head.token.get()), ("694d8a", 7));
        let head = Head::of(&kv("simba/orders/694d8a-x", 7, "me")).unwrap();
        assert_eq!(head.owner.as_str(), "me");
    }

    #[test]
    fn an_answer_without_a_revision_is_no_answer() {
        let at = |revision| Header { member_id: 1, revision, raft_term: 1 };
        assert_eq!(revision_of(Some(&at(7))).unwrap(), 7);
        assert!(revision_of(Some(&at(0))).is_err() && revision_of(None).is_err());
    }

    #[test]
    fn the_last_before_the_first_revision_is_none_at_all() {
        assert_eq!(last("simba/a/", 8).max_create_revision, 7);
        assert_eq!(last("simba/a/", 0).max_create_revision, 0, "no limit");
    }
}
