//! One connection. Its settings are applied before its first statement, every statement has a timeout, and a
//! connection in an unknown state is closed and replaced.

use std::future::{Future, poll_fn};
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use mysql_async::prelude::{FromRow, Queryable};
use mysql_async::{Conn, IoError, Opts, OptsBuilder};
use simba_core::spi::within;
use simba_core::{Clock, Error, ErrorKind, Moment, Result};
use simba_net::{Backoff, first_to_answer};
use tokio::net::lookup_host;

use crate::error::{Fault, NAME, connect_error, fault, is_tls, unavailable};
use crate::row::{Columns, Row};
use crate::schema::foreign_shape;
use crate::shared::Shared;

const MIN_BACKOFF: Duration = Duration::from_millis(25);
const MAX_BACKOFF: Duration = Duration::from_secs(1);

/// A connection that is replaced when it breaks.
///
/// While a statement is in flight, `conn` is `None`. So a statement whose future is dropped takes the
/// connection with it, and no later statement can receive its reply.
pub(crate) struct Connection {
    shared: Arc<Shared>,
    /// The settings of the session at the server: [`FOR_CALLS`](crate::statements::FOR_CALLS) or
    /// [`FOR_READS`](crate::statements::FOR_READS).
    settings: &'static str,
    conn: Option<Conn>,
    /// The settings are not applied yet: they are sent with the first statement, in one round trip.
    is_new: bool,
    /// The number of connects so far. A new number means that changes may have been missed.
    pub(crate) epoch: u64,
    last_used: Moment,
    backoff: Backoff,
    /// The time before which no connect is tried, and the error of the last try.
    retry_after: Option<(Moment, Error)>,
}

/// The result of a statement.
#[derive(Debug)]
pub(crate) struct Done {
    rows: Vec<mysql_async::Row>,
    /// The number of rows that were changed.
    pub(crate) changed: u64,
    /// The value that the statement passed to `LAST_INSERT_ID`, if it changed a row.
    pub(crate) number: Option<u64>,
    /// The local times before and after the round trip.
    pub(crate) times: (Moment, Moment),
}

impl Connection {
    pub(crate) fn new(shared: Arc<Shared>, settings: &'static str) -> Self {
        Self {
            last_used: shared.clock.now(),
            shared,
            settings,
            conn: None,
            is_new: true,
            epoch: 0,
            backoff: Backoff::new(MIN_BACKOFF, MAX_BACKOFF),
            retry_after: None,
        }
    }

    pub(crate) const fn is_connected(&self) -> bool {
        self.conn.is_some()
    }

    /// Connects unless it is connected. Fails immediately during the back-off after a failed try.
    ///
    /// # Errors
    ///
    /// Why the connection could not be made.
    pub(crate) async fn ready(&mut self) -> Result<()> {
        if self.conn.is_some() {
            return Ok(());
        }
        let now = self.shared.clock.now();
        if let Some((_, error)) = self.retry_after.as_ref().filter(|(until, _)| now < *until) {
            return Err(error.clone());
        }
        let connected = self.connect().await;
        let pause = |error: &Error| (self.shared.clock.now() + self.backoff.pause(), error.clone());
        self.retry_after = connected.as_ref().err().map(pause);
        let conn = connected?;
        tracing::debug!(backend = NAME, id = conn.id(), "connected");
        self.backoff.reset();
        (self.conn, self.is_new, self.epoch) = (Some(conn), true, self.epoch + 1);
        self.last_used = self.shared.clock.now();
        Ok(())
    }

    async fn connect(&self) -> Result<Conn> {
        let limit = self.shared.config.connect_timeout;
        let opts = self.shared.config.opts()?;
        self.shared.config.install_tls_provider();
        match within(&*self.shared.clock, limit, dial(&opts, &self.shared)).await {
            Some(connected) => connected.map_err(|error| connect_error(error, &self.shared.config.table)),
            None => Err(timed_out("no connection to the server", limit)),
        }
    }

    /// Carries out a statement. Connects before that if necessary.
    ///
    /// # Errors
    ///
    /// See [`Fault`]; after [`Fault::Lost`] and [`Fault::TimedOut`] the connection is closed.
    pub(crate) async fn execute(&mut self, limit: Duration, text: &str) -> Result<Done, Fault> {
        self.ready().await.map_err(Fault::NotWritable)?;
        let shared = Arc::clone(&self.shared);
        let with_settings = self.is_new.then(|| format!("{}; {text}", self.settings));
        let sent = shared.clock.now();
        let Some(mut conn) = self.conn.take() else {
            return Err(Fault::Lost(unavailable("there is no connection")));
        };
        let query = last_rows(&mut conn, with_settings.as_deref().unwrap_or(text));
        let outcome = within(&*shared.clock, limit, query).await;
        let (changed, number) = (conn.affected_rows(), conn.last_insert_id());
        let rows = self.finish(conn, outcome, limit).await?;
        let received = shared.clock.now();
        self.is_new = false;
        Ok(Done { rows, changed, number: number.filter(|_| changed > 0), times: (sent, received) })
    }

    /// Reads rows of the table.
    ///
    /// # Errors
    ///
    /// As for [`execute`](Self::execute); [`Fault::Refused`] for a row that is not Simba's.
    pub(crate) async fn rows(&mut self, limit: Duration, text: &str) -> Result<Vec<Row>, Fault> {
        self.each_row(limit, text).await?.into_iter().collect()
    }

    /// Reads rows of the table, each with an error of its own.
    ///
    /// # Errors
    ///
    /// As for [`execute`](Self::execute).
    pub(crate) async fn each_row(
        &mut self,
        limit: Duration,
        text: &str,
    ) -> Result<Vec<Result<Row, Fault>>, Fault> {
        let done = self.execute(limit, text).await?;
        let rows = done.rows.into_iter().map(|row| self.decode::<Columns>(row).map(Row::from));
        let rows: Vec<_> = rows.collect();
        if let Some(row) = rows.iter().flatten().next() {
            self.shared.note_time(row.now, done.times);
        }
        Ok(rows)
    }

    /// Carries out any other query.
    ///
    /// # Errors
    ///
    /// As for [`execute`](Self::execute).
    pub(crate) async fn query<T: FromRow>(&mut self, limit: Duration, text: &str) -> Result<Vec<T>> {
        let done = self.execute(limit, text).await?;
        done.rows.into_iter().map(|row| Ok(self.decode(row)?)).collect()
    }

    fn decode<T: FromRow>(&self, row: mysql_async::Row) -> Result<T, Fault> {
        mysql_async::from_row_opt(row).map_err(|_| Fault::Refused(foreign_shape(&self.shared)))
    }

    /// Returns whether the connection was idle for this long.
    pub(crate) fn is_idle_for(&self, now: Moment, interval: Duration) -> bool {
        self.is_connected() && self.last_used + interval <= now
    }

    /// Pings the connection, and reconnects if there is no reply.
    pub(crate) async fn ping(&mut self, limit: Duration) {
        let shared = Arc::clone(&self.shared);
        let Some(mut conn) = self.conn.take() else { return };
        let alive = within(&*shared.clock, limit, conn.ping()).await;
        if self.finish(conn, alive, limit).await.is_err() {
            drop(self.ready().await);
        }
    }

    /// Puts the connection back, unless it has to be closed.
    async fn finish<T>(
        &mut self,
        conn: Conn,
        outcome: Option<Result<T, mysql_async::Error>>,
        limit: Duration,
    ) -> Result<T, Fault> {
        self.last_used = self.shared.clock.now();
        let outcome = match outcome {
            Some(Ok(output)) => Ok(output),
            Some(Err(error)) => Err(fault(error, &self.shared.config.table)),
            None => Err(Fault::TimedOut(timed_out("no answer from the server", limit))),
        };
        if let Err(fault) = &outcome {
            tracing::debug!(backend = NAME, id = conn.id(), ?fault, "a statement failed");
        }
        match &outcome {
            // After a failover a new connection may reach the new primary.
            Err(Fault::Lost(_) | Fault::TimedOut(_) | Fault::NotWritable(_)) => close_now(conn).await,
            _ => self.conn = Some(conn),
        }
        outcome
    }
}

/// Connects and logs in at the first address of the host that answers.
async fn dial(opts: &Opts, shared: &Shared) -> mysql_async::Result<Conn> {
    if opts.socket().is_some() {
        return Conn::new(opts.clone()).await;
    }
    let addresses: Vec<_> = lookup_host((opts.ip_or_hostname(), opts.tcp_port())).await?.collect();
    dial_any(opts, addresses, shared.config.connect_timeout, &*shared.clock).await
}

/// Tries the addresses with divided limits. The driver would try them in turn, and one that does not answer
/// would use up the whole limit.
async fn dial_any(
    opts: &Opts,
    addresses: Vec<SocketAddr>,
    limit: Duration,
    clock: &dyn Clock,
) -> mysql_async::Result<Conn> {
    let connect = |address: SocketAddr| {
        let resolved = OptsBuilder::from_opts(opts.clone()).resolved_ips(Some(vec![address.ip()]));
        async move {
            match Conn::new(resolved).await {
                Err(mysql_async::Error::Io(IoError::Io(error))) if !is_tls(&error) => Err(error),
                // A server that rejects the user or the certificate has answered.
                answered => Ok(answered),
            }
        }
    };
    first_to_answer(addresses, limit, clock, connect).await?
}

/// Returns the rows of the last statement of a text that returns any.
async fn last_rows(conn: &mut Conn, text: &str) -> mysql_async::Result<Vec<mysql_async::Row>> {
    let (mut result, mut last) = (conn.query_iter(text).await?, Vec::new());
    while !result.is_empty() {
        let rows = result.collect().await?;
        last = if rows.is_empty() { last } else { rows };
    }
    // Returns the error of a statement that is not the first: the driver would return it for the next text.
    result.drop_result().await?;
    Ok(last)
}

/// Closes a connection without waiting. If it were dropped, the driver would keep reading in the background,
/// on a dead network until its timeout.
async fn close_now(conn: Conn) {
    let mut disconnecting = pin!(conn.disconnect());
    poll_fn(|context| {
        let _ = disconnecting.as_mut().poll(context);
        Poll::Ready(())
    })
    .await;
}

fn timed_out(what: &str, limit: Duration) -> Error {
    Error::new(ErrorKind::Unavailable, format!("{what} within {limit:?}")).with_backend(NAME)
}

#[cfg(test)]
mod tests {
    use simba_core::SystemClock;
    use simba_net::rustls::crypto::CryptoProvider;
    use tokio::io::AsyncWriteExt;
    use tokio::net::{TcpListener, TcpSocket};

    use super::*;
    use crate::config::{MySqlConfig, SslMode};
    use crate::statements::FOR_CALLS;

    /// The packet by which a server refuses a connection because it has too many: error 1040.
    const REFUSAL: &[u8] = b"\x0b\x00\x00\x00\xff\x10\x04too many";

    /// The driver panics without a default if the program enables a second provider. With only one, as here, the driver
    /// installs it itself, but not before the server has answered.
    #[tokio::test]
    async fn the_first_connect_with_tls_installs_a_default_provider() {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
        // No server listens there.
        let address = socket.local_addr().unwrap();
        let config = MySqlConfig::new("127.0.0.1", "db").with_port(address.port());
        let config = config.with_tls(SslMode::Required, None).unwrap();
        let shared = Arc::new(Shared::new(config, Arc::new(SystemClock)));
        let refused = Connection::new(shared, FOR_CALLS).ready().await.unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Unavailable);
        assert!(CryptoProvider::get_default().is_some());
    }

    /// A listener with a full backlog leaves a connect unanswered.
    #[tokio::test]
    async fn an_unanswered_address_does_not_prevent_the_next_try() {
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
