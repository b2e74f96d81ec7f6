//! One direction of a connection: what an [`Input`] reads is passed in order to its [`Output`].

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};

use fastrand::Rng;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep, sleep_until};

use super::conditions::{Direction, Watcher};

/// The maximum size of one read.
const CHUNK: usize = 16 * 1024;

/// How many chunks may be in flight, so that latency does not limit the throughput.
const IN_FLIGHT: usize = 64;

/// What a pipe transports.
pub(super) enum Piece {
    Chunk(Vec<u8>),
    /// The sender has closed its half.
    Close,
    /// The sender has reset the connection.
    Reset,
}

struct Delayed {
    piece: Piece,
    due: Option<Instant>,
}

/// The pipe ended with a reset, which ends the whole connection.
#[derive(Debug)]
pub(super) struct WasReset;

pub(super) struct Input<'a> {
    direction: Direction,
    watcher: Watcher,
    rng: Rng,
    reader: ReadHalf<'a>,
    queue: mpsc::Sender<Delayed>,
}

pub(super) struct Output<'a> {
    direction: Direction,
    watcher: Watcher,
    writer: WriteHalf<'a>,
    queue: mpsc::Receiver<Delayed>,
}

pub(super) fn pipe<'a>(
    direction: Direction,
    watcher: &Watcher,
    rng: Rng,
    (reader, writer): (ReadHalf<'a>, WriteHalf<'a>),
) -> (Input<'a>, Output<'a>) {
    let (sender, receiver) = mpsc::channel(IN_FLIGHT);
    let input = Input { direction, watcher: watcher.clone(), rng, reader, queue: sender };
    (input, Output { direction, watcher: watcher.clone(), writer, queue: receiver })
}

impl Input<'_> {
    pub(super) async fn read(&mut self) -> Piece {
        let mut chunk = Vec::with_capacity(CHUNK);
        match self.reader.read_buf(&mut chunk).await {
            Ok(0) => Piece::Close,
            Ok(_) => Piece::Chunk(chunk),
            Err(_) => Piece::Reset,
        }
    }

    /// Sends a piece once data flows in this direction.
    pub(super) async fn send(&mut self, piece: Piece) {
        self.watcher.flowing(self.direction).await;
        let latency = self.watcher.now().latency;
        let due = latency.map(|latency| sleep(latency.draw(&mut self.rng)).deadline());
        // Without an output the receiver has closed, and the data is lost.
        let _ = self.queue.send(Delayed { piece, due }).await;
    }
}

impl Output<'_> {
    /// Writes until the pipe ends or its receiver has closed. `broken` is for the whole connection; `written` is called
    /// after each chunk.
    pub(super) async fn run(
        mut self,
        broken: &AtomicBool,
        written: impl Fn() + Send,
    ) -> Result<(), WasReset> {
        while let Some(Delayed { piece, due }) = self.queue.recv().await {
            self.wait_until_due(due).await;
            match piece {
                Piece::Chunk(chunk) if self.write(&chunk).await.is_ok() => written(),
                Piece::Chunk(_) => {
                    broken.store(true, Ordering::Relaxed);
                    break;
                }
                // A failed write consumes the error, and the next read returns a clean end instead.
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

    async fn wait_until_due(&mut self, due: Option<Instant>) {
        if let Some(due) = due {
            tokio::select! {
                biased;
                () = self.watcher.until(|conditions| conditions.latency.is_none()) => {}
                () = sleep_until(due) => {}
            }
        }
        self.watcher.flowing(self.direction).await;
    }

    async fn write(&mut self, mut chunk: &[u8]) -> io::Result<()> {
        let direction = self.direction;
        while !chunk.is_empty() {
            self.watcher.flowing(direction).await;
            // A receiver that does not read blocks the write, and a stall may begin meanwhile.
            let written = tokio::select! {
                biased;
                () = self.watcher.until(|conditions| !conditions.flows(direction)) => continue,
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
