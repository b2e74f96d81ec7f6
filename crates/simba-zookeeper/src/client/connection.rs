//! One open connection: sends requests and pings, matches replies, notifies watches.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Clock, Moment};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, oneshot};

use super::failure::Failure;
use super::handshake::{Session, Transport};
use super::outbox::{Call, Completion, Outbox, Outcome};
use super::proof::{LeaderContact, SessionProof};
use super::protocol::message::{self, EVENT, Header, PING};
use super::protocol::{Code, Malformed, Reader, Reply, Request, Writer};
use super::{Command, Shared};

/// Requests are numbered from here. The login may have used smaller numbers.
pub(super) const FIRST_XID: i32 = 16;

/// The part of a session that outlives its connections.
pub(super) struct Context {
    pub(super) outbox: Outbox,
    pub(super) inbox: mpsc::UnboundedReceiver<Command>,
    pub(super) shared: Arc<Shared>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) closing: Option<oneshot::Sender<()>>,
    /// The client was dropped, or it was closed during a handshake: no further command is expected.
    pub(super) client_dropped: bool,
}

impl Context {
    /// Waits for the next command, and takes all commands that are queued.
    ///
    /// # Cancel safety
    ///
    /// A dropped call takes no command.
    pub(super) async fn receive(&mut self) {
        match self.inbox.recv().await {
            Some(command) => self.take(command),
            None => self.client_dropped = true,
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.take(command);
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Send(call) => self.outbox.calls.push_back(call),
            Command::Close(to) => self.closing = Some(to),
        }
    }

    /// Fails the calls and checks that wait to be sent, and keeps the background calls.
    pub(super) fn fail(&mut self, failure: &Failure) {
        while let Ok(command) = self.inbox.try_recv() {
            self.take(command);
        }
        self.outbox.fail(failure);
    }

    pub(super) const fn is_ending(&self) -> bool {
        self.closing.is_some() || self.client_dropped
    }
}

/// The reason for which a connection ended.
#[derive(Debug)]
pub(super) enum End {
    Broken(String),
    Expired,
    Closed,
}

/// A request that was sent and is not answered yet.
pub(super) struct InFlight {
    pub(super) xid: i32,
    pub(super) sent: Moment,
    pub(super) call: Call,
}

/// A connection with a granted session.
pub(super) struct Connection {
    transport: Transport,
    out: Writer,
    flushed: bool,
    in_flight: VecDeque<InFlight>,
    /// The time at which the unanswered ping was sent.
    ping: Option<Moment>,
    xid: i32,
    closing: bool,
    session: i64,
    timeout: Duration,
    contact: LeaderContact,
    began: Moment,
    /// The time at which the last message arrived.
    pub(super) last_received: Moment,
}

impl Connection {
    /// Creates a connection on which the requests `in_flight` were sent during the handshake.
    pub(super) fn new(
        transport: Transport,
        in_flight: VecDeque<InFlight>,
        session: i64,
        timeout: Duration,
        now: Moment,
    ) -> Self {
        Self {
            contact: LeaderContact::new(transport.requested_at),
            transport,
            out: Writer::default(),
            flushed: true,
            ping: None,
            xid: in_flight.back().map_or(FIRST_XID, |request| request.xid),
            in_flight,
            closing: false,
            session,
            timeout,
            began: now,
            last_received: now,
        }
    }

    /// Runs until the connection or the session ends.
    pub(super) async fn run(&mut self, ctx: &mut Context, session: &mut Session) -> End {
        let clock = Arc::clone(&ctx.clock);
        // A ping in every twelfth of the timeout: see `LeaderContact`.
        let (interval, silence_limit) = (self.timeout / 12, self.timeout / 3);
        let mut tick = clock.sleep_until(clock.now() + interval);
        // The read that brought the answer to the handshake may have brought others.
        if let Some(end) = self.on_read(Ok(true), ctx, session) {
            return end;
        }
        loop {
            self.send(ctx);
            let has_output = !self.out.bytes().is_empty() || !self.flushed;
            tokio::select! {
                biased;
                read = self.transport.frames.fill(&mut self.transport.reader) => {
                    if let Some(end) = self.on_read(read, ctx, session) {
                        return end;
                    }
                }
                written = write(&mut self.transport.writer, self.out.bytes()), if has_output => match written {
                    Ok(count) => {
                        self.out.sent(count);
                        self.flushed = count == 0;
                    }
                    Err(error) => return End::Broken(error.to_string()),
                },
                () = ctx.receive(), if !ctx.is_ending() => {}
                () = &mut tick => {
                    tick = clock.sleep_until(clock.now() + interval);
                    if self.oldest_wait(clock.now()) >= silence_limit {
                        return End::Broken(format!("the server was silent for {silence_limit:?}"));
                    }
                    self.heartbeat(clock.now(), &ctx.shared);
                }
            }
        }
    }

    /// Returns how long the oldest unanswered request has waited since the session was granted.
    fn oldest_wait(&self, now: Moment) -> Duration {
        let oldest = self.in_flight.front().map(|request| request.sent).into_iter().chain(self.ping).min();
        oldest.map_or(Duration::ZERO, |sent| now - sent.max(self.began))
    }

    fn heartbeat(&mut self, now: Moment, shared: &Shared) {
        if self.ping.is_none() && !self.closing {
            message::ping(&mut self.out);
            self.ping = Some(now);
        }
        self.check_liveness(now, shared);
    }

    /// Proves the session by a quorum call while it has waiters. A waiter whose turn comes then needs one read only.
    fn check_liveness(&mut self, now: Moment, shared: &Shared) {
        let until = shared.proofs.until(self.session).unwrap_or(Moment::ZERO);
        let fresh = until.saturating_since(now) >= self.timeout / 2;
        let is_sent = |request: &InFlight| matches!(request.call.completion, Completion::Ignore);
        if fresh || self.closing || !shared.has_waiters() || self.in_flight.iter().any(is_sent) {
            return;
        }
        // The root exists while a contender waits below it.
        let request = Request::Check { paths: vec![shared.root.clone()] };
        self.write(Call { request, completion: Completion::Ignore }, now);
    }

    // ===== out =====

    /// Moves the waiting calls to the output buffer.
    fn send(&mut self, ctx: &mut Context) {
        while let Some(call) = ctx.outbox.next_call() {
            self.write(call, ctx.clock.now());
        }
        if ctx.is_ending() && !self.closing {
            self.closing = true;
            self.write(Call { request: Request::Close, completion: Completion::Ignore }, ctx.clock.now());
        }
    }

    fn write(&mut self, call: Call, now: Moment) {
        let xid = self.next_xid();
        call.request.write(xid, &mut self.out);
        self.in_flight.push_back(InFlight { xid, sent: now, call });
    }

    fn next_xid(&mut self) -> i32 {
        self.xid = self.xid.checked_add(1).unwrap_or(FIRST_XID);
        self.xid
    }

    // ===== in =====

    /// Handles the result of a read. Returns the reason if the connection has ended.
    fn on_read(&mut self, read: io::Result<bool>, ctx: &mut Context, session: &mut Session) -> Option<End> {
        match read {
            Ok(true) => match self.read(ctx, session) {
                Ok(end) => end,
                Err(malformed) => Some(End::Broken(malformed.to_string())),
            },
            Ok(false) if self.closing => Some(End::Closed),
            Ok(false) => Some(End::Broken("the server closed the connection".into())),
            Err(error) => Some(End::Broken(error.to_string())),
        }
    }

    /// Handles all complete messages in the buffer.
    fn read(&mut self, ctx: &mut Context, session: &mut Session) -> Result<Option<End>, Malformed> {
        // The frame borrows the buffer, and `on_frame` borrows `self`: move the buffer out meanwhile.
        let mut frames = std::mem::take(&mut self.transport.frames);
        let mut end = Ok(None);
        while let Ok(None) = end {
            end = match frames.next() {
                Ok(Some(frame)) => self.on_frame(frame, ctx, session),
                Ok(None) => break,
                Err(malformed) => Err(malformed),
            };
        }
        self.transport.frames = frames;
        end
    }

    fn on_frame(
        &mut self,
        frame: &[u8],
        ctx: &mut Context,
        session: &mut Session,
    ) -> Result<Option<End>, Malformed> {
        let mut body = Reader::new(frame);
        let header = Header::read(&mut body)?;
        session.zxid = session.zxid.max(header.zxid);
        self.last_received = ctx.clock.now();
        match header.xid {
            PING => {
                if let Some(sent) = self.ping.take() {
                    self.contact.answered(sent, self.last_received);
                }
            }
            EVENT => {
                let topic = ctx.shared.topic(message::event(&mut body)?);
                ctx.shared.wakeups.notify(&topic);
            }
            xid => {
                // Parse before the request is removed: an answer that cannot be parsed ends the connection, and
                // `lost` has to find all requests in flight.
                let request = self.in_flight.front().filter(|request| request.xid == xid);
                let request = request.ok_or(Malformed("an answer came for another request"))?;
                let outcome = match Code::of(header.error) {
                    Some(code) => Err(Failure::Refused(code)),
                    None => Ok(request.call.request.read(&mut body)?),
                };
                let request = self.in_flight.pop_front();
                return Ok(request.and_then(|request| self.conclude(request, outcome, ctx)));
            }
        }
        Ok(None)
    }

    /// Delivers an answer. Returns the reason if it ends the connection.
    fn conclude(&mut self, request: InFlight, outcome: Outcome, ctx: &mut Context) -> Option<End> {
        let InFlight { sent, call, .. } = request;
        let is_expired = |error: &i32| Code::of(*error) == Some(Code::SESSION_EXPIRED);
        let (proves, end) = match (&call.request, &outcome) {
            (Request::Close, _) => (false, Some(End::Closed)),
            (_, Err(Failure::Refused(Code::SESSION_EXPIRED))) => (false, Some(End::Expired)),
            // Only a request whose checks all succeeded counts as a proof.
            (_, Ok(Reply::Checked(errors))) => (
                errors.iter().all(|error| *error == 0),
                errors.iter().any(is_expired).then_some(End::Expired),
            ),
            (request, outcome) => (outcome.is_ok() && request.is_write(), None),
        };
        if proves {
            ctx.shared.proofs.add(self.proof(sent));
        }
        ctx.outbox.calls.extend(call.conclude(outcome));
        end
    }

    fn proof(&mut self, sent: Moment) -> SessionProof {
        SessionProof { session: self.session, until: self.contact.kept_until(sent, self.timeout) }
    }

    /// Handles the end of the connection: the outcome of the requests in flight is unknown.
    pub(super) fn lost(&mut self, ctx: &mut Context) {
        let mut again = Vec::new();
        for request in self.in_flight.drain(..) {
            again.extend(request.call.lost());
        }
        for call in again.into_iter().rev() {
            ctx.outbox.calls.push_front(call);
        }
    }
}

/// Writes as many of the bytes as possible, or flushes if there are none.
///
/// # Cancel safety
///
/// A dropped call has written nothing.
async fn write(writer: &mut (impl AsyncWrite + Unpin + Send), bytes: &[u8]) -> io::Result<usize> {
    if bytes.is_empty() {
        writer.flush().await?;
        return Ok(0);
    }
    match writer.write(bytes).await? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        count => Ok(count),
    }
}

#[cfg(test)]
mod tests {
    use simba_core::SystemClock;

    use super::*;

    const SESSION: i64 = 7;

    /// Returns a connection whose other end is closed, and the context of its session.
    fn connection() -> (Connection, Context) {
        let (near, _) = tokio::io::duplex(16);
        let (reader, writer) = tokio::io::split(near);
        let transport = Transport::of(reader, writer, Moment::ZERO);
        let (in_flight, timeout) = (VecDeque::new(), Duration::from_secs(12));
        let connection = Connection::new(transport, in_flight, SESSION, timeout, Moment::ZERO);
        let shared = Arc::new(Shared::new(String::from("/simba"), 12_000, Arc::new(SystemClock)));
        let (_, inbox) = mpsc::unbounded_channel();
        let (clock, outbox) = (Arc::new(SystemClock), Outbox::default());
        (connection, Context { outbox, inbox, shared, clock, closing: None, client_dropped: false })
    }

    fn send(ctx: &mut Context, request: Request) -> oneshot::Receiver<Outcome> {
        let (to, outcome) = oneshot::channel();
        ctx.outbox.calls.push_back(Call::new(request, to));
        outcome
    }

    fn check(ctx: &mut Context) -> oneshot::Receiver<Outcome> {
        send(ctx, Request::Check { paths: vec!["/simba/m/n".into()] })
    }

    /// Returns an answer without an error to the request `xid`.
    fn answer(xid: i32, body: impl FnOnce(&mut Writer)) -> Writer {
        let mut writer = Writer::default();
        writer.int(xid).long(1).int(0);
        body(&mut writer);
        writer
    }

    #[test]
    fn after_a_malformed_answer_calls_fail_as_lost_and_deletions_are_repeated() {
        // An answer with a wrong number, and one without its body.
        for xid in [FIRST_XID + 9, FIRST_XID + 1] {
            let (mut connection, mut ctx) = connection();
            let mut read = send(&mut ctx, Request::Data { path: "/a".into(), watch: false });
            ctx.outbox.calls.push_back(Call::delete("/simba/m/n".into()));
            connection.send(&mut ctx);
            let frame = answer(xid, |_| {});
            assert!(connection.on_frame(frame.bytes(), &mut ctx, &mut Session::default()).is_err());
            connection.lost(&mut ctx);
            assert!(matches!(read.try_recv(), Ok(Err(Failure::Lost))), "it may have been carried out");
            let left = ctx.outbox.next_call().expect("a deletion is repeated");
            assert!(matches!(left.request, Request::Delete { .. }), "{left:?}");
        }
    }

    #[test]
    fn checks_with_a_malformed_answer_fail_as_lost() {
        let (mut connection, mut ctx) = connection();
        let mut checked = check(&mut ctx);
        connection.send(&mut ctx);
        let frame = answer(FIRST_XID + 1, |w| {
            w.int(99).bool(false).int(0);
        });
        assert!(connection.on_frame(frame.bytes(), &mut ctx, &mut Session::default()).is_err());
        connection.lost(&mut ctx);
        assert!(matches!(checked.try_recv(), Ok(Err(Failure::Lost))));
    }

    /// Answers a check of one node. Returns the end of the connection, and of the session's proof.
    fn answered_check(error: i32) -> (Option<End>, Option<Moment>) {
        let (mut connection, mut ctx) = connection();
        let mut checked = check(&mut ctx);
        connection.send(&mut ctx);
        let frame = answer(FIRST_XID + 1, |w| {
            match error {
                0 => w.int(13).bool(false).int(0),
                error => w.int(-1).bool(false).int(error).int(error),
            };
            w.int(-1).bool(true).int(-1);
        });
        let end = connection.on_frame(frame.bytes(), &mut ctx, &mut Session::default()).unwrap();
        assert!(matches!(checked.try_recv(), Ok(Ok(Reply::Checked(errors))) if errors == [error]));
        (end, ctx.shared.proofs.until(SESSION))
    }

    #[test]
    fn only_a_check_that_succeeds_proves_the_session() {
        assert!(matches!(answered_check(0), (None, Some(_))));
        assert!(matches!(answered_check(-101), (None, None)));
    }

    #[test]
    fn a_check_that_finds_an_expired_session_ends_the_connection() {
        assert!(matches!(answered_check(-112), (Some(End::Expired), None)));
    }
}
