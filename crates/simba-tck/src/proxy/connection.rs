//! One connection: a lane for the requests and one for the replies.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};

use super::conditions::{Outlook, Way};
use super::lane::{Inlet, Piece, lane};
use super::shared::Shared;
use crate::held::Released;

/// Takes a client in, or sends it away.
pub(super) fn admit(client: TcpStream, shared: &Arc<Shared>, rng: &mut Rng) {
    let outlook = shared.outlook();
    let conditions = outlook.now();
    if conditions.refusing {
        reset(client);
        shared.count(|counts| counts.accepted += 1);
        return;
    }
    let open = Open::new(shared);
    let connection = Connection {
        shared: Arc::clone(shared),
        outlook,
        rng: rng.fork(),
        doomed: AtomicBool::new(false),
        broken: AtomicBool::new(false),
        answer_due: watch::Sender::default(),
    };
    tokio::spawn(async move {
        connection.serve(client, conditions.cuts).await;
        // Its sockets are closed before it stops counting.
        drop(open);
    });
}

/// Counts a connection while it is open.
struct Open(Arc<Shared>);

impl Open {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.count(|counts| {
            counts.accepted += 1;
            counts.connections += 1;
        });
        Self(Arc::clone(shared))
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.count(|counts| counts.connections -= 1);
    }
}

struct Connection {
    shared: Arc<Shared>,
    outlook: Outlook,
    rng: Rng,
    /// Its next reply is lost.
    doomed: AtomicBool,
    /// One of its ends takes no more.
    broken: AtomicBool,
    /// A held request was delivered, and the server has not answered it. Dropped once it has.
    answer_due: watch::Sender<Option<oneshot::Sender<()>>>,
}

impl Connection {
    /// Serves a client until the connection ends or is cut: `cuts` is how often that had happened before it.
    async fn serve(mut self, mut client: TcpStream, cuts: u64) {
        let mut outlook = self.outlook.clone();
        let mut cut = std::pin::pin!(outlook.until(|conditions| conditions.cuts != cuts));
        let connected = tokio::select! {
            biased;
            () = &mut cut => Err(io::ErrorKind::ConnectionReset.into()),
            connected = self.connect() => connected,
        };
        let Ok(mut server) = connected else { return reset(client) };
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let orderly = tokio::select! {
            biased;
            () = &mut cut => false,
            orderly = self.exchange(&mut client, &mut server) => orderly,
        };
        if !orderly {
            reset(client);
            reset(server);
        }
    }

    async fn connect(&mut self) -> io::Result<TcpStream> {
        self.outlook.flowing(Way::Request).await;
        TcpStream::connect(&self.shared.upstream).await
    }

    /// Carries both ways until both ends are done; `false` if one is gone before.
    async fn exchange(&mut self, client: &mut TcpStream, server: &mut TcpStream) -> bool {
        let (client, server) = (client.split(), server.split());
        let (rng, outlook) = ((self.rng.fork(), self.rng.fork()), &self.outlook);
        let (requests, to_server) = lane(Way::Request, outlook, rng.0, (client.0, server.1));
        let (replies, to_client) = lane(Way::Reply, outlook, rng.1, (server.0, client.1));
        let intake = async {
            tokio::join!(self.take_requests(requests), self.take_replies(replies));
            pending::<Infallible>().await
        };
        let outflow = async {
            tokio::try_join!(
                to_server.run(&self.broken, || self.request_arrived()),
                to_client.run(&self.broken, || {}),
            )
        };
        tokio::select! {
            biased;
            done = outflow => done.is_ok() && !self.broken.load(Ordering::Relaxed),
            never = intake => match never {},
        }
    }

    async fn take_requests(&self, mut inlet: Inlet<'_>) {
        loop {
            match inlet.read().await {
                Piece::Chunk(chunk) => {
                    if self.shared.is_request(&chunk) {
                        self.shared.count(|counts| counts.requests += 1);
                        if !self.let_go(&chunk).await {
                            return inlet.send(Piece::Reset).await;
                        }
                    }
                    inlet.send(Piece::Chunk(chunk)).await;
                }
                end => {
                    let _ = self.answer_due.subscribe().wait_for(Option::is_none).await;
                    return inlet.send(end).await;
                }
            }
        }
    }

    /// Waits while the request that has just come is held; `false` if it is discarded.
    async fn let_go(&self, chunk: &[u8]) -> bool {
        let Some(Released { released, answer }) = self.shared.hold(chunk) else { return true };
        let delivered = released.await.is_ok();
        self.answer_due.send_replace(delivered.then_some(answer));
        delivered
    }

    /// Chooses this connection for a lost reply if one is wanted. No reply is read between the write of the
    /// request and this: both happen in one task, without an await.
    fn request_arrived(&self) {
        if !self.doomed.load(Ordering::Relaxed) {
            self.doomed.store(self.shared.loses_reply(), Ordering::Relaxed);
        }
    }

    async fn take_replies(&self, mut inlet: Inlet<'_>) {
        loop {
            let piece = inlet.read().await;
            self.answer_due.send_replace(None);
            match piece {
                Piece::Chunk(_) if self.doomed.load(Ordering::Relaxed) => {
                    return inlet.send(Piece::Reset).await;
                }
                Piece::Chunk(_) => inlet.send(piece).await,
                Piece::Close | Piece::Reset => return inlet.send(piece).await,
            }
        }
    }
}

/// Closes with a reset: without lingering, nothing that is left is sent.
fn reset(stream: TcpStream) {
    let _ = stream.set_zero_linger();
    drop(stream);
}
