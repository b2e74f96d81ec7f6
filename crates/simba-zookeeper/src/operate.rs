//! What operators ask.

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream;
use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord, Operate, Probe};
use simba_core::{Lease, MutexName, Result};

use crate::backend::ZookeeperBackend;
use crate::client::{Client, Reply, Request, srvr};
use crate::error::{failed, restless};
use crate::latch;
use crate::paths;
use crate::queue::{self, Head};

/// How many mutexes are read at a time.
const AT_ONCE: usize = 64;
/// How often a queue that changes under the look is looked at again.
const LOOKS: usize = 8;

/// One mutex: who holds it, and how many nodes there are.
struct Seen {
    head: Option<Head>,
    nodes: usize,
}

async fn see(client: &Client, path: &str) -> Result<Seen> {
    for _ in 0..LOOKS {
        let names = queue::names(client, path).await?.unwrap_or_default();
        let Some(first) = latch::first(&names) else { return Ok(Seen { head: None, nodes: 0 }) };
        if let Some(head) = queue::head(client, path, first, None).await? {
            return Ok(Seen { head: Some(head), nodes: names.len() });
        }
    }
    Err(restless())
}

fn record(mutex: MutexName, seen: Seen) -> MutexRecord {
    let mut record = MutexRecord::free(mutex);
    record.waiters = Some(seen.nodes.saturating_sub(1));
    if let Some(head) = seen.head {
        record.owner = Some(head.owner);
        record.token = Some(head.token);
    }
    record
}

impl ZookeeperBackend {
    async fn record_of(&self, client: &Client, mutex: MutexName) -> Result<MutexRecord> {
        paths::check(&mutex)?;
        let path = self.config().paths().mutex(&mutex);
        Ok(record(mutex, see(client, &path).await?))
    }

    /// What the server makes of the usual lease.
    async fn findings(&self) -> Result<Vec<Finding>> {
        let wanted = Lease::default().total();
        let client = self.client(wanted)?;
        client.ready().await?;
        let granted = client.timeout();
        if granted == wanted {
            return Ok(Vec::new());
        }
        Ok(vec![Finding::new(
            format!("a session of {wanted:?}, as the usual lease asks for, is granted for {granted:?}"),
            "set minSessionTimeout and maxSessionTimeout of the servers, or take a lease within them",
        )])
    }
}

#[async_trait]
impl Operate for ZookeeperBackend {
    async fn list(&self) -> Result<Vec<MutexRecord>> {
        let client = &*self.any_client()?;
        let names = queue::names(client, &self.config().paths().root()).await?.unwrap_or_default();
        // What is no name was not made by a contender of ours.
        let mut reads = Vec::new();
        for mutex in names.iter().filter_map(|name| MutexName::legacy(name).ok()) {
            reads.push(self.record_of(client, mutex));
        }
        let records: Vec<_> = stream::iter(reads).buffer_unordered(AT_ONCE).collect().await;
        let mut records: Vec<MutexRecord> = records.into_iter().collect::<Result<_>>()?;
        // An empty node is what the server has not swept yet.
        records.retain(|record| record.owner.is_some());
        records.sort_by(|one, other| one.mutex.cmp(&other.mutex));
        Ok(records)
    }

    async fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        self.record_of(&*self.any_client()?, mutex.clone()).await
    }

    async fn evict(&self, mutex: &MutexName, condition: EvictIf) -> Result<Eviction> {
        paths::check(mutex)?;
        let (client, path) = (self.any_client()?, self.config().paths().mutex(mutex));
        for _ in 0..LOOKS {
            let Some(head) = see(&client, &path).await?.head else { return Ok(Eviction::Vacant) };
            if !condition.holds_for(&head.owner, Some(head.token)) {
                return Ok(Eviction::Other(head.owner));
            }
            // A node's name is never used again: this frees the holder that was seen and no other.
            match client.call(Request::Delete { path: format!("{path}/{}", head.name) }).await {
                Ok(_) => return Ok(Eviction::Freed { owner: head.owner, window: client.timeout() }),
                Err(failure) if failure.is_no_node() => {}
                Err(failure) => return Err(failed("delete the holder's node", failure)),
            }
        }
        Err(restless())
    }

    async fn probe(&self) -> Result<Probe> {
        let findings = self.findings().await?;
        let (client, clock) = (self.any_client()?, self.clock());
        let before = clock.now();
        let chroot = &*self.config().chroot;
        let path = if chroot.is_empty() { "/" } else { chroot }.to_owned();
        let answered: Result<Reply, _> = client.call(Request::Exists { path, watch: false }).await;
        answered.map_err(|failure| failed("answer a probe", failure))?;
        let mut probe = Probe::default();
        probe.round_trip = clock.now() - before;
        probe.server = self.version().await;
        probe.findings = findings;
        Ok(probe)
    }
}

impl ZookeeperBackend {
    /// As a server names itself to people; a port with TLS does not talk to them.
    async fn version(&self) -> String {
        const LIMIT: std::time::Duration = std::time::Duration::from_secs(1);
        let place = self.config().places.first().filter(|_| self.config().tls.is_none());
        let said = match place {
            Some(place) => srvr(place, LIMIT, self.clock()).await,
            None => None,
        };
        let version = said.as_deref().and_then(|said| said.lines().next()?.split_once("version: "));
        let version = version.and_then(|(_, version)| version.split([',', '-', ' ']).next());
        version.map_or_else(|| "ZooKeeper".to_owned(), |version| format!("ZooKeeper {version}"))
    }
}
