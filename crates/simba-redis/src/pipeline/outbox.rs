//! Requests of one connection: those that are not sent yet, and those without a reply.

use std::collections::VecDeque;
use std::sync::Arc;

use simba_core::{Error, ErrorKind, MutexName, Result};
use simba_net::Socket;
use tokio::sync::oneshot;

use super::ReplySender;
use super::batch::Batch;
use super::spread::{self, Spread, Verdict};
use crate::error;
use crate::resp::{self, Reply};
use crate::scripts::FastPath;

/// Maximum number of outstanding replies. Calls beyond it fail, since the server cannot keep up.
const MAX_OUTSTANDING: usize = 1 << 18;
/// Number of outstanding replies up to which calls are sent at once. With more, a batch costs less.
const MAX_UNBATCHED: usize = 3;

#[derive(Default)]
pub(super) struct Outbox {
    pub(super) bytes: Vec<u8>,
    /// Whether the writer is sending earlier bytes.
    pub(super) writing: bool,
    socket: Option<Socket>,
    /// Whether calls may be written in the caller's task, which is done under low load.
    writes_directly: bool,
    /// Calls that are sent as one command after `bytes`.
    batch: Batch,
    pub(super) probe: Probe,
    /// Shared by all connections of the handle.
    spread: Arc<Spread>,
    /// Callers that wait for the reply to the outstanding `WAIT`. Empty without one.
    replica_waiters: Vec<oneshot::Sender<Reply>>,
    expected: VecDeque<Expected>,
    /// Number of calls without a reply, including those in the batch.
    pub(super) outstanding: usize,
    /// Number of replies received.
    pub(super) answered: u64,
    pub(super) broken: Option<Error>,
}

/// State of the probe that shows whether one script reaches the keys of all mutexes. Calls are batched only if it does:
/// otherwise a script would acquire a mutex on the wrong server.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Probe {
    #[default]
    NotSent,
    /// The reply is outstanding, or was when the connection ended.
    Sent,
    Answered(Verdict),
}

/// The receivers of an outstanding reply.
pub(super) enum Expected {
    One(ReplySender),
    /// Callers whose calls were sent as one command.
    Batch(Vec<ReplySender>),
    /// The last command of a probe for keys that are spread over servers.
    SpreadProbe,
    /// `WAIT`, for all [`replica_waiters`](Outbox::replica_waiters).
    ReplicaWait,
}

impl Outbox {
    pub(super) fn new(spread: Arc<Spread>) -> Self {
        Self { spread, ..Self::default() }
    }

    pub(super) fn set_socket(&mut self, socket: Option<Socket>, encrypted: bool) {
        (self.socket, self.writes_directly) = (socket, !encrypted);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.bytes.is_empty() && self.batch.is_empty()
    }

    /// Returns whether so few replies are outstanding that a call is sent at once instead of batched.
    pub(super) fn is_quiet(&self) -> bool {
        self.is_empty() && self.outstanding <= MAX_UNBATCHED && !self.writing
    }

    /// Returns why no call can be added.
    pub(super) fn refusal(&self) -> Option<Error> {
        let overloaded = self.outstanding >= MAX_OUTSTANDING;
        self.broken.clone().or_else(|| overloaded.then(error::overloaded))
    }

    /// Adds the one command that `write` writes.
    pub(super) fn add(&mut self, expected: Expected, write: impl FnOnce(&mut Vec<u8>)) {
        self.flush_batch();
        write(&mut self.bytes);
        self.expected.push_back(expected);
        self.outstanding += 1;
    }

    /// Appends a call to the batch. Returns true if the batch became full and all bytes were sent.
    pub(super) fn append(
        &mut self,
        call: &FastPath<'_>,
        mutex: &MutexName,
        digest: &str,
        sender: ReplySender,
    ) -> bool {
        self.batch.add(call, mutex, digest, sender);
        self.outstanding += 1;
        if !self.batch.is_full() {
            return false;
        }
        self.flush_batch();
        !self.writing && self.send()
    }

    /// Waits for replicas with `command`, or with the outstanding `WAIT`. The caller has the replies to its writes and,
    /// since replies come in the order of the requests, an outstanding `WAIT` was sent after these writes.
    pub(super) fn wait_for_replicas(&mut self, command: &[&str], sender: oneshot::Sender<Reply>) {
        if self.replica_waiters.is_empty() {
            self.add(Expected::ReplicaWait, |out| resp::write_command(out, command));
        }
        self.replica_waiters.push(sender);
    }

    /// Appends the batch to the bytes, so that later commands come after it.
    pub(super) fn flush_batch(&mut self) {
        if !self.batch.is_empty() {
            self.expected.push_back(Expected::Batch(self.batch.write(&mut self.bytes)));
        }
    }

    /// Writes from the caller's task, which saves a task switch when few calls could share the write. Returns whether
    /// all bytes were sent. Errors are left to the connection's own task.
    pub(super) fn send(&mut self) -> bool {
        let socket = self.socket.as_ref().filter(|_| self.writes_directly);
        let sent = socket.map_or(0, |socket| socket.send(&self.bytes));
        self.bytes.drain(..sent);
        self.bytes.is_empty()
    }

    /// Passes a reply to the oldest request.
    pub(super) fn dispatch(&mut self, reply: Reply) -> Result<()> {
        self.answered += 1;
        match (self.expected.pop_front().ok_or_else(error::unexpected_reply)?, reply) {
            (Expected::One(sender), reply) => self.answer(sender, reply),
            (Expected::Batch(senders), Reply::Array(replies)) if replies.len() == senders.len() => {
                senders.into_iter().zip(replies).for_each(|(sender, reply)| self.answer(sender, reply));
            }
            (Expected::Batch(senders), Reply::Error(message)) => {
                let missing = message.starts_with("NOSCRIPT");
                // One call may be the cause of another error, so each is repeated alone.
                let reply = if missing { Reply::Error(message) } else { Reply::Nil };
                senders.into_iter().for_each(|sender| self.answer(sender, reply.clone()));
            }
            (Expected::Batch(_), _) => return Err(error::unexpected_reply()),
            (Expected::ReplicaWait, reply) => {
                self.answer(None, Reply::Nil);
                // Fails if the caller's future was dropped.
                self.replica_waiters.drain(..).for_each(|caller| drop(caller.send(reply.clone())));
            }
            (Expected::SpreadProbe, reply) => {
                self.answer(None, Reply::Nil);
                let verdict = spread::verdict(&reply);
                self.probe = Probe::Answered(verdict);
                self.spread.record(verdict);
            }
        }
        Ok(())
    }

    fn answer(&mut self, sender: ReplySender, reply: Reply) {
        self.outstanding = self.outstanding.saturating_sub(1);
        if let Some(sender) = sender {
            // Fails if the caller's future was dropped.
            let _ = sender.send(reply);
        }
    }

    /// Returns whether the handle was closed, so that the connection ends after everything is sent.
    pub(super) fn is_closed(&self) -> bool {
        self.broken.as_ref().is_some_and(|cause| cause.kind() == ErrorKind::Closed)
    }

    /// Refuses all calls from now on, and returns those without a reply.
    pub(super) fn close(&mut self, cause: Error) -> impl Sized + use<> {
        self.broken.get_or_insert(cause);
        let closed = self.is_closed();
        let resets = self.outstanding > 0 && !closed;
        // Otherwise the kernel could deliver an acquisition later, and the mutex would stay held without a holder.
        // A handle that is closed has released its mutexes, and the last releases must arrive, also the queued ones.
        self.socket.take().filter(|_| resets).into_iter().for_each(Socket::reset);
        if closed {
            self.flush_batch();
        } else {
            self.bytes = Vec::new();
        }
        self.outstanding = 0;
        let waiters = std::mem::take(&mut self.replica_waiters);
        (std::mem::take(&mut self.expected), std::mem::take(&mut self.batch), waiters)
    }
}
