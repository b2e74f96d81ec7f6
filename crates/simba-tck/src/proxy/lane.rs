//! One direction of a connection: what an [`Inlet`] reads travels in order to its [`Outlet`].

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::conditions::{Outlook, Way};

/// How much is read at once.
const CHUNK: usize = 16 * 1024;

/// How many chunks are on their way at once, so that latency does not throttle.
const IN_FLIGHT: usize = 64;

/// What goes along a lane.
pub(super) enum Piece {
    Chunk(Vec<u8>),
    /// The sender will send no more.
    Close,
    /// The sender is gone.
    Reset,
}

struct Parcel {
    piece: Piece,
    due: Option<Instant>,
}

/// A lane ended with a reset, which ends the whole connection.
#[derive(Debug)]
pub(super) struct WasReset;

pub(super) struct Inlet<'a> {
    way: Way,
    outlook: Outlook,
    rng: Rng,
    reader: ReadHalf<'a>,
    queue: mpsc::Sender<Parcel>,
}

pub(super) struct Outlet<'a> {
    way: Way,
    outlook: Outlook,
    writer: WriteHalf<'a>,
    queue: mpsc::Receiver<Parcel>,
}

pub(super) fn lane<'a>(
    way: Way,
    outlook: &Outlook,
    rng: Rng,
    (reader, writer): (ReadHalf<'a>, WriteHalf<'a>),
) -> (Inlet<'a>, Outlet<'a>) {
    let (sender, receiver) = mpsc::channel(IN_FLIGHT);
    let inlet = Inlet { way, outlook: outlook.clone(), rng, reader, queue: sender };
    (inlet, Outlet { way, outlook: outlook.clone(), writer, queue: receiver })
}

impl Inlet<'_> {
    pub(super) async fn read(&mut self) -> Piece {
        let mut chunk = Vec::with_capacity(CHUNK);
        match self.reader.read_buf(&mut chunk).await {
            Ok(0) => Piece::Close,
            Ok(_) => Piece::Chunk(chunk),
            Err(_) => Piece::Reset,
        }
    }

    /// Sends a piece on its way, once there is one.
    pub(super) async fn send(&mut self, piece: Piece) {
        self.outlook.flowing(self.way).await;
        let latency = self.outlook.now().latency;
        let due = latency.map(|latency| sleep(latency.draw(&mut self.rng)).deadline());
        // Without an outlet the receiver is gone, and what is sent to it is lost.
        let _ = self.queue.send(Parcel { piece, due }).await;
    }
}

impl Outlet<'_> {
    /// Writes until the lane ends or its receiver is gone. `broken` is for the whole connection; `written` is
    /// called after each chunk.
    pub(super) async fn run(
        mut self,
        broken: &AtomicBool,
        written: impl Fn() + Send,
    ) -> Result<(), WasReset> {
        while let Some(Parcel { piece, due }) = self.queue.recv().await {
            self.arrival(due).await;
            match piece {
                Piece::Chunk(chunk) if self.write(&chunk).await.is_ok() => written(),
                Piece::Chunk(_) => {
                    broken.store(true, Ordering::Relaxed);
                    break;
                }
                // A failed write takes the error away, and the next read sees an orderly end instead.
                Piece::Close if broken.load(Ordering::Relaxed) => return Err(WasReset),
                Piece::Close => {
                    let _ = self.writer.shutdown().await;
                    break;
                }
                Piece::Reset => return Err(WasReset),
            }
        }
        Ok(())
    }

    async fn arrival(&mut self, due: Option<Instant>) {
        if let Some(due) = due {
            tokio::select! {
                biased;
                () = self.outlook.until(|conditions| conditions.latency.is_none()) => {}
                () = sleep_until(due) => {}
            }
        }
        self.outlook.flowing(self.way).await;
    }

    async fn write(&mut self, mut chunk: &[u8]) -> io::Result<()> {
        let way = self.way;
        while !chunk.is_empty() {
            self.outlook.flowing(way).await;
            // A receiver that does not read blocks the write, and a stall may come meanwhile.
            let written = tokio::select! {
                biased;
                () = self.outlook.until(|conditions| !conditions.flows(way)) => continue,
                written = self.writer.write(chunk) => written?,
            };
            if written == 0 {
                return Err(io::ErrorKind::WriteZero.into());
            }
            chunk = chunk.get(written..).unwrap_or_default();
        }
        Ok(())
    }
}
