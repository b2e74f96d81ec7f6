//! A client of etcd: one connection for everything, made anew for as long as the client lives.

mod channel;
mod failure;
mod proto;
mod pulse;
mod supervisor;
mod watches;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use futures_util::stream;
use simba_core::{Clock, Error, Moment};
use tokio::runtime::Handle;
use tokio::sync::{Mutex, oneshot, watch};
use tonic::metadata::AsciiMetadataValue;

pub(crate) use self::failure::Failure;
pub(crate) use self::proto::{
    ASCENDING, BY_CREATION, Compare, DESCENDING, DeleteRangeRequest, Header, KeyValue, Op, PutRequest,
    RangeRequest, RangeResponse, RequestOp, StatusResponse, TxnRequest, TxnResponse,
};
#[cfg(test)]
pub(crate) use self::proto::{Done, ResponseOp};
pub(crate) use self::pulse::LeaseInUse;
pub(crate) use self::watches::{Sight, Watch};

use self::channel::{Line, Token};
use self::proto::{
    DeleteRangeResponse, LeaseGrantRequest, LeaseGrantResponse, LeaseRequest, LeaseResponse,
    LeaseRevokeResponse, StatusRequest, WatchResponse,
};
use self::pulse::Pulse;
use self::supervisor::Supervisor;
use self::watches::{Opened, Watches};
use crate::config::EtcdConfig;

/// A client. Dropped, it disconnects.
#[derive(Debug)]
pub(crate) struct Client {
    shared: Arc<Shared>,
    runtime: Handle,
    /// What all keys begin with.
    root: String,
}

/// What the client and its supervisor share.
#[derive(Debug)]
struct Shared {
    config: Arc<EtcdConfig>,
    clock: Arc<dyn Clock>,
    state: watch::Sender<State>,
    pulse: Arc<Pulse>,
    watches: Arc<Watches>,
    token: Token,
    /// Held while a token that was rejected is replaced.
    login: Mutex<()>,
}

#[derive(Clone, Debug)]
enum State {
    Connecting,
    Ready {
        /// Grows with each connection.
        number: u64,
        line: Line,
    },
    /// No member was of use; another round begins in a moment.
    Failed(Error),
    Closed,
}

/// What the server says of a lease.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeptAlive {
    pub(crate) ttl: Duration,
    pub(crate) by: Reign,
}

/// Which member answered, in the reign of which leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Reign {
    member: u64,
    term: u64,
}

impl Reign {
    pub(crate) fn of(header: Option<&Header>) -> Self {
        header.map_or(Self { member: 0, term: 0 }, |header| Self {
            member: header.member_id,
            term: header.raft_term,
        })
    }

    /// Whether both are of one reign. Answers that do not say of which they are show nothing.
    pub(crate) fn confirms(self, other: Self) -> bool {
        self == other && self.term > 0
    }
}

impl Client {
    /// Begins to connect.
    pub(crate) fn start(config: Arc<EtcdConfig>, clock: Arc<dyn Clock>) -> Self {
        let shared = Arc::new(Shared {
            config: Arc::clone(&config),
            clock,
            state: watch::Sender::new(State::Connecting),
            pulse: Arc::default(),
            watches: Arc::default(),
            token: Token::default(),
            login: Mutex::new(()),
        });
        let (runtime, root) = (Handle::current(), config.keys().root());
        runtime.spawn(Supervisor::new(config, Arc::clone(&shared)).run());
        Self { shared, runtime, root }
    }

    /// Completes when a member lets us in, or none does.
    pub(crate) async fn ready(&self) -> Result<(), Error> {
        self.line().await.map(drop).map_err(|failure| crate::error::failed("connect", failure))
    }

    pub(crate) fn now(&self) -> Moment {
        self.shared.clock.now()
    }

    pub(crate) fn clock(&self) -> &Arc<dyn Clock> {
        &self.shared.clock
    }

    /// Counts a lease of this length as in use, until the result is dropped.
    pub(crate) fn use_lease(&self, lease: Duration) -> LeaseInUse {
        self.shared.pulse.use_lease(lease)
    }

    /// Carries this out in the background, also from outside a runtime.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        self.runtime.spawn(work);
    }

    pub(crate) fn close(&self) {
        self.shared.state.send_replace(State::Closed);
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
        let DeleteRangeResponse {} = self.call("/etcdserverpb.KV/DeleteRange", request).await?;
        Ok(())
    }

    /// A read that finds next to nothing, and takes a quorum, as one that is answered by a single member does not.
    pub(crate) fn look(&self) -> RangeRequest {
        RangeRequest::of_key(&self.root)
    }

    /// A transaction that is carried out to its end whether or not somebody waits for it.
    pub(crate) fn begin(
        self: &Arc<Self>,
        txn: TxnRequest,
    ) -> oneshot::Receiver<Result<TxnResponse, Failure>> {
        let (to, outcome) = oneshot::channel();
        let this = Arc::clone(self);
        self.spawn(async move {
            let _ = to.send(this.txn(txn).await);
        });
        outcome
    }

    /// Gives a new lease and what was granted.
    pub(crate) async fn grant(&self, seconds: i64) -> Result<(i64, Duration), Failure> {
        let request = LeaseGrantRequest { ttl: seconds };
        let granted: LeaseGrantResponse = self.call("/etcdserverpb.Lease/LeaseGrant", request).await?;
        Ok((granted.id, whole_seconds(granted.ttl)))
    }

    pub(crate) async fn revoke(&self, id: i64) -> Result<(), Failure> {
        let LeaseRevokeResponse {} =
            self.call("/etcdserverpb.Lease/LeaseRevoke", LeaseRequest { id }).await?;
        Ok(())
    }

    /// How much a lease has left, as the leader sees it; zero if it is gone.
    pub(crate) async fn time_to_live(&self, id: i64) -> Result<Duration, Failure> {
        let told: Result<LeaseResponse, _> =
            self.call("/etcdserverpb.Lease/LeaseTimeToLive", LeaseRequest { id }).await;
        match told {
            Ok(told) => Ok(whole_seconds(told.ttl)),
            Err(failure) if failure.is_lease_gone() => Ok(Duration::ZERO),
            Err(failure) => Err(failure),
        }
    }

    /// How long a call about a lease may take. A member that has just lost its leader goes on waiting for it for seconds,
    /// and a second call reaches the next one.
    pub(crate) fn patience(&self) -> Duration {
        self.shared.pulse.limit()
    }

    /// Gives a lease its whole length again; nothing if it is gone.
    pub(crate) async fn keep_alive(&self, id: i64) -> Result<Option<KeptAlive>, Failure> {
        let (number, line) = self.line().await?;
        self.shared.pulse.asked(self.now());
        let kept = async {
            let once = stream::iter([LeaseRequest { id }]);
            let mut answers = line.stream("/etcdserverpb.Lease/LeaseKeepAlive", once).await?;
            let answer: Option<LeaseResponse> = answers.message().await.map_err(Failure::of)?;
            answer.ok_or_else(|| Failure::of(tonic::Status::unavailable("no answer to a keep-alive")))
        };
        let kept = self.heard(number, kept.await)?;
        let by = Reign::of(kept.header.as_ref());
        Ok((kept.ttl > 0).then(|| KeptAlive { ttl: whole_seconds(kept.ttl), by }))
    }

    pub(crate) async fn status(&self) -> Result<StatusResponse, Failure> {
        self.call("/etcdserverpb.Maintenance/Status", StatusRequest {}).await
    }

    // ===== watches =====

    /// Watches; after a reconnect whoever has time is woken some time later.
    pub(crate) fn watch(&self, sight: Sight, has_time: bool) -> Watch {
        let (watch, opened) = self.shared.watches.add(sight, has_time);
        if let Some(opened) = opened {
            self.shared.listen(&self.runtime, opened);
        }
        watch
    }

    /// The same in a moment, and not at all if it is dropped before.
    pub(crate) fn watch_later(&self, sight: Sight) -> Watch {
        self.shared.watches.add_later(sight)
    }

    /// Rings after the next reconnect.
    pub(crate) fn watch_the_connection(&self) -> Watch {
        self.shared.watches.add_idle()
    }

    // ===== the way there =====

    async fn call<Q, A>(&self, path: &'static str, question: Q) -> Result<A, Failure>
    where
        Q: prost::Message + Clone + 'static,
        A: prost::Message + Default + 'static,
    {
        let (number, line) = self.line().await?;
        let token = line.token();
        self.shared.pulse.asked(self.now());
        let answer = line.unary(path, question.clone()).await;
        if !answer.as_ref().is_err_and(Failure::is_logged_out) {
            return self.heard(number, answer);
        }
        // In a task: a login takes long, and one that is cancelled with each caller would never end.
        let shared = Arc::clone(&self.shared);
        let _ = self.runtime.spawn(async move { shared.log_in_again(number, line, token).await }).await;
        let (number, line) = self.line().await?;
        self.shared.pulse.asked(self.now());
        self.heard(number, line.unary(path, question).await)
    }

    /// Draws conclusions about the connection from an answer.
    fn heard<A>(&self, number: u64, answer: Result<A, Failure>) -> Result<A, Failure> {
        match &answer {
            Err(Failure::Lost(_)) => self.shared.broken(number),
            Err(failure) if failure.is_logged_out() || failure.is_cut_off() => self.shared.broken(number),
            _ => self.shared.pulse.heard(self.now()),
        }
        answer
    }

    /// The connection; waits for one that is on its way.
    async fn line(&self) -> Result<(u64, Line), Failure> {
        let mut state = self.shared.state.subscribe();
        let settled = state.wait_for(|state| !matches!(state, State::Connecting)).await;
        match settled.as_deref() {
            Ok(State::Ready { number, line }) => Ok((*number, line.clone())),
            Ok(State::Failed(error)) => Err(Failure::Unsent(error.clone())),
            _ => Err(Failure::Closed),
        }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    /// This connection is of no use any more.
    fn broken(&self, number: u64) {
        self.state.send_if_modified(|state| {
            let is_it = matches!(state, State::Ready { number: now, .. } if *now == number);
            if is_it {
                *state = State::Connecting;
            }
            is_it
        });
    }

    /// Logs in again on the same connection after the server rejected this token: other calls under way go on.
    ///
    /// Gives the connection up if that fails; connecting anew shows what is wrong.
    async fn log_in_again(&self, number: u64, line: Line, rejected: Option<AsciiMetadataValue>) {
        self.pulse.heard(self.clock.now());
        let _one = self.login.lock().await;
        if line.token() != rejected {
            // Another call has logged in meanwhile.
            return;
        }
        self.pulse.asked(self.clock.now());
        let outcome = line.log_in(&self.config).await;
        if outcome.is_ok() && line.token() != rejected {
            self.pulse.heard(self.clock.now());
            self.watches.reopen(number);
        } else {
            tracing::debug!(?outcome, "the login is not renewed");
            self.broken(number);
        }
    }

    /// Hears what the server says of watches, for as long as the connection lasts.
    fn listen(self: &Arc<Self>, runtime: &Handle, opened: Opened) {
        let Opened { on, number: stream, mut asked } = opened;
        let State::Ready { number, line } = self.state.borrow().clone() else { return };
        if number != on {
            // Of a connection that is gone: whoever watched is woken since.
            return;
        }
        let this = Arc::clone(self);
        runtime.spawn(async move {
            let asked = stream::poll_fn(move |context| asked.poll_recv(context));
            let opened = line.stream("/etcdserverpb.Watch/Watch", asked).await;
            let ended = match opened {
                Ok(mut told) => loop {
                    match told.message().await {
                        Ok(Some(said)) => this.watches.told(&said),
                        ended => break ended.map(|_: Option<WatchResponse>| ()).map_err(Failure::of),
                    }
                },
                Err(failure) => Err(failure),
            };
            if this.watches.is_open(stream) {
                tracing::debug!(?ended, "the stream of watches ended");
                this.broken(number);
            }
        });
    }
}

fn whole_seconds(seconds: i64) -> Duration {
    Duration::from_secs(u64::try_from(seconds).unwrap_or(0))
}

/// Waits for the outcome of what was begun.
///
/// # Cancel safety
///
/// The outcome stays in the receiver.
pub(crate) async fn heard<T>(outcome: &mut oneshot::Receiver<Result<T, Failure>>) -> Result<T, Failure> {
    outcome.await.unwrap_or(Err(Failure::Closed))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_member_in_the_same_term_confirms_and_nobody_without_a_name_does() {
        let reign = |member_id, raft_term| Reign::of(Some(&Header { member_id, revision: 1, raft_term }));
        assert!(reign(1, 7).confirms(reign(1, 7)));
        assert!(!reign(1, 8).confirms(reign(1, 7)) && !reign(2, 7).confirms(reign(1, 7)));
        assert!(!Reign::of(None).confirms(Reign::of(None)));
    }
}
