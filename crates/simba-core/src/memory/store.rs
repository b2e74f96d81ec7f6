//! The table of mutexes, which other backends have in a server.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::backend::{Answer, Claim, Holding, Intent, Ownership, Prior};
use crate::clock::{Clock, Moment};
use crate::operate::{EvictIf, Eviction, MutexRecord};
use crate::types::{ContenderId, FencingToken, MutexName};
use crate::wakeups::Wakeups;

/// The id of a session within the store. Two sessions may have the same contender id, but never the same session id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionId(u64);

/// The sessions that a wake-up is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Topic {
    /// The waiter that may be first in the queue.
    Waiter(SessionId),
    /// All observers of the mutex.
    Owner(MutexName),
}

/// All mutexes of one store.
pub(super) struct Store {
    rows: Mutex<HashMap<MutexName, Row>>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) wakeups: Wakeups<Topic>,
    sessions: AtomicU64,
}

/// One mutex. Never removed: its token must stay after a release.
#[derive(Default)]
struct Row {
    owner: Option<Owner>,
    token: u64,
    waiters: VecDeque<Waiter>,
}

struct Owner {
    id: ContenderId,
    /// A session with the same contender id but another session id is not the owner.
    session: SessionId,
    until: Moment,
    ttl_until: Moment,
    since: SystemTime,
}

/// An entry in the queue, which expires unless its waiter polls.
struct Waiter {
    session: SessionId,
    until: Moment,
}

impl Store {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { rows: Mutex::default(), clock, wakeups: Wakeups::local(), sessions: AtomicU64::new(0) }
    }

    pub(super) fn open(&self) -> SessionId {
        SessionId(self.sessions.fetch_add(1, Ordering::Relaxed))
    }

    /// Acquires, renews, or reports; see [`Session::contend`](crate::spi::Session::contend).
    pub(super) fn contend(&self, session: SessionId, claim: &Claim, prior: Prior) -> Answer {
        let now = self.clock.now();
        let mut rows = self.rows();
        let row = rows.entry(claim.mutex.clone()).or_default();
        row.expire(now);
        match prior {
            Prior::Lapsed(token) if row.is_of(session) && row.token == token.get() => {
                row.acquire(session, claim, now, self.clock.wall());
            }
            _ if row.is_of(session) => row.renew(claim, now),
            _ if row.owner.is_some() || !row.is_turn_of(session) => row.queue(session, claim, now),
            _ => {
                row.remove_waiter(session);
                self.wakeups.notify(&Topic::Owner(claim.mutex.clone()));
                row.acquire(session, claim, now, self.clock.wall());
            }
        }
        match row.ownership(now) {
            Some(ownership) if row.is_of(session) => Answer::Ours(ownership),
            Some(ownership) => Answer::Held(ownership),
            None => Answer::Vacant,
        }
    }

    pub(super) fn inspect(&self, mutex: &MutexName) -> Option<Ownership> {
        self.on_row(mutex, |row, now| row.ownership(now)).flatten()
    }

    /// Frees the mutex if the session owns it, leaves the queue, and wakes the first waiter.
    pub(super) fn release(&self, session: SessionId, mutex: &MutexName, holding: Holding) {
        self.on_row(mutex, |row, _| {
            row.remove_waiter(session);
            let named = match holding {
                Holding::Nothing => false,
                Holding::Unknown => true,
                Holding::Under(token) => token.get() == row.token,
            };
            let freed = row.owner.take_if(|owner| owner.session == session && named).is_some();
            self.wake_next(row, mutex, freed);
        });
    }

    /// Leaves the queue without changing the mutex, and passes a wake-up of the session on.
    pub(super) fn leave(&self, session: SessionId, mutex: &MutexName) {
        self.on_row(mutex, |row, _| {
            if row.remove_waiter(session) {
                self.wake_next(row, mutex, false);
            }
        });
    }

    /// Wakes the first waiter if the mutex is free, and all observers if the owner changed.
    fn wake_next(&self, row: &Row, mutex: &MutexName, changed: bool) {
        if changed {
            self.wakeups.notify(&Topic::Owner(mutex.clone()));
        }
        if let (None, Some(next)) = (&row.owner, row.waiters.front()) {
            self.wakeups.notify(&Topic::Waiter(next.session));
        }
    }

    pub(super) fn lose_all(&self) {
        self.rows().clear();
    }

    /// Applies a change to the row of a mutex, if it has one, after the removal of what expired.
    fn on_row<R>(&self, mutex: &MutexName, change: impl FnOnce(&mut Row, Moment) -> R) -> Option<R> {
        let now = self.clock.now();
        let mut rows = self.rows();
        let row = rows.get_mut(mutex)?;
        row.expire(now);
        Some(change(row, now))
    }

    fn rows(&self) -> MutexGuard<'_, HashMap<MutexName, Row>> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// ===== for operators =====

impl Store {
    pub(super) fn list(&self) -> Vec<MutexRecord> {
        let now = self.clock.now();
        let mut records: Vec<_> =
            self.rows().iter_mut().map(|(mutex, row)| row.record(mutex.clone(), now)).collect();
        records.sort_by(|one, other| one.mutex.cmp(&other.mutex));
        records
    }

    pub(super) fn read(&self, mutex: &MutexName) -> MutexRecord {
        let record = self.on_row(mutex, |row, now| row.record(mutex.clone(), now));
        record.unwrap_or_else(|| MutexRecord::free(mutex.clone()))
    }

    pub(super) fn evict(&self, mutex: &MutexName, condition: &EvictIf) -> Eviction {
        let evicted = self.on_row(mutex, |row, now| {
            let token = Some(FencingToken::new(row.token));
            let Some(owner) = row.owner.take_if(|owner| condition.holds_for(&owner.id, token)) else {
                return row.owner.as_ref().map(|owner| Eviction::Other(owner.id.clone()));
            };
            self.wake_next(row, mutex, true);
            Some(Eviction::Freed { window: owner.until - now, owner: owner.id })
        });
        evicted.flatten().unwrap_or(Eviction::Vacant)
    }
}

impl Row {
    /// Removes what expired: the owner's lease, and the entries of waiters that no longer poll.
    fn expire(&mut self, now: Moment) {
        self.owner.take_if(|owner| owner.until <= now);
        self.waiters.retain(|waiter| waiter.until > now);
    }

    fn is_of(&self, session: SessionId) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.session == session)
    }

    fn is_turn_of(&self, session: SessionId) -> bool {
        self.waiters.front().is_none_or(|head| head.session == session)
    }

    /// Makes the session the owner, with a new token.
    fn acquire(&mut self, session: SessionId, claim: &Claim, now: Moment, since: SystemTime) {
        // The time is the minimum, so that tokens increase after the store lost its data.
        let floor = u64::try_from(now.since_zero().as_micros()).unwrap_or(u64::MAX);
        self.token = (self.token + 1).max(floor);
        let id = claim.contender.clone();
        self.owner = Some(Owner { id, session, until: now, ttl_until: now, since });
        self.renew(claim, now);
    }

    fn renew(&mut self, claim: &Claim, now: Moment) {
        if let Some(owner) = &mut self.owner {
            owner.until = now + claim.lease.total();
            owner.ttl_until = now + claim.lease.ttl();
        }
    }

    /// Extends the session's entry, or appends one. An entry lasts for two poll intervals. A session whose contender id
    /// owns the mutex under another session gets none.
    fn queue(&mut self, session: SessionId, claim: &Claim, now: Moment) {
        let same_id = self.owner.as_ref().is_some_and(|owner| owner.id == claim.contender);
        if claim.intent == Intent::Queue && !same_id {
            let until = now + (claim.lease.poll() * 2).max(claim.lease.ttl());
            match self.waiters.iter_mut().find(|waiter| waiter.session == session) {
                Some(waiter) => waiter.until = until,
                None => self.waiters.push_back(Waiter { session, until }),
            }
        }
    }

    fn remove_waiter(&mut self, session: SessionId) -> bool {
        let before = self.waiters.len();
        self.waiters.retain(|waiter| waiter.session != session);
        self.waiters.len() < before
    }

    fn ownership(&self, now: Moment) -> Option<Ownership> {
        let owner = self.owner.as_ref()?;
        Some(Ownership::new(owner.id.clone(), Some(FencingToken::new(self.token)), owner.until - now))
    }

    fn record(&mut self, mutex: MutexName, now: Moment) -> MutexRecord {
        self.expire(now);
        let owner = self.owner.as_ref();
        MutexRecord {
            owner: owner.map(|owner| owner.id.clone()),
            token: owner.map(|_| FencingToken::new(self.token)),
            acquired_at: owner.map(|owner| owner.since),
            remaining: owner.map(|owner| owner.until - now),
            in_transition: owner.map(|owner| owner.ttl_until <= now),
            waiters: Some(self.waiters.len()),
            mutex,
        }
    }
}
