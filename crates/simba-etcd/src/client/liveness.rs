//! Measures for how long the server has not answered.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// The longest time without an answer before the connection is given up. A short lease in use shortens it.
const MAX_SILENCE: Duration = Duration::from_secs(2);
/// The shortest one, whatever the lease: a server or a client under load answers late.
const MIN_SILENCE: Duration = Duration::from_millis(200);

/// The times of requests and answers, and the limit for an answer.
#[derive(Debug, Default)]
pub(super) struct Liveness {
    inner: Mutex<Inner>,
}

#[derive(Debug, Default)]
struct Inner {
    /// When the first request without an answer was sent.
    unanswered_since: Option<Moment>,
    last_answer: Option<Moment>,
    /// The lengths of the leases in use, each with the number of its users.
    leases: BTreeMap<Duration, usize>,
}

/// One user of a lease, until it is dropped.
#[derive(Debug)]
pub(crate) struct LeaseInUse {
    liveness: Arc<Liveness>,
    lease: Duration,
}

impl Drop for LeaseInUse {
    fn drop(&mut self) {
        let mut inner = self.liveness.inner();
        if let Some(users) = inner.leases.get_mut(&self.lease) {
            *users -= 1;
            if *users == 0 {
                inner.leases.remove(&self.lease);
            }
        }
    }
}

impl Liveness {
    /// Limits the time without an answer to a fifth of this lease, for as long as the result lives.
    pub(super) fn use_lease(self: &Arc<Self>, lease: Duration) -> LeaseInUse {
        *self.inner().leases.entry(lease).or_default() += 1;
        LeaseInUse { liveness: Arc::clone(self), lease }
    }

    /// Returns the time without an answer after which the connection is given up: a fifth of the shortest lease in use.
    pub(super) fn limit(&self) -> Duration {
        let shortest = self.inner().leases.keys().next().copied();
        shortest.map_or(MAX_SILENCE, |lease| (lease / 5).clamp(MIN_SILENCE, MAX_SILENCE))
    }

    /// Records that a request was sent.
    pub(super) fn sent(&self, now: Moment) {
        self.inner().unanswered_since.get_or_insert(now);
    }

    /// Excludes the last `duration` from the time without an answer.
    pub(super) fn exclude(&self, duration: Duration) {
        if let Some(since) = &mut self.inner().unanswered_since {
            *since = *since + duration;
        }
    }

    /// Records an answer. Any answer shows that the server is alive, so other pending requests do not count any more.
    pub(super) fn answered(&self, now: Moment) {
        let mut inner = self.inner();
        (inner.unanswered_since, inner.last_answer) = (None, Some(now));
    }

    /// Returns the time since the last answer, whether or not a request is pending. Zero before the first answer.
    pub(super) fn idle_for(&self, now: Moment) -> Duration {
        self.inner().last_answer.map_or(Duration::ZERO, |last| now.saturating_since(last))
    }

    /// Returns for how long a request has been pending without any answer.
    pub(super) fn unanswered_for(&self, now: Moment) -> Duration {
        self.inner().unanswered_since.map_or(Duration::ZERO, |since| now.saturating_since(since))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Moment {
        Moment::ZERO + Duration::from_secs(seconds)
    }

    #[test]
    fn silence_counts_from_the_first_request_without_an_answer() {
        let liveness = Liveness::default();
        assert_eq!(liveness.unanswered_for(at(9)), Duration::ZERO, "no request is pending");
        liveness.sent(at(1));
        liveness.sent(at(4));
        assert_eq!(liveness.unanswered_for(at(5)), Duration::from_secs(4));
        liveness.answered(at(6));
        assert_eq!(liveness.unanswered_for(at(9)), Duration::ZERO);
        assert_eq!(liveness.idle_for(at(9)), Duration::from_secs(3));
    }

    #[test]
    fn excluded_time_does_not_count_as_silence() {
        let liveness = Liveness::default();
        liveness.exclude(Duration::from_secs(3));
        liveness.sent(at(1));
        liveness.exclude(Duration::from_secs(3));
        assert_eq!(liveness.unanswered_for(at(5)), Duration::from_secs(1));
    }

    #[test]
    fn the_shortest_lease_in_use_sets_the_limit() {
        let liveness = Arc::new(Liveness::default());
        assert_eq!(liveness.limit(), MAX_SILENCE);
        let two = [liveness.use_lease(Duration::from_secs(2)), liveness.use_lease(Duration::from_secs(2))];
        let _long = liveness.use_lease(Duration::from_secs(60));
        let [first, second] = two;
        drop(first);
        assert_eq!(liveness.limit(), Duration::from_millis(400), "one user is left");
        let tiny = liveness.use_lease(Duration::from_millis(10));
        assert_eq!(liveness.limit(), MIN_SILENCE);
        drop((tiny, second));
        assert_eq!(liveness.limit(), MAX_SILENCE, "a lease that is not in use any more does not count");
    }
}
