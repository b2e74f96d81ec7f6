//! One connection: a pipe for the requests and one for the replies.

use std::convert::Infallible;
use std::future::pending;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use tokio::net::TcpStream;
use tokio::sync::{oneshot, watch};

use super::conditions::{Direction, Watcher};
use super::pipe::{Input, Piece, pipe};
use super::shared::Shared;
use crate::held::Released;

/// Accepts a client, or resets it.
pub(super) fn accept(client: TcpStream, shared: &Arc<Shared>, rng: &mut Rng) {
    let watcher = shared.watcher();
    let conditions = watcher.now();
    if conditions.refusing {
        reset(client);
        shared.count(|counts| counts.accepted += 1);
        return;
    }
    let open = OpenCount::new(shared);
    let connection = Connection {
        shared: Arc::clone(shared),
        watcher,
        rng: rng.fork(),
        loses_reply: AtomicBool::new(false),
        broken: AtomicBool::new(false),
        answer_due: watch::Sender::default(),
    };
    tokio::spawn(async move {
        connection.serve(client, conditions.cuts).await;
        // The sockets are closed before the connection stops counting.
        drop(open);
    });
}

/// Counts a connection while it is open.
struct OpenCount(Arc<Shared>);

impl OpenCount {
    fn new(shared: &Arc<Shared>) -> Self {
        shared.count(|counts| {
            counts.accepted += 1;
            counts.connections += 1;
        });
        Self(Arc::clone(shared))
    }
}

impl Drop for OpenCount {
    fn drop(&mut self) {
        self.0.count(|counts| counts.connections -= 1);
    }
}

struct Connection {
    shared: Arc<Shared>,
    watcher: Watcher,
    rng: Rng,
    /// The next reply is lost.
    loses_reply: AtomicBool,
    /// One of the ends accepts no more data.
    broken: AtomicBool,
    /// A held request was delivered, and the server has not answered it. Dropped once it has.
    answer_due: watch::Sender<Option<oneshot::Sender<()>>>,
}

impl Connection {
    /// Serves a client until the connection ends or is cut: `cuts` is the number of cuts before it.
    async fn serve(mut self, mut client: TcpStream, cuts: u64) {
        let mut watcher = self.watcher.clone();
        let mut cut = std::pin::pin!(watcher.until(|conditions| conditions.cuts != cuts));
        let connected = tokio::select! {
            biased;
            () = &mut cut => Err(io::ErrorKind::ConnectionReset.into()),
            connected = self.connect() => connected,
        };
        let Ok(mut server) = connected else { return reset(client) };
        let _ = client.set_nodelay(true);
        let _ = server.set_nodelay(true);
        let clean = tokio::select! {
            biased;
            () = &mut cut => false,
            clean = self.exchange(&mut client, &mut server) => clean,
        };
        if !clean {
            reset(client);
            reset(server);
        }
    }

    async fn connect(&mut self) -> io::Result<TcpStream> {
        self.watcher.flowing(Direction::Request).await;
        TcpStream::connect(&self.shared.upstream).await
    }

    /// Forwards both directions until both ends are done; `false` if one fails before.
    async fn exchange(&mut self, client: &mut TcpStream, server: &mut TcpStream) -> bool {
        let (client, server) = (client.split(), server.split());
        let (rng, watcher) = ((self.rng.fork(), self.rng.fork()), &self.watcher);
        let (requests, to_server) = pipe(Direction::Request, watcher, rng.0, (client.0, server.1));
        let (replies, to_client) = pipe(Direction::Reply, watcher, rng.1, (server.0, client.1));
        let reading = async {
            tokio::join!(self.take_requests(requests), self.take_replies(replies));
            pending::<Infallible>().await
        };
        let writing = async {
            tokio::try_join!(
                to_server.run(&self.broken, || self.request_arrived()),
                to_client.run(&self.broken, || {}),
            )
        };
        tokio::select! {
            biased;
            done = writing => done.is_ok() && !self.broken.load(Ordering::Relaxed),
            never = reading => match never {},
        }
    }

    async fn take_requests(&self, mut input: Input<'_>) {
        loop {
            match input.read().await {
                Piece::Chunk(chunk) => {
                    if self.shared.is_request(&chunk) {
                        self.shared.count(|counts| counts.requests += 1);
                        if !self.wait_while_held(&chunk).await {
                            return input.send(Piece::Reset).await;
                        }
                    }
                    input.send(Piece::Chunk(chunk)).await;
                }
                end => {
                    let _ = self.answer_due.subscribe().wait_for(Option::is_none).await;
                    return input.send(end).await;
                }
            }
        }
    }

    /// Waits while the received request is held; `false` if it is discarded.
    async fn wait_while_held(&self, chunk: &[u8]) -> bool {
        let Some(Released { released, answer }) = self.shared.hold(chunk) else { return true };
        let delivered = released.await.is_ok();
        self.answer_due.send_replace(delivered.then_some(answer));
        delivered
    }

    /// Selects this connection for a lost reply if one is requested. No reply is read between the write of the request
    /// and this call: both happen in one task, without an await.
    fn request_arrived(&self) {
        if !self.loses_reply.load(Ordering::Relaxed) {
            self.loses_reply.store(self.shared.loses_reply(), Ordering::Relaxed);
        }
    }

    async fn take_replies(&self, mut input: Input<'_>) {
        loop {
            let piece = input.read().await;
            self.answer_due.send_replace(None);
            match piece {
                Piece::Chunk(_) if self.loses_reply.load(Ordering::Relaxed) => {
                    return input.send(Piece::Reset).await;
                }
                Piece::Chunk(_) => input.send(piece).await,
                Piece::Close | Piece::Reset => return input.send(piece).await,
            }
        }
    }
}

/// Closes with a reset: with zero linger, remaining data is not sent.
fn reset(stream: TcpStream) {
    let _ = stream.set_zero_linger();
    drop(stream);
}
