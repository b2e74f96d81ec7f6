//! A contender's entry in the queue: its node is created once, and looked up if the outcome of the creation is unknown.

use std::fmt::Display;
use std::mem;
use std::sync::Arc;

use simba_core::{FencingToken, MutexName, Result};
use tokio::sync::oneshot;

use crate::client::{Client, Failure, Mode, Outcome, Reply, Request, Stat, recv};
use crate::error::{failed, found, no_randomness, unexpected_reply};
use crate::latch::{self, NamePrefix, NodeName};
use crate::queue;

/// A node that this contender has created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Node {
    pub(crate) name: NodeName,
    /// The session that the ephemeral node belongs to.
    pub(crate) session: i64,
    pub(crate) token: FencingToken,
}

/// The state of the entry at the store.
enum State {
    Absent,
    /// A creation is in flight.
    Creating {
        prefix: NamePrefix,
        outcome: oneshot::Receiver<Outcome>,
    },
    /// The server may have executed a creation.
    Unknown {
        prefix: NamePrefix,
    },
    /// The fields of a [`Node`], which would take more memory as a struct in this enum.
    Created {
        name: NodeName,
        session: i64,
        token: FencingToken,
    },
}

impl State {
    const fn created(name: NodeName, stat: Stat) -> Self {
        // Transactions are numbered from one, so they are never negative.
        Self::Created { name, session: stat.owner, token: FencingToken::new(stat.czxid.unsigned_abs()) }
    }
}

/// The entry of one contender in the queue of one mutex.
pub(crate) struct Entry {
    client: Arc<Client>,
    mutex: MutexName,
    state: State,
}

impl Entry {
    pub(crate) const fn new(client: Arc<Client>, mutex: MutexName) -> Self {
        Self { client, mutex, state: State::Absent }
    }

    pub(crate) const fn client(&self) -> &Arc<Client> {
        &self.client
    }

    /// Returns the path of the mutex's node.
    pub(crate) fn parent(&self) -> String {
        self.client.paths().mutex(&self.mutex)
    }

    pub(crate) fn path(&self, name: impl Display) -> String {
        format!("{}/{name}", self.parent())
    }

    /// Returns the contender's node if its session is the current one.
    pub(crate) fn node(&self) -> Option<Node> {
        match self.state {
            State::Created { name, session, token } if session == self.client.session() => {
                Some(Node { name, session, token })
            }
            _ => None,
        }
    }

    /// Records that the node does not exist any more.
    pub(crate) fn clear(&mut self) {
        self.state = State::Absent;
    }

    /// Sends requests to create a node and to list the queue after that. Waits for neither.
    pub(crate) fn create(&mut self, id: &str) -> Result<oneshot::Receiver<Outcome>> {
        let prefix = NamePrefix::random().ok_or_else(no_randomness)?;
        let create = Request::Create {
            path: self.path(prefix),
            data: id.as_bytes().to_vec(),
            mode: Mode::EphemeralSequential,
            access: self.client.config().access,
        };
        let list = Request::Children { path: self.parent(), watch: false };
        self.state = State::Creating { prefix, outcome: self.client.send(create) };
        Ok(self.client.send(list))
    }

    /// Waits for the outcome of a creation, and looks the node up if it is unknown. Returns `Ok(false)` if the mutex
    /// has no node.
    ///
    /// # Cancel safety
    ///
    /// A dropped call leaves the outcome to the next call.
    pub(crate) async fn resolve(&mut self) -> Result<bool> {
        if let State::Creating { prefix, outcome } = &mut self.state {
            let (prefix, outcome) = (*prefix, recv(outcome).await);
            if !self.record(prefix, outcome)? {
                return Ok(false);
            }
        }
        if let State::Unknown { prefix } = self.state {
            self.state = self.find(prefix).await?;
        }
        if self.node().is_none() {
            // It was deleted with its session.
            self.state = State::Absent;
        }
        Ok(true)
    }

    /// Records the outcome of a creation. Returns false if the mutex has no node.
    fn record(&mut self, prefix: NamePrefix, outcome: Outcome) -> Result<bool> {
        self.state = State::Absent;
        match outcome {
            Ok(Reply::Created { path, stat }) => {
                let name = prefix.parse(latch::name_of(&path)).ok_or_else(unexpected_reply)?;
                self.state = State::created(name, stat);
                Ok(true)
            }
            Ok(_) => Err(unexpected_reply()),
            Err(failure) if failure.is_no_node() => Ok(false),
            Err(failure) => {
                if let Failure::Lost = failure {
                    self.state = State::Unknown { prefix };
                }
                Err(failed("create a node", failure))
            }
        }
    }

    /// Looks up the node of a creation without an answer.
    async fn find(&self, prefix: NamePrefix) -> Result<State> {
        let names = queue::names(&self.client, &self.parent()).await?.unwrap_or_default();
        let Some(name) = names.iter().find_map(|name| prefix.parse(name)) else { return Ok(State::Absent) };
        let read = self.client.call(Request::Data { path: self.path(name), watch: false }).await;
        match found("look up the own node", read)? {
            Some(Reply::Data { stat, .. }) => Ok(State::created(name, stat)),
            Some(_) => Err(unexpected_reply()),
            None => Ok(State::Absent),
        }
    }

    /// Deletes the node. Succeeds if it does not exist.
    pub(crate) async fn delete(&mut self) -> Result<()> {
        if let Some(node) = self.node() {
            let deleted = self.client.call(Request::Delete { path: self.path(node.name) }).await;
            found("delete a node", deleted)?;
        }
        self.clear();
        Ok(())
    }

    /// Deletes the node in the background.
    pub(crate) fn delete_in_background(&mut self) {
        let state = mem::replace(&mut self.state, State::Absent);
        let sweep = |prefix: NamePrefix| self.client.sweep(self.parent(), prefix.to_string());
        match state {
            State::Absent => {}
            State::Created { name, session, .. } if session == self.client.session() => {
                self.client.delete_in_background(self.path(name));
            }
            // Deleted with its session.
            State::Created { .. } => {}
            State::Unknown { prefix } => sweep(prefix),
            State::Creating { prefix, mut outcome } => {
                // From here on the client itself deletes a node whose creation it cannot report.
                outcome.close();
                match outcome.try_recv() {
                    Ok(Ok(Reply::Created { path, .. })) => self.client.delete_in_background(path),
                    Ok(Err(Failure::Lost)) => sweep(prefix),
                    _ => {}
                }
            }
        }
    }
}
