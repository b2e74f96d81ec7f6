//! The nodes above a contender's: containers, which the server sweeps once they are empty.

use simba_core::Result;

use crate::client::{Access, Client, Code, Failure, Mode, Request};
use crate::error::{failed, no_chroot};

const DOING: &str = "create the node of the mutex";

/// Makes the node of a mutex and the one above it. Whoever comes first makes them.
///
/// # Errors
///
/// [`ErrorKind::Config`](simba_core::ErrorKind::Config) if the chroot is not there.
pub(crate) async fn make(client: &Client, path: &str) -> Result<()> {
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
        // Swept in between; the caller comes again.
        Err(failure) if failure.is_no_node() => Ok(()),
        outcome => outcome.map_err(|failure| failed(DOING, failure)),
    }
}

async fn container(client: &Client, path: &str, access: Access) -> Result<(), Failure> {
    let create = |mode| Request::Create { path: path.to_owned(), data: Vec::new(), mode, access };
    let mut outcome = client.call(create(Mode::Container)).await;
    if let Err(Failure::Refused(Code::Unimplemented)) = outcome {
        outcome = client.call(create(Mode::Persistent)).await;
    }
    match outcome {
        Ok(_) | Err(Failure::Refused(Code::NodeExists)) => Ok(()),
        Err(failure) => Err(failure),
    }
}
