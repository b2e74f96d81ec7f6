//! A store of one's own behind Simba: a table of mutexes under one lock.
//!
//! It stands for a store that knows rows and nothing else: no queue, no notifications. The engine polls it,
//! and its [profile](https://docs.rs/simba-tck) says so. A store across a network looks the same, with a
//! request in place of [`Table::with_row`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::{
    Answer, Backend, Claim, Clock, ContenderId, FencingToken, Holding, Intent, Moment, MutexName, Ownership,
    Prior, Result, Session, SystemClock, async_trait,
};

/// Mutexes in a table. Clones share the table, as two processes share a server.
#[derive(Clone, Debug, Default)]
pub struct TableBackend {
    table: Arc<Table>,
}

#[async_trait]
impl Backend for TableBackend {
    fn name(&self) -> &'static str {
        "table"
    }

    async fn open(&self, claim: Claim) -> Result<Box<dyn Session>> {
        Ok(Box::new(TableSession { table: Arc::clone(&self.table), claim }))
    }
}

#[derive(Debug, Default)]
struct Table {
    rows: Mutex<HashMap<MutexName, Row>>,
}

/// One mutex. It is never removed, since its token must outlive every owner.
#[derive(Debug, Default)]
struct Row {
    token: u64,
    owner: Option<Owner>,
}

#[derive(Debug)]
struct Owner {
    id: ContenderId,
    until: Moment,
}

impl Table {
    /// One atomic step at the store, by the store's own clock.
    fn with_row<R>(&self, mutex: &MutexName, step: impl FnOnce(&mut Row, Moment) -> R) -> R {
        let now = SystemClock.now();
        let mut rows = self.rows.lock().unwrap_or_else(PoisonError::into_inner);
        let row = rows.entry(mutex.clone()).or_default();
        row.owner.take_if(|owner| owner.until <= now);
        step(row, now)
    }
}

impl Row {
    fn is_owned_by(&self, id: &ContenderId) -> bool {
        self.owner.as_ref().is_some_and(|owner| owner.id == *id)
    }

    /// A new tenure has a new token. So has one that was given up for lost: what it left behind is fenced
    /// off.
    fn begins_anew(&self, prior: Prior) -> bool {
        self.owner.is_none() || prior == Prior::Lapsed(FencingToken::new(self.token))
    }

    fn give(&mut self, claim: &Claim, now: Moment) {
        self.owner = Some(Owner { id: claim.contender.clone(), until: now + claim.lease.total() });
    }

    fn ownership(&self, now: Moment) -> Option<Ownership> {
        let Owner { id, until } = self.owner.as_ref()?;
        let remaining: Duration = *until - now;
        Some(Ownership::new(id.clone(), Some(FencingToken::new(self.token)), remaining))
    }
}

struct TableSession {
    table: Arc<Table>,
    claim: Claim,
}

#[async_trait]
impl Session for TableSession {
    async fn contend(&mut self, prior: Prior) -> Result<Answer> {
        let claim = &self.claim;
        Ok(self.table.with_row(&claim.mutex, |row, now| {
            // With nothing before, a hold under our own id is not this session's.
            let ours = prior != Prior::Nothing && row.is_owned_by(&claim.contender);
            let takes = (ours || row.owner.is_none()) && claim.intent != Intent::Observe;
            if takes {
                row.token += u64::from(row.begins_anew(prior));
                row.give(claim, now);
            }
            match row.ownership(now) {
                Some(ownership) if takes => Answer::Ours(ownership),
                Some(ownership) => Answer::Held(ownership),
                None => Answer::Vacant,
            }
        }))
    }

    async fn inspect(&mut self) -> Result<Option<Ownership>> {
        Ok(self.table.with_row(&self.claim.mutex, |row, now| row.ownership(now)))
    }

    async fn release(&mut self, holding: Holding) -> Result<()> {
        self.table.with_row(&self.claim.mutex, |row, _| {
            let meant = match holding {
                Holding::Unknown => true,
                Holding::Under(token) => token.get() == row.token,
                // Without a queue there is nothing to leave.
                _ => false,
            };
            row.owner.take_if(|owner| meant && owner.id == self.claim.contender);
        });
        Ok(())
    }
}
