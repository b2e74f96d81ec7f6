//! What operators ask.

use std::time::Duration;

use async_trait::async_trait;
use futures_util::StreamExt as _;
use futures_util::stream;
use simba_core::operate::{EvictIf, Eviction, Finding, MutexRecord, Operate, Probe};
use simba_core::{Lease, MutexName, Result};
use simba_net::Place;

use crate::backend::ZookeeperBackend;
use crate::client::{Client, Reply, Request, four_letters, lease};
use crate::error::{failed, restless};
use crate::latch;
use crate::paths;
use crate::queue::{self, Head};

/// How many mutexes are read at a time.
const AT_ONCE: usize = 64;
/// How often a queue that changes under the look is looked at again.
const LOOKS: usize = 8;
/// How long a server may take to answer a command of four letters.
const FOUR_LETTERS: Duration = Duration::from_secs(1);

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

    /// Returns what the servers' settings mean for the usual lease.
    async fn findings(&self) -> Result<Vec<Finding>> {
        let wanted = Lease::default().total();
        let client = self.client(wanted)?;
        client.ready().await?;
        let granted = client.timeout();
        let mut findings = Vec::new();
        if granted != wanted {
            findings.push(Finding::new(
                format!("a session of {wanted:?}, as the usual lease asks for, is granted for {granted:?}"),
                "set minSessionTimeout and maxSessionTimeout of the servers, or take a lease within them",
            ));
        }
        let mut bounds: Vec<Bounds> = Vec::new();
        for place in &self.config().places {
            // Servers answer `conf` only if their settings allow it.
            bounds.extend(self.said("conf", place).await.and_then(|conf| Bounds::of(place, &conf)));
        }
        findings.extend(judge(&bounds, granted));
        Ok(findings)
    }

    /// Returns what a server answers to a command of four letters. A port with TLS answers none.
    async fn said(&self, word: &str, place: &Place) -> Option<String> {
        if self.config().tls.is_some() {
            return None;
        }
        four_letters(word, place, FOUR_LETTERS, self.clock()).await
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
        // Servers do not show how long the holder's session is: it is at most as long as they grant.
        let window = lease(self.longest_session().await?);
        for _ in 0..LOOKS {
            let Some(head) = see(&client, &path).await?.head else { return Ok(Eviction::Vacant) };
            if !condition.holds_for(&head.owner, Some(head.token)) {
                return Ok(Eviction::Other(head.owner));
            }
            // A node's name is never used again: this frees the holder that was seen and no other.
            match client.call(Request::Delete { path: format!("{path}/{}", head.name) }).await {
                Ok(_) => return Ok(Eviction::Freed { owner: head.owner, window }),
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
        let path = self.config().chroot_or_root().to_owned();
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
    /// Returns the name and version of the first server, or the name alone if it does not tell.
    async fn version(&self) -> String {
        let said = match self.config().places.first() {
            Some(place) => self.said("srvr", place).await,
            None => None,
        };
        let version = said.as_deref().and_then(|said| said.lines().next()?.split_once("version: "));
        let version = version.and_then(|(_, version)| version.split([',', '-', ' ']).next());
        version.map_or_else(|| "ZooKeeper".to_owned(), |version| format!("ZooKeeper {version}"))
    }
}

/// The settings of one server that sessions depend on.
#[derive(Clone, Debug)]
struct Bounds {
    server: String,
    tick: Duration,
    shortest: Duration,
    longest: Duration,
}

impl Bounds {
    /// Reads them out of the answer to `conf`.
    fn of(place: &Place, conf: &str) -> Option<Self> {
        let millis = |name: &str| {
            let value = conf.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='));
            value?.trim().parse().ok().map(Duration::from_millis)
        };
        Some(Self {
            server: place.to_string(),
            tick: millis("tickTime")?,
            shortest: millis("minSessionTimeout")?,
            longest: millis("maxSessionTimeout")?,
        })
    }
}

/// Judges the settings of the servers that told them, for sessions of this length.
fn judge(bounds: &[Bounds], session: Duration) -> Vec<Finding> {
    let mut findings = Vec::new();
    let Some((one, others)) = bounds.split_first() else { return findings };
    if let Some(other) =
        others.iter().find(|other| (other.shortest, other.longest) != (one.shortest, one.longest))
    {
        findings.push(Finding::new(
            format!(
                "{} grants sessions of {:?} to {:?}, {} of {:?} to {:?}: a reconnect can shorten a lease",
                one.server, one.shortest, one.longest, other.server, other.shortest, other.longest
            ),
            "set the same minSessionTimeout and maxSessionTimeout on all servers",
        ));
    }
    if let Some(lax) = bounds.iter().find(|server| server.shortest < server.tick * 2) {
        findings.push(Finding::new(
            format!(
                "{} grants sessions of {:?}, shorter than two ticks of {:?}: the leader may hear of them too late",
                lax.server, lax.shortest, lax.tick
            ),
            "set minSessionTimeout to two ticks or more",
        ));
    }
    if let Some(slow) = bounds.iter().find(|server| session < server.tick * 4) {
        findings.push(Finding::new(
            format!(
                "a session of {session:?} is shorter than four ticks of {:?} on {}: the leader may hear of it too late",
                slow.tick, slow.server
            ),
            "take a longer lease, or set a shorter tickTime",
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bounds(port: u16, tick: u64, shortest: u64, longest: u64) -> Bounds {
        let conf = format!(
            "clientPort=1\ntickTime={tick}\nminSessionTimeout={shortest}\nmaxSessionTimeout={longest}\n"
        );
        Bounds::of(&Place { host: "h".into(), port }, &conf).unwrap()
    }

    #[test]
    fn servers_with_other_bounds_or_slow_ticks_are_reported() {
        let found = |all: &[Bounds]| {
            let findings = judge(all, Duration::from_secs(16));
            findings.into_iter().map(|finding| finding.problem).collect::<Vec<_>>()
        };
        assert!(found(&[]).is_empty());
        assert!(found(&[bounds(1, 2_000, 4_000, 40_000), bounds(2, 2_000, 4_000, 40_000)]).is_empty());
        let differ = [bounds(1, 2_000, 4_000, 40_000), bounds(2, 2_000, 4_000, 8_000)];
        let [problem] = &found(&differ)[..] else { panic!() };
        assert!(problem.contains("h:1 grants sessions of 4s to 40s, h:2 of 4s to 8s"), "{problem}");
        let [problem] = &found(&[bounds(1, 2_000, 400, 40_000)])[..] else { panic!() };
        assert!(problem.contains("h:1 grants sessions of 400ms, shorter than two ticks of 2s"), "{problem}");
        let [problem] = &found(&[bounds(1, 5_000, 10_000, 40_000)])[..] else { panic!() };
        assert!(problem.contains("four ticks of 5s on h:1"), "{problem}");
        assert!(Bounds::of(&Place { host: "h".into(), port: 1 }, "conf is not executed").is_none());
    }
}
