//! One contender or observer at the store.

use std::sync::Arc;

use async_trait::async_trait;
use simba_core::{
    Answer, Claim, ContenderId, FencingToken, Holding, Intent, Moment, Ownership, Prior, Result, Session,
};
use tokio::sync::oneshot;

use crate::client::{Client, Ear, Failure, Names, Proof, Reply, Request, Ring, Topic, Urgency, heard};
use crate::error::{failed, restless, stranger};
use crate::latch::{self, Standing};
use crate::node::{Node, Seat};
use crate::parents;
use crate::queue::{self, Head};

/// How often a queue that changes under the look is looked at again.
const LOOKS: usize = 8;

/// A process may hold thousands of mutexes: what only those who wait need is boxed.
pub(crate) struct ZookeeperSession {
    seat: Seat,
    contender: ContenderId,
    intent: Intent,
    /// Our node is the first: it stays so for as long as it is there.
    leads: bool,
    /// Another session under our id holds the mutex: we take no place behind it.
    twin: bool,
    /// A hint came: it may be our turn.
    hinted: bool,
    /// The first hint was given.
    told: bool,
    /// Our node may be gone.
    suspect: bool,
    /// Our node is watched: we hear when it goes.
    guarded: bool,
    /// Until when the mutex is ours, by the last answer that said so.
    until: Moment,
    /// How often the session had been granted for a shorter time by then.
    cuts: u32,
    ear: Ear,
    /// Whom the last look found first; a node never changes its mind about its contender.
    head: Option<Box<Head>>,
    watched: Option<Box<Watched>>,
}

/// What is watched for our turn.
struct Watched {
    name: String,
    /// The connection that the watch ends with.
    on: u64,
}

impl Watched {
    fn new(name: &str, on: u64) -> Box<Self> {
        Box::new(Self { name: name.to_owned(), on })
    }
}

impl ZookeeperSession {
    pub(crate) fn new(client: Arc<Client>, claim: Claim) -> Self {
        let ear = client.ear();
        Self {
            seat: Seat::new(client, claim.mutex),
            contender: claim.contender,
            intent: claim.intent,
            leads: false,
            twin: false,
            hinted: false,
            told: false,
            suspect: false,
            guarded: false,
            until: Moment::ZERO,
            cuts: 0,
            ear,
            head: None,
            watched: None,
        }
    }

    const fn client(&self) -> &Arc<Client> {
        self.seat.client()
    }

    /// Records that the mutex is ours until then; what is left counts from the beginning of this call.
    fn ours(&mut self, node: Node, began: Moment, until: Moment) -> Answer {
        self.guarded &= self.leads;
        (self.leads, self.hinted) = (true, false);
        (self.watched, self.head) = (None, None);
        self.until = until;
        self.ear.forget(Ring::Turn);
        let remaining = until.saturating_since(began).min(self.client().lease());
        Answer::Ours(Ownership::new(self.contender.clone(), Some(node.token), remaining))
    }

    /// Nobody knows how much of its lease another's session has left: at most all of it.
    fn seen(&self, owner: ContenderId, token: FencingToken) -> Ownership {
        Ownership::new(owner, Some(token), self.client().lease())
    }

    fn held(&self, head: &Head) -> Answer {
        Answer::Held(self.seen(head.owner.clone(), head.token))
    }

    // ===== contending =====

    async fn ask(&mut self, prior: Prior) -> Result<Answer> {
        let began = self.client().now();
        for _ in 0..LOOKS {
            if !self.seat.settle().await? {
                parents::make(self.client(), &self.seat.parent()).await?;
            }
            if !self.leads {
                self.cuts = self.client().cuts();
            }
            let answer = match self.seat.node() {
                Some(node) if prior == Prior::Lapsed(node.token) => {
                    self.give_up().await?;
                    None
                }
                Some(node) if self.leads => self.renew(node, prior).await?,
                Some(node) => self.look(node, prior, began).await?,
                None => {
                    self.leads = false;
                    self.join(prior, began).await?
                }
            };
            if let Some(answer) = answer {
                return Ok(answer);
            }
        }
        Err(restless())
    }

    /// Deletes the node of a tenure that was lost here: the next tenure needs a greater token, hence a new node.
    async fn give_up(&mut self) -> Result<()> {
        self.seat.delete().await?;
        (self.leads, self.hinted, self.watched) = (false, false, None);
        Ok(())
    }

    /// Shows by a quorum that our node is there and its session alive. Nothing if it is not.
    async fn renew(&mut self, node: Node, prior: Prior) -> Result<Option<Answer>> {
        let began = self.client().now();
        let urgency = if prior == Prior::Held { Urgency::Renewal } else { Urgency::Turn };
        if prior != Prior::Held {
            // Before the check: a cut from before it does not shorten what the check proves.
            self.cuts = self.client().cuts();
        }
        let mut checked = self.check(node, urgency);
        // After the check was handed over: a cut that is not seen here fails the check.
        if prior == Prior::Held && self.is_cut() {
            self.cuts = self.client().cuts();
            return Ok(Some(self.ours(node, began, self.until.min(self.client().cut_at()))));
        }
        let until = self.confirmed(node, heard(&mut checked).await)?;
        Ok(until.map(|until| self.ours(node, began, until)))
    }

    /// Whether the session was granted for a shorter time since the mutex was ours.
    fn is_cut(&self) -> bool {
        self.client().cuts() != self.cuts
    }

    fn check(&self, node: Node, urgency: Urgency) -> oneshot::Receiver<Result<Proof, Failure>> {
        self.client().check(self.seat.path(node.name), urgency)
    }

    /// Until when the session of the node lasts, by a check that found the node; nothing if it is gone.
    fn confirmed(&mut self, node: Node, checked: Result<Proof, Failure>) -> Result<Option<Moment>> {
        match checked {
            Ok(proof) if proof.session == node.session => return Ok(Some(proof.until)),
            Err(failure) if !failure.is_no_node() => return Err(failed("renew", failure)),
            _ => {}
        }
        self.leads = false;
        self.seat.gone();
        Ok(None)
    }

    /// Takes a place in the queue, and the mutex if it is the first.
    async fn join(&mut self, prior: Prior, began: Moment) -> Result<Option<Answer>> {
        if (self.intent != Intent::Queue || self.twin)
            && let Some(head) = self.first().await?
        {
            self.twin &= head.owner == self.contender;
            if self.intent != Intent::Queue || self.twin {
                return Ok(Some(self.held(&head)));
            }
        }
        self.twin = false;
        let mut listed = self.seat.create(self.contender.as_str())?;
        if !self.seat.settle().await? {
            parents::make(self.client(), &self.seat.parent()).await?;
            return Ok(None);
        }
        let Some(node) = self.seat.node() else { return Ok(None) };
        let Some(names) = queue::children(heard(&mut listed).await)? else { return Ok(None) };
        // The creation was a quorum call, made within this one.
        let until = began + self.client().left(node.session, began);
        self.placed(node, &names, Some(until), prior, began).await
    }

    /// Looks how far our node has come.
    ///
    /// Who is first stays first for as long as its session lives: a look at any server shows it, however late it is.
    /// That the session lives, a quorum has to show. If one has shown it lately, what that gave is given here,
    /// counted from then; if not, it is asked along with the look, at least where it is likely our turn.
    async fn look(&mut self, node: Node, prior: Prior, began: Moment) -> Result<Option<Answer>> {
        let likely = self.hinted;
        let left = self.client().left(node.session, began);
        let proven = left >= self.client().lease() / 2;
        let list = Request::Children { path: self.seat.parent(), watch: false };
        let mut listed = self.client().send(list, None);
        let mut checked = (likely && !proven).then(|| self.check(node, Urgency::Turn));
        let Some(names) = queue::children(heard(&mut listed).await)? else {
            self.seat.gone();
            return Ok(None);
        };
        let mut until = proven.then_some(began + left);
        if let Some(checked) = &mut checked {
            until = self.confirmed(node, heard(checked).await)?;
            if until.is_none() {
                return Ok(None);
            }
        }
        self.placed(node, &names, until, prior, began).await
    }

    /// What follows from our place in the queue; `proven` is until when our session lasts, if that is known.
    async fn placed(
        &mut self,
        node: Node,
        names: &Names,
        proven: Option<Moment>,
        prior: Prior,
        began: Moment,
    ) -> Result<Option<Answer>> {
        match (latch::standing(names, &node.name.to_string()), proven) {
            (Standing::Missing, _) => {
                self.seat.gone();
                Ok(None)
            }
            (Standing::First, Some(until)) => Ok(Some(self.ours(node, began, until))),
            (Standing::First, None) => self.renew(node, Prior::Nothing).await,
            (Standing::Behind { first, next }, _) => self.behind(first, next, prior).await,
        }
    }

    /// It is somebody else's: finds out whose, and keeps or gives up our place.
    async fn behind(&mut self, first: &str, next: &str, prior: Prior) -> Result<Option<Answer>> {
        self.hinted = false;
        if self.intent != Intent::Queue {
            return self.withdraw(first).await;
        }
        let Some(head) = self.watch_and_know(first, next).await? else { return Ok(None) };
        if head.owner == self.contender && prior == Prior::Nothing {
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

    /// What tells of our turn, or of whatever there is to look at.
    fn ring(&self) -> Ring {
        if self.intent == Intent::Queue { Ring::Turn } else { Ring::News }
    }

    /// Listens from before a watch is left. What rang before is older than what that finds.
    fn listen(&mut self) -> Topic {
        let ring = self.ring();
        self.ear.forget(ring);
        self.ear.topic(ring)
    }

    fn is_watched(&self, name: &str) -> bool {
        let connection = self.client().connection();
        self.watched.as_ref().is_some_and(|watched| watched.name == name && watched.on == connection)
    }

    /// Watches who stands before us, and finds out who stands first, in one breath. Nothing if either is gone.
    async fn watch_and_know(&mut self, first: &str, next: &str) -> Result<Option<Head>> {
        let (watched, known) =
            (self.is_watched(next), self.head.as_ref().is_some_and(|head| head.name == first));
        let topic = (!watched).then(|| self.listen());
        let connection = self.client().connection();
        let mut watch = (!watched).then(|| queue::ask(self.client(), &self.seat.parent(), next, topic));
        let mut know = (!known && (watched || first != next))
            .then(|| queue::ask(self.client(), &self.seat.parent(), first, None));
        if let Some(watch) = &mut watch {
            let Some(head) = queue::told(next, heard(watch).await)? else { return Ok(None) };
            self.watched = Some(Watched::new(next, connection));
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
        let connection = self.client().connection();
        let topic = Some(self.listen());
        let found = queue::head(self.client(), &self.seat.parent(), name, topic).await?;
        self.watched = found.as_ref().map(|_| Watched::new(name, connection));
        Ok(found.is_some())
    }

    /// Who has this node: asked once.
    async fn known(&mut self, name: &str) -> Result<Option<Head>> {
        if let Some(head) = self.head.as_deref().filter(|head| head.name == name) {
            return Ok(Some(head.clone()));
        }
        self.head = queue::head(self.client(), &self.seat.parent(), name, None).await?.map(Box::new);
        Ok(self.head.as_deref().cloned())
    }

    // ===== looking =====

    /// Who holds the mutex.
    async fn first(&mut self) -> Result<Option<Head>> {
        for _ in 0..LOOKS {
            let names = queue::names(self.client(), &self.seat.parent()).await?;
            let Some(first) = names.as_ref().and_then(latch::first) else {
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
        let connection = self.client().connection();
        let children = Request::Children { path: self.seat.parent(), watch: true };
        let free = match heard(&mut self.client().send(children, topic)).await {
            Ok(Reply::Children(names)) => names.is_empty(),
            Ok(_) => return Err(stranger()),
            Err(failure) if failure.is_no_node() => {
                let exists = Request::Exists { path: self.seat.parent(), watch: true };
                match heard(&mut self.client().send(exists, topic)).await {
                    Err(failure) if failure.is_no_node() => true,
                    outcome => {
                        outcome.map(|_| false).map_err(|failure| failed("watch the mutex", failure))?
                    }
                }
            }
            Err(failure) => return Err(failed("watch the mutex", failure)),
        };
        self.watched = free.then(|| Watched::new("", connection));
        Ok(free)
    }

    fn is_armed(&self) -> bool {
        let name = self.head.as_ref().map_or("", |head| &head.name);
        self.is_watched(name)
    }

    // ===== hints =====

    /// Waits for signs that our node is gone, or that its session ends earlier than we know.
    async fn until_gone(&mut self) -> Result<()> {
        loop {
            if self.guarded && !self.suspect {
                self.ear.rung(Ring::Own).await;
                self.suspect = true;
            }
            // Boxed: seldom, and what waits has to be small.
            if self.is_cut() || !Box::pin(self.is_there()).await {
                return Ok(());
            }
            (self.guarded, self.suspect) = (true, false);
        }
    }

    /// Looks for our node, and watches it. Who cannot tell hears of the next connection.
    ///
    /// Without a suspicion that has time: a mutex that is held for a moment costs no watch.
    async fn is_there(&self) -> bool {
        let Some(node) = self.seat.node() else { return false };
        let request = Request::Data { path: self.seat.path(node.name), watch: true };
        let (client, topic) = (self.client(), self.ear.topic(Ring::Own));
        let mut seen =
            if self.suspect { client.send(request, Some(topic)) } else { client.send_later(request, topic) };
        !heard(&mut seen).await.is_err_and(|failure| failure.is_no_node())
    }

    async fn until_turn(&mut self) -> Result<()> {
        if self.intent != Intent::Queue && !self.is_armed() && !self.arm().await? {
            return Ok(());
        }
        if !self.told {
            self.told = true;
            return Ok(());
        }
        self.ear.rung(self.ring()).await;
        (self.hinted, self.watched) = (true, None);
        Ok(())
    }
}

#[async_trait]
impl Session for ZookeeperSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        // Of renewals thousands are under way at once: they alone are not boxed, and small.
        if let (true, Prior::Held, Some(node)) = (self.leads, prior, self.seat.node())
            && let Some(answer) = self.renew(node, prior).await?
        {
            return Ok(answer);
        }
        Box::pin(self.ask(prior)).await
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        let head = self.first().await?;
        Ok(head.map(|head| self.seen(head.owner, head.token)))
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
        Box::pin(self.until_turn()).await
    }
}
