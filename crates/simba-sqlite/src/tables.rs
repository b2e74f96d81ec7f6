//! The operations on the two tables: acquire, renew, queue, free. All of them run within a transaction and use the
//! time when it began.

use std::hash::{BuildHasher, RandomState};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{CachedStatement, Connection, Params};
use simba_core::spi::{Answer, Claim, Holding, Intent, Ownership, Prior};
use simba_core::{ContenderId, Error, ErrorKind, FencingToken, MutexName};

use crate::error::NAME;
use crate::machine::WaiterThread;
use crate::statements as sql;

/// The id of a session within the file. Two sessions may share a contender's id, but never this one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SessionId(i64);

impl SessionId {
    /// Returns an id that is unique among all processes. If the system's source of random numbers fails, the keys of a
    /// hasher of the standard library are used, which are random as well.
    pub(crate) fn generate() -> Self {
        let random = getrandom::u64().unwrap_or_else(|_| RandomState::new().hash_one(std::process::id()));
        Self(random.cast_signed())
    }
}

/// The reason why an operation failed.
#[derive(Debug)]
pub(crate) enum Fault {
    /// SQLite failed, or a column has a value of another type.
    Sqlite(rusqlite::Error),
    /// A row has an invalid value.
    Row(Error),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

type Result<T, E = Fault> = std::result::Result<T, E>;

/// The state of a mutex after an operation, from which waiters and observers are notified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct MutexState {
    pub(crate) mutex: MutexName,
    /// Whether the operation changed the owner.
    pub(crate) changed: bool,
    pub(crate) holder: Holder,
    pub(crate) next: Next,
}

/// The waiter that acquires the mutex next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// The mutex is held, or has no waiter.
    None,
    /// The mutex is free, and this waiter is to be woken.
    Wake(SessionId),
    /// The mutex is free, and a waiter that was woken before has not acquired it yet.
    Woken,
}

/// The holder of a mutex, or none, with the token: a change of either is a change of the holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Holder {
    owner: Option<SessionId>,
    token: i64,
}

/// The tables at one point in time.
pub(crate) struct Tables<'a> {
    pub(crate) connection: &'a Connection,
    /// The id of this boot.
    pub(crate) boot: &'a str,
    /// The thread that keeps the queue entries of this handle alive; none if the system cannot identify it.
    pub(crate) thread: Option<&'a WaiterThread>,
    /// Microseconds since the boot.
    pub(crate) now: i64,
    /// The wall clock, for display and as the lower bound of tokens.
    pub(crate) wall: SystemTime,
    /// The states of the mutexes that waiters and observers are notified of once the transaction is committed.
    pub(crate) states: Vec<MutexState>,
}

/// The row of a mutex. An owner whose lease has ended is none.
pub(crate) struct Row {
    pub(crate) owner: Option<Owner>,
    pub(crate) token: i64,
    /// Whether the queue may have entries.
    queued: bool,
}

pub(crate) struct Owner {
    pub(crate) id: ContenderId,
    pub(crate) session: SessionId,
    pub(crate) ttl_at: i64,
    pub(crate) until: i64,
    pub(crate) since: Option<SystemTime>,
}

impl Tables<'_> {
    /// Acquires, renews, or returns the holder; see [`Session::contend`](simba_core::spi::Session::contend).
    pub(crate) fn contend(&mut self, session: SessionId, claim: &Claim, prior: Prior) -> Result<Answer> {
        let row = self.row(&claim.mutex)?;
        let Some(owner) = row.owner else { return self.acquire_free(session, claim, &row) };
        if owner.session != session {
            // Another session of the owner's contender id must not queue behind it.
            if owner.id != claim.contender {
                self.queue(session, claim)?;
            }
            return Ok(Answer::Held(self.ownership(&owner, row.token)));
        }
        if matches!(prior, Prior::Lapsed(token) if to_column(token) == row.token) {
            return self.acquire(session, claim, row.token);
        }
        let (ttl_at, until) = self.ends(claim);
        self.run(sql::RENEW, (claim.mutex.as_str(), ttl_at, until))?;
        Ok(ours(claim, row.token))
    }

    /// Acquires a free mutex, unless another session is first in the queue.
    fn acquire_free(&mut self, session: SessionId, claim: &Claim, row: &Row) -> Result<Answer> {
        let head = if row.queued { self.head(&claim.mutex)? } else { None };
        if head.is_some_and(|head| head != session) {
            self.queue(session, claim)?;
            self.push_state(&claim.mutex, false, Holder { owner: None, token: row.token }, Next::Woken);
            return Ok(Answer::Vacant);
        }
        if head.is_some() {
            self.leave_queue(session, &claim.mutex)?;
        }
        self.acquire(session, claim, row.token)
    }

    /// Makes the session the owner, with a new token.
    fn acquire(&mut self, session: SessionId, claim: &Claim, token: i64) -> Result<Answer> {
        let since = self.wall.duration_since(UNIX_EPOCH).unwrap_or_default();
        // The wall clock is a lower bound, so that tokens still grow after a power cut has lost the last commits.
        let next = token.checked_add(1).ok_or_else(|| Fault::Row(token_exhausted()))?;
        let token = next.max(micros(since));
        let (ttl_at, until) = self.ends(claim);
        let since = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
        let (mutex, owner) = (claim.mutex.as_str(), claim.contender.as_str());
        self.run(sql::ACQUIRE, (mutex, owner, session.0, self.boot, ttl_at, until, token, since))?;
        self.push_state(&claim.mutex, true, Holder { owner: Some(session), token }, Next::None);
        Ok(ours(claim, token))
    }

    /// Returns the end of the ttl and of the whole lease, if it began now.
    fn ends(&self, claim: &Claim) -> (i64, i64) {
        (self.now + micros(claim.lease.ttl()), self.now + micros(claim.lease.total()))
    }

    /// Frees the mutex if the session owns it. Wakes the next waiter if the mutex is free then.
    pub(crate) fn release(&mut self, session: SessionId, mutex: &MutexName, holding: Holding) -> Result<()> {
        let token = match holding {
            Holding::Under(token) => Some(to_column(token)),
            Holding::Unknown => Some(self.row(mutex)?.token),
            _ => None,
        };
        match token {
            Some(token) if self.free(session, mutex, token)? => Ok(()),
            _ => self.wake_next(mutex),
        }
    }

    /// Frees the mutex and wakes the next waiter if the session owns it under this token. Returns whether it did.
    pub(crate) fn free(&mut self, session: SessionId, mutex: &MutexName, token: i64) -> Result<bool> {
        let freed = self.run(sql::FREE, (mutex.as_str(), session.0, token))? > 0;
        if freed {
            self.push_free(mutex, true, token)?;
        }
        Ok(freed)
    }

    /// Leaves the queue for a session that was dropped, and wakes the next one: this one may have been woken.
    pub(crate) fn leave(&mut self, session: SessionId, mutex: &MutexName) -> Result<()> {
        if self.leave_queue(session, mutex)? { self.wake_next(mutex) } else { Ok(()) }
    }

    /// Wakes the next waiter, if the mutex is free.
    fn wake_next(&mut self, mutex: &MutexName) -> Result<()> {
        let row = self.row(mutex)?;
        if row.owner.is_none() { self.push_free(mutex, false, row.token) } else { Ok(()) }
    }

    /// Adds the state of a free mutex, which names the next waiter.
    fn push_free(&mut self, mutex: &MutexName, changed: bool, token: i64) -> Result<()> {
        let next = self.head(mutex)?.map_or(Next::None, Next::Wake);
        self.push_state(mutex, changed, Holder { owner: None, token }, next);
        Ok(())
    }

    fn push_state(&mut self, mutex: &MutexName, changed: bool, holder: Holder, next: Next) {
        self.states.push(MutexState { mutex: mutex.clone(), changed, holder, next });
    }

    pub(crate) fn inspect(&self, mutex: &MutexName) -> Result<Option<Ownership>> {
        let row = self.row(mutex)?;
        Ok(row.owner.map(|owner| self.ownership(&owner, row.token)))
    }

    /// Returns the state of a mutex. Only reads.
    pub(crate) fn state_of(&self, mutex: &MutexName) -> Result<MutexState> {
        let row = self.row(mutex)?;
        let owner = row.owner.map(|owner| owner.session);
        let next = if owner.is_none() { self.first_waiting(mutex)?.1 } else { None };
        let (holder, next) = (Holder { owner, token: row.token }, next.map_or(Next::None, Next::Wake));
        Ok(MutexState { mutex: mutex.clone(), changed: false, holder, next })
    }

    // ===== the queue =====

    /// Deletes the session's queue entry. Returns whether there was one.
    pub(crate) fn leave_queue(&self, session: SessionId, mutex: &MutexName) -> Result<bool> {
        Ok(self.run(sql::LEAVE, (mutex.as_str(), session.0))? > 0)
    }

    /// Deletes the expired queue entries of all mutexes.
    pub(crate) fn delete_expired(&self) -> rusqlite::Result<()> {
        self.connection.prepare_cached(sql::DELETE_EXPIRED)?.execute((self.boot, self.now)).map(drop)
    }

    /// Extends the session's queue entry, or adds one at the end. An entry outlives two polls.
    fn queue(&self, session: SessionId, claim: &Claim) -> Result<()> {
        if claim.intent != Intent::Queue {
            return Ok(());
        }
        let mutex = claim.mutex.as_str();
        let until = self.now + micros((claim.lease.poll() * 2).max(claim.lease.ttl()));
        if self.run(sql::EXTEND_ENTRY, (mutex, session.0, self.boot, self.now, until))? == 0 {
            let thread = self.thread.map(WaiterThread::as_str);
            self.run(sql::ENQUEUE, (mutex, session.0, self.boot, until, thread))?;
        }
        Ok(())
    }

    /// Returns the first session in the queue that still waits. Deletes the entries before it.
    fn head(&self, mutex: &MutexName) -> Result<Option<SessionId>> {
        let (ended, head) = self.first_waiting(mutex)?;
        for session in ended {
            self.leave_queue(session, mutex)?;
        }
        Ok(head)
    }

    /// Returns the sessions before the first one in the queue that still waits, and that one. Only reads.
    fn first_waiting(&self, mutex: &MutexName) -> Result<(Vec<SessionId>, Option<SessionId>)> {
        let mut statement = self.statement(sql::QUEUE)?;
        let mut entries = statement.query([mutex.as_str()])?;
        let mut ended = Vec::new();
        while let Some(entry) = entries.next()? {
            let session = SessionId(entry.get(0)?);
            if self.is_waiting(entry)? {
                return Ok((ended, Some(session)));
            }
            ended.push(session);
        }
        Ok((ended, None))
    }

    /// Returns whether an entry has not expired and its thread is not known to have ended.
    fn is_waiting(&self, entry: &rusqlite::Row<'_>) -> rusqlite::Result<bool> {
        if entry.get_ref(1)?.as_str()? != self.boot || entry.get::<_, i64>(2)? <= self.now {
            return Ok(false);
        }
        let thread = entry.get_ref(3)?.as_str_or_null().ok().flatten();
        Ok(!self.thread.zip(thread).is_some_and(|(ours, thread)| ours.knows_ended(thread)))
    }

    // ===== rows =====

    pub(crate) fn row(&self, mutex: &MutexName) -> Result<Row> {
        let mut statement = self.statement(sql::ROW)?;
        let mut rows = statement.query([mutex.as_str()])?;
        match rows.next()? {
            Some(row) => self.decode(row),
            None => Ok(Row { owner: None, token: 0, queued: true }),
        }
    }

    /// Decodes the columns of [`sql::ROW`].
    pub(crate) fn decode(&self, row: &rusqlite::Row<'_>) -> Result<Row> {
        let (token, queued) = (row.get(5)?, row.get(7)?);
        let until = row.get::<_, Option<i64>>(4)?.unwrap_or_default();
        let of_this_boot = row.get_ref(2)?.as_str_or_null().ok().flatten() == Some(self.boot);
        let id = row.get_ref(0)?.as_str_or_null().map_err(rusqlite::Error::from)?;
        let Some(id) = id.filter(|_| of_this_boot && until > self.now) else {
            return Ok(Row { owner: None, token, queued });
        };
        let since: Option<i64> = row.get(6)?;
        let owner = Owner {
            id: ContenderId::foreign(id).map_err(Fault::Row)?,
            session: SessionId(row.get::<_, Option<i64>>(1)?.unwrap_or_default()),
            ttl_at: row.get::<_, Option<i64>>(3)?.unwrap_or_default(),
            until,
            since: since.and_then(|ms| Some(UNIX_EPOCH + Duration::from_millis(u64::try_from(ms).ok()?))),
        };
        Ok(Row { owner: Some(owner), token, queued })
    }

    fn ownership(&self, owner: &Owner, token: i64) -> Ownership {
        Ownership::new(owner.id.clone(), Some(to_token(token)), self.remaining(owner))
    }

    pub(crate) fn remaining(&self, owner: &Owner) -> Duration {
        Duration::from_micros(u64::try_from(owner.until - self.now).unwrap_or_default())
    }

    pub(crate) fn statement(&self, sql: &str) -> Result<CachedStatement<'_>> {
        Ok(self.connection.prepare_cached(sql)?)
    }

    fn run(&self, sql: &str, values: impl Params) -> Result<usize> {
        Ok(self.statement(sql)?.execute(values)?)
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

fn ours(claim: &Claim, token: i64) -> Answer {
    Answer::Ours(Ownership::new(claim.contender.clone(), Some(to_token(token)), claim.lease.total()))
}

/// Converts a column, which is never negative, to a token.
pub(crate) fn to_token(column: i64) -> FencingToken {
    FencingToken::new(u64::try_from(column).unwrap_or_default())
}

/// Converts a token to a column. A token that exceeds the column matches no row.
fn to_column(token: FencingToken) -> i64 {
    i64::try_from(token.get()).unwrap_or(-1)
}

/// Returns the error for a token that cannot grow. The backend never decreases a token.
fn token_exhausted() -> Error {
    let message =
        "the token of this mutex is at the end of its column: decrease it by hand, or choose another name";
    Error::new(ErrorKind::Config, message).with_backend(NAME)
}
