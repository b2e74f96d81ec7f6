//! A client of one ZooKeeper session: requests in order, many under way at once, over one connection at a time.
//!
//! Of the protocol it has what a latch needs. What it adds: checks of many callers go out as one request, a
//! creation that nobody waits for any more is undone, and watches end with their connection, whose next one wakes
//! everybody.

mod bells;
mod code;
mod connection;
mod early;
mod failure;
mod frame;
mod jute;
mod link;
mod message;
mod names;
mod proof;
mod sasl;
mod supervisor;
mod watches;
mod work;

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use simba_core::{Clock, Error, Moment, within};
use tokio::sync::{mpsc, oneshot, watch};

use bells::Bells;
pub(crate) use bells::{Ear, Ring, Topic};
pub(crate) use code::Code;
pub(crate) use connection::four_letters;
pub(crate) use failure::Failure;
pub(crate) use message::{Access, Mode, Reply, Request, Stat};
pub(crate) use names::Names;
use proof::Proofs;
pub(crate) use proof::{Proof, lease};
use supervisor::Supervisor;
pub(crate) use work::Outcome;
use work::{Check, Job, Then};

use crate::config::ZookeeperConfig;
use crate::paths::Paths;

/// Whether somebody waits for a check to begin its work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Urgency {
    /// It may wait for others, a hundredth of the session's timeout at the most.
    Renewal,
    /// It goes out at once.
    Turn,
}

enum Command {
    Do(Job),
    /// The one, and the other in the same breath.
    Both(Job, Job),
    /// In a moment, if somebody still waits for it then.
    Later(Job),
    Check(Check, Urgency),
    Close(oneshot::Sender<()>),
}

/// What the supervisor tells to everybody.
#[derive(Debug)]
struct Shared {
    /// The session, or 0 while there is none.
    session: AtomicI64,
    /// What the server granted, in milliseconds.
    timeout: AtomicU32,
    /// How many connections there have been.
    connection: AtomicU64,
    /// The node with all mutexes.
    root: String,
    bells: Arc<Bells>,
    proofs: Proofs,
    /// How the last try to connect went; nothing before the first.
    state: watch::Sender<Option<Result<(), Error>>>,
}

impl Shared {
    /// Starts without a session; `timeout` is what will be asked for, in milliseconds.
    fn new(root: String, timeout: u32) -> Self {
        Self {
            session: AtomicI64::new(0),
            timeout: AtomicU32::new(timeout),
            connection: AtomicU64::new(0),
            root,
            bells: Arc::default(),
            proofs: Proofs::default(),
            state: watch::Sender::new(None),
        }
    }
}

/// A session with the store. Its requests are carried out in the order in which they are made.
#[derive(Debug)]
pub(crate) struct Client {
    commands: mpsc::UnboundedSender<Command>,
    shared: Arc<Shared>,
    clock: Arc<dyn Clock>,
    config: Arc<ZookeeperConfig>,
}

impl Client {
    /// Starts a session that the server is to keep for `timeout` without a sign of life.
    pub(crate) fn start(config: Arc<ZookeeperConfig>, timeout: Duration, clock: Arc<dyn Clock>) -> Self {
        let (commands, inbox) = mpsc::unbounded_channel();
        let millis = u32::try_from(timeout.as_millis()).unwrap_or(i32::MAX as u32).min(i32::MAX as u32);
        let shared = Arc::new(Shared::new(config.paths().root(), millis));
        let supervisor =
            Supervisor::new(Arc::clone(&config), millis, Arc::clone(&clock), Arc::clone(&shared), inbox);
        tokio::spawn(supervisor.run());
        Self { commands, shared, clock, config }
    }

    /// Waits until the first try to connect is over.
    pub(crate) async fn ready(&self) -> Result<(), Error> {
        let mut state = self.shared.state.subscribe();
        let state = state.wait_for(Option::is_some).await.map(|state| state.clone());
        state.ok().flatten().unwrap_or_else(|| Err(crate::error::closed()))
    }

    /// The session that the store has of us, or 0.
    pub(crate) fn session(&self) -> i64 {
        self.shared.session.load(Ordering::Acquire)
    }

    /// How long the server keeps the session: what it granted, or what was asked for until it did.
    pub(crate) fn timeout(&self) -> Duration {
        Duration::from_millis(self.shared.timeout.load(Ordering::Acquire).into())
    }

    /// The number of the connection: watches of an earlier one are gone.
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

    /// Returns the longest time that a holder may count on the session from one quorum call on.
    pub(crate) fn lease(&self) -> Duration {
        lease(self.timeout())
    }

    /// Returns how much is left at this moment of what the last quorum call of a session has shown.
    pub(crate) fn left(&self, session: i64, at: Moment) -> Duration {
        self.shared.proofs.left(session, at)
    }

    /// Returns how often the session was granted for a shorter time than before.
    pub(crate) fn cuts(&self) -> u32 {
        self.shared.proofs.cuts()
    }

    /// Returns when all proofs end that are older than the last such grant.
    pub(crate) fn cut_at(&self) -> Moment {
        self.shared.proofs.cut_at()
    }

    /// Begins to listen for hints.
    pub(crate) fn ear(&self) -> Ear {
        self.shared.bells.ear()
    }

    /// Hands a request over. A creation whose receiver is dropped is undone.
    pub(crate) fn send(&self, request: Request, topic: Option<Topic>) -> oneshot::Receiver<Outcome> {
        let (to, outcome) = oneshot::channel();
        self.command(Command::Do(Job { request, topic, then: Then::Answer(to) }));
        outcome
    }

    /// Hands two requests over that are to be sent together, and carried out one after the other.
    pub(crate) fn send_both(
        &self,
        one: Request,
        other: Request,
    ) -> (oneshot::Receiver<Outcome>, oneshot::Receiver<Outcome>) {
        let ((to_one, of_one), (to_other, of_other)) = (oneshot::channel(), oneshot::channel());
        let one = Job { request: one, topic: None, then: Then::Answer(to_one) };
        let other = Job { request: other, topic: None, then: Then::Answer(to_other) };
        self.command(Command::Both(one, other));
        (of_one, of_other)
    }

    /// Hands a request over that is sent in a moment, and not at all if its receiver is dropped before.
    pub(crate) fn send_later(&self, request: Request, topic: Topic) -> oneshot::Receiver<Outcome> {
        let (to, outcome) = oneshot::channel();
        self.command(Command::Later(Job { request, topic: Some(topic), then: Then::Answer(to) }));
        outcome
    }

    /// Makes a request and waits for its outcome.
    pub(crate) async fn call(&self, request: Request) -> Outcome {
        heard(&mut self.send(request, None)).await
    }

    /// Asks whether a node exists, by a quorum; gives what the answer proves of the session.
    pub(crate) fn check(&self, path: String, urgency: Urgency) -> oneshot::Receiver<Result<Proof, Failure>> {
        let (to, outcome) = oneshot::channel();
        self.command(Command::Check(Check { path, to }, urgency));
        outcome
    }

    /// Deletes a node in the background.
    pub(crate) fn forget(&self, path: String) {
        self.command(Command::Do(Job::forget(path)));
    }

    /// Deletes in the background what a creation of unknown outcome may have left.
    pub(crate) fn sweep(&self, parent: String, prefix: String) {
        self.command(Command::Do(Job::sweep(parent, prefix)));
    }

    /// Ends the session, and with it all that it has at the store.
    pub(crate) async fn close(&self) {
        let (to, closed) = oneshot::channel();
        self.command(Command::Close(to));
        let _ = within(&*self.clock, self.timeout() / 3, closed).await;
    }

    /// What a closed client is told, its caller hears from the dropped sender.
    fn command(&self, command: Command) {
        let _ = self.commands.send(command);
    }
}

/// Waits for an outcome.
///
/// # Cancel safety
///
/// The outcome stays in the receiver.
pub(crate) async fn heard<T>(outcome: &mut oneshot::Receiver<Result<T, Failure>>) -> Result<T, Failure> {
    outcome.await.unwrap_or(Err(Failure::Closed))
}
