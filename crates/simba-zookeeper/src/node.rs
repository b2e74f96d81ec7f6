//! A contender's node at the store: made once, found again when nobody knows whether it was.

use std::mem;
use std::sync::Arc;

use simba_core::{FencingToken, Result};
use tokio::sync::oneshot;

use crate::client::{Access, Client, Failure, Mode, Outcome, Reply, Request, Stat, heard};
use crate::error::{failed, stranger};
use crate::latch;

/// A node that a session of ours has made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: String,
    /// The session that made it and that it ends with.
    pub(crate) session: i64,
    pub(crate) token: FencingToken,
}

impl Node {
    fn new(name: &str, stat: Stat) -> Self {
        Self {
            name: name.to_owned(),
            session: stat.owner,
            // Transactions are numbered from one: the sign is never used.
            token: FencingToken::new(stat.czxid.unsigned_abs()),
        }
    }
}

/// What we have at the store.
enum State {
    Nothing,
    /// A creation is under way.
    Creating {
        prefix: String,
        outcome: oneshot::Receiver<Outcome>,
    },
    /// A creation may have been carried out.
    Doubt {
        prefix: String,
    },
    Made(Node),
}

/// The place of one contender in the queue of one mutex. Dropping it gives the place up, in the background.
pub(crate) struct Seat {
    client: Arc<Client>,
    /// The node of the mutex.
    parent: Arc<str>,
    state: State,
}

impl Seat {
    pub(crate) const fn new(client: Arc<Client>, parent: Arc<str>) -> Self {
        Self { client, parent, state: State::Nothing }
    }

    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}/{name}", self.parent)
    }

    /// Our node, if its session is alive.
    pub(crate) fn node(&self) -> Option<&Node> {
        match &self.state {
            State::Made(node) if node.session == self.client.session() => Some(node),
            _ => None,
        }
    }

    /// The node is not there any more.
    pub(crate) fn gone(&mut self) {
        self.state = State::Nothing;
    }

    /// Asks for a node, without waiting for the answer.
    pub(crate) fn create(&mut self, id: &str, access: Access) -> Result<()> {
        let prefix = latch::prefix().ok_or_else(stranger)?;
        let request = Request::Create {
            path: self.path(&prefix),
            data: id.as_bytes().to_vec(),
            mode: Mode::EphemeralSequential,
            access,
        };
        let outcome = self.client.send(request, None);
        self.state = State::Creating { prefix, outcome };
        Ok(())
    }

    /// Finds out what became of a creation. `Ok(false)` if there is no node to create it under.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves the outcome to the next.
    pub(crate) async fn settle(&mut self) -> Result<bool> {
        if let State::Creating { prefix, outcome } = &mut self.state {
            let outcome = heard(outcome).await;
            let prefix = mem::take(prefix);
            if !self.created(prefix, outcome)? {
                return Ok(false);
            }
        }
        if let State::Doubt { prefix } = &self.state {
            let found = self.find(&prefix.clone()).await?;
            self.state = found.map_or(State::Nothing, State::Made);
        }
        if self.node().is_none() {
            // Its session is over, and it with it.
            self.state = State::Nothing;
        }
        Ok(true)
    }

    /// Takes the outcome of a creation; false if there is no node to create it under.
    fn created(&mut self, prefix: String, outcome: Outcome) -> Result<bool> {
        self.state = State::Nothing;
        match outcome {
            Ok(Reply::Created { path, stat }) => {
                self.state = State::Made(Node::new(latch::name_of(&path), stat));
                Ok(true)
            }
            Ok(_) => Err(stranger()),
            Err(failure) if failure.is_no_node() => Ok(false),
            Err(failure) => {
                if let Failure::Lost = failure {
                    self.state = State::Doubt { prefix };
                }
                Err(failed("create a node", failure))
            }
        }
    }

    /// Looks for what a creation without an answer has left.
    async fn find(&self, prefix: &str) -> Result<Option<Node>> {
        const DOING: &str = "look for a node of our own";
        // The server may lag behind the one that carried the creation out.
        let mut synced = self.client.send(Request::Sync { path: self.parent.to_string() }, None);
        let children = Request::Children { path: self.parent.to_string(), watch: false };
        let mut listed = self.client.send(children, None);
        let names = match (heard(&mut synced).await, heard(&mut listed).await) {
            (Ok(_), Ok(Reply::Children(names))) => names,
            (_, Err(failure)) if failure.is_no_node() => return Ok(None),
            (Err(failure), _) | (_, Err(failure)) => return Err(failed(DOING, failure)),
            _ => return Err(stranger()),
        };
        let Some(name) = names.iter().find(|name| name.starts_with(prefix)) else { return Ok(None) };
        match self.client.call(Request::Data { path: self.path(name), watch: false }).await {
            Ok(Reply::Data { stat, .. }) => Ok(Some(Node::new(name, stat))),
            Ok(_) => Err(stranger()),
            Err(failure) if failure.is_no_node() => Ok(None),
            Err(failure) => Err(failed(DOING, failure)),
        }
    }

    /// Deletes the node. What is gone already is done.
    pub(crate) async fn delete(&mut self) -> Result<()> {
        let Some(node) = self.node() else {
            self.gone();
            return Ok(());
        };
        match self.client.call(Request::Delete { path: self.path(&node.name) }).await {
            Err(failure) if !failure.is_no_node() => Err(failed("delete a node", failure)),
            _ => {
                self.gone();
                Ok(())
            }
        }
    }

    /// Gives the node up in the background.
    pub(crate) fn forget(&mut self) {
        let sweep = |prefix| self.client.sweep(self.parent.to_string(), prefix);
        match mem::replace(&mut self.state, State::Nothing) {
            State::Nothing => {}
            State::Made(node) if node.session == self.client.session() => {
                self.client.forget(self.path(&node.name));
            }
            // Gone with its session.
            State::Made(_) => {}
            State::Doubt { prefix } => sweep(prefix),
            State::Creating { prefix, mut outcome } => {
                // From here on the client undoes what it cannot tell us.
                outcome.close();
                match outcome.try_recv() {
                    Ok(Ok(Reply::Created { path, .. })) => self.client.forget(path),
                    Ok(Err(Failure::Lost)) => sweep(prefix),
                    _ => {}
                }
            }
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.forget();
    }
}
