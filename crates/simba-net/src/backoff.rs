use std::time::Duration;

/// Exponential backoff with jitter: each pause is twice as long as the last one, up to a cap, less a random part.
///
/// # Examples
///
/// ```
/// use std::time::Duration;
/// use simba_net::Backoff;
///
/// let mut backoff = Backoff::new(Duration::from_millis(50), Duration::from_secs(2));
/// assert!(backoff.pause() <= Duration::from_millis(50));
/// assert!(backoff.pause() <= Duration::from_millis(100));
/// backoff.reset();
/// assert!(backoff.pause() <= Duration::from_millis(50));
/// ```
#[derive(Clone, Debug)]
pub struct Backoff {
    first: Duration,
    cap: Duration,
    next: Duration,
}

impl Backoff {
    /// Creates a backoff whose first pause is at most `first` and whose later pauses are at most `cap`.
    #[must_use]
    pub const fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, next: first }
    }

    /// Returns the pause before the next attempt. Half of it is fixed and half is random, so that the clients of a
    /// restarted server do not reconnect at the same moment.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next.min(self.cap);
        self.next = pause.saturating_mul(2);
        pause / 2 + (pause / 2).mul_f64(fastrand::f64())
    }

    /// Starts again with the first pause. Call it after a successful attempt.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_the_cap_and_are_at_least_half_of_it() {
        let (first, cap) = (Duration::from_millis(50), Duration::from_secs(1));
        let mut backoff = Backoff::new(first, cap);
        for wanted in [50, 100, 200, 400, 800, 1_000, 1_000] {
            let (pause, most) = (backoff.pause(), Duration::from_millis(wanted));
            assert!(pause <= most && pause >= most / 2, "{pause:?} is not within half of {most:?}");
        }
        backoff.reset();
        assert!(backoff.pause() <= first);
    }
}
