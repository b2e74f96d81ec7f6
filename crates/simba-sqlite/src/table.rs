//! The two tables and what is done to them: take, renew, queue, free. All of it within a transaction, at the
//! moment when that began.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rusqlite::{CachedStatement, Connection, Params};
use simba_core::backend::{Answer, Holding, Intent, Ownership, Prior};
use simba_core::operate::{EvictIf, Eviction, MutexRecord};
use simba_core::{Claim, ContenderId, Error, ErrorKind, FencingToken, MutexName};

use crate::error::NAME;
use crate::machine::{BootClock, WaiterThread};
use crate::schema;
use crate::statements as sql;

/// A session's name within the file. Two sessions may share a contender's id; they never share this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct SessionId(i64);

impl SessionId {
    /// One that nobody else has, in this process or another.
    pub(crate) fn draw() -> Self {
        #[expect(clippy::cast_possible_wrap, reason = "all that counts is that it differs")]
        Self(getrandom::u64().unwrap_or_else(|_| fallback()) as i64)
    }
}

/// Of a system without random numbers: the hasher of the standard library has some of its own.
fn fallback() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

/// Why nothing was done.
#[derive(Debug)]
pub(crate) enum Fault {
    /// SQLite failed, and the transaction with it.
    Sqlite(rusqlite::Error),
    /// One row makes no sense. Nothing was written, the others are as good as ever.
    Row(Error),
}

impl From<rusqlite::Error> for Fault {
    fn from(error: rusqlite::Error) -> Self {
        Self::Sqlite(error)
    }
}

type Result<T, E = Fault> = std::result::Result<T, E>;

/// A mutex that others may want to hear of, and how it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct News {
    pub(crate) mutex: MutexName,
    /// Whether the owner is another one than before.
    pub(crate) changed: bool,
    pub(crate) standing: Standing,
    pub(crate) next: Next,
}

/// Which waiter takes the mutex next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// Held, or nobody waits.
    Nobody,
    /// Free, and this waiter is to be woken.
    Wake(SessionId),
    /// Free, and a waiter was woken before that has not taken the mutex yet.
    Woken,
}

/// Who holds a mutex, as far as it takes to see a change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    owner: Option<SessionId>,
    token: i64,
}

/// The tables at one moment.
pub(crate) struct Tables<'a> {
    pub(crate) connection: &'a Connection,
    pub(crate) boot: &'a BootClock,
    /// The thread that all sessions of this handle wait in; none if the system cannot name it.
    pub(crate) thread: Option<&'a WaiterThread>,
    /// Microseconds since the boot.
    pub(crate) now: i64,
    /// What day it is, for people and as the floor of tokens.
    pub(crate) wall: SystemTime,
}

/// One mutex as it stands at that moment: an owner whose lease has ended is none.
struct Row {
    owner: Option<Owner>,
    token: i64,
}

struct Owner {
    id: ContenderId,
    session: SessionId,
    ttl_at: i64,
    until: i64,
    since: Option<SystemTime>,
}

impl Tables<'_> {
    /// Takes, renews, or reports; see [`Session::contend`](simba_core::Session::contend).
    pub(crate) fn contend(
        &self,
        session: SessionId,
        claim: &Claim,
        prior: Prior,
        news: &mut Vec<News>,
    ) -> Result<Answer> {
        let row = self.row(&claim.mutex)?;
        match row.owner {
            Some(owner) if owner.session == session => {
                let lapsed = matches!(prior, Prior::Lapsed(token) if to_column(token) == row.token);
                let token = if lapsed { self.acquire(session, claim, row.token)? } else { row.token };
                if !lapsed {
                    self.renew(claim)?;
                }
                Ok(self.ours(claim, token))
            }
            Some(owner) => {
                // A twin, whose id already owns the mutex, gets no place.
                if owner.id != claim.contender {
                    self.queue(session, claim)?;
                }
                Ok(Answer::Held(self.ownership(&owner, row.token)))
            }
            None => match self.head(&claim.mutex)? {
                Some(head) if head != session => {
                    self.queue(session, claim)?;
                    let (mutex, standing) = (claim.mutex.clone(), Standing { owner: None, token: row.token });
                    news.push(News { mutex, changed: false, standing, next: Next::Woken });
                    Ok(Answer::Vacant)
                }
                head => {
                    if head.is_some() {
                        self.leave_queue(session, &claim.mutex)?;
                    }
                    let token = self.acquire(session, claim, row.token)?;
                    let standing = Standing { owner: Some(session), token };
                    let mutex = claim.mutex.clone();
                    news.push(News { mutex, changed: true, standing, next: Next::Nobody });
                    Ok(self.ours(claim, token))
                }
            },
        }
    }

    pub(crate) fn inspect(&self, mutex: &MutexName) -> Result<Option<Ownership>> {
        let row = self.row(mutex)?;
        Ok(row.owner.map(|owner| self.ownership(&owner, row.token)))
    }

    /// Frees the mutex if the session owns it, leaves the queue, and tells whose turn it is now.
    pub(crate) fn release(
        &self,
        session: SessionId,
        mutex: &MutexName,
        holding: Holding,
        news: &mut Vec<News>,
    ) -> Result<()> {
        let row = self.row(mutex)?;
        let meant = match holding {
            Holding::Unknown => true,
            Holding::Under(token) => to_column(token) == row.token,
            _ => false,
        };
        let owner = row.owner.map(|owner| owner.session);
        let freed = meant && owner == Some(session);
        if freed {
            self.run(sql::FREE, [mutex.as_str()])?;
        }
        if freed || owner.is_none() {
            news.push(self.vacant(mutex, row.token, freed)?);
        }
        Ok(())
    }

    /// Leaves the queue; whether there was a place to leave.
    pub(crate) fn leave_queue(&self, session: SessionId, mutex: &MutexName) -> Result<bool> {
        Ok(self.run(sql::LEAVE, (mutex.as_str(), session.0))? > 0)
    }

    /// Passes on a wake-up that was meant for a session that has left the queue.
    pub(crate) fn pass_on(&self, mutex: &MutexName, news: &mut Vec<News>) -> Result<()> {
        let row = self.row(mutex)?;
        if row.owner.is_none() {
            news.push(self.vacant(mutex, row.token, false)?);
        }
        Ok(())
    }

    /// How a mutex stands, for those who wait for it to change. Reads only.
    pub(crate) fn news_of(&self, mutex: &MutexName) -> Result<News> {
        let row = self.row(mutex)?;
        let owner = row.owner.map(|owner| owner.session);
        let next = if owner.is_none() { self.first_waiting(mutex)?.1 } else { None };
        let next = next.map_or(Next::Nobody, Next::Wake);
        let standing = Standing { owner, token: row.token };
        Ok(News { mutex: mutex.clone(), changed: false, standing, next })
    }

    /// Creates the tables and columns that are missing.
    pub(crate) fn apply_schema(&self) -> Result<()> {
        Ok(schema::apply(self.connection)?)
    }

    /// Forgets the waiters of all mutexes that look no more.
    pub(crate) fn bury_all(&self) -> Result<()> {
        self.run(sql::BURY_ALL, (self.boot.boot(), self.now))?;
        Ok(())
    }

    fn vacant(&self, mutex: &MutexName, token: i64, changed: bool) -> Result<News> {
        let standing = Standing { owner: None, token };
        let next = self.head(mutex)?.map_or(Next::Nobody, Next::Wake);
        Ok(News { mutex: mutex.clone(), changed, standing, next })
    }

    /// Gives the mutex to the session with a new token, which it returns.
    fn acquire(&self, session: SessionId, claim: &Claim, token: i64) -> Result<i64> {
        let since = self.wall.duration_since(UNIX_EPOCH).unwrap_or_default();
        // Time as a floor: a token still grows when a power cut has lost the last commits.
        let next = token.checked_add(1).ok_or_else(|| Fault::Row(at_its_end()))?;
        let token = next.max(micros(since));
        let (ttl_at, until) = self.ends(claim);
        let since = i64::try_from(since.as_millis()).unwrap_or(i64::MAX);
        let (mutex, owner, boot) = (claim.mutex.as_str(), claim.contender.as_str(), self.boot.boot());
        self.run(sql::ACQUIRE, (mutex, owner, session.0, boot, ttl_at, until, token, since))?;
        Ok(token)
    }

    fn renew(&self, claim: &Claim) -> Result<()> {
        let (ttl_at, until) = self.ends(claim);
        self.run(sql::RENEW, (claim.mutex.as_str(), ttl_at, until))?;
        Ok(())
    }

    /// The end of the ttl and of the whole lease, if it began now.
    fn ends(&self, claim: &Claim) -> (i64, i64) {
        (self.now + micros(claim.lease.ttl()), self.now + micros(claim.lease.total()))
    }

    /// Keeps the session's place, or gives it the last one. A place outlives two polls.
    fn queue(&self, session: SessionId, claim: &Claim) -> Result<()> {
        if claim.intent != Intent::Queue {
            return Ok(());
        }
        let (mutex, boot) = (claim.mutex.as_str(), self.boot.boot());
        let until = self.now + micros((claim.lease.poll() * 2).max(claim.lease.ttl()));
        if self.run(sql::STAY, (mutex, session.0, boot, self.now, until))? == 0 {
            let thread = self.thread.map(WaiterThread::as_str);
            self.run(sql::ENQUEUE, (mutex, session.0, boot, until, thread))?;
        }
        Ok(())
    }

    /// Returns the session whose turn it is. Deletes the entries before it, whose waiters are gone.
    fn head(&self, mutex: &MutexName) -> Result<Option<SessionId>> {
        let (gone, head) = self.first_waiting(mutex)?;
        for session in gone {
            self.leave_queue(session, mutex)?;
        }
        Ok(head)
    }

    /// Returns the first session in the queue that still waits, and those before it, which do not. Only reads.
    fn first_waiting(&self, mutex: &MutexName) -> Result<(Vec<SessionId>, Option<SessionId>)> {
        let mut statement = self.statement(sql::QUEUE)?;
        let mut entries = statement.query([mutex.as_str()])?;
        let mut gone = Vec::new();
        while let Some(entry) = entries.next()? {
            let session = SessionId(entry.get(0)?);
            if self.waits(entry)? {
                return Ok((gone, Some(session)));
            }
            gone.push(session);
        }
        Ok((gone, None))
    }

    /// Returns whether an entry's lease runs and, as far as can be known, its thread as well.
    fn waits(&self, entry: &rusqlite::Row<'_>) -> rusqlite::Result<bool> {
        if entry.get_ref(1)?.as_str()? != self.boot.boot() || entry.get::<_, i64>(2)? <= self.now {
            return Ok(false);
        }
        let thread = entry.get_ref(3)?.as_str_or_null().ok().flatten();
        Ok(!self.thread.zip(thread).is_some_and(|(ours, thread)| ours.sees_end_of(thread)))
    }

    fn row(&self, mutex: &MutexName) -> Result<Row> {
        let mut statement = self.statement(sql::ROW)?;
        let mut rows = statement.query([mutex.as_str()])?;
        match rows.next()? {
            Some(row) => self.decode(row),
            None => Ok(Row { owner: None, token: 0 }),
        }
    }

    fn decode(&self, row: &rusqlite::Row<'_>) -> Result<Row> {
        let token = row.get(5)?;
        let until: i64 = row.get::<_, Option<i64>>(4)?.unwrap_or_default();
        let Some(id) = row.get_ref(0)?.as_str_or_null().map_err(rusqlite::Error::from)? else {
            return Ok(Row { owner: None, token });
        };
        let of_this_boot = row.get_ref(2)?.as_str_or_null().ok().flatten() == Some(self.boot.boot());
        if until <= self.now || !of_this_boot {
            return Ok(Row { owner: None, token });
        }
        let since: Option<i64> = row.get(6)?;
        let owner = Owner {
            id: ContenderId::foreign(id).map_err(Fault::Row)?,
            session: SessionId(row.get::<_, Option<i64>>(1)?.unwrap_or_default()),
            ttl_at: row.get::<_, Option<i64>>(3)?.unwrap_or_default(),
            until,
            since: since.and_then(|ms| Some(UNIX_EPOCH + Duration::from_millis(u64::try_from(ms).ok()?))),
        };
        Ok(Row { owner: Some(owner), token })
    }

    fn ours(&self, claim: &Claim, token: i64) -> Answer {
        let token = Some(to_token(token));
        Answer::Ours(Ownership::new(claim.contender.clone(), token, claim.lease.total()))
    }

    fn ownership(&self, owner: &Owner, token: i64) -> Ownership {
        Ownership::new(owner.id.clone(), Some(to_token(token)), self.left(owner))
    }

    fn left(&self, owner: &Owner) -> Duration {
        Duration::from_micros(u64::try_from(owner.until - self.now).unwrap_or_default())
    }

    fn statement(&self, sql: &str) -> Result<CachedStatement<'_>> {
        Ok(self.connection.prepare_cached(sql)?)
    }

    fn run(&self, sql: &str, values: impl Params) -> Result<usize> {
        Ok(self.statement(sql)?.execute(values)?)
    }
}

// ===== for operators =====

impl Tables<'_> {
    pub(crate) fn list(&self) -> Result<Vec<MutexRecord>> {
        let mut statement = self.statement(sql::ROWS)?;
        let mut rows = statement.query((self.boot.boot(), self.now))?;
        let mut records = Vec::new();
        while let Some(row) = rows.next()? {
            let mutex =
                MutexName::legacy(row.get_ref(7)?.as_str().unwrap_or_default()).map_err(Fault::Row)?;
            records.push(self.record(mutex, self.decode(row)?, row.get(8)?));
        }
        Ok(records)
    }

    pub(crate) fn read(&self, mutex: &MutexName) -> Result<MutexRecord> {
        let mut statement = self.statement(sql::WAITERS)?;
        let count = (mutex.as_str(), self.boot.boot(), self.now);
        let waiters = statement.query_row(count, |row| row.get(0))?;
        Ok(self.record(mutex.clone(), self.row(mutex)?, waiters))
    }

    fn record(&self, mutex: MutexName, row: Row, waiters: i64) -> MutexRecord {
        let mut record = MutexRecord::free(mutex);
        record.waiters = Some(usize::try_from(waiters).unwrap_or_default());
        if let Some(owner) = row.owner {
            record.token = Some(to_token(row.token));
            record.acquired_at = owner.since;
            record.remaining = Some(self.left(&owner));
            record.in_transition = Some(owner.ttl_at <= self.now);
            record.owner = Some(owner.id);
        }
        record
    }

    pub(crate) fn evict(
        &self,
        mutex: &MutexName,
        condition: &EvictIf,
        news: &mut Vec<News>,
    ) -> Result<Eviction> {
        let row = self.row(mutex)?;
        let Some(owner) = row.owner else { return Ok(Eviction::Vacant) };
        if !condition.holds_for(&owner.id, Some(to_token(row.token))) {
            return Ok(Eviction::Other(owner.id));
        }
        self.run(sql::FREE, [mutex.as_str()])?;
        news.push(self.vacant(mutex, row.token, true)?);
        Ok(Eviction::Freed { window: self.left(&owner), owner: owner.id })
    }
}

fn micros(duration: Duration) -> i64 {
    i64::try_from(duration.as_micros()).unwrap_or(i64::MAX)
}

/// Tokens are born as positive columns.
fn to_token(column: i64) -> FencingToken {
    FencingToken::new(u64::try_from(column).unwrap_or_default())
}

/// A token that no column can hold is none of ours.
fn to_column(token: FencingToken) -> i64 {
    i64::try_from(token.get()).unwrap_or(-1)
}

/// A token is never set back by us.
fn at_its_end() -> Error {
    let message =
        "the token of this mutex is at the end of its column: set it back by hand, or choose another name";
    Error::new(ErrorKind::Config, message).with_backend(NAME)
}
