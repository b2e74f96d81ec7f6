use std::time::Duration;

/// How long to wait before the next try: twice as long as before the last one, up to a cap, less a random part.
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
    /// Pauses of at most `first`, then up to `cap`.
    #[must_use]
    pub const fn new(first: Duration, cap: Duration) -> Self {
        Self { first, cap, next: first }
    }

    /// The pause before the next try: half of it for sure, the other half by luck, so that the clients of a
    /// server that comes back fall out of step.
    pub fn pause(&mut self) -> Duration {
        let pause = self.next.min(self.cap);
        self.next = pause.saturating_mul(2);
        pause / 2 + (pause / 2).mul_f64(fastrand::f64())
    }

    /// Starts again with the first pause: the last try worked.
    pub fn reset(&mut self) {
        self.next = self.first;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_the_cap_and_never_below_half() {
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
