//! Calls of operators: list, read, evict.

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream;
use simba_core::operate::{EvictIf, Eviction, MutexRecord, Operate, Probe};
use simba_core::{ErrorKind, MutexName, Result};
use simba_net::queue::{Holder, MAX_ATTEMPTS, record, unstable_queue};

use crate::backend::ZookeeperBackend;
use crate::client::{Client, Request, lease};
use crate::error::found;
use crate::layout;
use crate::queue;

/// The number of mutexes that are read concurrently.
const CONCURRENT_READS: usize = 64;

impl ZookeeperBackend {
    async fn record_of(&self, client: &Client, mutex: MutexName) -> Result<MutexRecord> {
        layout::check(&mutex)?;
        let path = self.config().paths().mutex(&mutex);
        let (head, nodes) = queue::first(client, &path, None).await?;
        Ok(record(mutex, head.map(|head| head.holder), nodes))
    }

    /// Returns the record of a mutex for the list. Returns `None` if nobody holds it, or if this user may not read it,
    /// which must not fail the whole list.
    async fn listed(&self, client: &Client, mutex: MutexName) -> Result<Option<MutexRecord>> {
        match self.record_of(client, mutex.clone()).await {
            // The server has not deleted an empty node yet.
            Ok(record) => Ok(Some(record).filter(|record| record.owner.is_some())),
            Err(error) if error.kind() == ErrorKind::Denied => {
                tracing::warn!(%mutex, %error, "zookeeper: a mutex is omitted from the list");
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }
}

#[async_trait]
impl Operate for ZookeeperBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let client = &*self.any_client()?;
        let names = queue::names(client, &self.config().paths().root()).await?.unwrap_or_default();
        // A node whose name is invalid for a mutex belongs to another program.
        let mut reads = Vec::new();
        for mutex in names.iter().filter_map(|name| MutexName::legacy(name).ok()) {
            reads.push(self.listed(client, mutex));
        }
        let records: Vec<_> = stream::iter(reads).buffer_unordered(CONCURRENT_READS).collect().await;
        let mut records: Vec<MutexRecord> =
            records.into_iter().filter_map(Result::transpose).collect::<Result<_>>()?;
        records.sort_by(|one, other| one.mutex.cmp(&other.mutex));
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        self.record_of(&*self.any_client()?, mutex.clone()).await
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        layout::check(mutex)?;
        let (client, path) = (self.any_client()?, self.config().paths().mutex(mutex));
        // Servers do not report the timeout of the holder's session. It is at most the longest that they grant.
        let window = lease(self.longest_session().await?);
        for _ in 0..MAX_ATTEMPTS {
            let (Some(head), _) = queue::first(&client, &path, None).await? else {
                return Ok(Eviction::Vacant);
            };
            let Holder { owner, token } = head.holder;
            if !condition.holds_for(&owner, Some(token)) {
                return Ok(Eviction::Other(owner));
            }
            // The name of a node is never reused, so this evicts only the holder that was read.
            let deleted = client.call(Request::Delete { path: format!("{path}/{}", head.name) }).await;
            if found("delete the holder's node", deleted)?.is_some() {
                return Ok(Eviction::Freed { owner, window });
            }
        }
        Err(unstable_queue())
    }

    async fn probe(&self) -> Result<Probe> {
        self.probe_servers().await
    }
}
