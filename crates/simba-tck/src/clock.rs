//! A clock with injected faults.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use simba_core::clock::Sleep;
use simba_core::{Clock, Moment};
use tokio::sync::Notify;

/// A clock derived from another by a rate and by jumps: drift, suspend, a changed wall clock.
///
/// Clones share the state.
///
/// # Examples
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::time::Duration;
/// use simba_core::{Clock, TokioClock};
/// use simba_tck::SkewedClock;
///
/// let clock = SkewedClock::new(TokioClock::new());
/// let before = clock.now();
/// clock.jump(Duration::from_secs(60)); // the machine was suspended for a minute
/// assert!(clock.now() - before >= Duration::from_secs(60));
/// # }
/// ```
#[derive(Clone)]
pub struct SkewedClock {
    inner: Arc<Inner>,
}

struct Inner {
    base: Box<dyn Clock>,
    origin: Moment,
    rate: f64,
    skew: Mutex<Skew>,
    jumped: Notify,
}

#[derive(Clone, Copy)]
struct Skew {
    ahead: Duration,
    wall: Option<SystemTime>,
    paused: bool,
}

impl SkewedClock {
    /// Creates a clock that agrees with `base`.
    #[must_use]
    pub fn new(base: impl Clock) -> Self {
        Self::with_rate(base, 1.0)
    }

    /// Creates a clock that shows `rate` seconds for every second of `base`.
    #[must_use]
    pub fn with_rate(base: impl Clock, rate: f64) -> Self {
        let skew = Mutex::new(Skew { ahead: Duration::ZERO, wall: None, paused: false });
        let origin = base.now();
        Self { inner: Arc::new(Inner { base: Box::new(base), origin, rate, skew, jumped: Notify::new() }) }
    }

    /// Moves the clock forward, like a resume from suspend. Sleeps that are due complete.
    pub fn jump(&self, by: Duration) {
        self.inner.change(|skew| skew.ahead += by);
        self.inner.jumped.notify_waiters();
    }

    /// Lets no sleep complete, as in a stopped process; the time itself continues.
    pub fn pause(&self) {
        self.inner.change(|skew| skew.paused = true);
    }

    /// Lets sleeps complete again; overdue ones complete at once.
    pub fn resume(&self) {
        self.inner.change(|skew| skew.paused = false);
        self.inner.jumped.notify_waiters();
    }

    /// Returns the moment of the base clock at which this one shows `at`, without future jumps.
    #[must_use]
    pub fn on_base(&self, at: Moment) -> Moment {
        let Inner { origin, rate, .. } = &*self.inner;
        *origin + (at - *origin).saturating_sub(self.inner.skew().ahead).div_f64(*rate)
    }

    /// Sets the wall clock, which then does not advance until it is set again.
    pub fn set_wall(&self, wall: SystemTime) {
        self.inner.change(|skew| skew.wall = Some(wall));
    }
}

impl Inner {
    fn now(&self) -> Moment {
        let elapsed = (self.base.now() - self.origin).mul_f64(self.rate);
        self.origin + elapsed + self.skew().ahead
    }

    /// Returns the moment of the base clock to check again, unless this one jumps before.
    fn wake_at(&self, at: Moment) -> Moment {
        let left = (at - self.now()).div_f64(self.rate);
        // Rounding must not wake a sleep too early.
        self.base.now() + left + Duration::from_nanos(2)
    }

    fn skew(&self) -> Skew {
        *self.skew.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Skew)) {
        change(&mut self.skew.lock().unwrap_or_else(PoisonError::into_inner));
    }
}

impl Clock for SkewedClock {
    fn now(&self) -> Moment {
        self.inner.now()
    }

    fn sleep_until(&self, at: Moment) -> Sleep {
        let inner = Arc::clone(&self.inner);
        Box::pin(async move {
            loop {
                let mut jumped = std::pin::pin!(inner.jumped.notified());
                jumped.as_mut().enable();
                let paused = inner.skew().paused;
                if inner.now() >= at && !paused {
                    return;
                }
                tokio::select! {
                    biased;
                    () = jumped => {}
                    () = inner.base.sleep_until(inner.wake_at(at)), if !paused => {}
                }
            }
        })
    }

    fn wall(&self) -> SystemTime {
        self.inner.skew().wall.unwrap_or_else(|| self.inner.base.wall())
    }
}

impl fmt::Debug for SkewedClock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SkewedClock").field("rate", &self.inner.rate).finish_non_exhaustive()
    }
}
