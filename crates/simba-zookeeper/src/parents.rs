//! The nodes above a contender's node: containers, which the server deletes once they are empty.

use simba_core::Result;

use crate::client::{Access, Client, Code, Failure, Mode, Request};
use crate::error::{failed, no_chroot};

const DOING: &str = "create the node of the mutex";

/// Creates the node of a mutex and the node above it, unless they exist.
///
/// # Errors
///
/// [`ErrorKind::Config`](simba_core::ErrorKind::Config) if the chroot does not exist.
pub(crate) async fn create(client: &Client, path: &str) -> Result<()> {
    let (chroot, access) = (&*client.config().chroot, client.config().access);
    if container(client, path, access).await? {
        return Ok(());
    }
    if !container(client, &client.paths().root(), access).await? {
        return Err(no_chroot(chroot));
    }
    // If the server has deleted the parent in between, the caller tries again.
    container(client, path, access).await.map(drop)
}

/// Creates a node unless it exists. Returns false if its parent does not exist.
async fn container(client: &Client, path: &str, access: Access) -> Result<bool> {
    let request = |mode| Request::Create { path: path.to_owned(), data: Vec::new(), mode, access };
    let mut outcome = client.call(request(Mode::Container)).await;
    if let Err(Failure::Refused(Code::UNIMPLEMENTED)) = outcome {
        outcome = client.call(request(Mode::Persistent)).await;
    }
    match outcome {
        Ok(_) | Err(Failure::Refused(Code::NODE_EXISTS)) => Ok(true),
        Err(failure) if failure.is_no_node() => Ok(false),
        Err(failure) => Err(failed(DOING, failure)),
    }
}
