//! A client of etcd with one connection, which is replaced whenever it breaks.
//!
//! The crate `etcd-client` balances calls over the members of the cluster. Here a renewal is a keep-alive and a
//! transaction that the *same* member answers in the same term: only that shows that the leader that counted the
//! keep-alive still leads. Hence a client of its own, on tonic and prost, that sends all calls on one connection. It
//! also shares one login among all connections, renews it in place, and replaces a member that stops answering within a
//! fifth of the shortest lease.

mod connection;
mod failure;
mod liveness;
mod protocol;
mod supervisor;
mod wakeups;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use simba_core::{Clock, Error, Moment};
use simba_net::supervise::Supervised;
use tokio::runtime::Handle;
use tokio::sync::{Mutex, oneshot};
use tokio::task::JoinHandle;
use tonic::metadata::AsciiMetadataValue;

pub(crate) use self::failure::Failure;
pub(crate) use self::liveness::LeaseInUse;
#[cfg(test)]
pub(crate) use self::protocol::ResponseOp;
pub(crate) use self::protocol::{
    ASCENDING, BY_CREATION, Compare, DESCENDING, DeleteRangeRequest, Header, KeyValue, Op, PutRequest,
    RangeRequest, RangeResponse, RequestOp, StatusResponse, TxnRequest, TxnResponse,
};
pub(crate) use self::wakeups::{Watch, WatchTarget};

use self::connection::{Connection, Token};
use self::liveness::Liveness;
use self::protocol::{Empty, LeaseGrantRequest, LeaseRequest, LeaseResponse, WatchResponse};
use self::supervisor::Members;
use self::wakeups::{NewStream, Watches};
use crate::config::EtcdConfig;

/// A client. Dropping it disconnects.
#[derive(Debug)]
pub(crate) struct Client {
    shared: Arc<Shared>,
    runtime: Handle,
}

/// The state that the client and its supervisor share.
#[derive(Debug)]
struct Shared {
    config: Arc<EtcdConfig>,
    clock: Arc<dyn Clock>,
    supervised: Supervised<Connection>,
    liveness: Arc<Liveness>,
    watches: Arc<Watches>,
    token: Token,
    /// Locked while a rejected token is replaced.
    login: Mutex<()>,
}

/// The answer to a keep-alive of a lease that exists.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptAlive {
    pub(crate) ttl: Duration,
    pub(crate) term: Term,
}

/// The member that answered, and the Raft term that it answered in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Term {
    member: u64,
    term: u64,
}

impl Term {
    pub(crate) fn of(header: Option<&Header>) -> Self {
        header.map_or(Self { member: 0, term: 0 }, |header| Self {
            member: header.member_id,
            term: header.raft_term,
        })
    }

    /// Returns whether both are of the same member in the same term. An answer without a term confirms nothing.
    pub(crate) fn confirms(self, other: Self) -> bool {
        self == other && self.term > 0
    }
}

impl Client {
    /// Starts to connect in the background.
    pub(crate) fn start(config: Arc<EtcdConfig>, clock: Arc<dyn Clock>) -> Self {
        let shared = Arc::new(Shared {
            config,
            clock,
            supervised: Supervised::new(),
            liveness: Arc::default(),
            watches: Arc::default(),
            token: Token::default(),
            login: Mutex::new(()),
        });
        let runtime = Handle::current();
        runtime.spawn(Members::new(Arc::clone(&shared)).run());
        Self { shared, runtime }
    }

    /// Waits until a member accepts the connection, or every one has failed.
    pub(crate) async fn ready(&self) -> Result<(), Error> {
        self.connection().await.map(drop).map_err(|failure| crate::error::failed("connect", failure))
    }

    pub(crate) fn now(&self) -> Moment {
        self.shared.clock.now()
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Counts a lease of this length as in use until the result is dropped.
    pub(crate) fn use_lease(&self, lease: Duration) -> LeaseInUse {
        self.shared.liveness.use_lease(lease)
    }

    /// Spawns a task, also from outside a runtime.
    pub(crate) fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) -> JoinHandle<()> {
        self.runtime.spawn(task)
    }

    pub(crate) fn close(&self) {
        self.shared.supervised.close();
    }

    // ===== calls =====

    pub(crate) async fn txn(&self, txn: TxnRequest) -> Result<TxnResponse, Failure> {
        self.call("/etcdserverpb.KV/Txn", txn).await
    }

    pub(crate) async fn range(&self, range: RangeRequest) -> Result<RangeResponse, Failure> {
        self.call("/etcdserverpb.KV/Range", range).await
    }

    pub(crate) async fn delete(&self, key: &str) -> Result<(), Failure> {
        let request = DeleteRangeRequest { key: key.as_bytes().to_vec() };
        self.call("/etcdserverpb.KV/DeleteRange", request).await.map(|Empty {}| ())
    }

    /// Returns a read that finds at most one key and needs a quorum. A serializable read would need one member only.
    pub(crate) fn quorum_read(&self) -> RangeRequest {
        Connection::quorum_read(&self.shared.config)
    }

    /// Starts a transaction that runs to its end even if the receiver is dropped.
    pub(crate) fn start_txn(
        self: &Arc<Self>,
        txn: TxnRequest,
    ) -> oneshot::Receiver<Result<TxnResponse, Failure>> {
        let (reply, outcome) = oneshot::channel();
        let this = Arc::clone(self);
        drop(self.spawn(async move {
            let _ = reply.send(this.txn(txn).await);
        }));
        outcome
    }

    /// Requests a new lease. Returns its id and the granted length.
    pub(crate) async fn grant(&self, seconds: i64) -> Result<(i64, Duration), Failure> {
        let request = LeaseGrantRequest { ttl: seconds };
        let granted: LeaseResponse = self.call("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok((granted.id, whole_seconds(granted.ttl)))
    }

    pub(crate) async fn revoke(&self, id: i64) -> Result<(), Failure> {
        self.call("/etcdserverpb.Lease/LeaseRevoke", LeaseRequest { id }).await.map(|Empty {}| ())
    }

    /// Returns the remaining time of a lease by the clock of the leader; zero if the lease has ended.
    pub(crate) async fn time_to_live(&self, id: i64) -> Result<Duration, Failure> {
        let answer: Result<LeaseResponse, _> =
            self.call("/etcdserverpb.Lease/LeaseTimeToLive", LeaseRequest { id }).await;
        match answer {
            Ok(answer) => Ok(whole_seconds(answer.ttl)),
            Err(failure) if failure.is_lease_gone() => Ok(Duration::ZERO),
            Err(failure) => Err(failure),
        }
    }

    /// Returns the limit for a keep-alive. A member that has just lost its leader waits for the next one for seconds,
    /// while a second call may reach another member.
    pub(crate) fn call_limit(&self) -> Duration {
        self.shared.liveness.limit()
    }

    /// Extends a lease to its whole length; `None` if the lease has ended.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<Option<KeptAlive>, Failure> {
        let renew = |connection: Connection| async move {
            let once = stream::iter([LeaseRequest { id }]);
            let mut answers = connection.stream("/etcdserverpb.Lease/LeaseKeepAlive", once).await?;
            let answer: Option<LeaseResponse> = answers.message().await.map_err(Failure::of)?;
            answer.ok_or_else(|| Failure::of(tonic::Status::unavailable("no answer to a keep-alive")))
        };
        let kept = self.with_login(renew).await?;
        let term = Term::of(kept.header.as_ref());
        Ok((kept.ttl > 0).then(|| KeptAlive { ttl: whole_seconds(kept.ttl), term }))
    }

    pub(crate) async fn status(&self) -> Result<StatusResponse, Failure> {
        self.call("/etcdserverpb.Maintenance/Status", Empty {}).await
    }

    // ===== watches =====

    /// Adds a watch. After a reconnect it is notified immediately, or in batches if it is deferrable.
    pub(crate) fn watch(&self, target: WatchTarget, deferrable: bool) -> Watch {
        let (watch, stream) = self.shared.watches.add(target, deferrable);
        if let Some(stream) = stream {
            self.shared.read_watches(&self.runtime, stream);
        }
        watch
    }

    /// Adds a watch whose request is sent some time later, and not at all if the watch is dropped before.
    pub(crate) fn watch_deferred(&self, target: WatchTarget) -> Watch {
        self.shared.watches.add_deferred(target)
    }

    /// Adds a watch that is notified after the next reconnect.
    pub(crate) fn watch_reconnect(&self) -> Watch {
        self.shared.watches.add_for_reconnect()
    }

    // ===== connection =====

    async fn call<Q, A>(&self, path: &'static str, request: Q) -> Result<A, Failure>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        let send = |connection: Connection| {
            let request = request.clone();
            async move { connection.unary(path, request).await }
        };
        self.with_login(send).await
    }

    /// Sends a request, and once more after another login if the server rejected the token.
    async fn with_login<A, F>(&self, send: impl Fn(Connection) -> F) -> Result<A, Failure>
    where
        F: Future<Output = Result<A, Failure>>,
    {
        let connection = self.connection().await?;
        let token = connection.token();
        self.shared.liveness.sent(self.now());
        let answer = send(connection.clone()).await;
        if !answer.as_ref().is_err_and(Failure::is_logged_out) {
            return self.record(&connection, answer);
        }
        // In a task: a login takes long, and if every caller cancelled its own, none would complete.
        let shared = Arc::clone(&self.shared);
        let _ = self.runtime.spawn(async move { shared.log_in_again(connection, token).await }).await;
        let connection = self.connection().await?;
        self.shared.liveness.sent(self.now());
        let answer = send(connection.clone()).await;
        self.record(&connection, answer)
    }

    /// Records an answer: the server is alive, or the connection has to be replaced.
    fn record<A>(&self, connection: &Connection, answer: Result<A, Failure>) -> Result<A, Failure> {
        match &answer {
            Err(Failure::Lost(_)) => connection.end(),
            Err(failure) if failure.is_logged_out() || failure.lacks_quorum() => connection.end(),
            _ => self.shared.liveness.answered(self.now()),
        }
        answer
    }

    /// Returns the connection; waits while the client connects.
    async fn connection(&self) -> Result<Connection, Failure> {
        self.shared.supervised.connection().await.map_err(Failure::Unsent)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// Logs in again on the same connection after the server rejected this token. Other calls in flight continue.
    ///
    /// Gives the connection up if the login fails: the next attempt to connect reports the error.
    async fn log_in_again(&self, connection: Connection, rejected: Option<AsciiMetadataValue>) {
        self.liveness.answered(self.clock.now());
        let _one = self.login.lock().await;
        if connection.token() != rejected {
            // Another call has logged in since.
            return;
        }
        self.liveness.sent(self.clock.now());
        let outcome = connection.log_in(&self.config).await;
        if outcome.is_ok() && connection.token() != rejected {
            self.liveness.answered(self.clock.now());
            self.watches.reopen(connection.number());
        } else {
            tracing::debug!(?outcome, "the login was not renewed");
            connection.end();
        }
    }

    /// Opens a stream of watches and handles its messages until the connection ends.
    fn read_watches(self: &Arc<Self>, runtime: &Handle, stream: NewStream) {
        let NewStream { connection: on, number: stream, mut requests } = stream;
        // If the connection was replaced, that has notified all watches.
        let current = self.supervised.current().filter(|connection| connection.number() == on);
        let Some(connection) = current else { return };
        let this = Arc::clone(self);
        runtime.spawn(async move {
            let requests = stream::poll_fn(move |context| requests.poll_recv(context));
            let opened = connection.stream("/etcdserverpb.Watch/Watch", requests).await;
            let ended = match opened {
                Ok(mut responses) => loop {
                    match responses.message().await {
                        Ok(Some(response)) => this.watches.handle(&response),
                        ended => break ended.map(|_: Option<WatchResponse>| ()).map_err(Failure::of),
                    }
                },
                Err(failure) => Err(failure),
            };
            if this.watches.is_open(stream) {
                tracing::debug!(?ended, "the stream of watches ended");
                connection.end();
            }
        });
    }
}

fn whole_seconds(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// Waits for the outcome of a call that runs in another task.
///
/// # Cancel safety
///
/// The outcome stays in the receiver.
pub(crate) async fn wait_for<T>(outcome: &mut oneshot::Receiver<Result<T, Failure>>) -> Result<T, Failure> {
    outcome.await.unwrap_or(Err(Failure::Closed))
}

#[cfg(test)]
mod tests;
