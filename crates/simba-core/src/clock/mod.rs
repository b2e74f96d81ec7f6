//! The only source of time: a clock that does not stop in suspend, its timers, and a trait to replace both.
//!
//! `std::time::Instant` and tokio's timers stop while a machine is suspended; a lease does not. The engine
//! therefore reads [`SystemClock`]: `CLOCK_BOOTTIME` if the system has it, with timers on the same clock
//! and a thread for them, so that neither I/O nor a busy runtime delays a deadline.

mod alarm;
mod moment;
mod system;
mod timer;
mod within;

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::time::SystemTime;

pub use moment::Moment;
pub(crate) use moment::nanos;
pub use system::SystemClock;
pub(crate) use within::by;
pub use within::within;

/// A future that completes at its moment. Dropping it cancels the timer.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A monotonic clock with timers. Replace it in tests: [`TokioClock`] follows tokio's paused time.
///
/// # For implementors
///
/// `now` never goes back. `sleep_until(at)` never completes before `now() >= at`, and completes without delay then.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// Returns the current moment.
    fn now(&self) -> Moment;

    /// Completes when `now() >= at`.
    fn sleep_until(&self, at: Moment) -> Sleep;

    /// Completes when `now() >= at`, or some milliseconds later, so that many sleeps end together. Thousands of
    /// renewals a second then need only a few hundred wake-ups.
    fn sleep_until_about(&self, at: Moment) -> Sleep {
        self.sleep_until(at)
    }

    /// Returns the wall-clock time, for cron schedules only. It may jump, so no lease depends on it.
    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// A clock on tokio's time, which a test can pause and advance.
///
/// For tests and simulations only: tokio's time stops while the machine is suspended, so a lease on this clock
/// would last longer than at the store.
///
/// # Panics
///
/// Its methods panic outside a tokio runtime with the time driver enabled.
#[derive(Clone, Debug)]
pub struct TokioClock {
    origin: tokio::time::Instant,
}

impl TokioClock {
    /// Creates a clock that starts at [`Moment::ZERO`] now.
    #[must_use]
    pub fn new() -> Self {
        Self { origin: tokio::time::Instant::now() }
    }
}

impl Default for TokioClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for TokioClock {
    fn now(&self) -> Moment {
        Moment::ZERO + self.origin.elapsed()
    }

    fn sleep_until(&self, at: Moment) -> Sleep {
        Box::pin(tokio::time::sleep_until(self.origin + at.since_zero()))
    }
}
