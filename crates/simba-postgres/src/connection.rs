//! One connection to the server: check, calls, end.
//!
//! Calls are pipelined and answered in order. An abandoned connection is reset, so that the server executes nothing that
//! was not delivered yet.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared};
use simba_core::Result;
use simba_core::spi::within;
use simba_net::{Socket, supervise};
use tokio::sync::OnceCell;
use tokio::task::AbortHandle;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Row, Statement};

use crate::error::{DriverError, from_driver, has_code, is_locked, lost, protocol, read_only, unavailable};
use crate::login::{Login, OnNotify};
use crate::settings::{Pooling, Settings, session_settings};
use crate::statements::{Form, Query, get};

/// A parameter of a statement.
pub(crate) type Param<'a> = &'a (dyn ToSql + Sync);

/// Maximum number of attempts for a statement that the server rolls back.
const TRIES: u32 = 20;

/// The server rolled the statement back in favour of another one, so that it can be sent again.
const ROLLED_BACK: &[&str] = &["40001", "40P01"];
/// The server's NOTIFY queue is full because a listening session does not read.
const NOTIFY_QUEUE_FULL: &[&str] = &["54000"];
/// The prepared statements of the connection are invalid.
const STALE: &[&str] = &["26000", "0A000", "42P05"];

/// Whether the server accepts no writes.
pub(crate) const READ_ONLY: &str = "pg_is_in_recovery() OR current_setting('transaction_read_only')::boolean";

/// The addresses of the connection, as the server sees them.
const ADDRESSES: &str =
    "host(inet_client_addr()), inet_client_port(), host(inet_server_addr()), inet_server_port()";

/// An open connection.
///
/// Statements are sent immediately. Their answers count once the server is known to accept writes: the check is sent
/// before them, so this adds no round trip.
///
/// Session state is used only once one server process is known to serve the whole connection: otherwise a prepared
/// statement could be another client's statement of the same name.
///
/// Behind a pooler one statement is in flight at a time, and dropping a call ends the connection. Behind PgBouncer
/// 1.18 the first statement of a new connection was once answered without a row. The likely cause is a client that
/// ended with several statements in flight, whose remaining answers reached the next client.
#[derive(Clone)]
pub(crate) struct Connection(Arc<Inner>);

struct Inner {
    client: Client,
    settings: Arc<Settings>,
    endpoint: usize,
    /// The local and the remote address, as this process sees them.
    addresses: Option<(SocketAddr, SocketAddr)>,
    /// Whether the connection is direct (no pooler, no proxy), or why the server is not usable.
    checked: OnceCell<Result<bool>>,
    prepared: OnceLock<Vec<Statement>>,
    pooled_call: tokio::sync::Mutex<()>,
    abort: AbortHandle,
    /// Completes when the connection has ended.
    end: Shared<BoxFuture<'static, ()>>,
    /// Taken to reset the connection. A local socket cannot be reset.
    socket: Mutex<Option<Socket>>,
}

impl supervise::Connection for Connection {
    fn is_open(&self) -> bool {
        !self.has_ended()
    }
}

impl Connection {
    /// Opens a connection to the endpoint with this index within the connect timeout, and checks the server if `check`
    /// is set.
    ///
    /// # Errors
    ///
    /// The endpoint is not reachable, refuses the login, or accepts no writes.
    pub(crate) async fn open(
        settings: &Arc<Settings>,
        endpoint: usize,
        check: bool,
        on_notify: Option<OnNotify>,
    ) -> Result<Self> {
        let opened = async {
            let login = Login::open(settings, &settings.config.endpoints[endpoint], on_notify).await?;
            let driver = tokio::spawn(login.driver);
            let connection = Self(Arc::new(Inner {
                client: login.client,
                settings: Arc::clone(settings),
                endpoint,
                addresses: login.addresses,
                checked: OnceCell::new(),
                prepared: OnceLock::new(),
                pooled_call: tokio::sync::Mutex::const_new(()),
                abort: driver.abort_handle(),
                end: driver.map(drop).boxed().shared(),
                socket: Mutex::new(login.socket),
            }));
            if check {
                let in_flight = connection.in_flight();
                let checked = connection.check().await;
                in_flight.answered();
                checked?;
            }
            Ok(connection)
        };
        let limit = settings.config.connect_timeout;
        within(&*settings.clock, limit, Box::pin(opened)).await.unwrap_or_else(|| {
            let endpoint = &settings.config.endpoints[endpoint];
            Err(unavailable(format!("{endpoint} did not answer a login within {limit:?}")))
        })
    }

    /// Returns the index of its endpoint.
    pub(crate) fn endpoint(&self) -> usize {
        self.0.endpoint
    }

    /// Returns whether the connection is known to have no pooler or proxy in between.
    pub(crate) fn is_direct(&self) -> bool {
        matches!(self.0.checked.get(), Some(Ok(true)))
    }

    /// Returns whether the server was found to accept writes.
    pub(crate) fn is_usable(&self) -> bool {
        matches!(self.0.checked.get(), Some(Ok(_)))
    }

    /// Returns whether the connection has ended.
    pub(crate) fn has_ended(&self) -> bool {
        self.0.client.is_closed()
    }

    /// Waits until the connection has ended.
    pub(crate) async fn ended(&self) {
        self.0.end.clone().await;
    }

    /// Resets the connection, and waits until it has ended.
    pub(crate) async fn close(&self) {
        self.abort();
        self.ended().await;
    }

    /// Resets the connection. Unanswered calls fail, and unsent data is discarded. Dropping a connection instead ends
    /// it gracefully.
    pub(crate) fn abort(&self) {
        if let Some(socket) = self.0.socket.lock().unwrap_or_else(PoisonError::into_inner).take() {
            socket.reset();
        }
        self.0.abort.abort();
    }

    /// Refuses a server that accepts no writes, and detects whether the connection is direct. The query is sent once.
    ///
    /// # Errors
    ///
    /// The server accepts no writes, or did not answer the check.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a concurrent caller sends the query again.
    pub(crate) async fn check(&self) -> Result<()> {
        if let Some(checked) = self.0.checked.get() {
            return checked.clone().map(drop);
        }
        // Boxed to keep the future of every statement small; the query is sent once per connection.
        Box::pin(self.in_order(self.0.checked.get_or_init(|| self.query_check()))).await.clone().map(drop)
    }

    async fn query_check(&self) -> Result<bool> {
        let rows = self.query_unchecked(&format!("SELECT {READ_ONLY}, {ADDRESSES}")).await?;
        let row = rows.first().ok_or_else(|| protocol("the server returned no row for the check"))?;
        if get(row, 0)? {
            return Err(read_only(&self.0.settings.config.endpoints[self.0.endpoint]));
        }
        let (client, server) = ((get(row, 1)?, get(row, 2)?), (get(row, 3)?, get(row, 4)?));
        Ok(self.0.addresses.is_some_and(|(local, peer)| is_same(local, client) && is_same(peer, server)))
    }

    /// Waits for an answer. Behind a pooler, first waits for the answers to all earlier statements.
    async fn in_order<T>(&self, statement: impl Future<Output = T>) -> T {
        if self.0.settings.pooling() != Pooling::Transaction {
            return statement.await;
        }
        let _pooled_call = self.0.pooled_call.lock().await;
        let in_flight = self.in_flight();
        let answer = statement.await;
        in_flight.answered();
        answer
    }

    /// Begins a statement, on a connection without another one in flight.
    pub(crate) fn in_flight(&self) -> InFlight<'_> {
        InFlight { connection: self, answered: false }
    }

    /// Waits for an answer and the check of the server.
    async fn answer<T>(&self, statement: impl Future<Output = Result<T, DriverError>>) -> Result<T> {
        let answer = self.in_order(statement).await;
        self.check().await?;
        let error = match answer {
            Ok(answer) => return Ok(answer),
            Err(error) => from_driver(error, &self.0.settings.config),
        };
        if !has_code(&error, STALE) {
            return Err(error);
        }
        // A new connection prepares its statements again.
        self.abort();
        Err(lost().with_source(error))
    }

    /// Sends a statement immediately and waits for its rows. A statement that the server rolled back in favour of
    /// another one is sent again. If the server's NOTIFY queue is full, the statement is sent again without
    /// notifications, and waiters poll. A release that meets the lock of that queue is sent again in the same way.
    ///
    /// # Cancel safety
    ///
    /// A statement that was sent is executed; its answer is discarded.
    pub(crate) async fn call(&self, query: Query, params: &[Param<'_>]) -> Result<Vec<Row>> {
        for _ in 1..TRIES {
            match self.rows(query, params).await {
                Err(error) if has_code(&error, ROLLED_BACK) => tokio::task::yield_now().await,
                Err(error) if has_code(&error, NOTIFY_QUEUE_FULL) => {
                    tracing::warn!(
                        backend = crate::NAME,
                        "the server's queue of notifications is full: waiters poll; end the session that listens \
                         in an open transaction, see pg_notification_queue_usage()"
                    );
                    return self.rows_in(Form::Silent, query, params).await;
                }
                // It skips locked rows, so it waited for the server's lock for notifications. Other programs use that
                // one, too, and renewals use this connection. The waiters are notified by a background task.
                Err(error) if is_locked(&error) && query == Query::Release => {
                    return self.rows_in(Form::Silent, query, params).await;
                }
                answer => return answer,
            }
        }
        self.rows(query, params).await
    }

    /// Sends a statement immediately, once, and waits for its rows.
    pub(crate) async fn rows(&self, query: Query, params: &[Param<'_>]) -> Result<Vec<Row>> {
        match self.0.prepared.get().and_then(|prepared| prepared.get(query as usize)) {
            Some(statement) => self.answer(self.0.client.query(statement, params)).await,
            None => self.rows_in(Form::Bounded, query, params).await,
        }
    }

    /// Sends a statement that is not prepared.
    async fn rows_in(&self, form: Form, query: Query, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let typed: Vec<_> = params.iter().copied().zip(query.types().iter().cloned()).collect();
        let text = self.0.settings.statements.text(query, form);
        self.answer(self.0.client.query_typed(text, &typed)).await
    }

    /// Sends a statement that is not a [`Query`].
    pub(crate) async fn query(&self, text: &str, params: &[(Param<'_>, Type)]) -> Result<Vec<Row>> {
        self.answer(self.0.client.query_typed(text, params)).await
    }

    /// Sends a query whose answer counts even if the server accepts no writes.
    pub(crate) async fn query_unchecked(&self, text: &str) -> Result<Vec<Row>> {
        let rows = self.0.client.query_typed(text, &[]).await;
        rows.map_err(|error| from_driver(error, &self.0.settings.config))
    }

    /// Sends several statements without parameters in one transaction.
    pub(crate) async fn execute(&self, text: &str) -> Result<()> {
        self.answer(self.0.client.batch_execute(text)).await
    }

    /// Configures the session and prepares the frequent statements, where no pooler shares the session. If that fails,
    /// each call returns the reason.
    pub(crate) async fn prepare(&self) {
        if self.0.settings.pooling() != Pooling::Session || self.0.prepared.get().is_some() {
            return;
        }
        let (client, settings) = (&self.0.client, session_settings(&self.0.settings.config));
        let prepare = |query: &Query| {
            client.prepare_typed(self.0.settings.statements.text(*query, Form::Plain), query.types())
        };
        let prepared = futures_util::future::try_join_all(Query::PREPARED.iter().map(prepare));
        // The server executes them in this order, so that the statements need not wait for the settings' answer.
        let all = futures_util::future::try_join(client.batch_execute(&settings), prepared);
        match within(&*self.0.settings.clock, self.0.settings.config.call_timeout(), all).await {
            Some(Ok(((), prepared))) => drop(self.0.prepared.set(prepared)),
            Some(Err(error)) => tracing::debug!(%error, "statements are not prepared"),
            None => self.abort(),
        }
    }
}

/// A statement behind a pooler or on a connection of one caller. Dropping it before its answer resets the connection:
/// the driver would otherwise wait for the answer.
#[must_use]
pub(crate) struct InFlight<'a> {
    connection: &'a Connection,
    answered: bool,
}

impl InFlight<'_> {
    /// Keeps the connection.
    pub(crate) fn answered(mut self) {
        self.answered = true;
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        if !self.answered {
            self.connection.abort();
        }
    }
}

/// Returns whether the server sees the same address as this process. A pooler, a proxy or a router in between splits
/// the connection into two with different addresses.
fn is_same(local: SocketAddr, (address, port): (Option<String>, Option<i32>)) -> bool {
    let seen = address.and_then(|address| address.parse::<std::net::IpAddr>().ok());
    seen == Some(local.ip()) && port == Some(i32::from(local.port()))
}
