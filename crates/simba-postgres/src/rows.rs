//! What the rows of an answer say.

use std::time::{Duration, SystemTime};

use simba_core::{ContenderId, FencingToken, Ownership, Result};
use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use crate::error::protocol;

/// A column of a row.
pub(crate) fn get<'a, T: FromSql<'a>>(row: &'a Row, at: usize) -> Result<T> {
    row.try_get(at)
        .map_err(|fault| protocol("the server answered in another form than asked for").with_source(fault))
}

pub(crate) fn token(row: &Row, at: usize) -> Result<FencingToken> {
    let token = u64::try_from(get::<i64>(row, at)?);
    token.map(FencingToken::new).map_err(|_| protocol("the token of a mutex is below zero: it is not ours"))
}

pub(crate) fn contender(row: &Row, at: usize) -> Result<ContenderId> {
    ContenderId::foreign(get::<&str>(row, at)?)
        .map_err(|error| protocol("the owner of a mutex is none: it is not ours").with_source(error))
}

/// From one moment of the server's clock to another; nothing if it lies before.
pub(crate) fn left(until: SystemTime, now: SystemTime) -> Duration {
    until.duration_since(now).unwrap_or_default()
}

/// A row that begins with owner, session, token, end and now.
pub(crate) struct Seen<'a> {
    row: &'a Row,
    pub(crate) session: &'a str,
    pub(crate) remaining: Duration,
}

impl<'a> Seen<'a> {
    pub(crate) fn of(row: &'a Row) -> Result<Self> {
        Ok(Self { row, session: get(row, 1)?, remaining: left(get(row, 3)?, get(row, 4)?) })
    }

    /// Whether nobody has the mutex.
    pub(crate) fn is_free(&self) -> bool {
        self.remaining.is_zero()
    }

    pub(crate) fn ownership(&self) -> Result<Ownership> {
        Ok(Ownership::new(contender(self.row, 0)?, Some(token(self.row, 2)?), self.remaining))
    }
}
