//! Plugs a session into the supervision: resumes it while the servers keep it, starts another one after it has ended.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use simba_core::{Clock, Error, ErrorKind, Moment};
use simba_net::supervise::{self, Connector, Retry};
use tokio::sync::mpsc;

use super::connection::{Connection, Context, End, InFlight};
use super::failure::Failure;
use super::handshake::{Handshake, Session, Transport};
use super::outbox::{Completion, Outbox};
use super::pipeline::Pipeline;
use super::protocol::message::Granted;
use super::{Command, Shared};
use crate::config::ZookeeperConfig;

/// The bounds of the time for one handshake.
const MAX_HANDSHAKE: Duration = Duration::from_secs(5);
const MIN_HANDSHAKE: Duration = Duration::from_millis(50);
const FIRST_PAUSE: Duration = Duration::from_millis(10);
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The task of a session.
pub(super) struct Supervisor {
    config: Arc<ZookeeperConfig>,
    /// The timeout that is requested, in milliseconds.
    requested: u32,
    ctx: Context,
    session: Session,
    /// The servers in a random order.
    order: Vec<usize>,
    /// The time at which the last message of a server arrived.
    last_received: Moment,
    /// The shortest timeout that the session was granted. A previous server may still report the session to the leader
    /// with the timeout that it granted.
    timeout: Duration,
    /// The connection to run, and what was sent on it.
    granted: Option<(Transport, VecDeque<InFlight>)>,
    /// No attempt was made since the last connection ended.
    is_first_attempt: bool,
}

/// A session that a server has granted. Calls are queued for it rather than sent on it by their callers.
#[derive(Clone, Debug)]
pub(super) struct Connected;

impl supervise::Connection for Connected {}

impl Supervisor {
    pub(super) fn new(
        config: Arc<ZookeeperConfig>,
        requested: u32,
        clock: Arc<dyn Clock>,
        shared: Arc<Shared>,
        inbox: mpsc::UnboundedReceiver<Command>,
    ) -> Self {
        let mut order: Vec<usize> = (0..config.endpoints.len()).collect();
        fastrand::shuffle(&mut order);
        let last_received = clock.now();
        let outbox = Outbox::default();
        Self {
            config,
            requested,
            ctx: Context { outbox, inbox, shared, clock, closing: None, client_dropped: false },
            session: Session::default(),
            order,
            last_received,
            timeout: Duration::from_millis(requested.into()),
            granted: None,
            is_first_attempt: false,
        }
    }

    /// Keeps the session until the client is closed or dropped.
    pub(super) async fn run(mut self) {
        let (shared, clock) = (Arc::clone(&self.ctx.shared), Arc::clone(&self.ctx.clock));
        let max_pause = MAX_PAUSE.min(self.timeout / 6);
        let retry = Retry {
            first_pause: FIRST_PAUSE.min(self.timeout / 20),
            max_pause,
            // Do not retry in a hot loop against a server that grants a session and closes the connection.
            stable_after: max_pause,
            rotate: true,
            ..Retry::default()
        };
        shared.supervised.run(&mut self, &*clock, retry).await;
        shared.expired();
        self.ctx.fail(&Failure::Closed);
        if let Some(to) = self.ctx.closing.take() {
            let _ = to.send(());
        }
    }

    /// Ends the supervision, which drops this future.
    async fn close<T>(&mut self) -> T {
        self.ctx.shared.supervised.close();
        std::future::pending().await
    }

    fn handshake_limit(&self) -> Duration {
        (Duration::from_millis(self.requested.into()) / 3).clamp(MIN_HANDSHAKE, MAX_HANDSHAKE)
    }

    /// Handles the outcome of a handshake. Returns `None` if the session has expired: another one can be requested.
    fn conclude(
        &mut self,
        outcome: Result<Handshake, Error>,
        pipeline: Pipeline,
    ) -> Option<Result<Connected, Error>> {
        let id = self.session.id;
        let is_resumed = matches!(&outcome, Ok(Handshake::Granted(_, granted)) if granted.session == id);
        let in_flight = pipeline.end(is_resumed, &mut self.ctx.outbox);
        match outcome {
            Ok(Handshake::Granted(transport, granted)) => {
                self.grant(transport, granted, in_flight, is_resumed);
                Some(Ok(Connected))
            }
            Ok(Handshake::Expired) if id == 0 => {
                Some(Err(Error::new(ErrorKind::Unavailable, "the server grants no new session")))
            }
            Ok(Handshake::Expired) => {
                tracing::debug!("the session has expired");
                self.expire();
                None
            }
            Ok(Handshake::Unanswered(error)) => {
                self.expire_after(self.timeout / 3 * 2);
                Some(Err(error))
            }
            Err(error) => {
                self.expire_after(self.timeout * 3);
                Some(Err(error))
            }
        }
    }

    fn grant(
        &mut self,
        transport: Transport,
        granted: Granted,
        mut in_flight: VecDeque<InFlight>,
        is_resumed: bool,
    ) {
        (self.session.id, self.session.password) = (granted.session, granted.password);
        let timeout = Duration::from_millis(u64::try_from(granted.timeout).unwrap_or(0));
        if !is_resumed {
            self.timeout = timeout;
        } else if timeout < self.timeout {
            self.timeout = timeout;
            self.shorten(transport.requested_at, &mut in_flight);
        }
        self.ctx.shared.connected(self.session.id, self.timeout);
        self.granted = Some((transport, in_flight));
    }

    /// Limits the older proofs: the leader now counts a shorter timeout, from some moment after `requested_at`.
    ///
    /// A holder has to learn of that without waiting for an answer, so all pending calls and checks fail.
    fn shorten(&mut self, requested_at: Moment, in_flight: &mut VecDeque<InFlight>) {
        let timeout = self.timeout;
        tracing::warn!(
            ?timeout,
            "a server granted a shorter session than the one before: set equal bounds on all"
        );
        self.ctx.shared.proofs.shorten(requested_at + timeout);
        let error = Error::new(ErrorKind::Unavailable, "the session was granted for a shorter time");
        let failure = Failure::Unsent(error.clone());
        for request in in_flight {
            // Its answer is still to come.
            let completion = std::mem::replace(&mut request.call.completion, Completion::Ignore);
            if let Completion::Answer(to) = completion {
                let _ = to.send(Err(failure.clone()));
            }
        }
        // First those that wait for their batch, since a batch that is sent meanwhile is in the inbox after this.
        self.ctx.shared.checks.fail_waiting(&error);
        self.ctx.fail(&failure);
    }

    /// Abandons a session that no server has confirmed for as long as `silence`.
    ///
    /// If requests reach the servers but answers do not arrive, each attempt to connect keeps the session alive for a
    /// client that cannot use it. After two thirds of the timeout, when nothing is held any more, other contenders have
    /// to get their turn. If no server can be reached at all, the store may have been set up anew; the last transaction
    /// that the client has seen must not lock it out for ever.
    fn expire_after(&mut self, silence: Duration) {
        if self.session.id != 0 && self.ctx.clock.now() - self.last_received >= silence {
            self.expire();
        }
    }

    fn expire(&mut self) {
        self.session = Session::default();
        self.ctx.outbox.discard_background();
        self.ctx.shared.expired();
    }
}

impl Connector for Supervisor {
    type Connection = Connected;

    fn endpoints(&self) -> usize {
        self.order.len()
    }

    /// Unlimited, since the steps of [`connect`](Self::connect) have limits. If `connect` were dropped, as after a pause
    /// of the process, the checks that it has sent would fail as if the client were closed.
    fn limit(&self) -> Duration {
        Duration::MAX
    }

    async fn connect(&mut self, endpoint: usize) -> Result<Connected, Error> {
        let (clock, limit) = (Arc::clone(&self.ctx.clock), self.handshake_limit());
        loop {
            // A new session has nothing to check, and a login has to precede all requests. A server that closes the
            // connection with unread input may reset it, which discards its answer. So only the first attempt
            // pipelines.
            let is_first = std::mem::take(&mut self.is_first_attempt);
            let pipelined = is_first && self.session.id != 0 && self.config.login.is_none();
            let (mut pipeline, writes) = Pipeline::new(pipelined);
            let endpoint = &self.config.endpoints[self.order[endpoint]];
            let opening =
                Transport::open(&self.config, endpoint, &self.session, self.requested, limit, &clock, writes);
            let outcome = tokio::select! {
                biased;
                outcome = opening => outcome,
                // Commands keep arriving during the handshake.
                () = collect(&mut self.ctx, &mut pipeline) => return self.close().await,
            };
            if let Some(connected) = self.conclude(outcome, pipeline) {
                return connected;
            }
        }
    }

    async fn serve(&mut self, _connected: &Connected) -> Error {
        let Some((transport, in_flight)) = self.granted.take() else { return broken("no connection") };
        let (session, began) = (self.session.id, self.ctx.clock.now());
        let mut connection = Connection::new(transport, in_flight, session, self.timeout, began);
        let end = connection.run(&mut self.ctx, &mut self.session).await;
        connection.lost(&mut self.ctx);
        (self.last_received, self.is_first_attempt) = (connection.last_received, true);
        match end {
            _ if self.ctx.is_ending() => self.close().await,
            End::Closed => self.close().await,
            End::Expired => {
                self.expire();
                broken("the session has expired")
            }
            End::Broken(reason) => broken(reason),
        }
    }

    /// Fails the calls that wait, since no server grants a session, and collects others. With a permanent error, these
    /// fail immediately as well.
    async fn pause(&mut self, error: &Error) {
        let failure = Failure::Unsent(error.clone());
        // A connection that ended at once: another server may accept the calls.
        if !self.is_first_attempt {
            self.ctx.outbox.fail(&failure);
        }
        loop {
            self.ctx.receive().await;
            if self.ctx.is_ending() {
                return self.close().await;
            }
            if !error.is_transient() {
                self.ctx.outbox.fail(&failure);
            }
        }
    }
}

fn broken(reason: impl Into<std::borrow::Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::Unavailable, reason)
}

/// Collects commands during a handshake, and pipelines the checks. Returns when the session is to be closed.
async fn collect(ctx: &mut Context, pipeline: &mut Pipeline) {
    while !ctx.is_ending() {
        pipeline.send(&mut ctx.outbox, ctx.clock.now());
        ctx.receive().await;
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;
    use simba_core::SystemClock;
    use tokio::sync::oneshot;

    use super::super::outbox::{Call, Outcome};
    use super::super::proof::SessionProof;
    use super::super::protocol::Request;
    use super::*;

    fn check() -> (Call, oneshot::Receiver<Outcome>) {
        let (to, outcome) = oneshot::channel();
        (Call::new(Request::Check { paths: vec!["/simba/m/n".into()] }, to), outcome)
    }

    #[tokio::test]
    async fn all_pending_checks_fail_when_the_session_is_shortened() {
        let config = Arc::new(ZookeeperConfig::from_url(&"zookeeper://h".parse().unwrap()).unwrap());
        let clock = Arc::new(SystemClock);
        let shared = Arc::new(Shared::new(config.paths().root(), 30_000, Arc::new(SystemClock)));
        let (commands, inbox) = mpsc::unbounded_channel();
        let mut supervisor = Supervisor::new(config, 30_000, clock, Arc::clone(&shared), inbox);
        shared.proofs.add(SessionProof { session: 7, until: Moment::ZERO + Duration::from_secs(20) });
        // One was pipelined, one waits in the outbox, one is still in the inbox, one waits for its batch.
        let [(sent, one), (waiting, two), (new, three)] = [check(), check(), check()];
        let mut in_flight = VecDeque::from([InFlight { xid: 17, sent: Moment::ZERO, call: sent }]);
        supervisor.ctx.outbox.calls.push_back(waiting);
        assert!(commands.send(Command::Send(new)).is_ok());
        let batched = shared.checks.call_batched("/simba/m/n".into());
        supervisor.timeout = Duration::from_secs(4);
        supervisor.shorten(Moment::ZERO + Duration::from_secs(1), &mut in_flight);
        for mut outcome in [one, two, three] {
            assert!(matches!(outcome.try_recv(), Ok(Err(Failure::Unsent(_)))), "{outcome:?}");
        }
        assert!(batched.now_or_never().expect("answered").is_err());
        assert!(matches!(in_flight[0].call.completion, Completion::Ignore), "its answer is still to come");
        assert_eq!(shared.proofs.shortenings(), 1);
        assert_eq!(shared.proofs.until(7), Some(Moment::ZERO + Duration::from_secs(5)));
    }

    #[tokio::test(start_paused = true)]
    async fn a_check_in_a_handshake_survives_a_pause_of_the_process() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("zookeeper://{}", listener.local_addr().unwrap());
        let config = Arc::new(ZookeeperConfig::from_url(&url.parse().unwrap()).unwrap());
        let clock: Arc<dyn Clock> = Arc::new(simba_core::TokioClock::new());
        let shared = Arc::new(Shared::new(config.paths().root(), 3_000, Arc::clone(&clock)));
        let (_commands, inbox) = mpsc::unbounded_channel();
        let mut supervisor = Supervisor::new(config, 3_000, Arc::clone(&clock), shared, inbox);
        (supervisor.session.id, supervisor.is_first_attempt) = (7, true);
        let (call, mut outcome) = check();
        supervisor.ctx.outbox.calls.push_back(call);
        let limit = supervisor.limit();
        let mut attempt = Box::pin(simba_core::spi::within(&*clock, limit, supervisor.connect(0)));
        assert!(attempt.as_mut().now_or_never().is_none(), "it dials");
        let _silent = listener.accept().await.unwrap();
        tokio::time::advance(Duration::from_secs(60)).await;
        if attempt.as_mut().now_or_never().is_some() {
            drop(attempt);
        }
        assert!(
            !matches!(outcome.try_recv(), Err(oneshot::error::TryRecvError::Closed)),
            "the check was dropped"
        );
    }
}
