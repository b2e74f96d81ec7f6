//! The task of one connection: writes requests, reads replies, detects silence, reads the server's clock.

use std::io::{self, Cursor};
use std::time::Duration;

use simba_core::spi::within;
use simba_core::{Clock, Error, Result};
use simba_net::{ClockReading, ServerClock};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};

use super::Pipeline;
use super::outbox::Probe;
use super::spread::Verdict;
use crate::connection::{Duplex, Transport};
use crate::error;
use crate::resp::{self, Reply};
use crate::supervisor::Context;

/// Number of consecutive checks without a reply after which a connection counts as broken.
const SILENT_CHECKS: u32 = 4;
/// How long a deferred command waits for others: a thousand renewals are then a few writes, not a thousand.
const BATCH_DELAY: Duration = Duration::from_millis(2);
/// Capacity that a buffer keeps after a burst.
const KEPT_CAPACITY: usize = 64 << 10;

/// The sending half of a connection.
struct Writer {
    stream: WriteHalf<Box<dyn Duplex>>,
    /// Bytes that are being written. The position is after those that are written.
    bytes: Cursor<Vec<u8>>,
}

impl Writer {
    /// Writes the bytes.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the bytes that were not written are kept for the next call.
    async fn write(&mut self) -> io::Result<()> {
        self.stream.write_all_buf(&mut self.bytes).await?;
        // TLS buffers the bytes until they are flushed.
        self.stream.flush().await?;
        self.bytes.set_position(0);
        self.bytes.get_mut().clear();
        self.bytes.get_mut().shrink_to(KEPT_CAPACITY);
        Ok(())
    }
}

impl Pipeline {
    /// Runs the connection until it ends or `server_changed` completes, and returns the cause. The connection counts as
    /// broken after a time of `silence` without a reply, while one is outstanding. If the handle was closed, sends what
    /// is queued first, for as long as a reply may take.
    ///
    /// # Cancel safety
    ///
    /// Dropping it closes the connection: callers must not write to a connection without a reader.
    pub(crate) async fn run(
        &self,
        Transport { stream, socket, encrypted }: Transport,
        context: &Context,
        silence: Duration,
        server_clock: &ServerClock,
        server_changed: impl Future<Output = Error>,
    ) -> Error {
        let _close = CloseOnDrop(self);
        let clock = &*context.clock;
        self.outbox().set_socket(socket, encrypted);
        let (mut reader, stream) = tokio::io::split(stream);
        let mut writer = Writer { stream, bytes: Cursor::default() };
        let cause = tokio::select! {
            biased;
            () = self.inner.closed.notified() => self.cause(),
            cause = self.read(&mut reader) => cause,
            cause = self.write(&mut writer, clock) => cause,
            cause = self.detect_silence(clock, silence) => cause,
            cause = self.read_clock(clock, context.settings.ping, server_clock) => cause,
            cause = server_changed => cause,
        };
        self.close_with(cause.clone());
        if self.outbox().is_closed() {
            within(clock, context.settings.timeout, self.finish(&mut reader, &mut writer)).await;
        }
        cause
    }

    async fn write(&self, writer: &mut Writer, clock: &dyn Clock) -> Error {
        loop {
            self.wait_for_output(clock).await;
            if let Err(cause) = self.write_queued(writer).await {
                return error::io(cause);
            }
        }
    }

    async fn write_queued(&self, writer: &mut Writer) -> io::Result<()> {
        {
            let mut outbox = self.outbox();
            outbox.flush_batch();
            std::mem::swap(writer.bytes.get_mut(), &mut outbox.bytes);
            outbox.writing = true;
        }
        writer.write().await?;
        self.outbox().writing = false;
        Ok(())
    }

    /// Writes what is queued, and waits until the server has closed the connection: if unread replies are left, the
    /// kernel resets it and discards what was written.
    async fn finish(&self, reader: &mut ReadHalf<Box<dyn Duplex>>, writer: &mut Writer) -> io::Result<()> {
        // What a dropped write has left comes first.
        writer.write().await?;
        self.write_queued(writer).await?;
        writer.stream.shutdown().await?;
        tokio::io::copy(reader, &mut tokio::io::sink()).await.map(drop)
    }

    /// Waits until there is something to write. Yields once, so that other ready tasks can add commands to the write.
    async fn wait_for_output(&self, clock: &dyn Clock) {
        tokio::select! {
            biased;
            () = self.inner.output_ready.notified() => tokio::task::yield_now().await,
            () = self.inner.deferred_ready.notified() => {
                let end = clock.now() + BATCH_DELAY;
                tokio::select! {
                    biased;
                    () = self.inner.output_ready.notified() => {}
                    () = clock.sleep_until(end) => {}
                }
            }
        }
    }

    async fn read(&self, reader: &mut ReadHalf<Box<dyn Duplex>>) -> Error {
        let (mut buffer, mut replies) = (Vec::with_capacity(KEPT_CAPACITY), Vec::new());
        loop {
            match reader.read_buf(&mut buffer).await {
                Ok(0) => return error::io(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(cause) => return error::io(cause),
            }
            if let Err(cause) =
                parse_all(&mut buffer, &mut replies).and_then(|()| self.dispatch(&mut replies))
            {
                return cause;
            }
        }
    }

    /// Passes every reply to the oldest request.
    fn dispatch(&self, replies: &mut Vec<Reply>) -> Result<()> {
        let mut outbox = self.outbox();
        replies.drain(..).try_for_each(|reply| outbox.dispatch(reply))
    }

    /// Reads the server's clock at every ping interval, and warns if it was set. This is also the keep-alive of an idle
    /// connection.
    async fn read_clock(&self, clock: &dyn Clock, every: Duration, server_clock: &ServerClock) -> Error {
        loop {
            let sent = clock.now();
            let time = match self.call(&["TIME"]).await {
                Ok(reply) => server_time(&reply),
                Err(cause) => return cause,
            };
            let reading = time.map(|server| ClockReading { server, sent, received: clock.now() });
            if let Some(step) = reading.and_then(|reading| server_clock.read(reading)) {
                tracing::warn!(
                    step_ms = %step.0,
                    "redis: the server's clock was set, or a server with another clock took over; leases end too early \
                     or too late by this step, until each is renewed. Fix: synchronize the clocks of all servers by \
                     slewing"
                );
            }
            let probe = self.outbox().probe;
            if probe == Probe::Answered(Verdict::Unknown) {
                self.probe_spread();
            }
            clock.sleep_until(clock.now() + every).await;
        }
    }

    /// Completes when calls are outstanding and no reply has come for `limit`.
    async fn detect_silence(&self, clock: &dyn Clock, limit: Duration) -> Error {
        let (mut answered, mut silent) = (0, 0);
        while silent < SILENT_CHECKS {
            clock.sleep_until(clock.now() + limit / SILENT_CHECKS).await;
            let outbox = self.outbox();
            let is_silent = outbox.outstanding > 0 && outbox.answered == answered;
            answered = outbox.answered;
            silent = if is_silent { silent + 1 } else { 0 };
        }
        error::silent(limit)
    }
}

/// Moves all complete replies from `buffer` to `replies`.
fn parse_all(buffer: &mut Vec<u8>, replies: &mut Vec<Reply>) -> Result<()> {
    let mut at = 0;
    while let Some((reply, length)) = resp::parse(&buffer[at..]).map_err(error::malformed)? {
        replies.push(reply);
        at += length;
    }
    buffer.drain(..at);
    if buffer.is_empty() {
        buffer.shrink_to(KEPT_CAPACITY);
    }
    Ok(())
}

/// Returns the time since 1970 in a reply to `TIME`.
fn server_time(reply: &Reply) -> Option<Duration> {
    let [seconds, micros] = reply.array()? else { return None };
    let number = |reply: &Reply| reply.text()?.parse().ok();
    Duration::from_secs(number(seconds)?).checked_add(Duration::from_micros(number(micros)?))
}

/// Closes the connection when dropped, unless it is closed: its handle or its runtime has ended.
pub(crate) struct CloseOnDrop<'a>(pub(crate) &'a Pipeline);

impl Drop for CloseOnDrop<'_> {
    fn drop(&mut self) {
        self.0.close_with(error::closed());
    }
}
