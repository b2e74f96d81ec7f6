//! Carries out the calls of sessions. Calls that arrive together share statements; a call alone is a batch of
//! one.
//!
//! | step | statement | for |
//! |---|---|---|
//! | 1 | one write for each kind and lease | calls that know the version of their row |
//! | 2 | one read | calls that have no answer yet |
//! | 3 | one insert | takes of mutexes that were never used |
//!
//! What the read shows decides the next write, up to [`MAX_ROUNDS`] times. Every write is conditional on a version,
//! so a late or repeated one changes nothing.
//!
//! Renewals, the writes of a batch with several calls, and those on the last idle connection skip the rows that a peer
//! has locked. A row that should have been written and was not is locked: its call pauses, outside of any connection,
//! and tries again.

use std::collections::{BTreeMap, HashSet};
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::Poll;
use std::time::Duration;

use simba_core::Result;
use simba_core::spi::{Answer, Claim, Holding, Prior};
use simba_net::batch::{Answers, BatchError, BatchLimits, Batcher, SendBatch};
use tokio::runtime::Handle;

use crate::connection::{Connection, Done};
use crate::error::{Fault, closed};
use crate::limits::LeaseInUse;
use crate::own_hold::OwnHold;
use crate::pending::Pending;
use crate::row::RowsByName;
use crate::shared::Shared;
use crate::statements::{Kind, Terms};
use crate::supervisor::Pool;

/// The maximum number of calls in one batch.
const MAX_BATCH: usize = 128;
/// How often a call reads the row again after a concurrent change before it returns.
const MAX_ROUNDS: usize = 5;
/// Every statement has a limit of its own, by the leases of the sessions.
const NO_LIMIT: Duration = Duration::from_secs(3_600);
/// The pauses before a call is tried again, after a locked row or a lost connection. A peer's transaction takes
/// a few round trips.
const PAUSES: [Duration; 4] = [
    Duration::from_millis(2),
    Duration::from_millis(8),
    Duration::from_millis(20),
    Duration::from_millis(50),
];

/// What the calls of one write have in common.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Group {
    kind: Kind,
    terms: Terms,
    skip_locked: bool,
}

/// One call of one session.
#[derive(Clone, Debug)]
pub(crate) struct Call {
    pub(crate) session: Arc<SessionState>,
    pub(crate) request: Request,
    pub(crate) caller: Weak<()>,
}

/// What a session requests. The answer to a release is [`Answer::Vacant`].
#[derive(Clone, Copy, Debug)]
pub(crate) enum Request {
    Contend(Prior),
    Inspect,
    Release(Holding),
}

/// The state of a session that its calls use.
#[derive(Debug)]
pub(crate) struct SessionState {
    pub(crate) claim: Claim,
    own_hold: Mutex<OwnHold>,
    _lease: LeaseInUse,
    /// Held by the call in progress, so that a call whose caller was dropped ends before the next one begins.
    turn: tokio::sync::Mutex<()>,
}

impl SessionState {
    pub(crate) fn new(claim: Claim, shared: &Shared) -> Self {
        let _lease = shared.limits.use_lease(&claim.lease);
        Self { claim, own_hold: Mutex::default(), _lease, turn: tokio::sync::Mutex::default() }
    }

    pub(crate) fn own_hold(&self) -> MutexGuard<'_, OwnHold> {
        self.own_hold.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the lease in whole milliseconds, the unit of the table.
    pub(crate) fn terms(&self) -> Terms {
        let millis = |duration: Duration| u64::try_from(duration.as_millis()).unwrap_or(u64::MAX / 4);
        let ttl = millis(self.claim.lease.ttl());
        Terms { ttl, total: ttl + millis(self.claim.lease.transition()) }
    }
}

impl Call {
    /// Returns whether the caller was dropped and the call can be skipped. A release is always carried out.
    fn is_abandoned(&self) -> bool {
        self.caller.strong_count() == 0 && !matches!(self.request, Request::Release(_))
    }

    /// Returns whether the call is about a hold of its session.
    const fn is_urgent(&self) -> bool {
        matches!(self.request, Request::Contend(Prior::Held) | Request::Release(Holding::Under(_)))
    }

    /// Prepares the next try. A row with our id is ours if a take may have been carried out.
    fn retry(&mut self, fault: &Fault) {
        if let Request::Contend(prior @ Prior::Nothing) = &mut self.request
            && fault.outcome_unknown()
        {
            *prior = Prior::Unknown;
        }
    }
}

/// The calls of one handle.
pub(crate) struct Calls {
    shared: Arc<Shared>,
    pool: Pool,
    /// Calls about a hold of their session. They need one statement, and do not wait for the answers to others.
    urgent: Batcher<Call, Result<Answer, Fault>>,
    others: Batcher<Call, Result<Answer, Fault>>,
    /// Calls continue here and not in the task of the caller: a dropped statement would cost its connection.
    runtime: Handle,
}

impl Calls {
    pub(crate) fn new(shared: Arc<Shared>, pool: Pool) -> Self {
        let connections = shared.config.connections;
        let batcher = |in_flight| {
            let limits = BatchLimits { calls: MAX_BATCH, in_flight, time: NO_LIMIT, window: Duration::ZERO };
            Batcher::new(Arc::clone(&shared.clock), limits)
        };
        // One connection is left for renewals: the other calls may wait for an insert.
        let (urgent, others) = (batcher(connections), batcher(connections.saturating_sub(1).max(1)));
        Self { urgent, others, shared, pool, runtime: Handle::current() }
    }

    /// Sends batches and pings connections until the task is aborted.
    pub(crate) async fn run(self: Arc<Self>) {
        tokio::join!(self.urgent.run(&*self), self.others.run(&*self), self.pool.keep_alive());
    }

    /// Fails all calls from now on.
    pub(crate) fn close(&self) {
        self.pool.close();
        self.urgent.close(&closed());
        self.others.close(&closed());
    }

    /// Carries out a call.
    ///
    /// # Errors
    ///
    /// The outcome is unknown, or the server refused.
    ///
    /// # Cancel safety
    ///
    /// A dropped call that was sent is carried out, and ends before the next call of the session begins.
    pub(crate) async fn call(
        self: &Arc<Self>,
        session: &Arc<SessionState>,
        request: Request,
    ) -> Result<Answer> {
        let caller = Arc::new(());
        let call = Call { session: Arc::clone(session), request, caller: Arc::downgrade(&caller) };
        let mut carried_out = Box::pin(Arc::clone(self).carry_out(call));
        // Sent or queued here, so that calls are sent in the order in which they are made.
        let first_poll = poll_fn(|context| {
            let _entered = self.runtime.enter();
            Poll::Ready(carried_out.as_mut().poll(context))
        });
        match first_poll.await {
            Poll::Ready(reply) => reply,
            Poll::Pending => self.runtime.spawn(carried_out).await.unwrap_or_else(|_| Err(closed())),
        }
    }

    async fn carry_out(self: Arc<Self>, mut call: Call) -> Result<Answer> {
        let session = Arc::clone(&call.session);
        let _turn = session.turn.lock().await;
        let mut pauses = PAUSES.iter();
        loop {
            let batcher = if call.is_urgent() { &self.urgent } else { &self.others };
            let fault = match batcher.call(&*self, call.clone()).await? {
                Ok(reply) => return Ok(reply),
                Err(fault) => fault,
            };
            if fault.suggests_locked_row() {
                self.shared.note_locked();
            }
            let Some(pause) = pauses.next().filter(|_| fault.is_retried()) else {
                return Err(fault.into());
            };
            call.retry(&fault);
            self.shared.clock.sleep_until(self.shared.clock.now() + *pause).await;
        }
    }

    /// Sends one write for each kind and lease.
    async fn write_all(&self, connection: &mut Connection, calls: &mut [Pending<'_>]) {
        // A batch waits for no row: the answers to its other calls would be late. Nor does a call on the last idle
        // connection: renewals that come meanwhile would be late.
        let skip_locked = calls.len() > 1 || self.pool.is_exhausted() || self.shared.is_careful();
        let (mut groups, mut mutexes) = (BTreeMap::<Group, Vec<_>>::new(), HashSet::new());
        for call in calls.iter_mut() {
            let Some(kind) = call.planned_write() else { continue };
            // Of several calls about one mutex, the first writes and the others read the row afterwards. Names that
            // differ by case only are one row: a statement could give it the id of one call at the version of another.
            if mutexes.insert(call.mutex().as_str().to_lowercase()) {
                let skip_locked = skip_locked || kind == Kind::Renew;
                let group = Group { kind, terms: call.session.terms(), skip_locked };
                groups.entry(group).or_default().push(call);
            }
        }
        for (group, calls) in groups {
            // Most collations ignore accents as well, and no folding of ours knows which names they make one row.
            let is_alone =
                |call: &&mut Pending<'_>| group.kind == Kind::Take && !call.mutex().as_str().is_ascii();
            let (alone, mut together): (Vec<_>, Vec<_>) = calls.into_iter().partition(is_alone);
            for calls in together.chunks_mut(group.kind.max()) {
                self.write(connection, group, calls).await;
            }
            for call in alone {
                self.write(connection, group, &mut [call]).await;
            }
        }
    }

    async fn write(&self, connection: &mut Connection, group: Group, calls: &mut [&mut Pending<'_>]) {
        match self.send_write(connection, group, calls).await {
            Ok(done) if done.changed == calls.len() as u64 => {
                calls.iter_mut().for_each(|call| call.applied(&self.shared));
            }
            Ok(done) => calls.iter_mut().for_each(|call| call.unresolved(done.number)),
            Err(fault) if calls.len() > 1 && fault.may_concern_one_call() => {
                for call in calls.iter_mut() {
                    call.write_failed(None);
                    Box::pin(self.write(connection, group, &mut [call])).await;
                }
            }
            Err(fault) => calls.iter_mut().for_each(|call| call.write_failed(Some(&fault))),
        }
    }

    async fn send_write(
        &self,
        connection: &mut Connection,
        Group { kind, terms, skip_locked }: Group,
        calls: &[&mut Pending<'_>],
    ) -> Result<Done, Fault> {
        calls.iter().for_each(|call| call.sent());
        let targets: Vec<_> = calls.iter().filter_map(|call| call.target()).collect();
        let text = self.shared.statements.write(kind, terms, &targets, skip_locked);
        let done = connection.execute(self.shared.limits.statement(), &text).await?;
        if let Some(now) = done.number {
            self.shared.note_time(now, done.times);
        }
        Ok(done)
    }

    /// Reads the rows of the calls that have no reply yet, and decides what each does next.
    async fn read_all(&self, connection: &mut Connection, calls: &mut [Pending<'_>]) {
        let unanswered = calls.iter_mut().filter(|call| call.reply.is_none());
        let (alone, mut together): (Vec<_>, Vec<_>) = unanswered.partition(|call| call.is_read_alone);
        if !together.is_empty() {
            self.read(connection, &mut together).await;
        }
        for call in alone {
            self.read(connection, &mut [call]).await;
        }
    }

    async fn read(&self, connection: &mut Connection, calls: &mut [&mut Pending<'_>]) {
        let text = self.shared.statements.read(calls.iter().map(|call| call.mutex().as_str()));
        match connection.rows(self.shared.limits.statement(), &text).await {
            Ok(rows) => {
                let by_name = RowsByName::new(&rows);
                // A single row is the right one, whatever its spelling.
                let is_alone = calls.len() == 1;
                let only = rows.first().filter(|_| is_alone);
                for call in calls.iter_mut() {
                    match only.or_else(|| by_name.row(call.mutex())) {
                        None if !is_alone => call.not_returned(&self.shared),
                        row => call.decide(row, &self.shared),
                    }
                }
            }
            // One row that is not Simba's must not fail the other calls.
            Err(fault) if calls.len() > 1 && fault.may_concern_one_call() => {
                for call in calls.iter_mut() {
                    Box::pin(self.read(connection, &mut [call])).await;
                }
            }
            Err(fault) => calls.iter_mut().for_each(|call| call.fail(&fault)),
        }
    }

    /// Inserts the rows that takes found missing. Whether a peer was faster shows the take itself.
    async fn insert_all(&self, connection: &mut Connection, calls: &mut [Pending<'_>]) {
        let mut missing: Vec<_> = calls.iter_mut().filter(|call| call.is_missing()).collect();
        if !missing.is_empty() {
            self.insert(connection, &mut missing).await;
        }
    }

    async fn insert(&self, connection: &mut Connection, calls: &mut [&mut Pending<'_>]) {
        let text = self.shared.statements.insert(calls.iter().map(|call| call.mutex().as_str()).collect());
        match connection.execute(self.shared.limits.statement(), &text).await {
            Ok(_) => calls.iter_mut().for_each(|call| call.inserted()),
            // A peer that hangs while it inserts one of the rows must not fail the other calls.
            Err(fault) if calls.len() > 1 && fault.may_concern_one_call() => {
                for call in calls.iter_mut() {
                    Box::pin(self.insert(connection, &mut [call])).await;
                }
            }
            Err(fault) => calls.iter_mut().for_each(|call| call.fail(&fault)),
        }
    }
}

impl SendBatch for Calls {
    type Call = Call;
    type Answer = Result<Answer, Fault>;

    async fn send(&self, calls: &[Call]) -> Result<Answers<Self::Answer>, BatchError> {
        let mut pooled = self.pool.get().await?;
        let connection = &mut pooled.connection;
        let mut pending: Vec<Pending<'_>> =
            calls.iter().map(|call| Pending::new(call, &self.shared)).collect();
        for (call, pending) in calls.iter().zip(&mut pending) {
            if call.is_abandoned() {
                pending.fail(&Fault::Refused(closed()));
            }
        }
        for _ in 0..MAX_ROUNDS {
            self.write_all(connection, &mut pending).await;
            self.read_all(connection, &mut pending).await;
            self.insert_all(connection, &mut pending).await;
            if pending.iter().all(|call| call.reply.is_some()) {
                break;
            }
        }
        Ok(pending.into_iter().map(|call| Ok(call.into_reply())).collect())
    }
}
