//! The only source of time: a clock that does not stop in suspend, its timers, and a way to replace both.
//!
//! `std::time::Instant` and tokio's timers stand still while a machine sleeps; a lease does not. The engine
//! therefore reads [`SystemClock`]: `CLOCK_BOOTTIME` where the system has it, with timers on the same clock
//! served by one thread of their own, so that neither I/O nor a busy runtime delays a deadline.

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
pub use system::SystemClock;
pub(crate) use within::by;
pub use within::within;

/// Completes at the moment it was asked for. Dropping it takes the timer back.
pub type Sleep = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A monotonic clock with timers. Replace it in tests: [`TokioClock`] follows tokio's paused time.
///
/// # For implementors
///
/// `now` never goes back, and `sleep_until(at)` completes no earlier than `now() >= at` and soon after.
pub trait Clock: fmt::Debug + Send + Sync + 'static {
    /// This moment.
    fn now(&self) -> Moment;

    /// Completes when `now() >= at`.
    fn sleep_until(&self, at: Moment) -> Sleep;

    /// The same for what has time, which may be some milliseconds late: so that many wake up together. Thousands of
    /// renewals a second then cost a few hundred wake-ups.
    fn sleep_until_about(&self, at: Moment) -> Sleep {
        self.sleep_until(at)
    }

    /// The time of day, for cron schedules alone: it may jump, so no lease depends on it.
    fn wall(&self) -> SystemTime {
        SystemTime::now()
    }
}

/// Follows tokio's time, which a test can pause and advance.
///
/// For tests and simulations: tokio's time stands still while the machine sleeps, so a lease on this clock
/// would outlive its store's.
///
/// # Panics
///
/// Its methods panic outside a tokio runtime with the time driver enabled.
#[derive(Clone, Debug)]
pub struct TokioClock {
    origin: tokio::time::Instant,
}

impl TokioClock {
    /// A clock that starts at [`Moment::ZERO`] now.
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
