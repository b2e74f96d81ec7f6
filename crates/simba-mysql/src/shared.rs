//! State that all parts of one backend handle share.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Lease, Moment, MutexName};
use simba_net::{ClockReading, ClockStep, ServerClock};

use crate::config::MySqlConfig;
use crate::error::NAME;
use crate::schema;
use crate::statements::Statements;
use crate::wakeups::Wakeups;

/// The upper limit for one statement, however long the lease.
const MAX_CALL: Duration = Duration::from_secs(5);
/// The lower limit for one statement, however short the lease: a busy machine needs this long.
const MIN_CALL: Duration = Duration::from_millis(120);
/// How long statements skip locked rows after one was found.
const CAREFUL_PERIOD: Duration = Duration::from_secs(10);
/// The first version that JVM peers cannot read.
const JVM_LIMIT: u64 = 1 << 31;

/// The settings, the clock and the cached state of one handle.
pub(crate) struct Shared {
    pub(crate) config: MySqlConfig,
    pub(crate) statements: Statements,
    pub(crate) schema: String,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) wakeups: Arc<Wakeups>,
    server_clock: ServerClock,
    /// The shortest limit of any session of the handle, in nanoseconds.
    shortest_limit: AtomicU64,
    moments: Mutex<Moments>,
    version_warned: AtomicBool,
    name_warned: AtomicBool,
}

/// Until when something is the case.
#[derive(Clone, Copy)]
struct Moments {
    /// The latest end of a lease that was set or renewed.
    held_until: Moment,
    /// Until when statements skip locked rows.
    careful_until: Moment,
}

impl Shared {
    pub(crate) fn new(config: MySqlConfig, clock: Arc<dyn Clock>) -> Self {
        Self {
            statements: Statements::new(config.table.clone()),
            schema: schema::statement(&config.table),
            wakeups: Wakeups::new(config.poll),
            server_clock: ServerClock::default(),
            shortest_limit: AtomicU64::new(u64::MAX),
            moments: Mutex::new(Moments { held_until: Moment::ZERO, careful_until: Moment::ZERO }),
            version_warned: AtomicBool::new(false),
            name_warned: AtomicBool::new(false),
            clock,
            config,
        }
    }

    /// Records the lease of a new session.
    pub(crate) fn note_lease(&self, lease: &Lease) {
        let limit = u64::try_from((lease.ttl() / 3).as_nanos()).unwrap_or(u64::MAX);
        self.shortest_limit.fetch_min(limit, Ordering::Relaxed);
    }

    /// Returns how long a statement may take. Sessions share connections, so the shortest limit applies to all:
    /// a session waits behind a dead connection no longer than its lease allows.
    pub(crate) fn limit(&self) -> Duration {
        self.shortest_limit().max(MIN_CALL)
    }

    /// Returns the shortest time that any session of the handle can wait for a reply.
    pub(crate) fn shortest_limit(&self) -> Duration {
        Duration::from_nanos(self.shortest_limit.load(Ordering::Relaxed)).min(MAX_CALL)
    }

    /// Records that a mutex is held under this lease from now on.
    pub(crate) fn note_hold(&self, lease: &Lease) {
        let mut moments = self.moments();
        moments.held_until = moments.held_until.max(self.clock.now() + lease.total());
    }

    /// Returns whether a mutex may be held.
    pub(crate) fn is_holding(&self) -> bool {
        self.clock.now() < self.moments().held_until
    }

    /// Records that a peer has, or may have, locked a row for longer than a moment.
    pub(crate) fn note_locked(&self) {
        self.moments().careful_until = self.clock.now() + CAREFUL_PERIOD;
    }

    /// Returns whether every statement has to skip locked rows. A take or a release alone does not otherwise while a
    /// connection is idle, since that costs the server a third more.
    pub(crate) fn is_careful(&self) -> bool {
        self.clock.now() < self.moments().careful_until
    }

    fn moments(&self) -> MutexGuard<'_, Moments> {
        self.moments.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Records the server's time in a reply, with the local times before and after the call. Warns if the clock
    /// was set: leases are counted by it. The fencing token covers what the warning cannot prevent.
    pub(crate) fn note_time(&self, server_ms: u64, (sent, received): (Moment, Moment)) {
        let server = Duration::from_millis(server_ms);
        if let Some(ClockStep(ms)) = self.server_clock.read(ClockReading { server, sent, received }) {
            tracing::warn!(
                step_ms = %ms,
                "the clock of the MySQL server was set: leases end that much too early or too late, \
                 until each is renewed; correct it by slewing"
            );
        }
    }

    /// Warns once if JVM peers cannot read this version.
    pub(crate) fn note_version(&self, mutex: &MutexName, version: u64) {
        if version >= JVM_LIMIT && !self.version_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                backend = NAME, %mutex, version,
                "the version of a mutex has passed 2147483647: JVM peers cannot read it any more"
            );
        }
    }

    /// Warns once if the table may treat two different names as equal.
    pub(crate) fn note_name(&self, mutex: &MutexName) {
        let ambiguous = mutex.as_str().chars().any(|c| c.is_ascii_uppercase() || !c.is_ascii());
        if ambiguous && !self.name_warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                backend = NAME, %mutex,
                "most collations ignore case and accents: names that differ only in these are the same mutex here; \
                 use lower case"
            );
        }
    }
}
