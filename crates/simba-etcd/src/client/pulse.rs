//! Whether the server still answers.

use std::sync::{Mutex, MutexGuard, PoisonError};
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
    limit: Duration,
}

impl Default for Pulse {
    fn default() -> Self {
        Self { inner: Mutex::new(Inner { unanswered: None, heard: Moment::ZERO, limit: LONGEST }) }
    }
}

impl Pulse {
    /// A holder with a lease of this length has no time for a server that is silent for long.
    pub(super) fn hurry(&self, lease: Duration) {
        let mut inner = self.inner();
        inner.limit = inner.limit.min((lease / 5).max(SHORTEST));
    }

    /// How long the server may be silent.
    pub(super) fn limit(&self) -> Duration {
        self.inner().limit
    }

    pub(super) fn asked(&self, now: Moment) {
        self.inner().unanswered.get_or_insert(now);
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
    fn the_shortest_lease_counts() {
        let pulse = Pulse::default();
        assert_eq!(pulse.limit(), LONGEST);
        pulse.hurry(Duration::from_secs(2));
        pulse.hurry(Duration::from_secs(60));
        assert_eq!(pulse.limit(), Duration::from_millis(400));
        pulse.hurry(Duration::from_millis(10));
        assert_eq!(pulse.limit(), SHORTEST);
    }
}
