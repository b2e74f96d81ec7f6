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
    match container(client, path, access).await {
        Err(failure) if failure.is_no_node() => {}
        outcome => return outcome.map_err(|failure| failed(DOING, failure)),
    }
    match container(client, &client.paths().root(), access).await {
        Err(failure) if failure.is_no_node() => return Err(no_chroot(chroot)),
        outcome => outcome.map_err(|failure| failed(DOING, failure))?,
    }
    match container(client, path, access).await {
        // The server has deleted the parent in between; the caller tries again.
        Err(failure) if failure.is_no_node() => Ok(()),
        outcome => outcome.map_err(|failure| failed(DOING, failure)),
    }
}

async fn container(client: &Client, path: &str, access: Access) -> Result<(), Failure> {
    let request = |mode| Request::Create { path: path.to_owned(), data: Vec::new(), mode, access };
    let mut outcome = client.call(request(Mode::Container)).await;
    if let Err(Failure::Refused(Code::UNIMPLEMENTED)) = outcome {
        outcome = client.call(request(Mode::Persistent)).await;
    }
    match outcome {
        Ok(_) | Err(Failure::Refused(Code::NODE_EXISTS)) => Ok(()),
        Err(failure) => Err(failure),
    }
}
