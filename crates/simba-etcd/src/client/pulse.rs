//! Whether the server still answers.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use simba_core::Moment;

/// How long a server may be silent, if no lease is shorter.
const LONGEST: Duration = Duration::from_secs(2);
/// No silence is shorter than this: a busy server, or a busy machine here, takes its time.
const SHORTEST: Duration = Duration::from_millis(200);

/// Since when something is asked and nothing is answered.
#[derive(Debug)]
pub(super) struct Pulse {
    inner: Mutex<Inner>,
}

#[derive(Debug)]
struct Inner {
    unanswered: Option<Moment>,
    heard: Moment,
    /// The lengths of the leases in use, each with the number of its users.
    leases: BTreeMap<Duration, usize>,
}

/// Counts as one user of a lease until it is dropped.
#[derive(Debug)]
pub(crate) struct LeaseInUse {
    pulse: Arc<Pulse>,
    lease: Duration,
}

impl Drop for LeaseInUse {
    fn drop(&mut self) {
        let mut inner = self.pulse.inner();
        if let Some(users) = inner.leases.get_mut(&self.lease) {
            *users -= 1;
            if *users == 0 {
                inner.leases.remove(&self.lease);
            }
        }
    }
}

impl Default for Pulse {
    fn default() -> Self {
        let inner = Inner { unanswered: None, heard: Moment::ZERO, leases: BTreeMap::new() };
        Self { inner: Mutex::new(inner) }
    }
}

impl Pulse {
    /// Lets the server be silent for a fifth of this lease at most, for as long as the lease is in use.
    pub(super) fn use_lease(self: &Arc<Self>, lease: Duration) -> LeaseInUse {
        *self.inner().leases.entry(lease).or_default() += 1;
        LeaseInUse { pulse: Arc::clone(self), lease }
    }

    /// Returns how long the server may be silent: the shortest lease in use decides.
    pub(super) fn limit(&self) -> Duration {
        let shortest = self.inner().leases.keys().next().copied();
        shortest.map_or(LONGEST, |lease| (lease / 5).clamp(SHORTEST, LONGEST))
    }

    pub(super) fn asked(&self, now: Moment) {
        self.inner().unanswered.get_or_insert(now);
    }

    /// Does not count this last part of the time as silence.
    pub(super) fn leave_out(&self, part: Duration) {
        if let Some(since) = &mut self.inner().unanswered {
            *since = *since + part;
        }
    }

    /// Any answer will do: what else is under way may take its time.
    pub(super) fn heard(&self, now: Moment) {
        let mut inner = self.inner();
        (inner.unanswered, inner.heard) = (None, now);
    }

    /// For how long nothing was heard, whether or not somebody asked.
    pub(super) fn quiet(&self, now: Moment) -> Duration {
        now.saturating_since(self.inner().heard)
    }

    /// For how long it has been silent.
    pub(super) fn silence(&self, now: Moment) -> Duration {
        self.inner().unanswered.map_or(Duration::ZERO, |since| now.saturating_since(since))
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
    fn silence_counts_from_the_first_question_without_an_answer() {
        let pulse = Pulse::default();
        assert_eq!(pulse.silence(at(9)), Duration::ZERO, "nobody asked");
        pulse.asked(at(1));
        pulse.asked(at(4));
        assert_eq!(pulse.silence(at(5)), Duration::from_secs(4));
        pulse.heard(at(6));
        assert_eq!(pulse.silence(at(9)), Duration::ZERO);
        assert_eq!(pulse.quiet(at(9)), Duration::from_secs(3));
    }

    #[test]
    fn time_that_is_left_out_is_no_silence() {
        let pulse = Pulse::default();
        pulse.leave_out(Duration::from_secs(3));
        pulse.asked(at(1));
        pulse.leave_out(Duration::from_secs(3));
        assert_eq!(pulse.silence(at(5)), Duration::from_secs(1));
    }

    #[test]
    fn the_shortest_lease_in_use_decides() {
        let pulse = Arc::new(Pulse::default());
        assert_eq!(pulse.limit(), LONGEST);
        let two = [pulse.use_lease(Duration::from_secs(2)), pulse.use_lease(Duration::from_secs(2))];
        let _long = pulse.use_lease(Duration::from_secs(60));
        let [first, second] = two;
        drop(first);
        assert_eq!(pulse.limit(), Duration::from_millis(400), "one user is left");
        let tiny = pulse.use_lease(Duration::from_millis(10));
        assert_eq!(pulse.limit(), SHORTEST);
        drop((tiny, second));
        assert_eq!(pulse.limit(), LONGEST, "leases that are not in use any more do not count");
    }
}
