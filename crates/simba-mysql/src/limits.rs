//! The time limits for statements, by the shortest lease in use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Lease;

/// The upper limit for one statement, however long the lease.
const MAX_CALL: Duration = Duration::from_secs(5);
/// The lower limit for one statement, however short the lease: a busy machine needs this long.
const MIN_CALL: Duration = Duration::from_millis(120);

/// The limits that the sessions of one handle need.
#[derive(Debug)]
pub(crate) struct Limits {
    /// A third of each ttl in use, with the number of its sessions.
    in_use: Mutex<BTreeMap<Duration, usize>>,
    /// The shortest of them in nanoseconds, which every statement reads.
    shortest: AtomicU64,
}

/// One user of a lease, until it is dropped.
#[derive(Debug)]
pub(crate) struct LeaseInUse {
    limits: Arc<Limits>,
    limit: Duration,
}

impl Limits {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { in_use: Mutex::default(), shortest: AtomicU64::new(u64::MAX) })
    }

    /// Limits all statements to a third of this ttl, for as long as the result lives.
    pub(crate) fn use_lease(self: &Arc<Self>, lease: &Lease) -> LeaseInUse {
        let limit = lease.ttl() / 3;
        let mut in_use = self.in_use();
        *in_use.entry(limit).or_default() += 1;
        self.update(&in_use);
        LeaseInUse { limits: Arc::clone(self), limit }
    }

    /// Returns how long a statement may take. Sessions share connections, so the shortest limit applies to all:
    /// a session waits behind a dead connection no longer than its lease allows.
    pub(crate) fn statement(&self) -> Duration {
        self.shortest().max(MIN_CALL)
    }

    /// Returns the shortest time that any session of the handle can wait for a reply.
    pub(crate) fn shortest(&self) -> Duration {
        Duration::from_nanos(self.shortest.load(Ordering::Relaxed)).min(MAX_CALL)
    }

    fn update(&self, in_use: &BTreeMap<Duration, usize>) {
        let shortest = in_use.keys().next().and_then(|limit| u64::try_from(limit.as_nanos()).ok());
        self.shortest.store(shortest.unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    fn in_use(&self) -> MutexGuard<'_, BTreeMap<Duration, usize>> {
        self.in_use.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for LeaseInUse {
    fn drop(&mut self) {
        let mut in_use = self.limits.in_use();
        if let Some(sessions) = in_use.get_mut(&self.limit) {
            *sessions -= 1;
            if *sessions == 0 {
                in_use.remove(&self.limit);
            }
        }
        self.limits.update(&in_use);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lease(ttl_ms: u64) -> Lease {
        let ttl = Duration::from_millis(ttl_ms);
        Lease::new(ttl, ttl).unwrap()
    }

    #[test]
    fn the_shortest_lease_in_use_limits_a_statement() {
        let limits = Limits::new();
        assert_eq!(limits.statement(), MAX_CALL);
        let long = limits.use_lease(&lease(9_000));
        let (first, second) = (limits.use_lease(&lease(600)), limits.use_lease(&lease(600)));
        assert_eq!(limits.statement(), Duration::from_millis(200));
        drop(first);
        assert_eq!(limits.statement(), Duration::from_millis(200), "another session uses it");
        drop(second);
        assert_eq!(limits.statement(), Duration::from_secs(3), "a lease that is not in use limits nothing");
        drop(long);
        assert_eq!(limits.statement(), MAX_CALL);
    }

    #[test]
    fn a_limit_is_neither_too_short_for_a_busy_machine_nor_too_long() {
        let limits = Limits::new();
        let _long = limits.use_lease(&lease(60_000));
        assert_eq!(limits.statement(), MAX_CALL);
        let _short = limits.use_lease(&lease(300));
        assert_eq!((limits.statement(), limits.shortest()), (MIN_CALL, Duration::from_millis(100)));
    }
}
