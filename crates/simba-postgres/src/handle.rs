//! What the sessions of one handle share, and the one way of all calls.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Error, Hub, MutexName, Result, within};
use tokio::sync::{Notify, mpsc, watch};
use tokio_postgres::Row;

use crate::config::{Pooler, PostgresConfig};
use crate::desk::Desk;
use crate::errands::Errand;
use crate::error::{Trouble, closed, lost, unavailable};
use crate::gate::Gate;
use crate::statements::{LIVE, NOBODY, Query, Statements};
use crate::wire::{Param, Wire};

/// How often a statement that the server undid is sent again.
const TRIES: u32 = 20;

/// The connection for commands, as calls see it.
#[derive(Clone, Debug)]
pub(crate) enum State {
    /// On its way; calls wait for it.
    Connecting,
    /// It cannot be had for now; calls fail with the reason.
    Failing(Error),
    /// There.
    Up(Arc<Wire>),
    /// Closed for good.
    Closed,
}

/// Whether hints come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hints {
    /// Not now.
    Down,
    /// Yes.
    Up,
    /// Never, behind this pooler.
    Off,
}

/// What stands at the other end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Nature {
    /// Not known yet: nothing of a session is used.
    Unknown,
    /// One server process for as long as the connection lasts.
    Session,
    /// Another server process for each transaction.
    Pooled,
}

/// Everything that the sessions, the operators and the supervisor of one handle share.
#[derive(Debug)]
pub(crate) struct Handle {
    pub(crate) config: PostgresConfig,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) statements: Statements,
    pub(crate) ddl: String,
    /// The channel of this handle; no other handle has it.
    pub(crate) channel: String,
    /// Its channel for waiters whose life is shown by a lock.
    pub(crate) live_channel: String,
    pub(crate) state: watch::Sender<State>,
    pub(crate) hints: watch::Sender<Hints>,
    /// Somebody waits for hints: time to subscribe.
    pub(crate) wanted: Notify,
    /// The statements can be prepared now.
    pub(crate) proven: Notify,
    pub(crate) closing: watch::Sender<bool>,
    /// The last message to ourselves that came back.
    pub(crate) echo: watch::Sender<u64>,
    /// Wake-ups for one waiter, by the number of its session.
    pub(crate) turns: Hub<u64>,
    /// Sessions that are to poll within a second: their mutex is free, and promised to another waiter.
    rechecks: Mutex<HashSet<u64>>,
    pub(crate) recheck_wanted: Notify,
    /// Changes of owner, for all who watch a mutex.
    pub(crate) owners: Hub<MutexName>,
    pub(crate) errands: mpsc::UnboundedSender<Errand>,
    /// Where mutexes are taken and renewed.
    pub(crate) takes: Desk,
    /// Where they are freed.
    pub(crate) frees: Desk,
    /// Which place of the configuration is the one.
    pub(crate) place: AtomicUsize,
    pub(crate) warned: AtomicBool,
    pub(crate) nature: Arc<AtomicU8>,
    sessions: AtomicU64,
    gate: Gate,
}

impl Handle {
    pub(crate) fn new(
        config: PostgresConfig,
        clock: Arc<dyn Clock>,
    ) -> (Self, mpsc::UnboundedReceiver<Errand>) {
        let (errands, to_do) = mpsc::unbounded_channel();
        let nature = match config.pooler {
            Pooler::Auto => Nature::Unknown,
            Pooler::Yes => Nature::Pooled,
            Pooler::No => Nature::Session,
        };
        let nonce = nonce();
        let hints = if nature == Nature::Pooled { Hints::Off } else { Hints::Down };
        let handle = Self {
            statements: Statements::new(&config.tables, config.lock_timeout),
            ddl: config.tables.ddl(),
            channel: format!("simba_{nonce}"),
            live_channel: format!("{LIVE}{nonce}"),
            state: watch::Sender::new(State::Connecting),
            hints: watch::Sender::new(hints),
            wanted: Notify::new(),
            proven: Notify::new(),
            closing: watch::Sender::new(false),
            echo: watch::Sender::new(0),
            turns: Hub::local(),
            rechecks: Mutex::default(),
            recheck_wanted: Notify::new(),
            owners: Hub::new(),
            errands,
            takes: Desk::new(Query::Take, Query::TakeMany),
            frees: Desk::new(Query::Free, Query::FreeMany),
            place: AtomicUsize::new(0),
            warned: AtomicBool::new(false),
            nature: Arc::new(AtomicU8::new(nature as u8)),
            sessions: AtomicU64::new(0),
            gate: Gate::default(),
            config,
            clock,
        };
        (handle, to_do)
    }

    pub(crate) fn nature(&self) -> Nature {
        match self.nature.load(Ordering::Acquire) {
            nature if nature == Nature::Session as u8 => Nature::Session,
            nature if nature == Nature::Pooled as u8 => Nature::Pooled,
            _ => Nature::Unknown,
        }
    }

    pub(crate) fn learn(&self, nature: Nature) {
        self.nature.store(nature as u8, Ordering::Release);
    }

    /// The channel of a waiter's entry, which also says whether a lock shows that the waiter lives: only while this
    /// handle is subscribed. The poll that follows the subscription changes an entry that was made before.
    pub(crate) fn calls(&self) -> &str {
        match *self.hints.borrow() {
            Hints::Off => NOBODY,
            Hints::Down => &self.channel,
            Hints::Up => &self.live_channel,
        }
    }

    /// Whether this handle is subscribed, or cannot be.
    pub(crate) fn is_subscribed(&self) -> bool {
        *self.hints.borrow() != Hints::Down
    }

    /// Subscribes to wake-ups if this handle is not subscribed yet, and waits for it for at most `limit` and a second.
    /// Returns whether nothing more is to be waited for: it is subscribed, or cannot be.
    pub(crate) async fn subscribed(&self, limit: Duration) -> bool {
        if self.is_subscribed() {
            return true;
        }
        self.wanted.notify_one();
        let mut hints = self.hints.subscribe();
        let settled = hints.wait_for(|hints| *hints != Hints::Down);
        within(&*self.clock, limit.min(Duration::from_secs(1)), settled).await.is_some()
    }

    /// Has a waiter poll within a second.
    pub(crate) fn recheck(&self, number: u64) {
        if *self.hints.borrow() == Hints::Up {
            self.rechecks.lock().unwrap_or_else(PoisonError::into_inner).insert(number);
            self.recheck_wanted.notify_one();
        }
    }

    /// Wakes the waiters that are to poll.
    pub(crate) fn wake_rechecks(&self) {
        let waiting = std::mem::take(&mut *self.rechecks.lock().unwrap_or_else(PoisonError::into_inner));
        for number in waiting {
            self.turns.ring(&number);
        }
    }

    /// A number that no other session of this handle has.
    pub(crate) fn number(&self) -> u64 {
        self.sessions.fetch_add(1, Ordering::Relaxed)
    }

    /// The name of a session in the tables, which no other session anywhere has.
    pub(crate) fn session(&self, number: u64) -> String {
        format!("{}-{number:x}", self.channel)
    }

    /// The number of a session of this handle.
    fn number_of(&self, session: &str) -> Option<u64> {
        let number = session.strip_prefix(&*self.channel)?.strip_prefix('-')?;
        u64::from_str_radix(number, 16).ok()
    }

    /// Takes a message of another session, or our own.
    pub(crate) fn hear(&self, payload: &str) {
        match payload.split_once(' ') {
            Some(("turn", session)) => {
                if let Some(number) = self.number_of(session) {
                    self.turns.ring(&number);
                }
            }
            Some(("next", session)) => {
                if let Some(number) = self.number_of(session) {
                    self.recheck(number);
                }
            }
            Some(("owner", mutex)) => {
                if let Ok(mutex) = MutexName::legacy(mutex) {
                    self.owners.ring(&mutex);
                }
            }
            Some(("echo", number)) => {
                if let Ok(number) = number.parse() {
                    self.echo.send_replace(number);
                }
            }
            // Anyone may send anything.
            _ => {}
        }
    }

    /// Refuses a call for a mutex whose row stays locked.
    pub(crate) fn admit(&self, mutex: &MutexName) -> Result<()> {
        self.gate.admit(mutex, self.clock.now())
    }

    /// The connection for commands, once it is there.
    pub(crate) async fn wire(&self) -> Result<Arc<Wire>> {
        match &*self.state.borrow() {
            State::Up(wire) if !wire.is_closed() => return Ok(Arc::clone(wire)),
            _ => {}
        }
        let mut state = self.state.subscribe();
        loop {
            match &*state.borrow_and_update() {
                State::Up(wire) if !wire.is_closed() => return Ok(Arc::clone(wire)),
                State::Failing(error) => return Err(error.clone()),
                State::Closed => return Err(closed()),
                State::Up(_) | State::Connecting => {}
            }
            state.changed().await.map_err(|_| closed())?;
        }
    }

    /// Sends a statement about a mutex at once and waits for its rows. What the server undid for the sake of
    /// another one is sent again. What failed because the server's queue of notifications is full is sent again
    /// without notifications: waiters poll.
    pub(crate) async fn ask(
        &self,
        mutex: &MutexName,
        query: Query,
        params: &[Param<'_>],
    ) -> Result<Vec<Row>> {
        let pass = self.gate.pass(mutex, &*self.clock).await?;
        let (mut tried, mut silent) = (0, false);
        loop {
            tried += 1;
            let wire = self.wire().await?;
            let rows = match silent {
                true => wire.silent_rows(&self.statements, query, params).await,
                false => wire.rows(&self.statements, query, params).await,
            };
            match rows {
                Ok(rows) => return Ok(rows),
                Err(trouble) if trouble.is_notify_queue_full() && !silent => {
                    tracing::warn!(
                        backend = crate::NAME,
                        "the server's queue of notifications is full: waiters poll; end the session that listens \
                         in an open transaction, see pg_notification_queue_usage()"
                    );
                    silent = true;
                }
                Err(trouble) if trouble.is_undone() && tried < TRIES => tokio::task::yield_now().await,
                Err(trouble) => {
                    if trouble.is_locked() {
                        pass.shut(self.clock.now(), self.config.lock_timeout);
                    }
                    return Err(self.failed(&wire, trouble));
                }
            }
        }
    }

    /// The same for a statement about no mutex in particular, with a limit of its own.
    pub(crate) async fn ask_all(&self, query: Query, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let asked = async {
            let wire = self.wire().await?;
            let rows = wire.rows(&self.statements, query, params).await;
            rows.map_err(|trouble| self.failed(&wire, trouble))
        };
        self.in_time(asked).await
    }

    /// Gives a call the time that a statement may take, and a little more.
    pub(crate) async fn in_time<T>(&self, call: impl Future<Output = Result<T>> + Send) -> Result<T> {
        let limit = self.config.silence();
        let answer = within(&*self.clock, limit, call).await;
        answer.unwrap_or_else(|| Err(unavailable(format!("the server did not answer within {limit:?}"))))
    }

    pub(crate) fn failed(&self, wire: &Wire, trouble: Trouble) -> Error {
        if trouble.is_forgotten() {
            // Whatever became of what was prepared: a new connection prepares it anew.
            wire.abort();
            return lost().with_source(trouble.told(&self.config));
        }
        trouble.told(&self.config)
    }
}

/// Sixteen letters and digits that nobody else draws.
fn nonce() -> String {
    std::iter::repeat_with(|| fastrand::alphanumeric().to_ascii_lowercase()).take(20).collect()
}
