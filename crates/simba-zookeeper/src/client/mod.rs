//! A client of one ZooKeeper session: pipelined requests, executed in order, over one connection at a time.
//!
//! The crate `zookeeper-client` reports the end of a session when a server says so, which is too late: a holder has to
//! stop before its session ends, also while no server answers. Hence a client of its own, which knows at every moment
//! until when the servers keep the session for certain (see `proof`). It implements the part of the protocol that
//! a latch needs. In addition, checks of many callers are sent as one request, the node of a dropped creation is
//! deleted, and a reconnect notifies all subscribers, since watches end with their connection.

mod checks;
mod connection;
mod failure;
mod handshake;
mod outbox;
mod pipeline;
mod proof;
mod protocol;
mod supervisor;

use std::hash::{BuildHasher as _, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use simba_core::spi::{Subscription, Wakeups, within};
use simba_core::{Clock, Error, Moment};
use simba_net::supervise::Supervised;
use tokio::runtime::Handle;
use tokio::sync::{mpsc, oneshot};
use tokio_util::task::AbortOnDropHandle;

use checks::{CheckSender, Checks};
pub(crate) use checks::{Checked, checked};
pub(crate) use failure::Failure;
pub(crate) use handshake::four_letters;
use outbox::Call;
pub(crate) use outbox::Outcome;
use proof::Proofs;
pub(crate) use proof::lease;
pub(crate) use protocol::{Access, Code, Mode, Names, Reply, Request, Stat};
use supervisor::{Connected, Supervisor};

use crate::config::ZookeeperConfig;
use crate::layout::Paths;

/// The longest delay of a request whose caller may be dropped by then.
const DEFER_DELAY: Duration = Duration::from_millis(50);

enum Command {
    Send(Call),
    Close(oneshot::Sender<()>),
}

/// The state that the supervisor shares with the clients of a session.
#[derive(Debug)]
struct Shared {
    /// The session, or 0 while there is none.
    session: AtomicI64,
    /// The granted timeout in milliseconds.
    timeout: AtomicU32,
    /// The number of connections so far.
    connection: AtomicU64,
    /// The node with all mutexes.
    root: String,
    /// The topics are hashes of paths, to save memory. Two paths with the same hash wake each other's subscribers, which
    /// is harmless, since a hint is never taken as a fact.
    wakeups: Wakeups<u64>,
    hash: RandomState,
    /// Has one more reference for each waiter.
    waiters: Arc<()>,
    proofs: Proofs,
    checks: Checks,
    supervised: Supervised<Connected>,
}

impl Shared {
    /// Creates the state before the first session. `timeout` is the requested one in milliseconds.
    fn new(root: String, timeout: u32, clock: Arc<dyn Clock>) -> Self {
        let limits = checks::limits(Duration::from_millis(timeout.into()));
        Self {
            session: AtomicI64::new(0),
            timeout: AtomicU32::new(timeout),
            connection: AtomicU64::new(0),
            root,
            wakeups: Wakeups::local(),
            hash: RandomState::new(),
            waiters: Arc::new(()),
            proofs: Proofs::default(),
            checks: Checks::new(clock, limits),
            supervised: Supervised::new(),
        }
    }

    fn topic(&self, path: &str) -> u64 {
        self.hash.hash_one(path)
    }

    /// Publishes a new connection. Notifies all subscribers, since events may have been missed before it.
    fn connected(&self, session: i64, timeout: Duration) {
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX);
        self.timeout.store(millis, Ordering::Release);
        self.session.store(session, Ordering::Release);
        self.connection.fetch_add(1, Ordering::AcqRel);
        self.wakeups.notify_all();
    }

    fn has_waiters(&self) -> bool {
        Arc::strong_count(&self.waiters) > 1
    }

    /// Publishes that the session has ended, and its nodes with it.
    fn expired(&self) {
        self.session.store(0, Ordering::Release);
        self.wakeups.notify_all();
    }
}

/// A session with the store. The server executes its requests in the order of the calls.
#[derive(Debug)]
pub(crate) struct Client {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    config: Arc<ZookeeperConfig>,
    _checks: AbortOnDropHandle<()>,
}

impl Client {
    /// Starts a session. `timeout` is the time for which the servers have to keep it without a message.
    pub(crate) fn start(
        config: Arc<ZookeeperConfig>,
        timeout: Duration,
        clock: Arc<dyn Clock>,
        runtime: &Handle,
    ) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(i32::MAX as u32).min(i32::MAX as u32);
        let shared = Arc::new(Shared::new(config.paths().root(), millis, Arc::clone(&clock)));
        let supervisor =
            Supervisor::new(Arc::clone(&config), millis, Arc::clone(&clock), Arc::clone(&shared), inbox);
        runtime.spawn(supervisor.run());
        let (sender, checking) = (CheckSender { commands: commands.downgrade() }, Arc::clone(&shared));
        // Until the client is dropped: a check on a closed session has to fail.
        let checks = runtime.spawn(async move { checking.checks.run(&sender).await });
        Self { commands, shared, clock, config, _checks: AbortOnDropHandle::new(checks) }
    }

    /// Waits for the outcome of the first attempt to connect.
    pub(crate) async fn ready(&self) -> Result<(), Error> {
        self.shared.supervised.connection().await.map(drop)
    }

    /// Returns the number of the current session, or 0 if there is none.
    pub(crate) fn session(&self) -> i64 {
        self.shared.session.load(Ordering::Acquire)
    }

    /// Returns the granted timeout of the session, or the requested one before the first grant.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.shared.timeout.load(Ordering::Acquire).into())
    }

    /// Returns the number of the connection. Watches of earlier connections have ended.
    pub(crate) fn connection(&self) -> u64 {
        self.shared.connection.load(Ordering::Acquire)
    }

    pub(crate) fn config(&self) -> &ZookeeperConfig {
        &self.config
    }

    pub(crate) fn paths(&self) -> Paths<'_> {
        self.config.paths()
    }

    pub(crate) fn now(&self) -> Moment {
        self.clock.now()
    }

    /// Returns the longest time for which one quorum call proves the session.
    pub(crate) fn lease(&self) -> Duration {
        lease(self.timeout())
    }

    pub(crate) fn proofs(&self) -> &Proofs {
        &self.shared.proofs
    }

    /// Subscribes to the events of watches on this path, and to reconnects: watches end with their connection.
    pub(crate) fn subscribe(&self, path: &str) -> Subscription<u64> {
        self.shared.wakeups.subscribe(self.shared.topic(path))
    }

    /// Counts a waiter until the result is dropped. While there are waiters, the session is proven before their turn
    /// comes.
    pub(crate) fn count_waiter(&self) -> Arc<()> {
        Arc::clone(&self.shared.waiters)
    }

    /// Queues a request. If the receiver of a creation is dropped, the node is deleted.
    pub(crate) fn send(&self, request: Request) -> oneshot::Receiver<Outcome> {
        let (to, outcome) = oneshot::channel();
        self.command(Command::Send(Call::new(request, to)));
        outcome
    }

    /// Completes when a request is due that a short hold does not need.
    pub(crate) async fn defer(&self) {
        let delay = DEFER_DELAY.min(self.timeout() / 12);
        self.clock.sleep_until(self.clock.now() + delay).await;
    }

    /// Sends a request and waits for its outcome.
    pub(crate) async fn call(&self, request: Request) -> Outcome {
        recv(&mut self.send(request)).await
    }

    /// Checks by a quorum call that a node exists, which proves the session. Waits a little for others to share the
    /// request. The check is queued before this returns.
    pub(crate) fn check(&self, path: String) -> impl Future<Output = Checked> + Send {
        let checked = self.shared.checks.call_batched(path);
        async { checked.await.unwrap_or_else(|error| Err(Failure::Unsent(error))) }
    }

    /// Queues a check that is sent immediately, since a waiter's turn depends on it. See [`checked`].
    pub(crate) fn send_check(&self, path: String) -> oneshot::Receiver<Outcome> {
        self.send(Request::Check { paths: vec![path] })
    }

    /// Deletes a node in the background.
    pub(crate) fn delete_in_background(&self, path: String) {
        self.command(Command::Send(Call::delete(path)));
    }

    /// Deletes in the background the node that a creation of unknown outcome may have left.
    pub(crate) fn sweep(&self, parent: String, prefix: String) {
        self.command(Command::Send(Call::sweep(parent, prefix)));
    }

    /// Ends the session, which deletes its nodes.
    pub(crate) async fn close(&self) {
        let (to, closed) = oneshot::channel();
        self.command(Command::Close(to));
        let _ = within(&*self.clock, self.timeout() / 3, closed).await;
    }

    /// Queues a command. If the client is closed, the caller learns it from the dropped sender.
    fn command(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}

/// Waits for an outcome. Returns [`Failure::Closed`] if the client was closed.
///
/// # Cancel safety
///
/// The outcome stays in the receiver.
pub(crate) async fn recv<T>(outcome: &mut oneshot::Receiver<Result<T, Failure>>) -> Result<T, Failure> {
    outcome.await.unwrap_or(Err(Failure::Closed))
}
