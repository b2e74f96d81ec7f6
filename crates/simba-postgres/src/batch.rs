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
use crate::error::{CallError, lost};
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
    /// Whether a take may acquire a free mutex; otherwise it only renews.
    pub(crate) takes: bool,
    /// Whether a take that is sent alone creates the row of a new mutex. In a batch it always does.
    pub(crate) creates: bool,
    /// For a release: the holder saw no waiter, so a call sent alone first tries the statement for that case.
    pub(crate) uncontended: bool,
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

/// Sends acquisitions and renewals.
pub(crate) struct Takes<'a>(pub(crate) &'a Shared);

/// Sends releases.
pub(crate) struct Releases<'a>(pub(crate) &'a Shared);

impl SendBatch for Takes<'_> {
    type Call = Request;
    type Answer = Reply;

    async fn send(&self, calls: &[Request]) -> Result<Answers<Reply>, BatchError> {
        let Some(connection) = self.0.commands.current() else { return Ok(not_sent(calls)) };
        if let [call] = calls
            && !call.creates
        {
            let (mutex, owner, session) = (call.mutex.as_str(), call.owner.as_str(), &*call.session);
            let params: [Param<'_>; 7] =
                [&mutex, &owner, &session, &call.ttl, &call.total, &call.token, &call.takes];
            return answers(&connection, calls, connection.call(Query::Take, &params).await);
        }
        let Columns { mutexes, sessions, tokens } = &Columns::of(calls);
        let owners: Vec<&str> = calls.iter().map(|call| call.owner.as_str()).collect();
        let ttls: Vec<f64> = calls.iter().map(|call| call.ttl).collect();
        let totals: Vec<f64> = calls.iter().map(|call| call.total).collect();
        let takes: Vec<bool> = calls.iter().map(|call| call.takes).collect();
        let params: [Param<'_>; 7] = [mutexes, &owners, sessions, &ttls, &totals, tokens, &takes];
        answers(&connection, calls, connection.call(Query::TakeMany, &params).await)
    }
}

impl SendBatch for Releases<'_> {
    type Call = Request;
    type Answer = Reply;

    async fn send(&self, calls: &[Request]) -> Result<Answers<Reply>, BatchError> {
        let Some(connection) = self.0.commands.current() else { return Ok(not_sent(calls)) };
        if let [call] = calls
            && call.uncontended
        {
            let (mutex, session) = (call.mutex.as_str(), &*call.session);
            let rows = connection.call(Query::ReleaseUncontended, &[&mutex, &session, &call.token]).await;
            if !matches!(&rows, Ok(rows) if rows.is_empty()) {
                return answers(&connection, calls, rows);
            }
        }
        let Columns { mutexes, sessions, tokens } = &Columns::of(calls);
        let rows = connection.call(Query::Release, &[mutexes, sessions, tokens]).await;
        answers(&connection, calls, rows)
    }
}

/// The parameters that both statements have, one element per call.
struct Columns<'a> {
    mutexes: Vec<&'a str>,
    sessions: Vec<&'a str>,
    tokens: Vec<i64>,
}

impl<'a> Columns<'a> {
    fn of(calls: &'a [Request]) -> Self {
        Self {
            mutexes: calls.iter().map(|call| call.mutex.as_str()).collect(),
            sessions: calls.iter().map(|call| &*call.session).collect(),
            tokens: calls.iter().map(|call| call.token).collect(),
        }
    }
}

fn not_sent(calls: &[Request]) -> Answers<Reply> {
    calls.iter().map(|_| Ok(Reply::NotSent)).collect()
}

/// Returns the answer to each call. A batch that fails is sent again call by call, so that one bad call does not fail
/// the rest.
fn answers(
    connection: &Connection,
    calls: &[Request],
    rows: Result<Vec<Row>, CallError>,
) -> Result<Answers<Reply>, BatchError> {
    let rows = match rows {
        Ok(rows) => rows,
        Err(error) if error.is_locked() && calls.len() == 1 => Vec::new(),
        Err(_) if connection.has_ended() => return Err(BatchError::Fail(lost())),
        Err(error) => return Err(BatchError::RetryAlone(connection.error(error))),
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
