//! Reads the queue of a mutex.

use simba_core::{FencingToken, Result};
use simba_net::queue::{Holder, MAX_ATTEMPTS, unstable_queue};
use tokio::sync::oneshot;

use crate::client::{Client, Names, Outcome, Reply, Request, recv};
use crate::error::{found, unexpected_reply};
use crate::latch;

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
    let synced = found(DOING, recv(&mut synced).await)?;
    if synced.is_none() { Ok(None) } else { children(recv(&mut listed).await) }
}

/// Sends a request for the names of all nodes in the queue.
pub(crate) fn send_list(client: &Client, path: &str) -> oneshot::Receiver<Outcome> {
    client.send(Request::Children { path: path.to_owned(), watch: false })
}

/// Returns the names out of the answer to a `Children` request, or `None` if the mutex has no node.
pub(crate) fn children(outcome: Outcome) -> Result<Option<Names>> {
    match found(DOING, outcome)? {
        Some(Reply::Children(names)) => Ok(Some(names)),
        Some(_) => Err(unexpected_reply()),
        None => Ok(None),
    }
}

/// Sends a request to read a node, and to watch it.
pub(crate) fn send_read(client: &Client, path: &str, name: &str, watch: bool) -> oneshot::Receiver<Outcome> {
    client.send(Request::Data { path: format!("{path}/{name}"), watch })
}

/// Returns the node out of the answer to [`send_read`], or `None` if it does not exist any more.
pub(crate) fn parse(name: &str, outcome: Outcome) -> Result<Option<Head>> {
    match found(DOING, outcome)? {
        Some(Reply::Data { data, stat }) => {
            // A node without the id of a contender holds the mutex as well.
            let holder = Holder::of(&data, name.as_bytes(), FencingToken::new(stat.czxid.unsigned_abs()));
            Ok(Some(Head { name: name.to_owned(), holder }))
        }
        Some(_) => Err(unexpected_reply()),
        None => Ok(None),
    }
}

/// Reads a node. Returns `None` if it does not exist any more.
async fn read(client: &Client, path: &str, name: &str) -> Result<Option<Head>> {
    parse(name, recv(&mut send_read(client, path, name, false)).await)
}

/// Returns the first node, which holds the mutex, and the number of nodes. Does not read a `known` first node again,
/// since its contender never changes.
///
/// # Errors
///
/// The first node was deleted during every attempt to read it.
pub(crate) async fn first(client: &Client, path: &str, known: Option<Head>) -> Result<(Option<Head>, usize)> {
    for _ in 0..MAX_ATTEMPTS {
        let names = names(client, path).await?.unwrap_or_default();
        let Some(first) = latch::first(&names) else { return Ok((None, 0)) };
        let head = match &known {
            Some(known) if known.name == first => Some(known.clone()),
            _ => read(client, path, first).await?,
        };
        if head.is_some() {
            return Ok((head, names.len()));
        }
    }
    Err(unstable_queue())
}

/// Watches for the first node of an empty queue. Returns false if there is a node already.
pub(crate) async fn watch_empty(client: &Client, path: &str) -> Result<bool> {
    let path = path.to_owned();
    let listed = client.call(Request::Children { path: path.clone(), watch: true }).await;
    if let Some(names) = children(listed)? {
        return Ok(names.is_empty());
    }
    let created = client.call(Request::Exists { path, watch: true }).await;
    Ok(found(DOING, created)?.is_none())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::Stat;

    #[test]
    fn an_owner_without_an_id_is_identified_by_its_node() {
        let owner = |name: &str, data: &[u8]| {
            let read = || Ok(Reply::Data { data: data.to_vec(), stat: Stat { czxid: 7, owner: 0 } });
            let [head, again] = [(); 2].map(|()| parse(name, read()).unwrap().unwrap());
            assert_eq!(head, again, "the same at every read");
            assert_eq!((&*head.name, head.holder.token.get()), (name, 7));
            head.holder.owner.as_str().to_owned()
        };
        assert_eq!(owner("_c_x-latch-1", b"me"), "me");
        assert_eq!(owner("_c_x-latch-1", b"\xff"), "_c_x-latch-1");
        let long = "x".repeat(600);
        assert!(long.starts_with(&owner(&long, b"")));
    }
}
