//! The queue of a mutex: its keys in the order of their creation. Builds requests and reads their answers.

use simba_core::{ContenderId, FencingToken, Result};
use simba_net::queue::{Holder, Position, Proof};

use crate::client::{
    ASCENDING, BY_CREATION, Compare, DESCENDING, Header, KeyValue, Op, PutRequest, RangeRequest, RequestOp,
    TxnRequest, TxnResponse,
};
use crate::error::unexpected_answer;
use crate::layout::end_of;

/// The number of keys in one page of a list: far below the largest message that is accepted.
const PAGE: i64 = 1_000;

/// The first entry of the queue, which holds the mutex.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    /// Any bytes: other programs may have chosen the key.
    pub(crate) key: Vec<u8>,
    pub(crate) holder: Holder,
    pub(crate) lease: i64,
}

impl Head {
    /// Converts a key. A lock of etcd's own tools has no value: the last part of its key identifies it.
    pub(crate) fn of(kv: &KeyValue) -> Self {
        let holder = Holder::of(&kv.value, &kv.key, token(kv.create_revision));
        Self { key: kv.key.clone(), holder, lease: kv.lease }
    }
}

/// Converts a revision, which is never below one, into a token.
pub(crate) fn token(revision: i64) -> FencingToken {
    FencingToken::new(u64::try_from(revision).unwrap_or_default())
}

fn all(prefix: &str) -> RangeRequest {
    RangeRequest { key: prefix.as_bytes().to_vec(), range_end: end_of(prefix), ..RangeRequest::default() }
}

/// Returns a request for the oldest key with this prefix.
pub(crate) fn first(prefix: &str) -> RangeRequest {
    RangeRequest { limit: 1, sort_order: ASCENDING, sort_target: BY_CREATION, ..all(prefix) }
}

/// Returns a request for the keys with this prefix that follow `after`, ordered by name, a page at a time.
pub(crate) fn page(prefix: &str, after: Option<&KeyValue>) -> RangeRequest {
    let all = all(prefix);
    // The smallest key after another one is that key with a zero byte appended.
    let key = after.map(|last| [&*last.key, &[0]].concat()).unwrap_or_else(|| all.key.clone());
    RangeRequest { key, limit: PAGE, ..all }
}

/// Returns a request for the youngest key older than this revision; for zero, the youngest of all.
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

/// Returns a transaction that appends this entry to the queue, unless it exists already.
///
/// Its reads precede the write: they return the first entry, and the last one, which becomes the predecessor.
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

/// Returns a transaction that creates this entry if the queue is empty.
pub(crate) fn take(prefix: &str, key: &str, contender: &ContenderId, lease: i64) -> TxnRequest {
    TxnRequest {
        compare: vec![Compare::created_in(0, prefix.as_bytes().to_vec()).up_to(end_of(prefix))],
        success: vec![put(key, contender, lease)],
        failure: vec![Op::Range(first(prefix)).into()],
    }
}

/// Returns a transaction that reads the position of this entry.
pub(crate) fn read_position(prefix: &str, key: &str, revision: i64) -> TxnRequest {
    TxnRequest {
        compare: Vec::new(),
        success: vec![one(key), Op::Range(first(prefix)).into(), Op::Range(last(prefix, revision)).into()],
        failure: Vec::new(),
    }
}

/// The entry right ahead of another one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ahead {
    pub(crate) key: Vec<u8>,
    pub(crate) first: Head,
    /// The revision of this state.
    pub(crate) at: i64,
}

/// Reads the answer to [`read_position`]. A first entry has this proof.
///
/// # Errors
///
/// The answer contradicts itself.
pub(crate) fn position(mut answer: TxnResponse, revision: i64, proof: Proof) -> Result<Position<Ahead>> {
    let at = revision_of(answer.header.as_ref())?;
    let mut ranges = answer.ranges();
    let (Some(own), Some(first), Some(ahead)) = (ranges.next(), ranges.next(), ranges.next()) else {
        return Err(unexpected_answer());
    };
    let Some(own) = own.first().filter(|own| own.create_revision == revision) else {
        return Ok(Position::Missing);
    };
    match (&*first, &*ahead) {
        // Only an answer that names the own key as the first grants the mutex.
        ([first], []) if first.key == own.key && first.create_revision == revision => {
            Ok(Position::First(proof))
        }
        ([first], [ahead]) if first.create_revision < revision => Ok(behind(first, ahead, at)),
        _ => Err(unexpected_answer()),
    }
}

/// Reads the answer to a [`join`] that created the entry. A first entry has this proof.
pub(crate) fn new_position(mut answer: TxnResponse, proof: Proof) -> Result<Position<Ahead>> {
    let at = revision_of(answer.header.as_ref())?;
    let mut ranges = answer.ranges();
    match (ranges.next().as_deref(), ranges.next().as_deref()) {
        (Some([]), Some([])) => Ok(Position::First(proof)),
        (Some([first, ..]), Some([ahead, ..])) => Ok(behind(first, ahead, at)),
        _ => Err(unexpected_answer()),
    }
}

fn behind(first: &KeyValue, ahead: &KeyValue, at: i64) -> Position<Ahead> {
    Position::Behind(Ahead { key: ahead.key.clone(), first: Head::of(first), at })
}

/// Returns the store's revision at the time of the answer.
///
/// # Errors
///
/// There is none, or zero, which stands for a key that does not exist.
pub(crate) fn revision_of(header: Option<&Header>) -> Result<i64> {
    header.map(|header| header.revision).filter(|revision| *revision > 0).ok_or_else(unexpected_answer)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{RangeResponse, ResponseOp};

    fn kv(key: &str, revision: i64, value: &str) -> KeyValue {
        let (key, value) = (key.as_bytes().to_vec(), value.as_bytes().to_vec());
        KeyValue { key, create_revision: revision, value, lease: 5 }
    }

    #[test]
    fn an_owner_without_a_value_is_identified_by_the_end_of_its_key() {
        let head = Head::of(&kv("simba/orders/694d8a", 7, ""));
        assert_eq!((head.holder.owner.as_str(), head.holder.token.get()), ("694d8a", 7));
        let head = Head::of(&kv("simba/orders/694d8a-x", 7, "me"));
        assert_eq!(head.holder.owner.as_str(), "me");
    }

    #[test]
    fn keys_of_other_programs_may_have_any_bytes() {
        let owner = |key: &[u8], value: &[u8]| {
            let (key, value) = (key.to_vec(), value.to_vec());
            let head = Head::of(&KeyValue { key: key.clone(), create_revision: 7, value, lease: 0 });
            assert_eq!(head.key, key, "the key itself is unchanged");
            head.holder.owner.as_str().to_owned()
        };
        assert_eq!(owner(b"simba/orders/\xff", b"me"), "me");
        assert_eq!(owner(b"simba/orders/694d8a", b"\xff"), "694d8a");
        assert_eq!(owner(b"simba/orders/\xff", b""), "simba/orders/\\xff");
        assert_eq!(owner(b"simba/orders/", b""), "simba/orders/");
        let long = [b"simba/orders/", &[0xff; 128][..]].concat();
        assert!(owner(&long, b"").starts_with("simba/orders/\\xff\\xff"));
    }

    /// Returns an answer to [`read_position`]: own key, first of the queue, last before the own key.
    fn position_answer(own: &[KeyValue], first: &[KeyValue], ahead: &[KeyValue]) -> TxnResponse {
        let range = |kvs: &[KeyValue]| ResponseOp {
            range: Some(RangeResponse { kvs: kvs.to_vec(), ..RangeResponse::default() }),
        };
        let header = Some(Header { member_id: 1, revision: 20, raft_term: 1 });
        TxnResponse { header, succeeded: true, responses: vec![range(own), range(first), range(ahead)] }
    }

    #[test]
    fn only_an_answer_that_names_the_own_key_as_first_grants_the_mutex() {
        let (own, other, late) =
            (kv("simba/a/1", 9, "me"), kv("simba/a/0", 5, "other"), kv("simba/a/2", 12, ""));
        let proof = Proof { token: token(9), until: simba_core::Moment::ZERO };
        let position =
            |own: &[_], first: &[_], ahead: &[_]| position(position_answer(own, first, ahead), 9, proof);
        let is = |own: &KeyValue| std::slice::from_ref(own).to_vec();
        assert_eq!(position(&is(&own), &is(&own), &[]).unwrap(), Position::First(proof));
        assert!(matches!(position(&is(&own), &is(&other), &is(&other)).unwrap(), Position::Behind(_)));
        assert_eq!(position(&[], &is(&other), &is(&other)).unwrap(), Position::Missing);
        let contradictions: [[&[KeyValue]; 2]; 5] =
            [[&[], &[]], [&is(&other), &[]], [&[], &is(&other)], [&is(&late), &[]], [&is(&own), &is(&other)]];
        for [first, ahead] in contradictions {
            assert!(position(&is(&own), first, ahead).is_err(), "{first:?} {ahead:?}");
        }
    }

    #[test]
    fn pages_follow_each_other_without_a_gap() {
        let next = page("simba/a/", Some(&kv("simba/a/1", 7, "")));
        assert_eq!((next.key, next.range_end), (b"simba/a/1\0".to_vec(), b"simba/a0".to_vec()));
        assert_eq!(page("simba/a/", None).key, b"simba/a/");
    }

    #[test]
    fn an_answer_without_a_revision_is_an_error() {
        let at = |revision| Header { member_id: 1, revision, raft_term: 1 };
        assert_eq!(revision_of(Some(&at(7))).unwrap(), 7);
        assert!(revision_of(Some(&at(0))).is_err() && revision_of(None).is_err());
    }

    #[test]
    fn the_request_for_the_last_key_excludes_its_revision() {
        assert_eq!(last("simba/a/", 8).max_create_revision, 7);
        assert_eq!(last("simba/a/", 0).max_create_revision, 0, "no limit");
    }
}
