//! One connection at work: requests out, replies in, signs of life.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use simba_core::clock::Sleep;
use simba_core::{Clock, Moment};
use tokio::io::{AsyncWrite, AsyncWriteExt as _};
use tokio::sync::{mpsc, oneshot};

use super::code::Code;
use super::connection::{Life, Wire};
use super::failure::Failure;
use super::jute::{Malformed, Reader, Writer};
use super::message::{self, EVENT, Header, PING};
use super::watches::Watches;
use super::work::{Check, Job, Work};
use super::{Command, Shared, Urgency};

/// How long a renewal waits for others to go with it, at the most.
pub(super) const GATHERING: Duration = Duration::from_millis(20);
/// How long a request waits that nobody may need by then, at the most.
const LATER: Duration = Duration::from_millis(50);
/// Requests are numbered from here: the first numbers may have been used to log in.
pub(super) const FIRST: i32 = 16;

/// The requests of a session, whatever connection it has.
pub(super) struct Desk {
    pub(super) work: Work,
    pub(super) inbox: mpsc::UnboundedReceiver<Command>,
    pub(super) shared: Arc<Shared>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) closing: Option<oneshot::Sender<()>>,
    /// Nobody can ask for anything any more.
    pub(super) deserted: bool,
}

impl Desk {
    /// Waits for the next request, and takes all that wait with it.
    ///
    /// # Cancel safety
    ///
    /// Nothing is taken by a call that is dropped.
    pub(super) async fn receive(&mut self) {
        match self.inbox.recv().await {
            Some(command) => self.take(command),
            None => self.deserted = true,
        }
        while let Ok(command) = self.inbox.try_recv() {
            self.take(command);
        }
    }

    fn take(&mut self, command: Command) {
        match command {
            Command::Do(job) => self.work.jobs.push_back(job),
            Command::Both(one, other) => self.work.jobs.extend([one, other]),
            Command::Later(job) => self.work.later.push(job),
            Command::Check(check, urgency) => {
                self.work.urgent |= urgency == Urgency::Turn;
                self.work.checks.push(check);
            }
            Command::Close(to) => self.closing = Some(to),
        }
    }

    pub(super) const fn ends(&self) -> bool {
        self.closing.is_some() || self.deserted
    }
}

/// Why a connection is over.
#[derive(Debug)]
pub(super) enum End {
    Broken(String),
    Expired,
    Closed,
}

/// What was sent and is not answered yet.
pub(super) struct Flight {
    pub(super) xid: i32,
    pub(super) sent: Moment,
    pub(super) what: Cargo,
}

pub(super) enum Cargo {
    Job(Job),
    Checks(Vec<Check>),
    /// For those who wait: their session is to be proven when their turn comes.
    Vigil,
    Close,
}

/// A connection whose session is granted.
pub(super) struct Link {
    wire: Wire,
    out: Writer,
    flushed: bool,
    flights: VecDeque<Flight>,
    /// When the ping was sent that is not answered yet.
    ping: Option<Moment>,
    watches: Watches,
    xid: i32,
    closing: bool,
    session: i64,
    timeout: Duration,
    began: Moment,
    /// When the server was heard last.
    pub(super) heard: Moment,
}

impl Link {
    /// Takes up a connection on which the flights are under way already.
    pub(super) fn new(
        wire: Wire,
        flights: VecDeque<Flight>,
        session: i64,
        timeout: Duration,
        now: Moment,
    ) -> Self {
        Self {
            wire,
            out: Writer::default(),
            flushed: true,
            ping: None,
            watches: Watches::default(),
            xid: flights.back().map_or(FIRST, |flight| flight.xid),
            flights,
            closing: false,
            session,
            timeout,
            began: now,
            heard: now,
        }
    }

    /// Works until the connection or the session is over.
    pub(super) async fn run(&mut self, desk: &mut Desk, life: &mut Life) -> End {
        let clock = Arc::clone(&desk.clock);
        // A ping in every twelfth of the timeout: whatever server we are connected to, the leader of its ensemble
        // then heard of us within the last third, and a deadline at two thirds after a quorum call is sound.
        let (beat, patience) = (self.timeout / 12, self.timeout / 3);
        let mut tick = clock.sleep_until(clock.now() + beat);
        let (mut gather, mut later) = (None, None);
        // The answer that granted the session may have come with others.
        if let Some(end) = self.came(Ok(true), desk, life) {
            return end;
        }
        loop {
            let at_once = desk.work.urgent || desk.ends();
            self.send(desk, at_once);
            set(&mut gather, !desk.work.checks.is_empty(), GATHERING.min(self.timeout / 100), &*clock);
            set(&mut later, !desk.work.later.is_empty(), LATER.min(beat), &*clock);
            let pending = !self.out.bytes().is_empty();
            tokio::select! {
                biased;
                read = self.wire.frames.fill(&mut self.wire.reader) => {
                    if let Some(end) = self.came(read, desk, life) {
                        return end;
                    }
                }
                written = put(&mut self.wire.writer, self.out.bytes()), if pending || !self.flushed => match written {
                    Ok(count) => {
                        self.out.sent(count);
                        self.flushed = count == 0;
                    }
                    Err(error) => return End::Broken(error.to_string()),
                },
                () = desk.receive(), if !desk.ends() => {}
                () = over(&mut gather) => self.send(desk, true),
                () = over(&mut later) => desk.work.hurry(),
                () = &mut tick => {
                    tick = clock.sleep_until(clock.now() + beat);
                    if self.waited(clock.now()) >= patience {
                        return End::Broken(format!("the server was silent for {patience:?}"));
                    }
                    self.beat(clock.now(), &desk.shared);
                }
            }
        }
    }

    /// For how long the oldest request has waited for its answer since the session was granted.
    fn waited(&self, now: Moment) -> Duration {
        let oldest = self.flights.front().map(|flight| flight.sent).into_iter().chain(self.ping).min();
        oldest.map_or(Duration::ZERO, |sent| now - sent.max(self.began))
    }

    fn beat(&mut self, now: Moment, shared: &Shared) {
        if self.ping.is_none() && !self.closing {
            message::ping(&mut self.out);
            self.ping = Some(now);
        }
        self.keep_vigil(now, shared);
    }

    /// Has a quorum show that the session lives, while somebody waits: whose turn comes then has it by one look.
    fn keep_vigil(&mut self, now: Moment, shared: &Shared) {
        let lease = self.timeout / 3 * 2;
        let fresh = shared.proofs.left(self.session, now, lease) >= self.timeout / 2;
        if fresh || self.closing || self.flights.iter().any(|flight| matches!(flight.what, Cargo::Vigil)) {
            return;
        }
        if !self.watches.anybody_waits(|topic| shared.bells.has(topic)) {
            return;
        }
        let xid = self.next_xid();
        // It is there for as long as anybody waits below it.
        message::checks(xid, std::iter::once(&*shared.root), &mut self.out);
        self.flights.push_back(Flight { xid, sent: now, what: Cargo::Vigil });
    }

    // ===== out =====

    /// Puts all that waits into the way out; checks only if they are due.
    fn send(&mut self, desk: &mut Desk, checks: bool) {
        let now = desk.clock.now();
        while let Some(job) = desk.work.next_job() {
            let xid = self.next_xid();
            job.request.write(xid, &mut self.out);
            self.flights.push_back(Flight { xid, sent: now, what: Cargo::Job(job) });
        }
        while checks && !desk.work.checks.is_empty() {
            self.send_checks(desk.work.next_checks(), now);
        }
        desk.work.urgent &= !desk.work.checks.is_empty();
        if desk.ends() && !self.closing && desk.work.checks.is_empty() {
            self.closing = true;
            let xid = self.next_xid();
            message::close(xid, &mut self.out);
            self.flights.push_back(Flight { xid, sent: now, what: Cargo::Close });
        }
    }

    fn send_checks(&mut self, checks: Vec<Check>, now: Moment) {
        if checks.is_empty() {
            return;
        }
        let xid = self.next_xid();
        message::checks(xid, checks.iter().map(|check| &*check.path), &mut self.out);
        self.flights.push_back(Flight { xid, sent: now, what: Cargo::Checks(checks) });
    }

    fn next_xid(&mut self) -> i32 {
        self.xid = self.xid.checked_add(1).unwrap_or(FIRST);
        self.xid
    }

    // ===== in =====

    /// Takes what a read brought; gives what it means for the connection, if that is its end.
    fn came(&mut self, read: io::Result<bool>, desk: &mut Desk, life: &mut Life) -> Option<End> {
        match read {
            Ok(true) => match self.read(desk, life) {
                Ok(end) => end,
                Err(malformed) => Some(End::Broken(malformed.to_string())),
            },
            Ok(false) if self.closing => Some(End::Closed),
            Ok(false) => Some(End::Broken("the server closed the connection".into())),
            Err(error) => Some(End::Broken(error.to_string())),
        }
    }

    /// Takes all answers that came.
    fn read(&mut self, desk: &mut Desk, life: &mut Life) -> Result<Option<End>, Malformed> {
        loop {
            // The frame is borrowed from the buffer, and the rest of this is needed: so it is put aside.
            let mut frames = std::mem::take(&mut self.wire.frames);
            let outcome = match frames.next() {
                Ok(Some(frame)) => self.answer(frame, desk, life).map(Some),
                Ok(None) => Ok(None),
                Err(malformed) => Err(malformed),
            };
            self.wire.frames = frames;
            match outcome? {
                None => return Ok(None),
                Some(None) => {}
                Some(Some(end)) => return Ok(Some(end)),
            }
        }
    }

    fn answer(&mut self, frame: &[u8], desk: &mut Desk, life: &mut Life) -> Result<Option<End>, Malformed> {
        let mut body = Reader::new(frame);
        let header = Header::read(&mut body)?;
        life.zxid = life.zxid.max(header.zxid);
        self.heard = desk.clock.now();
        match header.xid {
            PING => self.ping = None,
            EVENT => self.event(&mut body, &desk.shared)?,
            xid => {
                let flight = self.flights.pop_front().filter(|flight| flight.xid == xid);
                let flight = flight.ok_or(Malformed("an answer came for another request"))?;
                return self.landed(flight, Code::of(header.error), &mut body, desk);
            }
        }
        Ok(None)
    }

    fn event(&mut self, body: &mut Reader<'_>, shared: &Shared) -> Result<(), Malformed> {
        for topic in self.watches.fired(message::event(body)?) {
            shared.bells.ring(topic);
        }
        Ok(())
    }

    fn landed(
        &mut self,
        flight: Flight,
        error: Option<Code>,
        body: &mut Reader<'_>,
        desk: &mut Desk,
    ) -> Result<Option<End>, Malformed> {
        let sent = flight.sent;
        match (flight.what, error) {
            (Cargo::Close, _) => return Ok(Some(End::Closed)),
            (Cargo::Job(job), Some(code)) => {
                // A watch on a node that is not there yet.
                if let (message::Request::Exists { .. }, Code::NoNode) = (&job.request, code) {
                    self.watch(&job);
                }
                desk.work.jobs.extend(job.conclude(Err(Failure::Refused(code))));
                return Ok(end_of(code));
            }
            (Cargo::Job(job), None) => {
                let reply = job.request.read(body)?;
                if job.request.is_write() {
                    desk.shared.proofs.add(self.session, sent);
                }
                self.watch(&job);
                desk.work.jobs.extend(job.conclude(Ok(reply)));
            }
            (Cargo::Checks(checks), Some(code)) => {
                checks.into_iter().for_each(|check| check.conclude(Err(Failure::Refused(code))));
                return Ok(end_of(code));
            }
            (Cargo::Checks(checks), None) => {
                let errors = message::checked(body, checks.len())?;
                self.prove(&errors, sent, &desk.shared);
                self.checked(checks, &errors, desk);
            }
            (Cargo::Vigil, Some(code)) => return Ok(end_of(code)),
            (Cargo::Vigil, None) => {
                let errors = message::checked(body, 1)?;
                self.prove(&errors, sent, &desk.shared);
            }
        }
        Ok(None)
    }

    /// Checks that all went well are a proof. Of others it is not asked what they prove.
    fn prove(&self, errors: &[i32], sent: Moment, shared: &Shared) {
        if !errors.is_empty() && errors.iter().all(|error| *error == 0) {
            shared.proofs.add(self.session, sent);
        }
    }

    fn watch(&mut self, job: &Job) {
        if let (Some(topic), Some(path)) = (job.topic, job.request.watched()) {
            self.watches.add(path, topic);
        }
    }

    /// One check that fails takes the others with it: those are asked again, without it.
    fn checked(&self, checks: Vec<Check>, errors: &[i32], desk: &mut Desk) {
        let failed = errors.iter().any(|error| *error != 0);
        let mut errors = errors.iter().map(|error| Code::of(*error));
        for check in checks {
            match errors.next() {
                Some(Some(code)) if code != Code::NotReached => {
                    check.conclude(Err(Failure::Refused(code)));
                }
                Some(None) if !failed => check.conclude(Ok(self.session)),
                _ => {
                    desk.work.urgent = true;
                    desk.work.checks.push(check);
                }
            }
        }
    }

    /// The connection is over: nobody knows what became of what is under way.
    pub(super) fn lost(&mut self, desk: &mut Desk) {
        let mut again = Vec::new();
        for flight in self.flights.drain(..) {
            match flight.what {
                Cargo::Job(job) => again.extend(job.lost()),
                Cargo::Checks(checks) => {
                    checks.into_iter().for_each(|check| check.conclude(Err(Failure::Lost)));
                }
                Cargo::Vigil | Cargo::Close => {}
            }
        }
        for job in again.into_iter().rev() {
            desk.work.jobs.push_front(job);
        }
    }
}

const fn end_of(code: Code) -> Option<End> {
    match code {
        Code::SessionExpired => Some(End::Expired),
        _ => None,
    }
}

/// Writes what there is, or flushes if there is nothing.
///
/// # Cancel safety
///
/// A dropped call has written nothing.
async fn put(writer: &mut (impl AsyncWrite + Unpin + Send), bytes: &[u8]) -> io::Result<usize> {
    if bytes.is_empty() {
        writer.flush().await?;
        return Ok(0);
    }
    match writer.write(bytes).await? {
        0 => Err(io::ErrorKind::WriteZero.into()),
        count => Ok(count),
    }
}

/// Sets a timer that is wanted and does not run yet, or puts it away.
pub(super) fn set(timer: &mut Option<Sleep>, wanted: bool, delay: Duration, clock: &dyn Clock) {
    match timer {
        Some(_) if wanted => {}
        _ => *timer = wanted.then(|| clock.sleep_until(clock.now() + delay)),
    }
}

pub(super) async fn over(timer: &mut Option<Sleep>) {
    match timer {
        Some(sleep) => sleep.await,
        None => std::future::pending().await,
    }
}

impl Shared {
    /// The server granted a connection for this session: anything may have been missed before it.
    pub(super) fn connected(&self, session: i64, timeout: Duration) {
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        self.timeout.store(millis, Ordering::Release);
        self.session.store(session, Ordering::Release);
        self.connection.fetch_add(1, Ordering::AcqRel);
        self.state.send_replace(Some(Ok(())));
        self.bells.ring_all();
    }

    /// The store has nothing of this session any more.
    pub(super) fn expired(&self) {
        self.session.store(0, Ordering::Release);
        self.bells.ring_all();
    }
}
