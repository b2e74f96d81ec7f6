//! What the queue of a mutex looks like from outside.

use simba_core::{ContenderId, FencingToken, Result};
use tokio::sync::oneshot;

use crate::client::{Client, Names, Outcome, Reply, Request, Stat, Topic, heard};
use crate::error::{failed, stranger};

const DOING: &str = "read the queue of the mutex";

/// Whoever stands first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Head {
    pub(crate) name: String,
    pub(crate) owner: ContenderId,
    pub(crate) token: FencingToken,
}

/// The names of all who stand in the queue; nothing if the mutex has no node.
pub(crate) async fn names(client: &Client, path: &str) -> Result<Option<Names>> {
    // A server may lag behind what another client was told already.
    let mut synced = client.send(Request::Sync { path: path.to_owned() }, None);
    let mut listed = client.send(Request::Children { path: path.to_owned(), watch: false }, None);
    match (heard(&mut synced).await, heard(&mut listed).await) {
        (Ok(_), listed) => children(listed),
        (Err(failure), _) if failure.is_no_node() => Ok(None),
        (Err(failure), _) => Err(failed(DOING, failure)),
    }
}

/// A list of children out of the answer to one.
pub(crate) fn children(outcome: Outcome) -> Result<Option<Names>> {
    match outcome {
        Ok(Reply::Children(names)) => Ok(Some(names)),
        Ok(_) => Err(stranger()),
        Err(failure) if failure.is_no_node() => Ok(None),
        Err(failure) => Err(failed(DOING, failure)),
    }
}

/// Asks who stands there, and leaves a watch if there is somebody to hint.
pub(crate) fn ask(
    client: &Client,
    path: &str,
    name: &str,
    topic: Option<Topic>,
) -> oneshot::Receiver<Outcome> {
    client.send(Request::Data { path: format!("{path}/{name}"), watch: topic.is_some() }, topic)
}

/// Who stands there, by the answer; nothing if nobody does any more.
pub(crate) fn told(name: &str, outcome: Outcome) -> Result<Option<Head>> {
    match outcome {
        Ok(Reply::Data { data, stat }) => Ok(Some(of(name, &data, stat))),
        Ok(_) => Err(stranger()),
        Err(failure) if failure.is_no_node() => Ok(None),
        Err(failure) => Err(failed(DOING, failure)),
    }
}

/// Who stands there; nothing if nobody does any more.
pub(crate) async fn head(
    client: &Client,
    path: &str,
    name: &str,
    topic: Option<Topic>,
) -> Result<Option<Head>> {
    told(name, heard(&mut ask(client, path, name, topic)).await)
}

/// A node that names no contender goes by its own name: it keeps others out all the same.
fn of(name: &str, data: &[u8], stat: Stat) -> Head {
    let id = std::str::from_utf8(data).ok().and_then(|id| ContenderId::foreign(id).ok());
    let owner = id.or_else(|| ContenderId::foreign(name).ok()).unwrap_or_else(ContenderId::generate);
    Head { name: name.to_owned(), owner, token: FencingToken::new(stat.czxid.unsigned_abs()) }
}
