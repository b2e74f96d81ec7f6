//! Requests that are held back.

use tokio::sync::oneshot;

/// A request that a [`FaultProxy`](crate::FaultProxy) or a [`Switch`](crate::Switch) holds back, or will hold back.
///
/// Dropping it discards the request; a proxy also resets its connection, because TCP does not lose bytes otherwise. If
/// no request has come yet, none is held back any more.
#[derive(Debug)]
pub struct Held {
    caught: Option<oneshot::Receiver<()>>,
    release: oneshot::Sender<()>,
    answered: oneshot::Receiver<()>,
}

impl Held {
    /// Returns both ends: for the test, and for a [`Weather`](crate::Weather) that holds the request back.
    #[must_use]
    pub fn pair() -> (Self, Trap) {
        let (catch, caught) = oneshot::channel();
        let (release, released) = oneshot::channel();
        let (answer, answered) = oneshot::channel();
        let trap = Trap { caught: catch, held: Released { released, answer } };
        (Self { caught: Some(caught), release, answered }, trap)
    }

    /// Waits until a request is held back, or none can be any more.
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

    /// Sends the request on, even if its client has disconnected: a proxy keeps the connection to the server open until
    /// the server has sent something or closed it.
    ///
    /// If no request has come yet, none is held back any more.
    pub fn deliver(self) {
        let _ = self.release.send(());
    }

    /// Sends the request on like [`deliver`](Self::deliver), and waits until the server has answered it or the
    /// connection has ended.
    ///
    /// # Cancel safety
    ///
    /// A dropped call may have sent the request on.
    pub async fn deliver_and_wait(self) {
        let _ = self.release.send(());
        let _ = self.answered.await;
    }
}

/// The network's end of a [`Held`]: holds back one request.
#[derive(Debug)]
pub struct Trap {
    caught: oneshot::Sender<()>,
    held: Released,
}

/// Decides about a request that is held back.
#[derive(Debug)]
pub(crate) struct Released {
    /// Receives when the request is to be sent on. Closed without a value if the request is to be discarded.
    pub(crate) released: oneshot::Receiver<()>,
    /// Dropped when the request was answered.
    pub(crate) answer: oneshot::Sender<()>,
}

impl Trap {
    /// Notifies the other end that a request was caught; `None` if the other end was dropped.
    pub(crate) fn trigger(self) -> Option<Released> {
        self.caught.send(()).ok().map(|()| self.held)
    }
}
