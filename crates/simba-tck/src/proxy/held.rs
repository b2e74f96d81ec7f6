//! Requests that are kept back.

use tokio::sync::oneshot;

/// A request that a [`FaultProxy`](super::FaultProxy) keeps back, or the wish for one.
///
/// Dropping it discards the request and resets its connection, for TCP does not lose bytes otherwise. If no
/// request has come yet, none is kept back any more.
#[derive(Debug)]
pub struct Held {
    caught: Option<oneshot::Receiver<()>>,
    release: oneshot::Sender<()>,
}

impl Held {
    /// Waits until a request is kept back, or the proxy has stopped.
    ///
    /// # Cancel safety
    ///
    /// A dropped call loses nothing.
    pub async fn caught(&mut self) {
        if let Some(caught) = &mut self.caught {
            let _ = caught.await;
            self.caught = None;
        }
    }

    /// Sends the request on, even if its client has gone: the connection to the server is kept open until the
    /// server has sent something or closed it.
    ///
    /// If no request has come yet, none is kept back any more.
    pub fn deliver(self) {
        let _ = self.release.send(());
    }
}

/// The proxy's end of a [`Held`].
#[derive(Debug)]
pub(super) struct Trap {
    caught: oneshot::Sender<()>,
    released: oneshot::Receiver<()>,
}

impl Trap {
    /// Tells the other end that a request was caught; `None` if nobody wants it any more.
    pub(super) fn spring(self) -> Option<oneshot::Receiver<()>> {
        self.caught.send(()).ok().map(|()| self.released)
    }
}

pub(super) fn pair() -> (Held, Trap) {
    let (catch, caught) = oneshot::channel();
    let (release, released) = oneshot::channel();
    (Held { caught: Some(caught), release }, Trap { caught: catch, released })
}
