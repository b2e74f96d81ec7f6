//! What all parts of one handle share.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mysql_async::Opts;
use simba_core::{Clock, Lease, MutexName};

use crate::config::MySqlConfig;
use crate::error::NAME;
use crate::schema;
use crate::server_clock::ServerClock;
use crate::statements::Statements;
use crate::waiters::Waiters;

/// No statement is waited for longer, however long the lease.
const MAX_CALL: Duration = Duration::from_secs(5);
/// No statement is given up earlier, however short the lease: a busy machine needs as much.
const MIN_CALL: Duration = Duration::from_millis(120);
/// The most mutexes of which a handle remembers at which version they are free.
const MOST_FREE: usize = 4_096;
/// The most mutexes of which a handle remembers that their rows stay locked.
const MOST_LOCKED: usize = 4_096;
/// From here on JVM peers cannot read a version.
const JVM_LIMIT: u64 = 1 << 31;

/// One handle's settings, clock, and memory.
pub(crate) struct Site {
    pub(crate) config: MySqlConfig,
    pub(crate) statements: Statements,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) server_clock: ServerClock,
    pub(crate) waiters: Arc<Waiters>,
    pub(crate) schema: String,
    opts: Opts,
    /// The shortest time that any session of the handle can wait, in nanoseconds.
    shortest: AtomicU64,
    /// The version of each mutex that a session of this handle released last: the next take needs no look.
    free: Mutex<HashMap<MutexName, u64>>,
    /// The mutexes whose rows stayed locked during all pauses of a call, whichever session made it.
    locked: Mutex<HashSet<MutexName>>,
    warned_of_version: AtomicBool,
    warned_of_names: AtomicBool,
}

impl Site {
    pub(crate) fn new(config: MySqlConfig, clock: Arc<dyn Clock>) -> Self {
        Self {
            statements: Statements::new(config.table.clone()),
            schema: schema::statement(&config.table),
            server_clock: ServerClock::default(),
            waiters: Waiters::new(config.poll),
            opts: config.opts(),
            shortest: AtomicU64::new(u64::MAX),
            free: Mutex::default(),
            locked: Mutex::default(),
            warned_of_version: AtomicBool::new(false),
            warned_of_names: AtomicBool::new(false),
            clock,
            config,
        }
    }

    pub(crate) fn opts(&self) -> Opts {
        self.opts.clone()
    }

    /// Learns of a session's lease.
    pub(crate) fn serve(&self, lease: &Lease) {
        let limit = u64::try_from((lease.ttl() / 3).as_nanos()).unwrap_or(u64::MAX);
        self.shortest.fetch_min(limit, Ordering::Relaxed);
    }

    /// How long a statement for this lease may take. Sessions share connections, so the one with the least
    /// time sets the measure for all: nobody waits behind a dead connection for longer than it can afford.
    pub(crate) fn limit(&self, lease: &Lease) -> Duration {
        (lease.ttl() / 3).min(MAX_CALL).min(self.shortest()).max(MIN_CALL)
    }

    /// The shortest time that any session of the handle can wait for a reply.
    pub(crate) fn shortest(&self) -> Duration {
        Duration::from_nanos(self.shortest.load(Ordering::Relaxed)).min(MAX_CALL)
    }

    /// Learns that this handle freed the mutex, which has this version since; wakes the next waiter.
    pub(crate) fn freed(&self, mutex: &MutexName, version: u64) {
        let mut free = self.free();
        if free.len() >= MOST_FREE {
            free.clear();
        }
        free.insert(mutex.clone(), version);
        drop(free);
        self.waiters.freed(mutex, version, self.clock.now());
    }

    /// Returns the version at which this handle freed the mutex, once.
    pub(crate) fn take_freed(&self, mutex: &MutexName) -> Option<u64> {
        self.free().remove(mutex)
    }

    fn free(&self) -> MutexGuard<'_, HashMap<MutexName, u64>> {
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether a call has paused for the locked row of this mutex and given up.
    pub(crate) fn stays_locked(&self, mutex: &MutexName) -> bool {
        self.locked().contains(mutex)
    }

    /// Remembers that a call paused for the locked row of this mutex and gave up.
    pub(crate) fn note_locked(&self, mutex: &MutexName) {
        let mut locked = self.locked();
        if locked.len() >= MOST_LOCKED {
            locked.clear();
        }
        locked.insert(mutex.clone());
    }

    /// Remembers that no peer has locked the row of this mutex any more.
    pub(crate) fn note_unlocked(&self, mutex: &MutexName) {
        self.locked().remove(mutex);
    }

    fn locked(&self) -> MutexGuard<'_, HashSet<MutexName>> {
        self.locked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says once that JVM peers will not be able to read this version.
    pub(crate) fn note_version(&self, mutex: &MutexName, version: u64) {
        if version >= JVM_LIMIT && !self.warned_of_version.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                backend = NAME, %mutex, version,
                "the version of a mutex has passed 2147483647: JVM peers cannot read it any more"
            );
        }
    }

    /// Says once that the table may not tell names apart that differ to us.
    pub(crate) fn note_name(&self, mutex: &MutexName) {
        let ambiguous = mutex.as_str().chars().any(|c| c.is_ascii_uppercase() || !c.is_ascii());
        if ambiguous && !self.warned_of_names.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                backend = NAME, %mutex,
                "in most collations a table does not tell upper case from lower case, nor accents: names that \
                 differ by them only are one mutex here; use lower case"
            );
        }
    }
}
