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
use super::message::{self, EVENT, Header, PING, Reply};
use super::proof::{LeaderContact, Proof};
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

    /// Fails what waits to be sent, and keeps what has to be done anyway.
    pub(super) fn fail(&mut self, failure: &Failure) {
        while let Ok(command) = self.inbox.try_recv() {
            self.take(command);
        }
        self.work.fail(failure);
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
    /// Checks whose callers were answered before the server answers.
    Unawaited,
    Close,
}

impl Cargo {
    /// Reads what a server answered.
    fn read(&self, error: Option<Code>, body: &mut Reader<'_>) -> Result<Answered, Malformed> {
        Ok(match (self, error) {
            (Self::Unawaited | Self::Close, _) => Answered::Done,
            (_, Some(code)) => Answered::Refused(code),
            (Self::Job(job), None) => Answered::Reply(job.request.read(body)?),
            (Self::Checks(checks), None) => Answered::Checked(message::checked(body, checks.len())?),
            (Self::Vigil, None) => Answered::Checked(message::checked(body, 1)?),
        })
    }
}

/// What a server answered.
enum Answered {
    Done,
    Refused(Code),
    Reply(Reply),
    /// The error of each check.
    Checked(Vec<i32>),
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
    contact: LeaderContact,
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
            contact: LeaderContact::new(wire.asked),
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
        // A ping in every twelfth of the timeout: see `LeaderContact`.
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
        let fresh = shared.proofs.left(self.session, now) >= self.timeout / 2;
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
            PING => {
                if let Some(sent) = self.ping.take() {
                    self.contact.answered(sent, self.heard);
                }
            }
            EVENT => self.event(&mut body, &desk.shared)?,
            xid => {
                // Read before it is taken: with an answer that cannot be read the connection is over, and what is
                // under way is lost with it.
                let flight = self.flights.front().filter(|flight| flight.xid == xid);
                let flight = flight.ok_or(Malformed("an answer came for another request"))?;
                let answered = flight.what.read(Code::of(header.error), &mut body)?;
                let flight = self.flights.pop_front();
                return Ok(flight.and_then(|flight| self.conclude(flight, answered, desk)));
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

    /// Concludes what was answered; gives what it means for the connection, if that is its end.
    fn conclude(&mut self, flight: Flight, answered: Answered, desk: &mut Desk) -> Option<End> {
        let sent = flight.sent;
        match (flight.what, answered) {
            (Cargo::Close, _) => return Some(End::Closed),
            (Cargo::Job(job), Answered::Refused(code)) => {
                // A watch on a node that is not there yet.
                if let (message::Request::Exists { .. }, Code::NoNode) = (&job.request, code) {
                    self.watch(&job, &desk.shared);
                }
                desk.work.jobs.extend(job.conclude(Err(Failure::Refused(code))));
                return end_of(code);
            }
            (Cargo::Job(job), Answered::Reply(reply)) => {
                if job.request.is_write() {
                    desk.shared.proofs.add(self.proof(sent));
                }
                self.watch(&job, &desk.shared);
                desk.work.jobs.extend(job.conclude(Ok(reply)));
            }
            (Cargo::Checks(checks), Answered::Refused(code)) => {
                checks.into_iter().for_each(|check| check.conclude(Err(Failure::Refused(code))));
                return end_of(code);
            }
            (Cargo::Checks(checks), Answered::Checked(errors)) => {
                return self.checked(checks, &errors, sent, desk);
            }
            (Cargo::Vigil, Answered::Refused(code)) => return end_of(code),
            (Cargo::Vigil, Answered::Checked(errors)) => {
                return self.checked(Vec::new(), &errors, sent, desk);
            }
            // Nobody waits for an unawaited one. The rest cannot be: `Cargo::read` reads each as what it was sent for.
            (Cargo::Job(_) | Cargo::Checks(_) | Cargo::Vigil | Cargo::Unawaited, _) => {}
        }
        None
    }

    fn proof(&mut self, sent: Moment) -> Proof {
        Proof { session: self.session, until: self.contact.kept_until(sent, self.timeout) }
    }

    fn watch(&mut self, job: &Job, shared: &Shared) {
        if let (Some(topic), Some(path)) = (job.topic, job.request.watched()) {
            self.watches.add(path, topic, |topic| shared.bells.has(topic));
        }
    }

    /// Concludes checks by the error of each. One that fails takes the others with it: those are sent again without
    /// it. Checks that all went well are a proof; of others it is not known what they prove.
    fn checked(&mut self, checks: Vec<Check>, errors: &[i32], sent: Moment, desk: &mut Desk) -> Option<End> {
        let mut codes = errors.iter().map(|error| Code::of(*error));
        if let Some(code) = codes.clone().flatten().find(|code| end_of(*code).is_some()) {
            // It is the session that failed, hence every check.
            checks.into_iter().for_each(|check| check.conclude(Err(Failure::Refused(code))));
            return end_of(code);
        }
        if codes.clone().all(|code| code.is_none()) {
            let proof = self.proof(sent);
            desk.shared.proofs.add(proof);
            checks.into_iter().for_each(|check| check.conclude(Ok(proof)));
            return None;
        }
        for check in checks {
            match codes.next().flatten() {
                Some(code) if code != Code::NotReached => check.conclude(Err(Failure::Refused(code))),
                _ => {
                    desk.work.urgent = true;
                    desk.work.checks.push(check);
                }
            }
        }
        None
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
                Cargo::Vigil | Cargo::Unawaited | Cargo::Close => {}
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

#[cfg(test)]
mod tests {
    use simba_core::SystemClock;

    use super::super::message::Request;
    use super::super::work::{Outcome, Then};
    use super::*;

    const SESSION: i64 = 7;

    /// A connection whose other end is closed, and the requests of its session.
    fn link() -> (Link, Desk) {
        let (near, _) = tokio::io::duplex(16);
        let (reader, writer) = tokio::io::split(near);
        let wire = Wire::of(reader, writer, Moment::ZERO);
        let link = Link::new(wire, VecDeque::new(), SESSION, Duration::from_secs(12), Moment::ZERO);
        let shared = Shared::new(String::from("/simba"), 12_000);
        let (_, inbox) = mpsc::unbounded_channel();
        let clock = Arc::new(SystemClock);
        let work = Work::default();
        (link, Desk { work, inbox, shared: Arc::new(shared), clock, closing: None, deserted: false })
    }

    fn send(desk: &mut Desk, request: Request) -> oneshot::Receiver<Outcome> {
        let (to, outcome) = oneshot::channel();
        desk.work.jobs.push_back(Job { request, topic: None, then: Then::Answer(to) });
        outcome
    }

    fn check(desk: &mut Desk) -> oneshot::Receiver<Result<Proof, Failure>> {
        let (to, outcome) = oneshot::channel();
        desk.work.checks.push(Check { path: "/simba/m/n".into(), to });
        outcome
    }

    /// An answer to the request of this number, without an error.
    fn answer(xid: i32, body: impl FnOnce(&mut Writer)) -> Writer {
        let mut writer = Writer::default();
        writer.int(xid).long(1).int(0);
        body(&mut writer);
        writer
    }

    #[test]
    fn an_answer_that_cannot_be_read_loses_what_is_under_way_and_no_more() {
        // A wrong number, and an answer without its body.
        for xid in [FIRST + 9, FIRST + 1] {
            let (mut link, mut desk) = link();
            let mut read = send(&mut desk, Request::Data { path: "/a".into(), watch: false });
            desk.work.jobs.push_back(Job::forget("/simba/m/n".into()));
            link.send(&mut desk, true);
            let frame = answer(xid, |_| {});
            assert!(link.answer(frame.bytes(), &mut desk, &mut Life::default()).is_err());
            link.lost(&mut desk);
            assert!(matches!(read.try_recv(), Ok(Err(Failure::Lost))), "it may have been carried out");
            let left = desk.work.next_job().expect("a deletion is repeated");
            assert!(matches!(left.request, Request::Delete { .. }), "{left:?}");
        }
    }

    #[test]
    fn checks_whose_answer_cannot_be_read_are_lost() {
        let (mut link, mut desk) = link();
        let mut checked = check(&mut desk);
        link.send(&mut desk, true);
        let frame = answer(FIRST + 1, |w| {
            w.int(99).bool(false).int(0);
        });
        assert!(link.answer(frame.bytes(), &mut desk, &mut Life::default()).is_err());
        link.lost(&mut desk);
        assert!(matches!(checked.try_recv(), Ok(Err(Failure::Lost))));
    }

    #[test]
    fn a_session_that_has_expired_ends_all_checks_at_once() {
        let (mut link, mut desk) = link();
        let mut outcomes = [check(&mut desk), check(&mut desk), check(&mut desk)];
        link.send(&mut desk, true);
        let frame = answer(FIRST + 1, |w| {
            for error in [-112, -2, -2] {
                w.int(-1).bool(false).int(error).int(error);
            }
            w.int(-1).bool(true).int(-1);
        });
        let end = link.answer(frame.bytes(), &mut desk, &mut Life::default()).unwrap();
        assert!(matches!(end, Some(End::Expired)), "{end:?}");
        for outcome in &mut outcomes {
            let outcome = outcome.try_recv().expect("answered without another request");
            assert!(matches!(outcome, Err(Failure::Refused(Code::SessionExpired))), "{outcome:?}");
        }
        assert!(desk.work.checks.is_empty());
    }

    #[test]
    fn one_check_that_fails_has_the_others_sent_again() {
        let (mut link, mut desk) = link();
        let mut outcomes = [check(&mut desk), check(&mut desk), check(&mut desk)];
        link.send(&mut desk, true);
        let frame = answer(FIRST + 1, |w| {
            w.int(13).bool(false).int(0);
            for error in [-101, -2] {
                w.int(-1).bool(false).int(error).int(error);
            }
            w.int(-1).bool(true).int(-1);
        });
        assert!(link.answer(frame.bytes(), &mut desk, &mut Life::default()).unwrap().is_none());
        assert!(outcomes[0].try_recv().is_err() && outcomes[2].try_recv().is_err(), "not answered yet");
        assert!(matches!(outcomes[1].try_recv(), Ok(Err(Failure::Refused(Code::NoNode)))));
        assert_eq!((desk.work.checks.len(), desk.work.urgent), (2, true));
    }
}
