//! Requests that are kept back.

use tokio::sync::oneshot;

/// A request that a [`FaultProxy`](crate::FaultProxy) or a [`Switch`](crate::Switch) keeps back, or the wish
/// for one.
///
/// Dropping it discards the request; a proxy also resets its connection, for TCP does not lose bytes
/// otherwise. If no request has come yet, none is kept back any more.
#[derive(Debug)]
pub struct Held {
    caught: Option<oneshot::Receiver<()>>,
    release: oneshot::Sender<()>,
}

impl Held {
    /// The wish for a request, and the trap that a [`Weather`](crate::Weather) sets for it.
    #[must_use]
    pub fn pair() -> (Self, Trap) {
        let (catch, caught) = oneshot::channel();
        let (release, released) = oneshot::channel();
        (Self { caught: Some(caught), release }, Trap { caught: catch, released })
    }

    /// Waits until a request is kept back, or none can be any more.
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

    /// Sends the request on, even if its client has gone: a proxy keeps the connection to the server open
    /// until the server has sent something or closed it.
    ///
    /// If no request has come yet, none is kept back any more.
    pub fn deliver(self) {
        let _ = self.release.send(());
    }
}

/// The network's end of a [`Held`]: keeps back the one request that springs it.
#[derive(Debug)]
pub struct Trap {
    caught: oneshot::Sender<()>,
    released: oneshot::Receiver<()>,
}

impl Trap {
    /// Tells the other end that a request was caught; `None` if nobody wants it any more.
    pub(crate) fn spring(self) -> Option<oneshot::Receiver<()>> {
        self.caught.send(()).ok().map(|()| self.released)
    }
}
