//! The calls that are combined into one statement when they arrive together: acquisitions, renewals and releases.
//!
//! The connection runs one transaction after the other, and each acquisition waits for the disk. A call that arrives
//! alone is sent in a statement of its own, which costs the server less.

use std::collections::HashMap;
use std::sync::Arc;

use simba_core::{ContenderId, MutexName, Result};
use simba_net::batch::{Answers, BatchError, BatchLimits, Batcher, SendBatch};
use tokio_postgres::Row;

use crate::backend::Shared;
use crate::config::PostgresConfig;
use crate::connection::{Connection, Param};
use crate::error::{is_locked, lost};
use crate::statements::{Query, get};

/// The columns of an answer's row after its session; missing columns are zero.
pub(crate) type Numbers = [i64; 4];

/// One call.
#[derive(Clone)]
pub(crate) struct Request {
    pub(crate) mutex: MutexName,
    pub(crate) owner: ContenderId,
    pub(crate) session: Arc<str>,
    pub(crate) ttl: f64,
    pub(crate) total: f64,
    /// The lapsed token (take) or the token of the tenure (release); negative for none.
    pub(crate) token: i64,
    pub(crate) kind: Kind,
}

/// What a call does. A batch has calls of the first two kinds or of the last two.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Renews only.
    Renew,
    /// Renews, or acquires a free mutex.
    Take,
    /// Releases.
    Release,
    /// Releases a mutex whose holder saw no waiter. Sent alone, it first tries the statement for that case.
    ReleaseUncontended,
}

/// The answer to a call.
pub(crate) enum Reply {
    /// There was no connection, so nothing was sent.
    NotSent,
    /// No row matched, or another transaction has locked it.
    NoRow,
    /// The call was successful.
    Row(Numbers),
}

/// Combines the calls of one kind.
pub(crate) type Calls = Batcher<Request, Reply>;

/// Returns the limits of both batchers.
pub(crate) fn limits(config: &PostgresConfig) -> BatchLimits {
    let window = std::time::Duration::ZERO;
    BatchLimits { calls: 256, in_flight: 2, time: config.call_timeout(), window }
}

impl SendBatch for Shared {
    type Call = Request;
    type Answer = Reply;

    async fn send(&self, calls: &[Request]) -> Result<Answers<Reply>, BatchError> {
        match self.commands.current() {
            Some(connection) => answers(&connection, calls, send(&connection, calls).await),
            None => Ok(calls.iter().map(|_| Ok(Reply::NotSent)).collect()),
        }
    }
}

async fn send(connection: &Connection, calls: &[Request]) -> Result<Vec<Row>> {
    if let [call] = calls {
        let (mutex, owner, session) = (call.mutex.as_str(), call.owner.as_str(), &*call.session);
        match call.kind {
            Kind::Renew | Kind::Take => {
                let takes = call.kind == Kind::Take;
                let params: [Param<'_>; 7] =
                    [&mutex, &owner, &session, &call.ttl, &call.total, &call.token, &takes];
                return connection.call(Query::Take, &params).await;
            }
            Kind::ReleaseUncontended => {
                let params: [Param<'_>; 3] = [&mutex, &session, &call.token];
                let rows = connection.call(Query::ReleaseUncontended, &params).await?;
                if !rows.is_empty() {
                    return Ok(rows);
                }
            }
            Kind::Release => {}
        }
    }
    let mutexes: Vec<&str> = calls.iter().map(|call| call.mutex.as_str()).collect();
    let sessions: Vec<&str> = calls.iter().map(|call| &*call.session).collect();
    let tokens: Vec<i64> = calls.iter().map(|call| call.token).collect();
    if calls.iter().any(|call| matches!(call.kind, Kind::Release | Kind::ReleaseUncontended)) {
        return connection.call(Query::Release, &[&mutexes, &sessions, &tokens]).await;
    }
    let owners: Vec<&str> = calls.iter().map(|call| call.owner.as_str()).collect();
    let ttls: Vec<f64> = calls.iter().map(|call| call.ttl).collect();
    let totals: Vec<f64> = calls.iter().map(|call| call.total).collect();
    let takes: Vec<bool> = calls.iter().map(|call| call.kind != Kind::Renew).collect();
    let params: [Param<'_>; 7] = [&mutexes, &owners, &sessions, &ttls, &totals, &tokens, &takes];
    connection.call(Query::TakeMany, &params).await
}

/// Returns the answer to each call. A batch that fails is sent again call by call, so that one bad call does not fail
/// the rest.
fn answers(
    connection: &Connection,
    calls: &[Request],
    rows: Result<Vec<Row>>,
) -> Result<Answers<Reply>, BatchError> {
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) if is_locked(&error) && calls.len() == 1 => Vec::new(),
        Err(_) if connection.has_ended() => return Err(BatchError::Fail(lost())),
        Err(error) => return Err(BatchError::RetryAlone(error)),
    };
    let parse = |row| Ok((get::<&str>(row, 0)?, numbers(row)?));
    let numbers: HashMap<&str, Numbers> = rows.iter().map(parse).collect::<Result<_>>()?;
    let answer = |call: &Request| numbers.get(&*call.session).map_or(Reply::NoRow, |row| Reply::Row(*row));
    Ok(calls.iter().map(|call| Ok(answer(call))).collect())
}

/// Returns the columns of a row after its session.
fn numbers(row: &Row) -> Result<Numbers> {
    let mut numbers = Numbers::default();
    for (at, number) in numbers.iter_mut().enumerate().take(row.len() - 1) {
        *number = get(row, at + 1)?;
    }
    Ok(numbers)
}
