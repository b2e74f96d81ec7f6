//! The table of mutexes: what another backend keeps in a server.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use crate::backend::{Answer, Claim, Holding, Intent, Ownership, Prior};
use crate::clock::{Clock, Moment};
use crate::hub::Hub;
use crate::operate::{EvictIf, Eviction, MutexRecord};
use crate::types::{ContenderId, FencingToken, MutexName};

/// A session's name within the store. Two sessions may share a contender's id; they never share this.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct SessionId(u64);

/// Whom a hint is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Topic {
    /// The one waiter whose turn it may be.
    Turn(SessionId),
    /// Everyone who watches the mutex.
    Owner(MutexName),
}

/// All mutexes of one store.
pub(super) struct Store {
    rows: Mutex<HashMap<MutexName, Row>>,
    clock: Arc<dyn Clock>,
    hub: Hub<Topic>,
    sessions: AtomicU64,
}

/// One mutex. Never removed: its token must outlive every owner.
#[derive(Default)]
struct Row {
    owner: Option<Owner>,
    token: u64,
    waiters: VecDeque<Waiter>,
}

struct Owner {
    id: ContenderId,
    /// Another session of the same id is a stranger, whatever it believes to have.
    session: SessionId,
    until: Moment,
    ttl_until: Moment,
    since: SystemTime,
}

/// A place in the queue, which ends unless its waiter looks again.
struct Waiter {
    session: SessionId,
    until: Moment,
}

impl Store {
    pub(super) fn new(clock: Arc<dyn Clock>) -> Self {
        Self { rows: Mutex::default(), clock, hub: Hub::local(), sessions: AtomicU64::new(0) }
    }

    pub(super) fn hub(&self) -> &Hub<Topic> {
        &self.hub
    }

    pub(super) fn clock(&self) -> &dyn Clock {
        &*self.clock
    }

    pub(super) fn open(&self) -> SessionId {
        SessionId(self.sessions.fetch_add(1, Ordering::Relaxed))
    }

    /// Takes, renews, or reports; see [`Session::contend`](crate::Session::contend).
    pub(super) fn contend(&self, session: SessionId, claim: &Claim, prior: Prior) -> Answer {
        let now = self.clock.now();
        let mut rows = self.rows();
        let row = rows.entry(claim.mutex.clone()).or_default();
        row.expire(now);
        let took = match prior {
            Prior::Lapsed(token) if row.is_of(session) && row.token == token.get() => {
                row.acquire(session, claim, now, self.clock.wall())
            }
            _ if row.is_of(session) => row.renew(claim, now),
            _ if row.owner.is_some() || !row.is_turn_of(session) => row.queue(session, claim, now),
            _ => {
                row.leave(session);
                self.hub.ring(&Topic::Owner(claim.mutex.clone()));
                row.acquire(session, claim, now, self.clock.wall())
            }
        };
        match row.ownership(now) {
            Some(ours) if took => Answer::Ours(ours),
            Some(other) => Answer::Held(other),
            None => Answer::Vacant,
        }
    }

    pub(super) fn inspect(&self, mutex: &MutexName) -> Option<Ownership> {
        let now = self.clock.now();
        let mut rows = self.rows();
        let row = rows.get_mut(mutex)?;
        row.expire(now);
        row.ownership(now)
    }

    /// Frees the mutex if the contender owns it, leaves the queue, and wakes whose turn it is now.
    pub(super) fn release(&self, session: SessionId, claim: &Claim, holding: Holding) {
        let now = self.clock.now();
        let mut rows = self.rows();
        let Some(row) = rows.get_mut(&claim.mutex) else { return };
        row.expire(now);
        row.leave(session);
        let meant = match holding {
            Holding::Nothing => false,
            Holding::Unknown => true,
            Holding::Under(token) => token.get() == row.token,
        };
        let freed = row.owner.take_if(|owner| owner.session == session && meant).is_some();
        self.wake_next(row, &claim.mutex, freed);
    }

    /// Leaves the queue without touching the mutex, and passes on a wake-up that was meant for the session.
    pub(super) fn leave(&self, session: SessionId, mutex: &MutexName) {
        let now = self.clock.now();
        let mut rows = self.rows();
        let Some(row) = rows.get_mut(mutex) else { return };
        row.expire(now);
        if row.leave(session) {
            self.wake_next(row, mutex, false);
        }
    }

    /// Wakes the head of the queue if the mutex is free.
    fn wake_next(&self, row: &Row, mutex: &MutexName, changed: bool) {
        if changed {
            self.hub.ring(&Topic::Owner(mutex.clone()));
        }
        if let (None, Some(next)) = (&row.owner, row.waiters.front()) {
            self.hub.ring(&Topic::Turn(next.session));
        }
    }

    pub(super) fn lose_all(&self) {
        self.rows().clear();
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
        let now = self.clock.now();
        let mut rows = self.rows();
        rows.get_mut(mutex)
            .map_or_else(|| MutexRecord::free(mutex.clone()), |row| row.record(mutex.clone(), now))
    }

    pub(super) fn evict(&self, mutex: &MutexName, condition: &EvictIf) -> Eviction {
        let now = self.clock.now();
        let mut rows = self.rows();
        let Some(row) = rows.get_mut(mutex) else { return Eviction::Vacant };
        row.expire(now);
        let token = Some(FencingToken::new(row.token));
        match row.owner.take() {
            None => Eviction::Vacant,
            Some(owner) if condition.holds_for(&owner.id, token) => {
                self.wake_next(row, mutex, true);
                Eviction::Freed { window: owner.until - now, owner: owner.id }
            }
            Some(owner) => {
                let id = owner.id.clone();
                row.owner = Some(owner);
                Eviction::Other(id)
            }
        }
    }
}

impl Row {
    /// Forgets what ran out: the owner's lease, and the places of waiters that look no more.
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

    /// Gives the mutex to the contender with a new token. True, as for all that makes it the caller's.
    fn acquire(&mut self, session: SessionId, claim: &Claim, now: Moment, since: SystemTime) -> bool {
        // Time as a floor: a token still grows after the store lost its memory.
        let floor = u64::try_from(now.since_zero().as_micros()).unwrap_or(u64::MAX);
        self.token = (self.token + 1).max(floor);
        let id = claim.contender.clone();
        self.owner = Some(Owner { id, session, until: now, ttl_until: now, since });
        self.renew(claim, now)
    }

    fn renew(&mut self, claim: &Claim, now: Moment) -> bool {
        if let Some(owner) = &mut self.owner {
            owner.until = now + claim.lease.total();
            owner.ttl_until = now + claim.lease.ttl();
        }
        true
    }

    /// Keeps the session's place, or gives it the last one; false, since the mutex is not the caller's. A
    /// place outlives two polls. A twin, whose id already owns the mutex, gets none.
    fn queue(&mut self, session: SessionId, claim: &Claim, now: Moment) -> bool {
        let twin = self.owner.as_ref().is_some_and(|owner| owner.id == claim.contender);
        if claim.intent == Intent::Queue && !twin {
            let until = now + (claim.lease.poll() * 2).max(claim.lease.ttl());
            match self.waiters.iter_mut().find(|waiter| waiter.session == session) {
                Some(waiter) => waiter.until = until,
                None => self.waiters.push_back(Waiter { session, until }),
            }
        }
        false
    }

    fn leave(&mut self, session: SessionId) -> bool {
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
