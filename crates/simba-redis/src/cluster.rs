//! Which node of a cluster has a mutex, and one connection to each that is needed.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Error, MutexName, Result};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::config::Address;
use crate::error;
use crate::node::{Context, Node, Source};
use crate::pipe::Pipe;
use crate::resp::Reply;
use crate::scripts::{Invocation, Script, Usual};
use crate::wire::Wire;

const SLOTS: u16 = 16384;
/// How often a call follows a redirect before it gives up.
const REDIRECTS: usize = 5;
/// The least distance between two looks at the map.
const LOOK: Duration = Duration::from_millis(100);

pub(crate) struct Cluster {
    table: Arc<Table>,
    task: AbortHandle,
}

struct Table {
    context: Arc<Context>,
    seeds: Vec<Address>,
    map: Mutex<Map>,
    /// Rung when the map proves wrong.
    wrong: Notify,
}

#[derive(Default)]
struct Map {
    ranges: Vec<Range>,
    /// What redirects told since the last look.
    moved: HashMap<u16, Address>,
    nodes: HashMap<Address, Arc<Node>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    first: u16,
    last: u16,
    master: Address,
    replicas: Vec<Address>,
}

impl Cluster {
    pub(crate) async fn connect(seeds: Vec<Address>, context: Arc<Context>) -> Result<Self> {
        let table = Arc::new(Table { context, seeds, map: Mutex::default(), wrong: Notify::new() });
        table.look().await?;
        let task = tokio::spawn(keep(Arc::clone(&table))).abort_handle();
        let cluster = Self { table, task };
        // The first word with a node tells whether we may use it, and what it calls the scripts.
        let first = cluster.table.map().ranges.first().map(|range| range.master.clone());
        if let Some(address) = first {
            let wire = cluster.table.context.ready(&address).await?;
            drop(wire);
        }
        Ok(cluster)
    }

    /// Runs a script on the node that has the mutex, following it if it moves.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>) -> Result<(Reply, Pipe)> {
        // The keys of one command must be of one slot.
        let whole = Invocation { usual: None, ..*call };
        if let Some(Usual::Renew(..)) = call.usual {
            let renewed = self.run(&Invocation { script: Script::Renew, ..whole }).await?;
            if renewed.0 != Reply::Int(0) {
                return Ok(renewed);
            }
        }
        self.run(&whole).await
    }

    async fn run(&self, call: &Invocation<'_>) -> Result<(Reply, Pipe)> {
        let table = &self.table;
        let slot = slot(call.mutex);
        let mut node = table.node_of(slot)?;
        // A node that is gone does not answer, and who asked it does not wait for ever.
        let suspicion = Suspicion(&table.wrong);
        for _ in 0..REDIRECTS {
            let (reply, pipe) = node.invoke(call).await?;
            match &reply {
                Reply::Error(words) => match redirect(words, |host, port| {
                    endpoint(host, port, node.address()).or_else(|| table.only_node_at(port))
                }) {
                    Some(Redirect::Moved(slot, address)) => {
                        table.map().moved.insert(slot, address.clone());
                        node = table.node(address);
                    }
                    Some(Redirect::Ask(address)) => return table.ask(address, call).await,
                    None if is_redirect(words) => return Err(error::unknown_endpoint(words)),
                    None => return Ok((reply, pipe)),
                },
                _ => {
                    suspicion.allay();
                    return Ok((reply, pipe));
                }
            }
        }
        Err(error::refused("TRYAGAIN too many redirects"))
    }

    /// Sends a call whose reply nobody waits for, to where the mutex was last.
    pub(crate) fn send(&self, call: &Invocation<'_>) {
        let Ok(node) = self.table.node_of(slot(call.mutex)) else { return };
        if let Some(pipe) = node.pipe_now() {
            let _ = pipe.send(|out| call.write(out, &self.table.context.scripts));
        }
    }

    /// Every master that has slots.
    pub(crate) fn masters(&self) -> Vec<Arc<Node>> {
        let addresses: Vec<_> = self.table.map().ranges.iter().map(|range| range.master.clone()).collect();
        let mut masters: Vec<Arc<Node>> = Vec::new();
        for address in addresses {
            let node = self.table.node(address);
            if !masters.iter().any(|known| Arc::ptr_eq(known, &node)) {
                masters.push(node);
            }
        }
        masters
    }

    pub(crate) fn close(&self) {
        self.task.abort();
        self.table.map().nodes.values().for_each(|node| node.close());
    }

    /// Connects to any node that knows the map, for subscriptions: what is published anywhere arrives everywhere.
    /// A node that was reset knows no other.
    pub(crate) async fn any(&self) -> Result<Wire> {
        self.table.any().await.map(|(wire, _)| wire)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.close();
    }
}

/// Has the map looked at again, unless it is allayed by an answer: also when a call is dropped unanswered.
struct Suspicion<'a>(&'a Notify);

impl Suspicion<'_> {
    fn allay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Suspicion<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Looks at the map again whenever it proves wrong.
async fn keep(table: Arc<Table>) {
    loop {
        table.wrong.notified().await;
        if let Err(cause) = table.look().await {
            tracing::debug!(%cause, "no node tells the map of the cluster");
        }
        table.context.clock.sleep_until(table.context.clock.now() + LOOK).await;
    }
}

impl Table {
    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn node_of(&self, slot: u16) -> Result<Arc<Node>> {
        let address = {
            let map = self.map();
            let covers = |range: &&Range| (range.first..=range.last).contains(&slot);
            let known = map.moved.get(&slot);
            known.or_else(|| map.ranges.iter().find(covers).map(|range| &range.master)).cloned()
        };
        match address {
            Some(address) => Ok(self.node(address)),
            None => {
                self.wrong.notify_one();
                Err(error::refused("CLUSTERDOWN no node has the slot"))
            }
        }
    }

    fn node(&self, address: Address) -> Arc<Node> {
        let mut map = self.map();
        let node = map.nodes.entry(address).or_insert_with_key(|address| {
            Node::start(Source::Member(address.clone()), Arc::clone(&self.context), None)
        });
        Arc::clone(node)
    }

    /// Returns the node of the map at this port, if there is only one.
    fn only_node_at(&self, port: u16) -> Option<Address> {
        let is_there =
            |address: &Address| matches!(address, Address::Tcp { port: there, .. } if *there == port);
        let map = self.map();
        let nodes = map.ranges.iter().flat_map(|range| std::iter::once(&range.master).chain(&range.replicas));
        let mut there = nodes.filter(|address| is_there(address));
        let first = there.next()?;
        there.all(|address| address == first).then(|| first.clone())
    }

    /// A node that has taken a slot over in part answers only who asks for it.
    async fn ask(&self, address: Address, call: &Invocation<'_>) -> Result<(Reply, Pipe)> {
        const ASKING: &[u8] = b"*1\r\n$6\r\nASKING\r\n";
        let pipe = self.node(address).pipe().await?;
        let reply = pipe.call_after(ASKING, |out| call.write_source(out, &self.context.scripts)).await?;
        Ok((reply, pipe))
    }

    /// Asks the nodes for the map, until one tells.
    async fn look(&self) -> Result<()> {
        let (_, ranges) = self.any().await?;
        let mut map = self.map();
        map.moved.clear();
        let masters: Vec<_> = ranges.iter().map(|range| range.master.clone()).collect();
        // Who is no master any more needs no connection; calls under way end with it.
        let gone: Vec<_> = map.nodes.keys().filter(|address| !masters.contains(address)).cloned().collect();
        let gone: Vec<_> = gone.iter().filter_map(|address| map.nodes.remove(address)).collect();
        map.ranges = ranges;
        drop(map);
        drop(gone);
        Ok(())
    }

    /// Connects to any node that knows where slots are, and returns its map, which has at least one range.
    async fn any(&self) -> Result<(Wire, Vec<Range>)> {
        let mut last: Option<Error> = None;
        for address in self.known() {
            match self.greet(&address).await {
                Ok(known) => return Ok(known),
                // A node that is down says less than one that refuses us.
                Err(cause) if last.as_ref().is_none_or(Error::is_transient) => last = Some(cause),
                Err(_) => {}
            }
        }
        Err(last.unwrap_or_else(error::gone))
    }

    async fn greet(&self, address: &Address) -> Result<(Wire, Vec<Range>)> {
        let (settings, clock) = (&self.context.settings, &*self.context.clock);
        let slots: &[&[&str]] = &[&["CLUSTER", "SLOTS"]];
        let (wire, replies) = Wire::open_with(address, settings, &settings.login, clock, slots).await?;
        let ranges = replies.first().and_then(|reply| ranges(reply, address));
        match ranges.ok_or_else(|| error::unexpected("the map of the cluster"))? {
            // What a node answers that was reset, or that has not met the others yet.
            ranges if ranges.is_empty() => Err(error::refused("CLUSTERDOWN the node knows no slots")),
            ranges => Ok((wire, ranges)),
        }
    }

    /// Every address that was ever heard of and is not out of date, in random order.
    fn known(&self) -> Vec<Address> {
        let mut known = self.seeds.clone();
        for range in &self.map().ranges {
            for address in std::iter::once(&range.master).chain(&range.replicas) {
                if !known.contains(address) {
                    known.push(address.clone());
                }
            }
        }
        fastrand::shuffle(&mut known);
        known
    }
}

#[derive(Debug, PartialEq, Eq)]
enum Redirect {
    Moved(u16, Address),
    Ask(Address),
}

fn is_redirect(words: &str) -> bool {
    words.starts_with("MOVED ") || words.starts_with("ASK ")
}

/// Returns where a node redirects to; `None` if it does not, or cannot tell the address.
fn redirect(words: &str, resolve: impl Fn(&str, u16) -> Option<Address>) -> Option<Redirect> {
    let mut parts = words.split(' ');
    let (code, slot, address) = (parts.next()?, parts.next()?.parse().ok()?, parts.next()?);
    let (host, port) = address.rsplit_once(':')?;
    let address = resolve(host, port.parse().ok()?)?;
    match code {
        "MOVED" => Some(Redirect::Moved(slot, address)),
        "ASK" => Some(Redirect::Ask(address)),
        _ => None,
    }
}

fn ranges(reply: &Reply, asked: &Address) -> Option<Vec<Range>> {
    reply.array()?.iter().map(|range| range_of(range, asked)).collect()
}

fn range_of(reply: &Reply, asked: &Address) -> Option<Range> {
    let [first, last, master, replicas @ ..] = reply.array()? else { return None };
    let slot = |reply: &Reply| u16::try_from(reply.int()?).ok();
    Some(Range {
        first: slot(first)?,
        last: slot(last)?,
        master: address_of(master, asked)?,
        replicas: replicas.iter().filter_map(|replica| address_of(replica, asked)).collect(),
    })
}

fn address_of(reply: &Reply, asked: &Address) -> Option<Address> {
    let [host, port, rest @ ..] = reply.array()? else { return None };
    let port = u16::try_from(port.int()?).ok()?;
    // Redis 7 adds the address where it names a node by something else.
    let ip = || {
        let [_, details, ..] = rest else { return None };
        let details = details.array()?;
        details.chunks(2).find_map(|pair| (pair.first()?.text()? == "ip").then(|| pair.get(1)?.text())?)
    };
    endpoint(host.text().unwrap_or_default(), port, Some(asked))
        .or_else(|| ip().map(|host| Address::tcp(host, port)))
}

/// Returns the address that a node names. Without a host it is the host that was asked. `?` stands for a host name that
/// the node does not know.
fn endpoint(host: &str, port: u16, asked: Option<&Address>) -> Option<Address> {
    match (host, asked) {
        ("?", _) => None,
        ("", Some(Address::Tcp { host, .. })) => Some(Address::tcp(host.clone(), port)),
        ("", _) => None,
        (host, _) => Some(Address::tcp(host, port)),
    }
}

/// The slot of a mutex: what lies between the first brace of its key and the next closing one is hashed.
fn slot(mutex: &MutexName) -> u16 {
    let name = mutex.as_str();
    let tag = name.split('}').next().unwrap_or(name);
    crc16(tag.as_bytes()) % SLOTS
}

fn crc16(bytes: &[u8]) -> u16 {
    bytes.iter().fold(0, |crc, byte| {
        (0..8).fold(crc ^ (u16::from(*byte) << 8), |crc, _| match crc & 0x8000 {
            0 => crc << 1,
            _ => (crc << 1) ^ 0x1021,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slot_is_the_one_that_the_cluster_computes() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        // As CLUSTER KEYSLOT says.
        assert_eq!(slot(&MutexName::new("foo").unwrap()), 12182);
        assert_eq!(slot(&MutexName::legacy("foo}x").unwrap()), 12182);
    }

    #[test]
    fn a_node_without_a_host_has_the_host_that_was_asked_or_its_ip() {
        let asked = Address::tcp("10.0.0.1", 7000);
        let text = |text: &str| Reply::Bulk(text.into());
        let node = |host: Reply, details: Vec<Reply>| {
            let node = vec![host, Reply::Int(7001), text("id"), Reply::Array(details)];
            address_of(&Reply::Array(node), &asked)
        };
        assert_eq!(node(Reply::Nil, vec![]), Some(Address::tcp("10.0.0.1", 7001)));
        assert_eq!(node(text("?"), vec![text("ip"), text("10.0.0.7")]), Some(Address::tcp("10.0.0.7", 7001)));
        assert_eq!(node(text("?"), vec![]), None);
        assert_eq!(node(text("b"), vec![text("ip"), text("10.0.0.7")]), Some(Address::tcp("b", 7001)));
    }

    #[test]
    fn redirects_are_told_from_other_errors() {
        let (there, asked) = (Address::tcp("10.0.0.7", 7001), Address::tcp("10.0.0.1", 7000));
        let redirect = |words| redirect(words, |host, port| endpoint(host, port, Some(&asked)));
        assert_eq!(redirect("MOVED 3999 10.0.0.7:7001"), Some(Redirect::Moved(3999, there.clone())));
        assert_eq!(redirect("ASK 3999 10.0.0.7:7001"), Some(Redirect::Ask(there)));
        let same_host = Address::tcp("10.0.0.1", 7001);
        assert_eq!(redirect("MOVED 1 :7001"), Some(Redirect::Moved(1, same_host)));
        assert_eq!(redirect("MOVED 1 ?:7001"), None);
        assert!(is_redirect("MOVED 1 ?:7001"));
        for words in ["", "MOVED", "MOVED x y", "CLUSTERDOWN Hash slot not served", "ASK 1 nowhere"] {
            assert_eq!(redirect(words), None, "{words}");
        }
    }
}
