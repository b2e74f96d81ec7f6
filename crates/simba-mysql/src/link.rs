//! One supervised connection: it has its settings before anyone uses it, no statement waits for ever, and a
//! connection in doubt is given up and made anew.

use std::collections::HashSet;
use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use mysql_async::prelude::Queryable;
use mysql_async::{Conn, IoError, Opts, OptsBuilder, Value};
use simba_core::{Clock, Error, ErrorKind, Moment, Result, within};
use simba_net::{Backoff, first_to_answer};
use tokio::net::lookup_host;

use crate::error::{Fault, NAME, fault, is_tls, unreached};
use crate::row::{Columns, Row};
use crate::server_clock::Reading;
use crate::site::Site;
use crate::spell::spell;
use crate::statements::{FOR_CALLS, FOR_LOOKS, Statements};

const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A round trip that takes longer than a server needs to understand a statement many times over.
const SLOW: Duration = Duration::from_millis(10);

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Purpose {
    /// The calls of sessions: short, and many wait behind each.
    Calls,
    /// Looks at many rows, and what operators do.
    Looks,
}

/// A connection that is made anew when it breaks.
///
/// While a statement is under way the connection is out of its place, so a statement that is dropped half-way
/// takes the connection with it: nobody gets the reply to another's question.
pub(crate) struct Link {
    site: Arc<Site>,
    purpose: Purpose,
    conn: Option<Conn>,
    /// The settings are not made yet: they go out with the first statement, in one round trip.
    fresh: bool,
    /// How often it was connected.
    epoch: u64,
    /// The statements that the server has prepared, by where their text is: all of ours live as long as we do.
    prepared: HashSet<usize>,
    /// How long the last round trip took.
    trip: Duration,
    backoff: Backoff,
    /// No try to connect before this moment, and why the last one failed.
    pause: Option<(Moment, Error)>,
}

/// What a write did.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    pub(crate) rows: u64,
    /// What the statement handed to `LAST_INSERT_ID`, if it changed a row.
    pub(crate) number: Option<u64>,
    sent: Moment,
    received: Moment,
}

impl Written {
    /// The server's time, for a statement that hands it over.
    pub(crate) fn reading(&self) -> Option<Reading> {
        let (sent, received) = (self.sent, self.received);
        self.number.filter(|_| self.rows > 0).map(|server_ms| Reading { server_ms, sent, received })
    }
}

impl Link {
    pub(crate) fn new(site: Arc<Site>, purpose: Purpose) -> Self {
        let backoff = Backoff::new(FIRST_PAUSE, LONGEST_PAUSE);
        Self {
            site,
            purpose,
            conn: None,
            fresh: true,
            epoch: 0,
            prepared: HashSet::new(),
            trip: Duration::ZERO,
            backoff,
            pause: None,
        }
    }

    /// How often it was connected: it grows whenever something may have been missed.
    pub(crate) const fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Connects unless it is connected; true if it had to. Fails at once during the pause after a failed try.
    ///
    /// # Errors
    ///
    /// There is no connection, and why.
    pub(crate) async fn ready(&mut self) -> Result<bool> {
        if self.conn.is_some() {
            return Ok(false);
        }
        let now = self.site.clock.now();
        if let Some((_, error)) = self.pause.as_ref().filter(|(until, _)| now < *until) {
            return Err(error.clone());
        }
        match self.connect().await {
            Ok(conn) => {
                tracing::debug!(backend = NAME, purpose = ?self.purpose, id = conn.id(), "connected");
                self.conn = Some(conn);
                self.fresh = true;
                self.prepared.clear();
                self.epoch += 1;
                self.backoff.reset();
                self.pause = None;
                Ok(true)
            }
            Err(error) => {
                let until = self.site.clock.now() + self.backoff.pause();
                self.pause = Some((until, error.clone()));
                Err(error)
            }
        }
    }

    async fn connect(&self) -> Result<Conn> {
        let limit = self.site.config.connect_timeout;
        match within(&*self.site.clock, limit, dial(&self.site)).await {
            Some(connected) => connected.map_err(|error| unreached(error, self.site.statements.table())),
            None => Err(unanswered("no connection to the server", limit)),
        }
    }

    /// Makes the settings and has the server prepare what calls need, so that the first of them are as fast as
    /// the rest.
    pub(crate) async fn warm_up(&mut self) {
        drop(self.command(self.site.config.connect_timeout, "SELECT 1").await);
        while self.prepare_next().await {}
    }

    /// Has the server prepare the next statement that calls need; false if there is none.
    pub(crate) async fn prepare_next(&mut self) -> bool {
        let site = Arc::clone(&self.site);
        let Statements { take, renew, release, read, insert, .. } = &site.statements;
        let texts = [renew, take, release, read, insert];
        match texts.into_iter().find(|text| !self.prepared.contains(&place(text))) {
            Some(text) => self.prepare(text).await,
            None => false,
        }
    }

    /// Whether round trips take so long that none should be spent on anything that can do without.
    pub(crate) fn is_slow(&self) -> bool {
        self.trip > SLOW
    }

    /// Has the server prepare a statement, unless that costs more than it saves: on a slow network a spelt
    /// statement is as fast, and whoever calls next would have to wait.
    pub(crate) async fn prepare(&mut self, text: &str) -> bool {
        if self.prepared.contains(&place(text)) || self.is_slow() || self.fresh {
            return false;
        }
        let site = Arc::clone(&self.site);
        let limit = site.config.connect_timeout;
        let Some(mut conn) = self.conn.take() else { return false };
        let sent = site.clock.now();
        let prepared = within(&*site.clock, limit, conn.prep(text)).await;
        self.trip = site.clock.now() - sent;
        // A table that is not there yet is for the calls to find out.
        let prepared = self.settle(conn, prepared, limit).await.is_ok();
        prepared && self.prepared.insert(place(text))
    }

    /// Carries a write out.
    ///
    /// # Errors
    ///
    /// See [`Fault`]; after [`Fault::Lost`] and [`Fault::Late`] there is no connection.
    pub(crate) async fn write(
        &mut self,
        limit: Duration,
        text: &str,
        values: Vec<Value>,
    ) -> Result<Written, Fault> {
        let site = Arc::clone(&self.site);
        let sent = site.clock.now();
        let mut conn = self.take()?;
        let executed = match self.spelt(text, &values) {
            Some(spelt) => within(&*site.clock, limit, conn.query_drop(spelt)).await,
            None => within(&*site.clock, limit, conn.exec_drop(text, values)).await,
        };
        let (rows, number) = (conn.affected_rows(), conn.last_insert_id());
        self.settle(conn, executed, limit).await?;
        let received = site.clock.now();
        (self.fresh, self.trip) = (false, received - sent);
        Ok(Written { rows, number, sent, received })
    }

    /// Reads rows of the table.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub(crate) async fn rows(
        &mut self,
        limit: Duration,
        text: &str,
        values: Vec<Value>,
    ) -> Result<Vec<Row>, Fault> {
        let sent = self.site.clock.now();
        let rows: Vec<Columns> = self.query(limit, text, values).await?;
        let rows: Vec<Row> = rows.into_iter().map(Row::from).collect();
        if let Some(row) = rows.first() {
            let received = self.site.clock.now();
            self.site.server_clock.read(Reading { server_ms: row.now, sent, received });
        }
        Ok(rows)
    }

    /// Asks for anything else.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub(crate) async fn query<T>(
        &mut self,
        limit: Duration,
        text: &str,
        values: Vec<Value>,
    ) -> Result<Vec<T>, Fault>
    where
        T: mysql_async::prelude::FromRow + Send + 'static,
    {
        let site = Arc::clone(&self.site);
        let sent = site.clock.now();
        let mut conn = self.take()?;
        let rows: Option<Result<Vec<mysql_async::Row>, _>> = match self.spelt(text, &values) {
            Some(spelt) => within(&*site.clock, limit, last_rows(&mut conn, spelt)).await,
            None => within(&*site.clock, limit, conn.exec(text, values)).await,
        };
        let rows = self.settle(conn, rows, limit).await?;
        (self.fresh, self.trip) = (false, site.clock.now() - sent);
        let strange = |_| Fault::Refused(foreign_shape(&site));
        rows.into_iter().map(|row| mysql_async::from_row_opt(row).map_err(strange)).collect()
    }

    /// Carries out a statement that is not worth preparing.
    ///
    /// # Errors
    ///
    /// As for [`write`](Self::write).
    pub(crate) async fn command(&mut self, limit: Duration, text: &str) -> Result<(), Fault> {
        self.write(limit, text, Vec::new()).await.map(drop)
    }

    /// The statement spelt out, unless the server has it prepared; with the settings in front, unless they are
    /// made. So a connection that is new saves two round trips when there is the least time: a renewal waits.
    fn spelt(&self, text: &str, values: &[Value]) -> Option<String> {
        if self.fresh {
            return Some(format!("{}; {}", self.purpose.settings(), spell(text, values)));
        }
        (!self.prepared.contains(&place(text))).then(|| spell(text, values))
    }

    /// Asks an idle connection for a sign of life, and makes it anew if there is none.
    pub(crate) async fn ping(&mut self, limit: Duration) {
        let site = Arc::clone(&self.site);
        let Some(mut conn) = self.conn.take() else { return };
        let alive = within(&*site.clock, limit, conn.ping()).await;
        if self.settle(conn, alive, limit).await.is_err() {
            drop(self.ready().await);
        }
    }

    fn take(&mut self) -> Result<Conn, Fault> {
        self.conn.take().ok_or_else(|| Fault::Lost(crate::error::gone("there is no connection")))
    }

    /// Puts the connection back in its place, unless it is to be given up.
    async fn settle<T>(
        &mut self,
        conn: Conn,
        outcome: Option<Result<T, mysql_async::Error>>,
        limit: Duration,
    ) -> Result<T, Fault> {
        let outcome = match outcome {
            Some(Ok(output)) => Ok(output),
            Some(Err(error)) => Err(fault(error, self.site.statements.table())),
            None => Err(Fault::Late(unanswered("no answer from the server", limit))),
        };
        if let Err(fault) = &outcome {
            tracing::debug!(backend = NAME, purpose = ?self.purpose, id = conn.id(), ?fault, "a statement failed");
        }
        match &outcome {
            // Where the successor of a server that became read-only is, a new connection finds out.
            Err(Fault::Lost(_) | Fault::Late(_) | Fault::Demoted(_)) => kill(conn).await,
            _ => self.conn = Some(conn),
        }
        outcome
    }
}

/// Connects and logs in at the first address of the host that answers.
async fn dial(site: &Site) -> mysql_async::Result<Conn> {
    let opts = site.opts();
    if opts.socket().is_some() {
        return Conn::new(opts).await;
    }
    let addresses: Vec<_> = lookup_host((opts.ip_or_hostname(), opts.tcp_port())).await?.collect();
    dial_any(&opts, addresses, site.config.connect_timeout, &*site.clock).await
}

/// The driver itself would try one address after the other, and an address that does not answer would use up the limit.
async fn dial_any(
    opts: &Opts,
    addresses: Vec<SocketAddr>,
    limit: Duration,
    clock: &dyn Clock,
) -> mysql_async::Result<Conn> {
    let connect = |address: SocketAddr| {
        let there = OptsBuilder::from_opts(opts.clone()).resolved_ips(Some(vec![address.ip()]));
        async move {
            match Conn::new(there).await {
                Err(mysql_async::Error::Io(IoError::Io(error))) if !is_tls(&error) => Err(error),
                // A server that refuses the user or the certificate has answered.
                answered => Ok(answered),
            }
        }
    };
    first_to_answer(addresses, limit, clock, connect).await?
}

/// Where a text is, for as long as it lives.
fn place(text: &str) -> usize {
    text.as_ptr() as usize
}

/// The rows of the last statement in a text that has any.
async fn last_rows(conn: &mut Conn, text: String) -> mysql_async::Result<Vec<mysql_async::Row>> {
    let (mut result, mut last) = (conn.query_iter(text).await?, Vec::new());
    while !result.is_empty() {
        let rows = result.collect().await?;
        last = if rows.is_empty() { last } else { rows };
    }
    Ok(last)
}

/// Closes a connection without waiting for anything. Merely dropped, the driver would read on in the
/// background, for as long as a dead network takes.
async fn kill(conn: Conn) {
    let mut goodbye = pin!(conn.disconnect());
    poll_fn(|context| {
        let _ = goodbye.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}

impl Purpose {
    const fn settings(self) -> &'static str {
        match self {
            Self::Calls => FOR_CALLS,
            Self::Looks => FOR_LOOKS,
        }
    }
}

fn unanswered(what: &str, limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{what} within {limit:?}")).with_backend(NAME)
}

pub(crate) fn foreign_shape(site: &Site) -> Error {
    let message = format!(
        "the table {} holds values that Simba's does not: name another with `table`, then run `simba schema --apply`",
        site.statements.table()
    );
    Error::new(ErrorKind::Config, message).with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use simba_core::SystemClock;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;

    /// The packet by which a server refuses a connection because it has too many: error 1040.
    const REFUSAL: &[u8] = b"\x0b\x00\x00\x00\xff\x10\x04too many";

    /// A listener with a full backlog leaves a connect without an answer.
    #[tokio::test]
    async fn an_address_that_does_not_answer_keeps_no_other_from_being_tried() {
        let answering = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = answering.local_addr().unwrap();
        let silent = SocketAddr::from(([127, 0, 0, 2], address.port()));
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(silent).unwrap();
        let listener = socket.listen(0).unwrap();
        let fills = std::net::TcpStream::connect(silent).unwrap();
        tokio::spawn(async move {
            let (mut stream, _) = answering.accept().await.unwrap();
            stream.write_all(REFUSAL).await.unwrap();
            std::future::pending::<()>().await;
        });
        let opts = OptsBuilder::default().ip_or_hostname("db.example").tcp_port(address.port());
        let (opts, limit) = (Opts::from(opts.prefer_socket(false)), Duration::from_secs(20));
        let dialed = dial_any(&opts, vec![silent, address], limit, &SystemClock);
        let answer = within(&SystemClock, limit, dialed).await.expect("the second address is tried");
        assert!(
            matches!(&answer, Err(mysql_async::Error::Server(error)) if error.code == 1040),
            "{answer:?}"
        );
        drop((listener, fills));
    }
}
