//! One contender's node in the queue of a mutex. [`QueueSession`](simba_net::queue::QueueSession) decides what is done
//! with it.

use std::sync::Arc;
use std::time::Duration;

use simba_core::spi::Subscription;
use simba_core::{ContenderId, FencingToken, Moment, Result};
use simba_net::queue::{Holder, Position, Proof, Queue};

use crate::client::{Checked, Client, Names, Request, checked, recv};
use crate::entry::{Entry, Node};
use crate::error::found;
use crate::latch::{self, Ahead};
use crate::parents;
use crate::queue::{self, Head};

/// The queue of one mutex. A process may hold thousands of mutexes, so the state that only waiters need is boxed.
pub(crate) struct ZookeeperQueue {
    entry: Entry,
    /// The end of the last proof.
    until: Moment,
    /// The number of shorter grants of the session at that time.
    shortenings: u32,
    /// The own node may be deleted.
    is_in_doubt: bool,
    /// Notified when the own node is deleted.
    own_watch: Option<Subscription<u64>>,
    waiting: Option<Box<Waiting>>,
}

/// The state of a session that waits for its turn, or for another owner.
#[derive(Default)]
struct Waiting {
    /// The first node at the last read. The contender of a node never changes.
    head: Option<Head>,
    watch: Option<Watch>,
    /// The watch was notified since the queue was read.
    is_hinted: bool,
    /// Makes the client prove its session before the turn comes. `None` for sessions that do not queue.
    _counted: Option<Arc<()>>,
}

impl Waiting {
    /// Returns whether this node is watched on the current connection. Watches end with their connection.
    fn watches(&self, name: &str, client: &Client) -> bool {
        let connection = client.connection();
        self.watch.as_ref().is_some_and(|watch| watch.name == name && watch.connection == connection)
    }
}

/// The watch that reports the turn, or the change of the owner.
struct Watch {
    /// The name of the watched node; empty for the node of the mutex.
    name: String,
    connection: u64,
    subscription: Subscription<u64>,
}

impl Watch {
    /// Subscribes to the events of a node. The request that sets the watch has to follow.
    fn new(client: &Client, path: &str, name: String) -> Self {
        Self { name, connection: client.connection(), subscription: client.subscribe(path) }
    }
}

impl ZookeeperQueue {
    pub(crate) const fn new(entry: Entry) -> Self {
        let (until, waiting) = (Moment::ZERO, None);
        Self { entry, until, shortenings: 0, is_in_doubt: false, own_watch: None, waiting }
    }

    const fn client(&self) -> &Arc<Client> {
        self.entry.client()
    }

    /// Clears the entry, whose node does not exist any more.
    fn clear(&mut self) {
        self.entry.clear();
        (self.own_watch, self.is_in_doubt) = (None, false);
    }

    /// Returns whether a reconnect has granted a shorter session since the last proof.
    fn is_shortened(&self) -> bool {
        self.client().proofs().shortenings() != self.shortenings
    }

    /// Returns the end of the proof that a check gives, or `None` if the node does not exist any more.
    fn confirmed(&mut self, node: Node, checked: Checked) -> Result<Option<Moment>> {
        // A check by another session does not prove that of the node.
        let until = found("renew", checked)?.and_then(|()| self.client().proofs().until(node.session));
        if until.is_none() {
            self.clear();
        }
        Ok(until)
    }

    async fn create_parents(&self) -> Result<Position<Ahead>> {
        parents::create(self.client(), &self.entry.parent()).await?;
        Ok(Position::Missing)
    }

    async fn join(&mut self, contender: &ContenderId, queues: bool) -> Result<Position<Ahead>> {
        if !queues && let Some(head) = self.read_head().await? {
            return Ok(Position::Taken(head));
        }
        self.clear();
        let mut listed = self.entry.create(contender.as_str())?;
        if !self.entry.resolve().await? {
            return self.create_parents().await;
        }
        let Some(node) = self.entry.node() else { return Ok(Position::Missing) };
        let Some(names) = queue::children(recv(&mut listed).await)? else { return Ok(Position::Missing) };
        // The creation was a quorum call: it is the last proof.
        let until = self.client().proofs().until(node.session).unwrap_or(Moment::ZERO);
        Ok(self.position(node, &names, until))
    }

    /// Reads the position of the own node in the queue.
    ///
    /// The first node stays the first while its session lives, so a read from any server suffices, even from one that
    /// lags behind. A quorum call has to prove that the session lives. If the last one is too old, a check is sent
    /// together with the read when a hint makes the turn likely.
    async fn read_position(&mut self, node: Node) -> Result<Position<Ahead>> {
        let likely = self.waiting.as_ref().is_some_and(|waiting| waiting.is_hinted);
        let mut until = self.client().proofs().until(node.session).unwrap_or(Moment::ZERO);
        let is_proven = until.saturating_since(self.now()) >= self.lease() / 2;
        let mut listed = queue::send_list(self.client(), &self.entry.parent());
        let mut checking =
            (likely && !is_proven).then(|| self.client().send_check(self.entry.path(node.name)));
        let Some(names) = queue::children(recv(&mut listed).await)? else {
            self.clear();
            return Ok(Position::Missing);
        };
        if let Some(checking) = &mut checking {
            let Some(confirmed) = self.confirmed(node, checked(recv(checking).await))? else {
                return Ok(Position::Missing);
            };
            until = confirmed;
        }
        Ok(self.position(node, &names, until))
    }

    fn position(&mut self, node: Node, names: &Names, until: Moment) -> Position<Ahead> {
        let position = latch::position(names, &node.name.to_string(), Proof { token: node.token, until });
        match position {
            Position::Missing => self.clear(),
            Position::First(_) => self.until = until,
            _ => {}
        }
        position
    }

    /// Reads and watches the own node. Returns true if the read fails: the next connection gives another hint.
    ///
    /// Unless the node is in doubt, the read is deferred, so that a mutex that is held for less than 50 ms needs no
    /// watch.
    async fn own_node_exists(&self, path: String) -> bool {
        if !self.is_in_doubt {
            self.client().defer().await;
        }
        let found = self.client().call(Request::Data { path, watch: true }).await;
        !found.is_err_and(|failure| failure.is_no_node())
    }
}

impl Queue for ZookeeperQueue {
    type Ahead = Ahead;

    fn now(&self) -> Moment {
        self.client().now()
    }

    fn lease(&self) -> Duration {
        self.client().lease()
    }

    fn token(&self) -> Option<FencingToken> {
        self.entry.node().map(|node| node.token)
    }

    async fn locate(&mut self, contender: &ContenderId, queues: bool) -> Result<Position<Ahead>> {
        self.shortenings = self.client().proofs().shortenings();
        if !self.entry.resolve().await? {
            return self.create_parents().await;
        }
        match self.entry.node() {
            Some(node) => self.read_position(node).await,
            None => self.join(contender, queues).await,
        }
    }

    /// Proves by a quorum call that the node exists and its session is alive.
    async fn prove(&mut self, renews: bool) -> Result<Option<Proof>> {
        let Some(node) = self.entry.node() else { return Ok(None) };
        let (client, path) = (Arc::clone(self.client()), self.entry.path(node.name));
        let until = if renews {
            let checking = client.check(path);
            // After the check was queued: a shorter grant that is not visible here fails the check.
            if self.is_shortened() {
                self.shortenings = client.proofs().shortenings();
                Some(client.proofs().shortened(self.until))
            } else {
                self.confirmed(node, checking.await)?
            }
        } else {
            // Before the check: a shorter grant before it does not limit what the check proves.
            self.shortenings = client.proofs().shortenings();
            self.confirmed(node, checked(recv(&mut client.send_check(path)).await))?
        };
        self.until = until.unwrap_or(self.until);
        Ok(until.map(|until| Proof { token: node.token, until }))
    }

    async fn delete(&mut self) -> Result<()> {
        self.entry.resolve().await?;
        self.entry.delete().await?;
        self.clear();
        Ok(())
    }

    fn delete_in_background(&mut self) {
        self.entry.delete_in_background();
    }

    async fn read_head(&mut self) -> Result<Option<Holder>> {
        let (client, parent) = (Arc::clone(self.client()), self.entry.parent());
        let waiting = self.waiting.get_or_insert_default();
        (waiting.head, _) = queue::first(&client, &parent, waiting.head.clone()).await?;
        Ok(waiting.head.as_ref().map(|head| head.holder.clone()))
    }

    /// Watches the node directly before the own one and reads the first node, in one round trip.
    async fn watch_ahead(&mut self, Ahead { first, next }: Ahead) -> Result<Option<Holder>> {
        let (client, parent) = (Arc::clone(self.client()), self.entry.parent());
        let waiting = self.waiting.get_or_insert_default();
        waiting._counted.get_or_insert_with(|| client.count_waiter());
        waiting.is_hinted = false;
        let is_watched = waiting.watches(&next, &client);
        let is_known = waiting.head.as_ref().is_some_and(|head| head.name == first);
        let watching = (!is_watched).then(|| {
            let watch = Watch::new(&client, &format!("{parent}/{next}"), next.clone());
            (watch, queue::send_read(&client, &parent, &next, true))
        });
        let mut reading = (!is_known && (is_watched || first != next))
            .then(|| queue::send_read(&client, &parent, &first, false));
        if let Some((watch, mut read)) = watching {
            let Some(head) = queue::parse(&next, recv(&mut read).await)? else { return Ok(None) };
            waiting.watch = Some(watch);
            if first == next {
                waiting.head = Some(head);
            }
        }
        if let Some(read) = &mut reading {
            waiting.head = queue::parse(&first, recv(read).await)?;
        }
        Ok(waiting.head.as_ref().map(|head| head.holder.clone()))
    }

    async fn watch_head(&mut self) -> Result<bool> {
        let (client, parent) = (Arc::clone(self.client()), self.entry.parent());
        let waiting = self.waiting.get_or_insert_default();
        let name = waiting.head.as_ref().map_or("", |head| &head.name).to_owned();
        if waiting.watches(&name, &client) {
            return Ok(true);
        }
        let (watch, is_unchanged) = if name.is_empty() {
            (Watch::new(&client, &parent, name), queue::watch_empty(&client, &parent).await?)
        } else {
            let watch = Watch::new(&client, &format!("{parent}/{name}"), name.clone());
            let found =
                queue::parse(&name, recv(&mut queue::send_read(&client, &parent, &name, true)).await)?;
            (watch, found.is_some())
        };
        waiting.watch = is_unchanged.then_some(watch);
        Ok(is_unchanged)
    }

    async fn notified(&mut self) {
        let client = Arc::clone(self.client());
        let waiting = self.waiting.get_or_insert_default();
        // Without a watch, the next connection notifies.
        let watch = waiting.watch.get_or_insert_with(|| Watch::new(&client, "", String::new()));
        watch.subscription.notified().await;
        (waiting.watch, waiting.is_hinted) = (None, true);
    }

    fn stop_waiting(&mut self) {
        self.waiting = None;
    }

    async fn lost(&mut self) {
        loop {
            if let Some(watch) = &mut self.own_watch {
                watch.notified().await;
                (self.own_watch, self.is_in_doubt) = (None, true);
            }
            let Some(node) = self.entry.node().filter(|_| !self.is_shortened()) else { return };
            let path = self.entry.path(node.name);
            let watch = self.client().subscribe(&path);
            // Boxed to keep the future of a waiting holder small; this call is rare.
            if !Box::pin(self.own_node_exists(path)).await {
                return;
            }
            (self.own_watch, self.is_in_doubt) = (Some(watch), false);
        }
    }
}
