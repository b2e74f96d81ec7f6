//! Calls for operators: list, read and evict holders.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::{MutexName, Result};
use simba_net::queue::{Holder, MAX_ATTEMPTS, unstable_queue};

use crate::backend::EtcdBackend;
use crate::client::{Compare, DeleteRangeRequest, KeyValue, Op, TxnRequest};
use crate::error::failed;
use crate::layout;
use crate::queue::{self, Head};

/// The state of one queue: its first entry and the number of its keys.
struct QueueState {
    head: Option<Head>,
    keys: usize,
}

impl EtcdBackend {
    /// Returns the keys with this prefix in the order in which they were created.
    ///
    /// Reads them in pages, so that no answer is large. Keys that are created or deleted meanwhile may be missing or
    /// included.
    async fn keys_under(&self, prefix: &str) -> Result<Vec<KeyValue>> {
        let mut keys = Vec::new();
        loop {
            let listed = self.client().range(queue::page(prefix, keys.last())).await;
            let page = listed.map_err(|failure| failed("list the keys", failure))?;
            let is_last = !page.more || page.kvs.is_empty();
            keys.extend(page.kvs);
            if is_last {
                keys.sort_by_key(|key: &KeyValue| key.create_revision);
                return Ok(keys);
            }
        }
    }

    async fn read_queue(&self, mutex: &MutexName) -> Result<QueueState> {
        let kvs = self.keys_under(&self.config().keys().mutex(mutex)).await?;
        Ok(QueueState { head: kvs.first().map(Head::of), keys: kvs.len() })
    }

    /// Returns the remaining time of the holder's lease; `None` without a holder, and for a key without a lease.
    async fn remaining(&self, head: Option<&Head>) -> Result<Option<Duration>> {
        let Some(head) = head.filter(|head| head.lease != 0) else { return Ok(None) };
        let remaining = self.client().time_to_live(head.lease).await;
        remaining.map(Some).map_err(|failure| failed("read the remaining time of a lease", failure))
    }
}

fn record(mutex: MutexName, queue: QueueState, remaining: Option<Duration>) -> MutexRecord {
    let mut record = simba_net::queue::record(mutex, queue.head.map(|head| head.holder), queue.keys);
    record.remaining = remaining;
    record
}

#[async_trait]
impl Operate for EtcdBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let keys = self.config().keys();
        let mut mutexes: BTreeMap<MutexName, QueueState> = BTreeMap::new();
        for kv in self.keys_under(&keys.root()).await? {
            // A key without a valid name was not created by Simba.
            let Some(mutex) = keys.mutex_of(&kv.key) else { continue };
            match mutexes.get_mut(&mutex) {
                Some(queue) => queue.keys += 1,
                None => drop(mutexes.insert(mutex, QueueState { head: Some(Head::of(&kv)), keys: 1 })),
            }
        }
        // Many mutexes share a lease, so each is read once.
        let mut leases = HashMap::new();
        let mut records = Vec::new();
        for (mutex, queue) in mutexes {
            let lease = queue.head.as_ref().map(|head| head.lease);
            let remaining = match leases.get(&lease) {
                Some(known) => *known,
                None => *leases.entry(lease).or_insert(self.remaining(queue.head.as_ref()).await?),
            };
            records.push(record(mutex, queue, remaining));
        }
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        layout::check(mutex)?;
        let queue = self.read_queue(mutex).await?;
        let remaining = self.remaining(queue.head.as_ref()).await?;
        Ok(record(mutex.clone(), queue, remaining))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        layout::check(mutex)?;
        for _ in 0..MAX_ATTEMPTS {
            let Some(head) = self.read_queue(mutex).await?.head else { return Ok(Eviction::Vacant) };
            if !condition.holds_for(&head.holder.owner, Some(head.holder.token)) {
                return Ok(Eviction::Other(head.holder.owner));
            }
            let window = self.remaining(Some(&head)).await?.unwrap_or_default();
            // Deletes the holder that was read, and no later one.
            let (key, Holder { owner, token }) = (head.key, head.holder);
            let revision = i64::try_from(token.get()).unwrap_or_default();
            let txn = TxnRequest {
                compare: vec![Compare::created_in(revision, key.clone())],
                success: vec![Op::Delete(DeleteRangeRequest { key }).into()],
                failure: Vec::new(),
            };
            let deleted = self.client().txn(txn).await;
            if deleted.map_err(|failure| failed("delete the holder's key", failure))?.succeeded {
                return Ok(Eviction::Freed { owner, window });
            }
        }
        Err(unstable_queue())
    }

    async fn probe(&self) -> Result<Probe> {
        self.probe_servers().await
    }
}
