//! A contender's node at the store: made once, found again when nobody knows whether it was.

use std::fmt::Display;
use std::mem;
use std::sync::Arc;

use simba_core::{FencingToken, MutexName, Result};
use tokio::sync::oneshot;

use crate::client::{Client, Failure, Mode, Outcome, Reply, Request, Stat, heard};
use crate::error::{failed, no_chance, stranger};
use crate::latch::{self, Mark, Name};

/// A node that a session of ours has made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: Name,
    /// The session that made it and that it ends with.
    pub(crate) session: i64,
    pub(crate) token: FencingToken,
}

/// What we have at the store.
enum State {
    Nothing,
    /// A creation is under way.
    Creating {
        mark: Mark,
        outcome: oneshot::Receiver<Outcome>,
    },
    /// A creation may have been carried out.
    Doubt {
        mark: Mark,
    },
    /// As a [`Node`], which would take more room in here.
    Made {
        name: Name,
        session: i64,
        token: FencingToken,
    },
}

impl State {
    const fn made(name: Name, stat: Stat) -> Self {
        // Transactions are numbered from one: the sign is never used.
        Self::Made { name, session: stat.owner, token: FencingToken::new(stat.czxid.unsigned_abs()) }
    }
}

/// The place of one contender in the queue of one mutex. Dropping it gives the place up, in the background.
pub(crate) struct Seat {
    client: Arc<Client>,
    mutex: MutexName,
    state: State,
}

impl Seat {
    pub(crate) const fn new(client: Arc<Client>, mutex: MutexName) -> Self {
        Self { client, mutex, state: State::Nothing }
    }

    pub(crate) const fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// The node of the mutex.
    pub(crate) fn parent(&self) -> String {
        self.client.paths().mutex(&self.mutex)
    }

    pub(crate) fn path(&self, name: impl Display) -> String {
        format!("{}/{name}", self.parent())
    }

    /// Our node, if its session is alive.
    pub(crate) fn node(&self) -> Option<Node> {
        match self.state {
            State::Made { name, session, token } if session == self.client.session() => {
                Some(Node { name, session, token })
            }
            _ => None,
        }
    }

    /// The node is not there any more.
    pub(crate) fn gone(&mut self) {
        self.state = State::Nothing;
    }

    /// Asks for a node and, in the same breath, for the queue that it then stands in. Waits for neither.
    pub(crate) fn create(&mut self, id: &str) -> Result<oneshot::Receiver<Outcome>> {
        let mark = Mark::random().ok_or_else(no_chance)?;
        let create = Request::Create {
            path: self.path(mark),
            data: id.as_bytes().to_vec(),
            mode: Mode::EphemeralSequential,
            access: self.client.config().access,
        };
        let list = Request::Children { path: self.parent(), watch: false };
        let (outcome, listed) = self.client.send_both(create, list);
        self.state = State::Creating { mark, outcome };
        Ok(listed)
    }

    /// Finds out what became of a creation. `Ok(false)` if there is no node to create it under.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves the outcome to the next.
    pub(crate) async fn settle(&mut self) -> Result<bool> {
        if let State::Creating { mark, outcome } = &mut self.state {
            let (mark, outcome) = (*mark, heard(outcome).await);
            if !self.created(mark, outcome)? {
                return Ok(false);
            }
        }
        if let State::Doubt { mark } = self.state {
            self.state = self.find(mark).await?;
        }
        if self.node().is_none() {
            // Its session is over, and it with it.
            self.state = State::Nothing;
        }
        Ok(true)
    }

    /// Takes the outcome of a creation; false if there is no node to create it under.
    fn created(&mut self, mark: Mark, outcome: Outcome) -> Result<bool> {
        self.state = State::Nothing;
        match outcome {
            Ok(Reply::Created { path, stat }) => {
                let name = mark.find(latch::name_of(&path)).ok_or_else(stranger)?;
                self.state = State::made(name, stat);
                Ok(true)
            }
            Ok(_) => Err(stranger()),
            Err(failure) if failure.is_no_node() => Ok(false),
            Err(failure) => {
                if let Failure::Lost = failure {
                    self.state = State::Doubt { mark };
                }
                Err(failed("create a node", failure))
            }
        }
    }

    /// Looks for what a creation without an answer has left.
    async fn find(&self, mark: Mark) -> Result<State> {
        const DOING: &str = "look for a node of our own";
        // The server may lag behind the one that carried the creation out.
        let mut synced = self.client.send(Request::Sync { path: self.parent() }, None);
        let children = Request::Children { path: self.parent(), watch: false };
        let mut listed = self.client.send(children, None);
        let names = match (heard(&mut synced).await, heard(&mut listed).await) {
            (Ok(_), Ok(Reply::Children(names))) => names,
            (_, Err(failure)) if failure.is_no_node() => return Ok(State::Nothing),
            (Err(failure), _) | (_, Err(failure)) => return Err(failed(DOING, failure)),
            _ => return Err(stranger()),
        };
        let Some(name) = names.iter().find_map(|name| mark.find(name)) else { return Ok(State::Nothing) };
        match self.client.call(Request::Data { path: self.path(name), watch: false }).await {
            Ok(Reply::Data { stat, .. }) => Ok(State::made(name, stat)),
            Ok(_) => Err(stranger()),
            Err(failure) if failure.is_no_node() => Ok(State::Nothing),
            Err(failure) => Err(failed(DOING, failure)),
        }
    }

    /// Deletes the node. What is gone already is done.
    pub(crate) async fn delete(&mut self) -> Result<()> {
        let Some(node) = self.node() else {
            self.gone();
            return Ok(());
        };
        match self.client.call(Request::Delete { path: self.path(node.name) }).await {
            Err(failure) if !failure.is_no_node() => Err(failed("delete a node", failure)),
            _ => {
                self.gone();
                Ok(())
            }
        }
    }

    /// Gives the node up in the background.
    pub(crate) fn forget(&mut self) {
        let state = mem::replace(&mut self.state, State::Nothing);
        let sweep = |mark: Mark| self.client.sweep(self.parent(), mark.to_string());
        match state {
            State::Nothing => {}
            State::Made { name, session, .. } if session == self.client.session() => {
                self.client.forget(self.path(name));
            }
            // Gone with its session.
            State::Made { .. } => {}
            State::Doubt { mark } => sweep(mark),
            State::Creating { mark, mut outcome } => {
                // From here on the client undoes what it cannot tell us.
                outcome.close();
                match outcome.try_recv() {
                    Ok(Ok(Reply::Created { path, .. })) => self.client.forget(path),
                    Ok(Err(Failure::Lost)) => sweep(mark),
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
