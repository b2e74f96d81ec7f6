//! What operators ask.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use async_trait::async_trait;
use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord, Operate, Probe};
use simba_core::{Lease, MutexName, Result};

use crate::backend::EtcdBackend;
use crate::client::{Compare, DeleteRangeRequest, KeyValue, Op, TxnRequest};
use crate::error::{failed, restless};
use crate::keys;
use crate::queue::{self, Head};

/// How often a holder that changes under the look is looked at again.
const LOOKS: usize = 8;

/// One mutex, from its keys in the order of the queue.
struct Seen {
    head: Option<Head>,
    keys: usize,
}

impl EtcdBackend {
    /// Returns the keys with this prefix in the order in which they were created.
    ///
    /// Reads them in pages, so that no answer is large. Keys that come or go meanwhile may be left out or shown.
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

    async fn see(&self, mutex: &MutexName) -> Result<Seen> {
        let kvs = self.keys_under(&self.config().keys().mutex(mutex)).await?;
        Ok(Seen { head: kvs.first().map(Head::of).transpose()?, keys: kvs.len() })
    }

    /// How much the holder's lease has left; nothing for a key without one.
    async fn remaining(&self, head: &Head) -> Result<Option<Duration>> {
        if head.lease == 0 {
            return Ok(None);
        }
        let left = self.client().time_to_live(head.lease).await;
        left.map(Some).map_err(|failure| failed("ask for a lease", failure))
    }

    /// What is wrong with the servers, and what they make of the usual lease.
    async fn findings(&self, errors: Vec<String>) -> Result<Vec<Finding>> {
        let told = |error| {
            let cure = "see `etcdctl endpoint status` and `etcdctl alarm list`";
            Finding::new(format!("a member says: {error}"), cure)
        };
        let mut findings: Vec<_> = errors.into_iter().map(told).collect();
        if let Err(error) = self.renews(&mut findings).await {
            let cure = "name the members in the URL, not a proxy that spreads calls over them, and see what they say";
            findings.push(Finding::new(format!("no lease is granted and renewed: {error}"), cure));
        }
        Ok(findings)
    }

    /// Is granted a lease and renews it, as a holder does.
    async fn renews(&self, findings: &mut Vec<Finding>) -> Result<()> {
        let wanted = Lease::default().total();
        let tenancy = self.tenancy(wanted)?;
        let life = tenancy.life().await?;
        if life.ttl() > wanted {
            findings.push(Finding::new(
                format!("a lease of {wanted:?}, as is usual, is granted for {:?}", life.ttl()),
                "take longer leases, or set a shorter `--election-timeout`: what a lost holder leaves stays longer",
            ));
        }
        // No key of ours has this name: that it is not there is what a quorum confirms.
        let checked = tenancy.check(&life, &self.config().keys().root(), 0).await;
        checked.map(drop).map_err(|failure| failed("renew", failure))
    }
}

fn record(mutex: MutexName, seen: Seen, remaining: Option<Duration>) -> MutexRecord {
    let mut record = MutexRecord::free(mutex);
    record.waiters = Some(seen.keys.saturating_sub(1));
    if let Some(head) = seen.head {
        record.owner = Some(head.owner);
        record.token = Some(head.token);
        record.remaining = remaining;
    }
    record
}

#[async_trait]
impl Operate for EtcdBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let keys = self.config().keys();
        let mut mutexes: BTreeMap<MutexName, Seen> = BTreeMap::new();
        for kv in self.keys_under(&keys.root()).await? {
            // What is no name was not made by a contender of ours.
            let Some(mutex) = keys.mutex_of(&kv.key) else { continue };
            match mutexes.get_mut(&mutex) {
                Some(seen) => seen.keys += 1,
                // Whoever has a key without any name holds it all the same, and hides no other mutex.
                None => drop(mutexes.insert(mutex, Seen { head: Head::of(&kv).ok(), keys: 1 })),
            }
        }
        // One lease carries many mutexes.
        let mut leases = HashMap::new();
        let mut records = Vec::new();
        for (mutex, seen) in mutexes {
            let remaining = match &seen.head {
                Some(head) if leases.contains_key(&head.lease) => leases[&head.lease],
                Some(head) => *leases.entry(head.lease).or_insert(self.remaining(head).await?),
                None => None,
            };
            records.push(record(mutex, seen, remaining));
        }
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        keys::check(mutex)?;
        let seen = self.see(mutex).await?;
        let remaining = match &seen.head {
            Some(head) => self.remaining(head).await?,
            None => None,
        };
        Ok(record(mutex.clone(), seen, remaining))
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        keys::check(mutex)?;
        for _ in 0..LOOKS {
            let Some(head) = self.see(mutex).await?.head else { return Ok(Eviction::Vacant) };
            if !condition.holds_for(&head.owner, Some(head.token)) {
                return Ok(Eviction::Other(head.owner));
            }
            let window = self.remaining(&head).await?.unwrap_or_default();
            // The holder that was seen and no other.
            let key = head.key;
            let made = i64::try_from(head.token.get()).unwrap_or_default();
            let txn = TxnRequest {
                compare: vec![Compare::created_in(made, key.clone())],
                success: vec![Op::Delete(DeleteRangeRequest { key }).into()],
                failure: Vec::new(),
            };
            let deleted = self.client().txn(txn).await;
            if deleted.map_err(|failure| failed("delete the holder's key", failure))?.succeeded {
                return Ok(Eviction::Freed { owner: head.owner, window });
            }
        }
        Err(restless())
    }

    async fn probe(&self) -> Result<Probe> {
        let client = self.client();
        let before = client.now();
        client.range(client.look()).await.map_err(|failure| failed("answer a probe", failure))?;
        let mut probe = Probe::default();
        probe.round_trip = client.now() - before;
        let status = client.status().await.map_err(|failure| failed("tell its state", failure))?;
        probe.server = format!("etcd {}", status.version);
        probe.findings = self.findings(status.errors).await?;
        Ok(probe)
    }
}
