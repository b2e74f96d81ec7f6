//! Notifies the sessions of this handle of changes, and other processes through a file beside the database (`-bell`): a
//! process that changes an owner writes to it, and a process with waiters watches it.
//!
//! Watching the journal would not do: SQLite writes it before a reader can see the change.

use std::collections::HashMap;
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::Sender;
use std::time::{Duration, Instant};
use std::{io, mem, thread};

use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use simba_core::MutexName;
use simba_core::spi::Wakeups;

use crate::connection::Request;
use crate::database::Database;
use crate::names::with_suffix;
use crate::probe;
use crate::tables::{Holder, MutexState, Next, SessionId};
use crate::worker::Worker;

/// The shortest time between two polls after events: a busy process must not keep this one busy.
const MIN_PAUSE: Duration = Duration::from_micros(500);

/// How soon to check again whether a waiter that was woken in another process still runs, to try again to delete the
/// entries of dropped sessions, and to poll for sessions that cannot be woken by the wakeup file.
const RECHECK_AFTER: Duration = Duration::from_millis(250);

/// The sessions that a notification is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Topic {
    /// The one waiter that may acquire next.
    Turn(SessionId),
    /// All observers of the mutex.
    Owner(MutexName),
}

/// The wakeups of one handle.
pub(crate) struct Notifier {
    wakeups: Wakeups<Topic>,
    wakeup_file: WakeupFile,
    /// For the watcher's thread, to request polls.
    requests: Sender<Request>,
    /// The mutexes that sessions of this handle are subscribed to, or were until the last poll.
    subscribed: HashMap<MutexName, Subscribed>,
    /// When to check again, see [`RECHECK_AFTER`].
    pub(crate) recheck_at: Option<Instant>,
    /// Whether the wakeup file could not be watched the last time, which is logged once.
    watch_failed: bool,
}

struct Subscribed {
    /// Each session that is subscribed has a clone.
    sessions: Arc<()>,
    /// The holder of which observers were notified last.
    holder: Holder,
}

impl Notifier {
    pub(crate) fn new(database: &Path, wakeups: Wakeups<Topic>, requests: Sender<Request>) -> Self {
        let (wakeup_file, subscribed) = (WakeupFile::new(database), HashMap::new());
        Self { wakeups, wakeup_file, requests, subscribed, recheck_at: None, watch_failed: false }
    }

    /// Wakes all sessions: they contend again and find that the handle is closed.
    pub(crate) fn close(self) {
        drop(self.wakeup_file);
        self.wakeups.notify_all();
    }

    pub(crate) fn recheck(&mut self) {
        self.recheck_at.get_or_insert_with(|| Instant::now() + RECHECK_AFTER);
    }

    /// Notifies the sessions of this handle. Returns whether other processes may have sessions to notify.
    pub(crate) fn notify(&mut self, states: Vec<MutexState>) -> bool {
        let mut others = false;
        for MutexState { mutex, changed, holder, next } in states {
            let elsewhere = matches!(next, Next::Wake(next) if self.wakeups.notify(&Topic::Turn(next)) == 0);
            others |= changed || elsewhere;
            let Some(subscribed) = self.subscribed.get_mut(&mutex) else { continue };
            if mem::replace(&mut subscribed.holder, holder) != holder {
                self.wakeups.notify(&Topic::Owner(mutex));
            }
            if elsewhere || next == Next::Woken {
                self.recheck();
            }
        }
        others
    }

    /// Notifies other processes.
    pub(crate) fn notify_others(&mut self) {
        self.wakeup_file.notify();
        if !self.subscribed.is_empty() {
            // The file may have been created anew, so that it is not watched yet.
            self.watch();
        }
    }

    /// Notifies exactly the sessions of this handle that may acquire or that observe a change. Runs after a
    /// notification of another process and when a recheck is due.
    pub(crate) fn poll(&mut self, database: &Database) {
        self.wakeup_file.poll_started();
        self.recheck_at = None;
        self.subscribed.retain(|_, subscribed| Arc::strong_count(&subscribed.sessions) > 1);
        if self.subscribed.is_empty() {
            return;
        }
        let (began, tables) = (Instant::now(), database.tables());
        let state_of = |mutex: &MutexName| {
            let unreadable = |fault| {
                let error = database.to_error(fault);
                tracing::debug!(%mutex, %error, "cannot read a mutex that is waited for: its waiters poll");
            };
            tables.state_of(mutex).map_err(unreadable).ok()
        };
        let states = self.subscribed.keys().filter_map(state_of).collect();
        self.notify(states);
        // The wakeup file may have been removed and created anew.
        self.watch();
        self.wakeup_file.poll_finished(began.elapsed());
    }

    /// Subscribes a session until it drops what this returns.
    pub(crate) fn subscribe(&mut self, database: &Database, mutex: MutexName) -> Arc<()> {
        self.watch();
        // If this read fails, the session's next call, which follows every subscription, finds the state.
        let state = database.tables().state_of(&mutex).ok();
        if state.as_ref().is_some_and(|state| state.next != Next::None) {
            self.recheck();
        }
        let holder = state.map(|state| state.holder).unwrap_or_default();
        let subscribed = self.subscribed.entry(mutex);
        Arc::clone(&subscribed.or_insert(Subscribed { sessions: Arc::default(), holder }).sessions)
    }

    /// Watches the wakeup file unless it is watched already. Returns whether it is watched; logs the first failure.
    pub(crate) fn watch(&mut self) -> bool {
        let watched = self.wakeup_file.watch(&self.requests);
        if let (Err(error), false) = (&watched, self.watch_failed) {
            let file = self.wakeup_file.path.display();
            tracing::warn!(%file, %error, "the file cannot be watched, so waiters poll: {}", probe::WATCH_FIX);
        }
        self.watch_failed = watched.is_err();
        match watched {
            Ok(false) => {}
            // Find the changes that were missed before this watch.
            Ok(true) => self.recheck_at = Some(Instant::now()),
            // The file may be removed just before it is watched, and watches may be available again later.
            Err(_) => self.recheck(),
        }
        !self.watch_failed
    }
}

/// The wakeup file of one database, as one handle uses it.
#[derive(Debug)]
struct WakeupFile {
    database: PathBuf,
    path: PathBuf,
    file: Option<File>,
    watcher: Option<RecommendedWatcher>,
    state: Arc<WatchState>,
}

/// State that the watcher's thread shares with the worker.
#[derive(Debug, Default)]
struct WatchState {
    /// Whether a poll was requested and has not started.
    requested: AtomicBool,
    /// The pause after an event, in microseconds.
    pause: AtomicU64,
}

impl WakeupFile {
    /// Returns the wakeup file of this database. It is created at its first use.
    fn new(database: &Path) -> Self {
        let (database, path) = (database.to_owned(), with_suffix(database, "-bell"));
        Self { database, path, file: None, watcher: None, state: Arc::default() }
    }

    /// Notifies every process that watches the file. If that fails, the waiters there poll.
    fn notify(&mut self) {
        if let Err(error) = self.open().and_then(|file| file.write_all_at(b"!", 0)) {
            self.file = None;
            tracing::debug!(file = %self.path.display(), %error, "cannot write the wakeup file: waiters poll");
        }
    }

    /// Returns the open file. Opens it again if it was removed, so that all processes use the one under the name.
    fn open(&mut self) -> io::Result<&File> {
        let file = match self.file.take() {
            Some(file) if file.metadata()?.nlink() > 0 => file,
            _ => {
                // A watch on the removed file reports nothing any more.
                self.watcher = None;
                self.open_or_create()?
            }
        };
        Ok(self.file.insert(file))
    }

    /// Creates the file with the mode and the owner of the database, also if this process runs as another user, such
    /// as root.
    fn open_or_create(&self) -> io::Result<File> {
        let database = std::fs::metadata(&self.database)?;
        let mode = database.mode() & 0o666;
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&self.path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
                OpenOptions::new().write(true).open(&self.path)
            }
            created => {
                let file = created?;
                // A process that may not do this shares the database only with its owner.
                let _ = file.set_permissions(Permissions::from_mode(mode));
                let _ = fchown(&file, Some(database.uid()), Some(database.gid()));
                Ok(file)
            }
        }
    }

    /// Starts to request a poll at every notification. Returns whether the watch is new: earlier notifications were
    /// missed.
    ///
    /// # Errors
    ///
    /// The system has no watch left.
    fn watch(&mut self, requests: &Sender<Request>) -> notify::Result<bool> {
        self.open().map_err(notify::Error::io)?;
        if self.watcher.is_some() {
            return Ok(false);
        }
        let (state, requests) = (Arc::clone(&self.state), requests.clone());
        state.requested.store(false, Ordering::Release);
        let mut watcher = notify::recommended_watcher(move |event| state.on_event(&event, &requests))?;
        watcher.watch(&self.path, RecursiveMode::NonRecursive)?;
        self.watcher = Some(watcher);
        Ok(true)
    }

    /// Records that a poll starts: a later notification requests another one.
    fn poll_started(&self) {
        self.state.requested.store(false, Ordering::Release);
    }

    /// Records how long a poll took. Polling is limited to a quarter of the time.
    fn poll_finished(&self, took: Duration) {
        let pause = u64::try_from((took * 3).as_micros()).unwrap_or(u64::MAX);
        self.state.pause.store(pause, Ordering::Relaxed);
    }
}

impl WatchState {
    /// Requests a poll, then pauses. Runs on the watcher's thread, which does nothing else: all events that come
    /// during the pause request one poll.
    fn on_event(&self, event: &notify::Result<Event>, requests: &Sender<Request>) {
        // Other processes open and close the file; only a write is a notification.
        if matches!(event, Ok(Event { kind: EventKind::Access(_), .. })) {
            return;
        }
        let poll = Request::Run(Box::new(Worker::poll));
        if !self.requested.swap(true, Ordering::AcqRel) && requests.send(poll).is_ok() {
            let pause = Duration::from_micros(self.pause.load(Ordering::Relaxed));
            thread::sleep(pause.max(MIN_PAUSE));
        }
    }
}
