//! Reads the queue of a mutex.

use simba_core::{ContenderId, FencingToken, Result};
use simba_net::queue::Holder;
use tokio::sync::oneshot;

use crate::client::{Client, Names, Outcome, Reply, Request, Stat, recv};
use crate::error::{failed, unexpected_reply};

const DOING: &str = "read the queue of the mutex";

/// A node of the queue, usually the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) name: String,
    pub(crate) holder: Holder,
}

/// Returns the names of all nodes in the queue, or `None` if the mutex has no node.
pub(crate) async fn names(client: &Client, path: &str) -> Result<Option<Names>> {
    // The server may lag behind a state that another client has already seen.
    let mut synced = client.send(Request::Sync { path: path.to_owned() });
    let mut listed = send_list(client, path);
    match (recv(&mut synced).await, recv(&mut listed).await) {
        (Ok(_), listed) => children(listed),
        (Err(failure), _) if failure.is_no_node() => Ok(None),
        (Err(failure), _) => Err(failed(DOING, failure)),
    }
}

/// Sends a request for the names of all nodes in the queue.
pub(crate) fn send_list(client: &Client, path: &str) -> oneshot::Receiver<Outcome> {
    client.send(Request::Children { path: path.to_owned(), watch: false })
}

/// Returns the names out of the answer to a `Children` request, or `None` if the mutex has no node.
pub(crate) fn children(outcome: Outcome) -> Result<Option<Names>> {
    match outcome {
        Ok(Reply::Children(names)) => Ok(Some(names)),
        Ok(_) => Err(unexpected_reply()),
        Err(failure) if failure.is_no_node() => Ok(None),
        Err(failure) => Err(failed(DOING, failure)),
    }
}

/// Sends a request to read a node, and to watch it.
pub(crate) fn send_read(client: &Client, path: &str, name: &str, watch: bool) -> oneshot::Receiver<Outcome> {
    client.send(Request::Data { path: format!("{path}/{name}"), watch })
}

/// Returns the node out of the answer to [`send_read`], or `None` if it does not exist any more.
pub(crate) fn parse(name: &str, outcome: Outcome) -> Result<Option<Head>> {
    match outcome {
        Ok(Reply::Data { data, stat }) => Ok(Some(head_of(name, &data, stat))),
        Ok(_) => Err(unexpected_reply()),
        Err(failure) if failure.is_no_node() => Ok(None),
        Err(failure) => Err(failed(DOING, failure)),
    }
}

/// Reads a node. Returns `None` if it does not exist any more.
pub(crate) async fn read(client: &Client, path: &str, name: &str) -> Result<Option<Head>> {
    parse(name, recv(&mut send_read(client, path, name, false)).await)
}

/// Watches for the first node of an empty queue. Returns false if there is a node already.
pub(crate) async fn watch_empty(client: &Client, path: &str) -> Result<bool> {
    let path = path.to_owned();
    match client.call(Request::Children { path: path.clone(), watch: true }).await {
        Ok(Reply::Children(names)) => return Ok(names.is_empty()),
        Ok(_) => return Err(unexpected_reply()),
        Err(failure) if failure.is_no_node() => {}
        Err(failure) => return Err(failed(DOING, failure)),
    }
    match client.call(Request::Exists { path, watch: true }).await {
        Err(failure) if failure.is_no_node() => Ok(true),
        outcome => outcome.map(|_| false).map_err(|failure| failed(DOING, failure)),
    }
}

/// Converts a node. A node without the id of a contender holds the mutex as well; its name is used as the owner.
fn head_of(name: &str, data: &[u8], stat: Stat) -> Head {
    let id = std::str::from_utf8(data).ok().and_then(|id| ContenderId::foreign(id).ok());
    let owner = id.or_else(|| ContenderId::foreign(name).ok()).unwrap_or_else(ContenderId::generate);
    let token = FencingToken::new(stat.czxid.unsigned_abs());
    Head { name: name.to_owned(), holder: Holder { owner, token } }
}
