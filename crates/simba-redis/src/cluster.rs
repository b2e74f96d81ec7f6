//! Cluster: finds the node that has a mutex, and keeps one connection to each node in use.

use std::collections::{HashMap, HashSet};
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Error, MutexName, Result};
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::config::Address;
use crate::connection::Connection;
use crate::error;
use crate::pipeline::Pipeline;
use crate::resp::Reply;
use crate::scripts::{FastPath, Invocation, Script};
use crate::supervisor::{Context, Node, Source, Via};

const SLOTS: u16 = 16384;
/// Maximum number of redirects that one call follows.
const REDIRECTS: usize = 5;
/// Minimum interval between two refreshes of the map.
const REFRESH_INTERVAL: Duration = Duration::from_millis(100);

pub(crate) struct Cluster {
    table: Arc<Table>,
    task: AbortHandle,
}

struct Table {
    context: Arc<Context>,
    /// Nodes that the URL names.
    seeds: Vec<Address>,
    map: Mutex<Map>,
    /// Notified when the map may be out of date.
    stale: Notify,
}

#[derive(Default)]
struct Map {
    ranges: Vec<Range>,
    /// Slots that redirects have named since the last refresh.
    moved: HashMap<u16, Address>,
    nodes: HashMap<(Address, Via), Arc<Node>>,
    /// Whether the handle was closed. A node that is added later is closed too.
    closed: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Range {
    slots: RangeInclusive<u16>,
    master: Address,
    replicas: Vec<Address>,
}

impl Range {
    fn nodes(&self) -> impl Iterator<Item = &Address> {
        std::iter::once(&self.master).chain(&self.replicas)
    }
}

impl Cluster {
    pub(crate) async fn connect(seeds: Vec<Address>, context: Arc<Context>) -> Result<Self> {
        let table = Arc::new(Table { context, seeds, map: Mutex::default(), stale: Notify::new() });
        table.refresh().await?;
        let task = tokio::spawn(refresh_when_stale(Arc::clone(&table))).abort_handle();
        let cluster = Self { table, task };
        // Reports a missing right at connect, and stores the digests of the scripts.
        if let Some(master) = cluster.masters().first() {
            master.connected().await?;
        }
        Ok(cluster)
    }

    /// Runs a script on the node that has the mutex, and follows redirects.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>) -> Result<(Reply, Pipeline)> {
        // Never batched: the keys of one command must be in one slot.
        let single = Invocation { fast_path: None, ..*call };
        if let Some(FastPath::Renew(..)) = call.fast_path {
            let renewed = self.run(&Invocation { script: Script::Renew, ..single }).await?;
            if renewed.0 != Reply::Int(0) {
                return Ok(renewed);
            }
        }
        self.run(&single).await
    }

    async fn run(&self, call: &Invocation<'_>) -> Result<(Reply, Pipeline)> {
        let table = &self.table;
        let mut address = table.master_of(slot(call.mutex))?;
        // A dead node never answers and the caller drops the call, so the map is refreshed unless a reply comes.
        let refresh_on_drop = RefreshOnDrop(&table.stale);
        for _ in 0..REDIRECTS {
            let (reply, pipeline) = table.node(address.clone(), call.via).invoke(call).await?;
            let Reply::Error(message) = &reply else {
                refresh_on_drop.disarm();
                return Ok((reply, pipeline));
            };
            let Some(Redirect { moved, slot, host, port }) = redirect(message) else {
                return Ok((reply, pipeline));
            };
            let target = endpoint(host, port, &address).or_else(|| table.only_node_at(port));
            address = target.ok_or_else(|| error::unknown_endpoint(message))?;
            if !moved {
                return table.invoke_asking(address, call).await;
            }
            table.map().moved.insert(slot, address.clone());
        }
        Err(error::refused("TRYAGAIN too many redirects"))
    }

    /// Sends a call to the last known node of the mutex and ignores its reply.
    pub(crate) fn send(&self, call: &Invocation<'_>) {
        if let Ok(address) = self.table.master_of(slot(call.mutex)) {
            self.table.node(address, call.via).send(call);
        }
    }

    /// Returns every master that has slots.
    pub(crate) fn masters(&self) -> Vec<Arc<Node>> {
        let addresses: HashSet<_> =
            self.table.map().ranges.iter().map(|range| range.master.clone()).collect();
        addresses.into_iter().map(|address| self.table.node(address, Via::Main)).collect()
    }

    pub(crate) fn close(&self) {
        self.task.abort();
        let mut map = self.table.map();
        map.closed = true;
        map.nodes.values().for_each(|node| node.close(error::closed()));
    }

    /// Connects to any node with a map, for subscriptions: a cluster forwards published messages to all its nodes. A
    /// node without a map was reset and belongs to no cluster.
    pub(crate) async fn connect_any(&self) -> Result<Connection> {
        self.table.connect_any().await.map(|(connection, _)| connection)
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.close();
    }
}

/// Requests a refresh of the map when dropped, unless disarmed by a reply. Covers calls that are dropped unanswered.
struct RefreshOnDrop<'a>(&'a Notify);

impl RefreshOnDrop<'_> {
    fn disarm(self) {
        std::mem::forget(self);
    }
}

impl Drop for RefreshOnDrop<'_> {
    fn drop(&mut self) {
        self.0.notify_one();
    }
}

/// Refreshes the map whenever it may be out of date.
async fn refresh_when_stale(table: Arc<Table>) {
    loop {
        table.stale.notified().await;
        if let Err(cause) = table.refresh().await {
            tracing::debug!(%cause, "cannot refresh the cluster map");
        }
        table.context.clock.sleep_until(table.context.clock.now() + REFRESH_INTERVAL).await;
    }
}

impl Table {
    fn map(&self) -> MutexGuard<'_, Map> {
        self.map.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the last known master of a slot.
    fn master_of(&self, slot: u16) -> Result<Address> {
        let map = self.map();
        let covers = |range: &&Range| range.slots.contains(&slot);
        let known = map.moved.get(&slot);
        let master = known.or_else(|| map.ranges.iter().find(covers).map(|range| &range.master));
        master.cloned().ok_or_else(|| {
            self.stale.notify_one();
            error::refused("CLUSTERDOWN no node has the slot")
        })
    }

    fn node(&self, address: Address, via: Via) -> Arc<Node> {
        let mut map = self.map();
        let closed = map.closed;
        let node = map.nodes.entry((address, via)).or_insert_with_key(|(address, via)| {
            let node = Node::start(Source::Member(address.clone()), Arc::clone(&self.context), *via);
            if closed {
                // Before it begins to connect.
                node.close(error::closed());
            }
            node
        });
        Arc::clone(node)
    }

    /// Returns the address with this port in the map, if there is exactly one.
    fn only_node_at(&self, port: u16) -> Option<Address> {
        let has_port =
            |address: &Address| matches!(address, Address::Tcp { port: other, .. } if *other == port);
        let map = self.map();
        let mut matching = map.ranges.iter().flat_map(Range::nodes).filter(|address| has_port(address));
        let first = matching.next()?;
        matching.all(|address| address == first).then(|| first.clone())
    }

    /// Runs a script on a node that is importing the slot. Such a node executes only commands after `ASKING`.
    async fn invoke_asking(&self, address: Address, call: &Invocation<'_>) -> Result<(Reply, Pipeline)> {
        // Kept until the reply: the map does not name a node that has no slot yet, so a refresh drops it.
        let node = self.node(address, call.via);
        let pipeline = node.pipeline().await?;
        let reply =
            pipeline.call_after(&["ASKING"], |out| call.write_source(out, &self.context.scripts)).await?;
        Ok((reply, pipeline))
    }

    /// Reads the map from the first node that has one.
    async fn refresh(&self) -> Result<()> {
        let (_, ranges) = self.connect_any().await?;
        let mut map = self.map();
        map.moved.clear();
        // The connections of former masters are closed as soon as no call waits for a reply.
        let masters: HashSet<_> = ranges.iter().map(|range| range.master.clone()).collect();
        let old: Vec<_> = map.nodes.extract_if(|(address, _), _| !masters.contains(address)).collect();
        map.ranges = ranges;
        drop(map);
        drop(old);
        Ok(())
    }

    /// Connects to any node with a map and returns the map, which has at least one range.
    async fn connect_any(&self) -> Result<(Connection, Vec<Range>)> {
        let mut last: Option<Error> = None;
        for address in self.known_addresses() {
            match self.connect_with_map(&address).await {
                Ok(known) => return Ok(known),
                // Report a permanent refusal rather than an unreachable node.
                Err(cause) if last.as_ref().is_none_or(Error::is_transient) => last = Some(cause),
                Err(_) => {}
            }
        }
        Err(last.unwrap_or_else(error::disconnected))
    }

    async fn connect_with_map(&self, address: &Address) -> Result<(Connection, Vec<Range>)> {
        let (login, slots) = (&self.context.settings.login, [vec!["CLUSTER", "SLOTS"]]);
        let (connection, replies) = Connection::open(address, &self.context, login, &slots).await?;
        let ranges = replies.first().and_then(|reply| ranges(reply, address));
        match ranges.ok_or_else(|| error::unexpected("CLUSTER SLOTS"))? {
            // The reply of a node that was reset or has not joined the cluster yet.
            ranges if ranges.is_empty() => Err(error::refused("CLUSTERDOWN the node knows no slots")),
            ranges => Ok((connection, ranges)),
        }
    }

    /// Returns the addresses of the URL and of the current map, in random order.
    fn known_addresses(&self) -> Vec<Address> {
        let map = self.map();
        let known: HashSet<_> = self.seeds.iter().chain(map.ranges.iter().flat_map(Range::nodes)).collect();
        let mut known: Vec<_> = known.into_iter().cloned().collect();
        fastrand::shuffle(&mut known);
        known
    }
}

/// A redirect to another node, for good or for one call.
#[derive(Debug, PartialEq, Eq)]
struct Redirect<'a> {
    moved: bool,
    slot: u16,
    host: &'a str,
    port: u16,
}

/// Returns the redirect in an error reply.
fn redirect(message: &str) -> Option<Redirect<'_>> {
    let mut parts = message.split(' ');
    let moved = match parts.next()? {
        "MOVED" => true,
        "ASK" => false,
        _ => return None,
    };
    let (slot, address) = (parts.next()?.parse().ok()?, parts.next()?);
    let (host, port) = address.rsplit_once(':')?;
    Some(Redirect { moved, slot, host, port: port.parse().ok()? })
}

fn ranges(reply: &Reply, queried: &Address) -> Option<Vec<Range>> {
    reply.array()?.iter().map(|range| range_of(range, queried)).collect()
}

fn range_of(reply: &Reply, queried: &Address) -> Option<Range> {
    let [first, last, master, replicas @ ..] = reply.array()? else { return None };
    let slot = |reply: &Reply| u16::try_from(reply.int()?).ok();
    Some(Range {
        slots: slot(first)?..=slot(last)?,
        master: address_of(master, queried)?,
        replicas: replicas.iter().filter_map(|replica| address_of(replica, queried)).collect(),
    })
}

fn address_of(reply: &Reply, queried: &Address) -> Option<Address> {
    let [host, port, rest @ ..] = reply.array()? else { return None };
    let port = u16::try_from(port.int()?).ok()?;
    // Redis 7 adds the IP address if it names the node by a host name.
    let ip = || {
        let [_, details, ..] = rest else { return None };
        let details = details.array()?;
        details.chunks(2).find_map(|pair| (pair.first()?.text()? == "ip").then(|| pair.get(1)?.text())?)
    };
    endpoint(host.text().unwrap_or_default(), port, queried)
        .or_else(|| ip().map(|host| Address::tcp(host, port)))
}

/// Returns the address that a node names. An empty host stands for the host that was queried, `?` for an unknown host
/// name.
fn endpoint(host: &str, port: u16, queried: &Address) -> Option<Address> {
    match (host, queried) {
        ("?", _) => None,
        ("", Address::Tcp { host, .. }) => Some(Address::tcp(host.clone(), port)),
        ("", _) => None,
        (host, _) => Some(Address::tcp(host, port)),
    }
}

/// Returns the slot of a mutex: the hash of its key's text from the first opening brace to the next closing one.
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
    use simba_core::{ErrorKind, TokioClock};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
    use tokio::net::TcpListener;

    use super::*;
    use crate::config::RedisConfig;
    use crate::resp;

    /// Answers one connection. Notifies `asked` for a script and answers it after `answer`.
    async fn serve(listener: TcpListener, asked: &Notify, answer: &Notify) {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut buffer = Vec::new();
        while stream.read_buf(&mut buffer).await.unwrap() > 0 {
            while let Some((command, length)) = resp::parse(&buffer).unwrap() {
                buffer.drain(..length);
                let reply = match command.array().unwrap()[0].text().unwrap() {
                    "TIME" => "*2\r\n$1\r\n1\r\n$1\r\n0\r\n",
                    "EVAL" => {
                        asked.notify_one();
                        answer.notified().await;
                        ":7\r\n"
                    }
                    _ => "+OK\r\n",
                };
                stream.write_all(reply.as_bytes()).await.unwrap();
            }
        }
    }

    /// A slot moves to a node that has no slot yet, so that a refreshed map does not name the node.
    #[tokio::test]
    async fn refresh_ends_no_call_to_an_importing_node() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        let config = RedisConfig::from_url(&"redis+cluster://unused".parse().unwrap()).unwrap();
        let context = Arc::new(Context::new(config.settings, Arc::new(TokioClock::new())));
        let table = Table { context, seeds: Vec::new(), map: Mutex::default(), stale: Notify::new() };
        let (asked, answer, mutex) = (Notify::new(), Notify::new(), MutexName::new("m").unwrap());
        let call = Invocation::new(Script::Inspect, &mutex, &[]);
        let refresh = async {
            asked.notified().await;
            let removed = std::mem::take(&mut table.map().nodes);
            drop(removed);
            answer.notify_one();
        };
        let calls = async { tokio::join!(table.invoke_asking(address, &call), refresh).0 };
        let reply = tokio::select! {
            reply = calls => reply,
            () = serve(listener, &asked, &answer) => panic!("the connection ended before the reply"),
        };
        assert_eq!(reply.unwrap().0, Reply::Int(7));
    }

    #[tokio::test]
    async fn closed_cluster_opens_no_connection_to_a_node_that_it_has_not_used() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let master = Address::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        let config = RedisConfig::from_url(&"redis+cluster://unused".parse().unwrap()).unwrap();
        let context = Arc::new(Context::new(config.settings, Arc::new(TokioClock::new())));
        let ranges = vec![Range { slots: 0..=SLOTS - 1, master, replicas: Vec::new() }];
        let map = Mutex::new(Map { ranges, ..Map::default() });
        let table = Arc::new(Table { context, seeds: Vec::new(), map, stale: Notify::new() });
        let cluster = Cluster { table, task: tokio::spawn(async {}).abort_handle() };
        cluster.close();
        let mutex = MutexName::new("m").unwrap();
        let call = Invocation { via: Via::Acquisitions, ..Invocation::new(Script::Contend, &mutex, &[]) };
        let error = cluster.invoke(&call).await.err().unwrap();
        assert_eq!(error.kind(), ErrorKind::Closed, "{error}");
        let accepted = futures_util::FutureExt::now_or_never(listener.accept());
        assert!(accepted.is_none(), "broken: a closed handle connects");
    }

    #[test]
    fn slot_is_computed_as_by_the_cluster() {
        assert_eq!(crc16(b"123456789"), 0x31c3);
        // Values of CLUSTER KEYSLOT.
        assert_eq!(slot(&MutexName::new("foo").unwrap()), 12182);
        assert_eq!(slot(&MutexName::legacy("foo}x").unwrap()), 12182);
    }

    #[test]
    fn node_without_a_host_has_the_queried_host_or_its_ip() {
        let queried = Address::tcp("10.0.0.1", 7000);
        let text = |text: &str| Reply::Bulk(text.into());
        let node = |host: Reply, details: Vec<Reply>| {
            let node = vec![host, Reply::Int(7001), text("id"), Reply::Array(details)];
            address_of(&Reply::Array(node), &queried)
        };
        assert_eq!(node(Reply::Nil, vec![]), Some(Address::tcp("10.0.0.1", 7001)));
        assert_eq!(node(text("?"), vec![text("ip"), text("10.0.0.7")]), Some(Address::tcp("10.0.0.7", 7001)));
        assert_eq!(node(text("?"), vec![]), None);
        assert_eq!(node(text("b"), vec![text("ip"), text("10.0.0.7")]), Some(Address::tcp("b", 7001)));
    }

    #[test]
    fn redirects_are_distinguished_from_other_errors() {
        let to = |moved, slot, host| Some(Redirect { moved, slot, host, port: 7001 });
        assert_eq!(redirect("MOVED 3999 10.0.0.7:7001"), to(true, 3999, "10.0.0.7"));
        assert_eq!(redirect("ASK 3999 10.0.0.7:7001"), to(false, 3999, "10.0.0.7"));
        assert_eq!(redirect("MOVED 1 :7001"), to(true, 1, ""));
        assert_eq!(redirect("MOVED 1 ?:7001"), to(true, 1, "?"));
        let queried = Address::tcp("10.0.0.1", 7000);
        assert_eq!(endpoint("", 7001, &queried), Some(Address::tcp("10.0.0.1", 7001)));
        assert_eq!(endpoint("?", 7001, &queried), None);
        for message in ["", "MOVED", "MOVED x y", "CLUSTERDOWN Hash slot not served", "ASK 1 nowhere"] {
            assert_eq!(redirect(message), None, "{message}");
        }
    }
}
