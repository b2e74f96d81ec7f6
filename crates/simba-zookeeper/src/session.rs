//! One contender or observer at the store.

use std::sync::Arc;

use async_trait::async_trait;
use simba_core::{
    Answer, Claim, ContenderId, FencingToken, Holding, Intent, Listener, Ownership, Prior, Result, Session,
};

use crate::client::{Access, Client, Failure, Reply, Request, Topic, Urgency, heard};
use crate::error::{failed, restless, stranger};
use crate::latch::{self, Standing};
use crate::node::{Node, Seat};
use crate::parents;
use crate::paths::Paths;
use crate::queue::{self, Head};

/// How often a queue that changes under the look is looked at again.
const LOOKS: usize = 8;

pub(crate) struct ZookeeperSession {
    client: Arc<Client>,
    claim: Claim,
    /// The node of the mutex.
    path: Arc<str>,
    paths: Paths,
    access: Access,
    seat: Seat,
    /// Our node is the first: it stays so for as long as it is there.
    leads: bool,
    /// Whom the last look found first; a node never changes its mind about its contender.
    head: Option<Box<Head>>,
    /// Another session under our id holds the mutex: we take no place behind it.
    twin: bool,
    /// Hears when it may be our turn; only while we wait or look.
    turn: Option<Listener<Topic>>,
    own: Listener<Topic>,
    caller: u64,
    /// What is watched for our turn, and on which connection.
    watched: Option<(String, u64)>,
    /// A hint came: it may be our turn.
    hinted: bool,
    /// The first hint was given.
    told: bool,
    /// Our node may be gone.
    suspect: bool,
}

impl ZookeeperSession {
    pub(crate) fn new(
        client: Arc<Client>,
        claim: Claim,
        path: Arc<str>,
        paths: Paths,
        access: Access,
    ) -> Self {
        let caller = client.caller();
        let own = client.hub().listen(Topic::Own(caller));
        let seat = Seat::new(Arc::clone(&client), Arc::clone(&path));
        Self {
            client,
            claim,
            path,
            paths,
            access,
            seat,
            leads: false,
            head: None,
            twin: false,
            turn: None,
            own,
            caller,
            watched: None,
            hinted: false,
            told: false,
            suspect: false,
        }
    }

    /// What a quorum call that is answered now gives, counted from before it was sent. Two thirds: the leader of
    /// the ensemble may have heard of us last a third of the timeout before.
    fn ownership(&self, owner: ContenderId, token: FencingToken) -> Ownership {
        Ownership::new(owner, Some(token), self.client.timeout() / 3 * 2)
    }

    fn ours(&mut self, node: &Node) -> Answer {
        self.leads = true;
        self.hinted = false;
        self.watched = None;
        self.turn = None;
        Answer::Ours(self.ownership(self.claim.contender.clone(), node.token))
    }

    fn held(&self, head: &Head) -> Answer {
        Answer::Held(self.ownership(head.owner.clone(), head.token))
    }

    // ===== contending =====

    async fn ask(&mut self, prior: Prior) -> Result<Answer> {
        for _ in 0..LOOKS {
            if !self.seat.settle().await? {
                parents::make(&self.client, &self.path, &self.paths, self.access).await?;
            }
            let answer = match self.seat.node().cloned() {
                Some(node) if self.leads => self.renew(node, prior).await?,
                Some(node) => self.look(node, prior).await?,
                None => {
                    self.leads = false;
                    self.join(prior).await?
                }
            };
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
        Err(restless())
    }

    /// Shows by a quorum that our node is there and its session alive. Nothing if it is not.
    async fn renew(&mut self, node: Node, prior: Prior) -> Result<Option<Answer>> {
        let urgency = if prior == Prior::Held { Urgency::Renewal } else { Urgency::Turn };
        let mut checked = self.client.check(&self.seat.path(&node.name), urgency);
        Ok(self.confirmed(&node, heard(&mut checked).await)?.then(|| self.ours(&node)))
    }

    /// Whether a check found the node, under the session that made it.
    fn confirmed(&mut self, node: &Node, checked: Result<i64, Failure>) -> Result<bool> {
        match checked {
            Ok(session) if session == node.session => return Ok(true),
            Err(failure) if !failure.is_no_node() => return Err(failed("renew", failure)),
            _ => {}
        }
        self.leads = false;
        self.seat.gone();
        Ok(false)
    }

    /// Takes a place in the queue, and the mutex if it is the first.
    async fn join(&mut self, prior: Prior) -> Result<Option<Answer>> {
        if (self.claim.intent != Intent::Queue || self.twin)
            && let Some(head) = self.first().await?
        {
            self.twin &= head.owner == self.claim.contender;
            if self.claim.intent != Intent::Queue || self.twin {
                return Ok(Some(self.held(&head)));
            }
        }
        self.twin = false;
        self.seat.create(self.claim.contender.as_str(), self.access)?;
        // In the same breath: the server carries it out after the creation.
        let mut listed = self.list(true);
        if !self.seat.settle().await? {
            parents::make(&self.client, &self.path, &self.paths, self.access).await?;
            return Ok(None);
        }
        let Some(node) = self.seat.node().cloned() else { return Ok(None) };
        let Some(names) = queue::children(heard(&mut listed).await)? else { return Ok(None) };
        // The creation was a quorum call, made within this one.
        self.placed(node, &names, true, prior).await
    }

    /// Asks for the queue. Whoever turns out to lead then also hears when a child goes.
    fn list(&self, watch: bool) -> tokio::sync::oneshot::Receiver<crate::client::Outcome> {
        let topic = watch.then_some(Topic::Own(self.caller));
        self.client.send(Request::Children { path: self.path.to_string(), watch }, topic)
    }

    /// Looks how far our node has come.
    async fn look(&mut self, node: Node, prior: Prior) -> Result<Option<Answer>> {
        // After a hint it is likely our turn: the proof goes along with the look.
        let likely = self.hinted;
        let mut checked = likely.then(|| self.client.check(&self.seat.path(&node.name), Urgency::Turn));
        let mut listed = self.list(likely);
        if let Some(checked) = &mut checked
            && !self.confirmed(&node, heard(checked).await)?
        {
            return Ok(None);
        }
        let Some(names) = queue::children(heard(&mut listed).await)? else {
            self.seat.gone();
            return Ok(None);
        };
        self.placed(node, &names, likely, prior).await
    }

    async fn placed(
        &mut self,
        node: Node,
        names: &[String],
        proven: bool,
        prior: Prior,
    ) -> Result<Option<Answer>> {
        match latch::standing(names, &node.name) {
            Standing::Missing => {
                self.seat.gone();
                Ok(None)
            }
            Standing::First if proven => Ok(Some(self.ours(&node))),
            Standing::First => self.renew(node, Prior::Nothing).await,
            Standing::Behind { first, next } => self.behind(first, next, prior).await,
        }
    }

    /// It is somebody else's: finds out whose, and keeps or gives up our place.
    async fn behind(&mut self, first: &str, next: &str, prior: Prior) -> Result<Option<Answer>> {
        self.hinted = false;
        if self.claim.intent != Intent::Queue {
            return self.withdraw(first).await;
        }
        let Some(head) = self.watch_and_know(first, next).await? else { return Ok(None) };
        if head.owner == self.claim.contender && prior == Prior::Nothing {
            self.twin = true;
            return self.withdraw(first).await;
        }
        Ok(Some(self.held(&head)))
    }

    /// Gives the place up, since it is not the first.
    async fn withdraw(&mut self, first: &str) -> Result<Option<Answer>> {
        self.seat.delete().await?;
        let head = self.known(first).await?;
        Ok(head.map(|head| self.held(&head)))
    }

    /// Listens for our turn, from before the watch that tells of it.
    fn listen(&mut self) -> Topic {
        let topic = Topic::Turn(self.caller);
        let hub = self.client.hub();
        self.turn.get_or_insert_with(|| hub.listen(topic));
        topic
    }

    fn is_watched(&self, name: &str) -> bool {
        let connection = self.client.connection();
        self.watched.as_ref().is_some_and(|(watched, on)| watched == name && *on == connection)
    }

    /// Watches who stands before us, and finds out who stands first, in one breath. Nothing if either is gone.
    async fn watch_and_know(&mut self, first: &str, next: &str) -> Result<Option<Head>> {
        let (watched, known) =
            (self.is_watched(next), self.head.as_ref().is_some_and(|head| head.name == first));
        let topic = Some(self.listen());
        let connection = self.client.connection();
        let mut watch = (!watched).then(|| queue::ask(&self.client, &self.path, next, topic));
        let mut know =
            (!known && (watched || first != next)).then(|| queue::ask(&self.client, &self.path, first, None));
        if let Some(watch) = &mut watch {
            let Some(head) = queue::told(next, heard(watch).await)? else { return Ok(None) };
            self.watched = Some((next.to_owned(), connection));
            if first == next {
                self.head = Some(Box::new(head));
            }
        }
        if let Some(know) = &mut know {
            self.head = queue::told(first, heard(know).await)?.map(Box::new);
        }
        Ok(self.head.as_deref().cloned())
    }

    /// Watches a node; false if it is gone.
    async fn watch(&mut self, name: &str) -> Result<bool> {
        let connection = self.client.connection();
        let topic = Some(self.listen());
        let found = queue::head(&self.client, &self.path, name, topic).await?;
        self.watched = found.as_ref().map(|_| (name.to_owned(), connection));
        Ok(found.is_some())
    }

    /// Who has this node: asked once.
    async fn known(&mut self, name: &str) -> Result<Option<Head>> {
        if let Some(head) = self.head.as_deref().filter(|head| head.name == name) {
            return Ok(Some(head.clone()));
        }
        self.head = queue::head(&self.client, &self.path, name, None).await?.map(Box::new);
        Ok(self.head.as_deref().cloned())
    }

    // ===== looking =====

    /// Who holds the mutex.
    async fn first(&mut self) -> Result<Option<Head>> {
        for _ in 0..LOOKS {
            let names = queue::names(&self.client, &self.path).await?;
            let Some(first) = names.as_deref().and_then(latch::first) else {
                self.head = None;
                return Ok(None);
            };
            if let Some(head) = self.known(first).await? {
                return Ok(Some(head));
            }
        }
        Err(restless())
    }

    /// Leaves a watch where the owner changes next; false if it has changed already.
    async fn arm(&mut self) -> Result<bool> {
        let topic = Some(self.listen());
        if let Some(head) = &self.head {
            let name = head.name.clone();
            return self.watch(&name).await;
        }
        let connection = self.client.connection();
        let children = Request::Children { path: self.path.to_string(), watch: true };
        let free = match heard(&mut self.client.send(children, topic)).await {
            Ok(Reply::Children(names)) => names.is_empty(),
            Ok(_) => return Err(stranger()),
            Err(failure) if failure.is_no_node() => {
                let exists = Request::Exists { path: self.path.to_string(), watch: true };
                match heard(&mut self.client.send(exists, topic)).await {
                    Err(failure) if failure.is_no_node() => true,
                    outcome => {
                        outcome.map(|_| false).map_err(|failure| failed("watch the mutex", failure))?
                    }
                }
            }
            Err(failure) => return Err(failed("watch the mutex", failure)),
        };
        self.watched = free.then(|| (String::new(), connection));
        Ok(free)
    }

    fn is_armed(&self) -> bool {
        let name = self.head.as_ref().map_or("", |head| &head.name);
        self.is_watched(name)
    }

    // ===== hints =====

    /// Waits for signs that our node is gone.
    async fn until_gone(&mut self) -> Result<()> {
        loop {
            if !self.suspect {
                self.own.rung().await;
                self.suspect = true;
            }
            let Some(node) = self.seat.node() else { return Ok(()) };
            let request = Request::Data { path: self.seat.path(&node.name), watch: true };
            match heard(&mut self.client.send(request, Some(Topic::Own(self.caller)))).await {
                Err(failure) if failure.is_no_node() => return Ok(()),
                // The next connection rings again.
                _ => self.suspect = false,
            }
        }
    }

    async fn until_turn(&mut self) -> Result<()> {
        if self.claim.intent != Intent::Queue && !self.is_armed() && !self.arm().await? {
            return Ok(());
        }
        if !self.told {
            self.told = true;
            return Ok(());
        }
        self.listen();
        if let Some(turn) = &mut self.turn {
            turn.rung().await;
        }
        (self.hinted, self.watched) = (true, None);
        Ok(())
    }
}

#[async_trait]
impl Session for ZookeeperSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        self.ask(prior).await
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let head = self.first().await?;
        Ok(head.map(|head| self.ownership(head.owner, head.token)))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.seat.settle().await?;
        if let (Holding::Under(token), Some(node)) = (holding, self.seat.node())
            && node.token != token
        {
            return Ok(());
        }
        self.seat.delete().await?;
        (self.leads, self.hinted, self.watched) = (false, false, None);
        Ok(())
    }

    async fn changed(&mut self) -> Result<()> {
        if self.leads {
            return self.until_gone().await;
        }
        self.until_turn().await
    }
}
