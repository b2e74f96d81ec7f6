//! State that all parts of one backend handle share.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::{Clock, Moment, MutexName};
use simba_net::{ClockReading, ClockStep, ServerClock};

use crate::config::MySqlConfig;
use crate::error::NAME;
use crate::limits::Limits;
use crate::schema;
use crate::statements::Statements;
use crate::wakeups::Wakeups;

/// How long statements skip locked rows after one was found.
const CAREFUL_PERIOD: Duration = Duration::from_secs(10);
/// The greatest version that JVM peers can read.
pub(crate) const JVM_MAX: u64 = (1 << 31) - 1;

/// The settings, the clock and the cached state of one handle.
pub(crate) struct Shared {
    pub(crate) config: MySqlConfig,
    pub(crate) statements: Statements,
    pub(crate) schema: String,
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) wakeups: Arc<Wakeups>,
    pub(crate) limits: Arc<Limits>,
    server_clock: ServerClock,
    /// Until when statements skip locked rows.
    careful_until: Mutex<Moment>,
    version_warned: AtomicBool,
    name_warned: AtomicBool,
}

impl Shared {
    pub(crate) fn new(config: MySqlConfig, clock: Arc<dyn Clock>) -> Self {
        Self {
            statements: Statements::new(config.table.clone()),
            schema: schema::statement(&config.table),
            wakeups: Wakeups::new(config.poll),
            limits: Limits::new(),
            server_clock: ServerClock::default(),
            careful_until: Mutex::new(Moment::ZERO),
            version_warned: AtomicBool::new(false),
            name_warned: AtomicBool::new(false),
            clock,
            config,
        }
    }

    /// Records that a peer has, or may have, locked a row for longer than a moment.
    pub(crate) fn note_locked(&self) {
        *self.careful_until() = self.clock.now() + CAREFUL_PERIOD;
    }

    /// Returns whether every statement has to skip locked rows. A take or a release alone does not otherwise while a
    /// connection is idle, since that costs the server a third more.
    pub(crate) fn is_careful(&self) -> bool {
        self.clock.now() < *self.careful_until()
    }

    fn careful_until(&self) -> MutexGuard<'_, Moment> {
        self.careful_until.lock().unwrap_or_else(PoisonError::into_inner)
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
        if version > JVM_MAX && !self.version_warned.swap(true, Ordering::Relaxed) {
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
