//! One connection for the commands of all sessions: replies come in the order of the requests.
//!
//! Every request leaves a slot behind, and every reply takes the oldest slot, whether its caller still waits or
//! not. So a call that is dropped never leaves its reply to the next.

use std::collections::VecDeque;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Error, MutexName, Result};
use simba_net::{ClockReading, ServerClock, Socket};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, ReadHalf, WriteHalf};
use tokio::sync::{Notify, oneshot};

use crate::batch::Batch;
use crate::error;
use crate::node::GOOD;
use crate::resp::{self, Reply};
use crate::scripts::{Invocation, Script, Scripts, Usual};
use crate::spread_probe::{self, Spread, Verdict};
use crate::stream::Stream;

/// How many replies may be outstanding; beyond that the server does not keep up, and who asks is told.
const MOST_WAITING: usize = 1 << 18;
/// How many replies may be outstanding where nobody waits for company: with more, a shared write costs less.
const QUIET: usize = 3;
/// How many looks without a reply make a silent connection a broken one.
const SILENT_LOOKS: u32 = 4;
/// How long what has time may wait for company: a thousand renewals are then a few writes, not a thousand.
const LEISURE: Duration = Duration::from_millis(2);
/// What a buffer may keep of a burst.
const KEPT: usize = 64 << 10;

/// The way into one connection. Clones are cheap.
#[derive(Clone)]
pub(crate) struct Pipe {
    inner: Arc<Inner>,
}

struct Inner {
    outbox: Mutex<Outbox>,
    filled: Notify,
    /// Rung for what has time.
    begun: Notify,
    /// Shared by all connections of the handle.
    spread: Arc<Spread>,
}

/// Whether a command goes out at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Haste {
    Now,
    /// Within a moment, together with others.
    Leisure,
}

#[derive(Default)]
struct Outbox {
    bytes: Vec<u8>,
    /// Bytes of before are on their way.
    writing: bool,
    /// Where whoever asks while little is under way may write himself.
    socket: Option<Socket>,
    /// What goes out as one command behind these bytes.
    batch: Batch,
    /// Whether one script reaches the keys of all mutexes; `None` until a probe has shown it. Calls share a script
    /// only then: elsewhere it would take a mutex on the wrong server.
    one_server: Option<bool>,
    /// The reply to a probe is outstanding, or was when the connection ended.
    probing: bool,
    /// The last probe showed nothing: it is sent again.
    probe_again: bool,
    expected: VecDeque<Expected>,
    replica_waits: ReplicaWaits,
    /// How many wait for a reply, of those in the batch too.
    waiting: usize,
    /// How many replies came so far.
    answered: u64,
    /// A reply came that somebody waited for.
    served: bool,
    broken: Option<Error>,
}

/// Callers that wait until replicas have their writes. The server answers nothing else on the connection while it waits,
/// so one `WAIT` is under way at a time, and the next is for all callers that came meanwhile. One for each would keep
/// renewals waiting for their sum.
#[derive(Default)]
struct ReplicaWaits {
    command: Vec<u8>,
    under_way: bool,
    next: Vec<Slot>,
}

/// Who waits for a reply; `None` if nobody cares.
pub(crate) type Slot = Option<oneshot::Sender<Reply>>;

/// What a reply is for.
enum Expected {
    One(Slot),
    /// One command of many.
    Many(Vec<Slot>),
    /// A `WAIT` for replicas, for the writes of several callers.
    ReplicaWait(Vec<Slot>),
    /// The end of a probe for keys that are spread over servers.
    SpreadProbe,
}

impl Pipe {
    pub(crate) fn new(spread: Arc<Spread>) -> Self {
        let (outbox, filled, begun) = (Mutex::default(), Notify::new(), Notify::new());
        Self { inner: Arc::new(Inner { outbox, filled, begun, spread }) }
    }

    /// Sends a probe for keys that are spread over servers. Its reply decides whether calls may share a script.
    pub(crate) fn probe_spread(&self) {
        let Ok(mut outbox) = self.open() else { return };
        let probe = spread_probe::commands();
        for write in &probe.writes {
            outbox.add(None, |out| out.extend_from_slice(write));
        }
        outbox.expect(Expected::SpreadProbe, |out| out.extend_from_slice(&probe.read));
        outbox.probing = true;
        drop(outbox);
        self.inner.filled.notify_one();
    }

    /// Sends each call by itself, without a probe.
    pub(crate) fn skip_probe(&self) {
        self.inner.outbox().one_server = Some(false);
    }

    /// Returns whether a probe has no reply, also after the connection has ended.
    pub(crate) fn is_probing(&self) -> bool {
        self.inner.outbox().probing
    }

    /// Sends what `write` writes, which is one command, and waits for its reply.
    ///
    /// # Cancel safety
    ///
    /// The command is sent all the same; its reply goes to nobody.
    pub(crate) async fn call(&self, write: impl FnOnce(&mut Vec<u8>)) -> Result<Reply> {
        let (slot, reply) = oneshot::channel();
        self.push(self.open()?, Some(slot), Haste::Now, write);
        reply.await.map_err(|_| self.cause())
    }

    /// The same for a call of a script, by itself or as one of many. `Nil` if it was one of many, and is to be made
    /// by itself: it was not the usual case, or they were refused together.
    ///
    /// # Cancel safety
    ///
    /// As [`call`](Self::call); but what is to be made by itself need not have been made.
    pub(crate) async fn invoke(&self, call: &Invocation<'_>, scripts: &Scripts) -> Result<Reply> {
        let (slot, reply) = oneshot::channel();
        self.hand_in(call, scripts, Some(slot))?;
        reply.await.map_err(|_| self.cause())
    }

    fn hand_in(&self, call: &Invocation<'_>, scripts: &Scripts, slot: Slot) -> Result<()> {
        let mut outbox = self.open()?;
        let alone = outbox.one_server != Some(true) || call.haste == Haste::Now && outbox.is_quiet();
        let (Some(usual), Some(digest), false) = (&call.usual, scripts.digest(Script::Many), alone) else {
            self.push(outbox, slot, call.haste, |out| call.write(out, scripts));
            return Ok(());
        };
        let first = outbox.is_empty();
        let sent = outbox.join(usual, call.mutex, digest, slot);
        drop(outbox);
        if !sent {
            self.ring(call.haste, first);
        }
        Ok(())
    }

    /// Waits until replicas have what was written before. `command` is a `WAIT`, the same in every call.
    ///
    /// # Cancel safety
    ///
    /// As [`call`](Self::call).
    pub(crate) async fn wait_for_replicas(&self, command: &[u8]) -> Result<Reply> {
        let (slot, reply) = oneshot::channel();
        {
            let mut outbox = self.open()?;
            command.clone_into(&mut outbox.replica_waits.command);
            outbox.replica_waits.next.push(Some(slot));
            outbox.send_replica_wait();
        }
        self.inner.filled.notify_one();
        reply.await.map_err(|_| self.cause())
    }

    /// Sends commands that belong together, and waits for the reply to the last one.
    pub(crate) async fn call_after(&self, first: &[u8], write: impl FnOnce(&mut Vec<u8>)) -> Result<Reply> {
        let (slot, reply) = oneshot::channel();
        {
            let mut outbox = self.open()?;
            outbox.add(None, |out| out.extend_from_slice(first));
            outbox.add(Some(slot), write);
        }
        self.inner.filled.notify_one();
        reply.await.map_err(|_| self.cause())
    }

    /// Sends a command whose reply nobody waits for.
    pub(crate) fn send(&self, write: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        self.push(self.open()?, None, Haste::Now, write);
        Ok(())
    }

    fn push(
        &self,
        mut outbox: MutexGuard<'_, Outbox>,
        slot: Slot,
        haste: Haste,
        write: impl FnOnce(&mut Vec<u8>),
    ) {
        let (first, quiet) = (outbox.is_empty(), outbox.is_quiet());
        outbox.add(slot, write);
        let sent = quiet && haste == Haste::Now && outbox.send();
        drop(outbox);
        if !sent {
            self.ring(haste, first);
        }
    }

    fn ring(&self, haste: Haste, first: bool) {
        match haste {
            Haste::Now => self.inner.filled.notify_one(),
            Haste::Leisure if first => self.inner.begun.notify_one(),
            // Whoever was first has rung.
            Haste::Leisure => {}
        }
    }

    fn open(&self) -> Result<MutexGuard<'_, Outbox>> {
        let outbox = self.inner.outbox();
        match &outbox.broken {
            Some(cause) => Err(cause.clone()),
            None if outbox.waiting >= MOST_WAITING => Err(error::overrun()),
            None => Ok(outbox),
        }
    }

    /// Ends the connection: everyone who waits gets this cause, and so does everyone who comes.
    pub(crate) fn break_off(&self, cause: Error) {
        let mut outbox = self.inner.outbox();
        if outbox.broken.is_none() {
            outbox.broken = Some(cause);
        }
        (outbox.bytes, outbox.socket, outbox.waiting) = (Vec::new(), None, 0);
        let waiting = (
            std::mem::take(&mut outbox.expected),
            std::mem::take(&mut outbox.batch),
            std::mem::take(&mut outbox.replica_waits),
        );
        drop(outbox);
        drop(waiting);
        self.inner.filled.notify_one();
    }

    pub(crate) fn is_broken(&self) -> bool {
        self.inner.outbox().broken.is_some()
    }

    /// Returns whether any call was answered on it, other than those that every connection begins with.
    pub(crate) fn has_answered(&self) -> bool {
        self.inner.outbox().served
    }

    fn cause(&self) -> Error {
        self.inner.outbox().broken.clone().unwrap_or_else(error::gone)
    }

    /// Carries bytes until the connection ends, and says why it did.
    pub(crate) async fn drive(
        &self,
        stream: Stream,
        clock: &dyn Clock,
        limits: Limits,
        server_clock: &ServerClock,
    ) -> Error {
        // However it ends: what nobody reads from, nobody may write to.
        let _end = End(self);
        self.inner.outbox().socket = stream.socket();
        let (reader, writer) = tokio::io::split(stream);
        let cause = tokio::select! {
            biased;
            cause = self.read(reader) => cause,
            cause = self.write(writer, clock) => cause,
            cause = self.watch(clock, limits) => cause,
            cause = self.read_clock(clock, limits.ping, server_clock) => cause,
        };
        self.break_off(cause.clone());
        cause
    }

    async fn write(&self, mut writer: WriteHalf<Stream>, clock: &dyn Clock) -> Error {
        let mut bytes = Vec::new();
        loop {
            self.due(clock).await;
            {
                let mut outbox = self.inner.outbox();
                if let Some(cause) = &outbox.broken {
                    return cause.clone();
                }
                outbox.seal();
                std::mem::swap(&mut bytes, &mut outbox.bytes);
                outbox.writing = true;
            }
            // Encryption keeps back what is not flushed.
            if let Err(cause) = writer.write_all(&bytes).await.and(writer.flush().await) {
                return error::io(cause);
            }
            self.inner.outbox().writing = false;
            bytes.clear();
            bytes.shrink_to(KEPT);
        }
    }

    /// Waits until there is something to write, and until who is ready too has got its command into the same write.
    async fn due(&self, clock: &dyn Clock) {
        tokio::select! {
            biased;
            () = self.inner.filled.notified() => tokio::task::yield_now().await,
            () = self.inner.begun.notified() => {
                let end = clock.now() + LEISURE;
                tokio::select! {
                    biased;
                    () = self.inner.filled.notified() => {}
                    () = clock.sleep_until(end) => {}
                }
            }
        }
    }

    async fn read(&self, mut reader: ReadHalf<Stream>) -> Error {
        let mut buffer = Vec::with_capacity(KEPT);
        let mut replies = Vec::new();
        loop {
            match reader.read_buf(&mut buffer).await {
                Ok(0) => return error::io(io::ErrorKind::UnexpectedEof.into()),
                Ok(_) => {}
                Err(cause) => return error::io(cause),
            }
            let mut at = 0;
            loop {
                match resp::parse(&buffer[at..]) {
                    Ok(Some((reply, length))) => {
                        replies.push(reply);
                        at += length;
                    }
                    Ok(None) => break,
                    Err(cause) => return error::malformed(cause),
                }
            }
            buffer.drain(..at);
            if buffer.is_empty() {
                buffer.shrink_to(KEPT);
            }
            if let Err(cause) = self.hand_out(&mut replies) {
                return cause;
            }
        }
    }

    /// Gives every reply to the oldest request.
    fn hand_out(&self, replies: &mut Vec<Reply>) -> Result<()> {
        let mut outbox = self.inner.outbox();
        for reply in replies.drain(..) {
            let Some(expected) = outbox.expected.pop_front() else { return Err(error::unasked()) };
            outbox.answered += 1;
            match (expected, reply) {
                (Expected::One(slot), reply) => outbox.answer(slot, reply),
                (Expected::Many(slots), Reply::Array(replies)) if slots.len() == replies.len() => {
                    slots.into_iter().zip(replies).for_each(|(slot, reply)| outbox.answer(slot, reply));
                }
                (Expected::Many(slots), Reply::Error(words)) => {
                    let reply = Outbox::alone(words);
                    slots.into_iter().for_each(|slot| outbox.answer(slot, reply.clone()));
                }
                (Expected::ReplicaWait(slots), reply) => {
                    slots.into_iter().for_each(|slot| outbox.answer(slot, reply.clone()));
                    outbox.replica_waits.under_way = false;
                    outbox.send_replica_wait();
                    self.inner.filled.notify_one();
                }
                (Expected::SpreadProbe, reply) => {
                    outbox.answer(None, Reply::Nil);
                    let verdict = spread_probe::verdict(&reply);
                    outbox.probing = false;
                    outbox.probe_again = verdict == Verdict::Unknown;
                    outbox.one_server =
                        (verdict != Verdict::Unknown).then_some(verdict == Verdict::OneServer);
                    self.record_spread(verdict, &reply);
                }
                (Expected::Many(_), _) => return Err(error::unasked()),
            }
        }
        Ok(())
    }

    fn record_spread(&self, verdict: Verdict, reply: &Reply) {
        if self.inner.spread.record(verdict) {
            tracing::warn!(
                ?reply,
                "redis: keys of different mutexes are on different servers, most likely behind a proxy; each call is \
                 sent by itself. Fix: connect to the server itself, or with redis+cluster:// to a cluster"
            );
        }
    }

    /// Reads the server's clock at every ping interval, and warns if it was set. This is also what keeps an idle
    /// connection from being silent.
    async fn read_clock(&self, clock: &dyn Clock, every: Duration, server_clock: &ServerClock) -> Error {
        // Not at once: it would count as a call that was answered.
        clock.sleep_until(clock.now() + every.min(GOOD)).await;
        loop {
            let sent = clock.now();
            match self.call(|out| out.extend_from_slice(b"*1\r\n$4\r\nTIME\r\n")).await {
                Ok(reply) => {
                    let received = clock.now();
                    let reading = server_time(&reply).map(|server| ClockReading { server, sent, received });
                    if let Some(step) = reading.and_then(|reading| server_clock.read(reading)) {
                        tracing::warn!(
                            step_ms = %step.0,
                            "redis: the server's clock was set, or a server with another clock took over; leases end \
                             that much too early or too late, until each is renewed. Fix: keep the clocks of all \
                             servers in step by slewing"
                        );
                    }
                }
                Err(cause) => return cause,
            }
            let again = std::mem::take(&mut self.inner.outbox().probe_again);
            if again {
                self.probe_spread();
            }
            clock.sleep_until(clock.now() + every).await;
        }
    }

    /// Ends the connection if the server does not answer.
    async fn watch(&self, clock: &dyn Clock, limits: Limits) -> Error {
        let look = limits.silence / SILENT_LOOKS;
        let (mut answered, mut silent) = (0, 0);
        loop {
            clock.sleep_until(clock.now() + look).await;
            let (now_answered, waiting) = {
                let outbox = self.inner.outbox();
                (outbox.answered, outbox.waiting > 0)
            };
            let progress = now_answered != answered;
            answered = now_answered;
            silent = if waiting && !progress { silent + 1 } else { 0 };
            if silent >= SILENT_LOOKS {
                return error::silent(limits.silence);
            }
        }
    }
}

impl Outbox {
    fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.batch.is_empty()
    }

    /// Whether so little is under way that nobody is worth waiting for.
    fn is_quiet(&self) -> bool {
        self.is_empty() && self.waiting <= QUIET && !self.writing
    }

    /// Adds a command.
    fn add(&mut self, slot: Slot, write: impl FnOnce(&mut Vec<u8>)) {
        self.expect(Expected::One(slot), write);
    }

    fn expect(&mut self, expected: Expected, write: impl FnOnce(&mut Vec<u8>)) {
        self.seal();
        write(&mut self.bytes);
        self.expected.push_back(expected);
        self.waiting += 1;
    }

    /// Adds a call to those that go out as one; whether it was the last of them, and they went out.
    fn join(&mut self, usual: &Usual<'_>, mutex: &MutexName, digest: &str, slot: Slot) -> bool {
        self.batch.add(usual, mutex, digest, slot);
        self.waiting += 1;
        if !self.batch.is_full() {
            return false;
        }
        self.seal();
        !self.writing && self.send()
    }

    /// Sends a `WAIT` for all who want one, unless one is under way.
    fn send_replica_wait(&mut self) {
        if self.replica_waits.under_way || self.replica_waits.next.is_empty() {
            return;
        }
        self.seal();
        self.bytes.extend_from_slice(&self.replica_waits.command);
        let slots = std::mem::take(&mut self.replica_waits.next);
        self.waiting += slots.len();
        self.expected.push_back(Expected::ReplicaWait(slots));
        self.replica_waits.under_way = true;
    }

    /// What follows comes behind the batch.
    fn seal(&mut self) {
        if !self.batch.is_empty() {
            self.expected.push_back(Expected::Many(self.batch.write(&mut self.bytes)));
        }
    }

    /// What each of many is told when all of them were refused.
    fn alone(words: String) -> Reply {
        match words.starts_with("NOSCRIPT") {
            true => Reply::Error(words),
            // It may be for one of them alone: each is to ask by itself.
            false => Reply::Nil,
        }
    }

    fn answer(&mut self, slot: Slot, reply: Reply) {
        self.waiting = self.waiting.saturating_sub(1);
        if let Some(slot) = slot {
            self.served = true;
            // Who does not wait any more has dropped its end.
            let _ = slot.send(reply);
        }
    }

    /// Writes in the task of who asks, which saves a hop to another where hardly anybody could share the write;
    /// whether all of it went out. What is wrong with the connection, its own task finds out.
    fn send(&mut self) -> bool {
        let sent = self.socket.as_ref().map_or(0, |socket| socket.send(&self.bytes));
        self.bytes.drain(..sent);
        self.bytes.is_empty()
    }
}

/// Returns the time since 1970 in a reply to `TIME`.
pub(crate) fn server_time(reply: &Reply) -> Option<Duration> {
    let [seconds, micros] = reply.array()? else { return None };
    let number = |reply: &Reply| reply.text()?.parse().ok();
    Duration::from_secs(number(seconds)?).checked_add(Duration::from_micros(number(micros)?))
}

impl Inner {
    fn outbox(&self) -> MutexGuard<'_, Outbox> {
        self.outbox.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Ends the connection, unless it has ended.
struct End<'a>(&'a Pipe);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.break_off(error::gone());
    }
}

/// How long a connection may be silent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// With a reply outstanding, before it counts as broken.
    pub(crate) silence: Duration,
    /// Between two readings of the server's clock, which are signs of life as well.
    pub(crate) ping: Duration,
}
