//! An alarm: lets a thread sleep until a moment of the machine's clock, suspend included.
//!
//! Linux: a timer descriptor on `CLOCK_BOOTTIME`, which fires at once after a resume. On other systems, or if the
//! kernel provides none: a condition variable with a timeout of a second, so that a deadline that passed
//! in suspend is noticed at most a second after the resume.

use std::fmt;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use super::moment::Moment;
use super::system::now;

/// An alarm for one waiting thread.
pub(super) trait Alarm: fmt::Debug + Send + Sync {
    /// Sets the alarm to `at`, instead of any moment set before.
    fn set(&self, at: Moment);

    /// Waits until the alarm fires.
    fn wait(&self);
}

/// Returns the best alarm that the system provides.
pub(super) fn new() -> Box<dyn Alarm> {
    #[cfg(target_os = "linux")]
    if let Ok(descriptor) = descriptor::Descriptor::new() {
        return Box::new(descriptor);
    }
    Box::new(Sliced::default())
}

/// The portable alarm: waits in slices.
#[derive(Debug, Default)]
struct Sliced {
    at: Mutex<Option<Moment>>,
    changed: Condvar,
}

/// The maximum delay after a resume until a deadline that passed in suspend is noticed.
const SLICE: Duration = Duration::from_secs(1);

impl Alarm for Sliced {
    fn set(&self, at: Moment) {
        *self.at.lock().unwrap_or_else(PoisonError::into_inner) = Some(at);
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut at = self.at.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            let left = at.map_or(SLICE, |at| at - now());
            if left.is_zero() {
                *at = None;
                return;
            }
            let slice = left.min(SLICE);
            at = self.changed.wait_timeout(at, slice).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(target_os = "linux")]
mod descriptor {
    use std::os::fd::OwnedFd;
    use std::thread;
    use std::time::Duration;

    use rustix::time::{
        Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
        timerfd_settime,
    };

    use super::Alarm;
    use crate::clock::Moment;

    #[derive(Debug)]
    pub(super) struct Descriptor(OwnedFd);

    impl Descriptor {
        pub(super) fn new() -> rustix::io::Result<Self> {
            timerfd_create(TimerfdClockId::Boottime, TimerfdFlags::CLOEXEC).map(Self)
        }
    }

    impl Alarm for Descriptor {
        fn set(&self, at: Moment) {
            let since_zero = at.since_zero();
            // A zero would disarm the timer. One nanosecond after boot has passed as well.
            let since_zero = since_zero.max(Duration::from_nanos(1));
            let value = Timespec {
                tv_sec: i64::try_from(since_zero.as_secs()).unwrap_or(i64::MAX),
                tv_nsec: i64::from(since_zero.subsec_nanos()),
            };
            let once = Itimerspec { it_interval: Timespec { tv_sec: 0, tv_nsec: 0 }, it_value: value };
            let set = timerfd_settime(&self.0, TimerfdTimerFlags::ABSTIME, &once);
            debug_assert!(set.is_ok(), "an absolute time in range is always accepted");
        }

        fn wait(&self) {
            let mut expirations = [0; 8];
            if rustix::io::read(&self.0, &mut expirations).is_err() {
                // After an interrupt the caller checks the clock again. Any other error must not spin.
                thread::sleep(Duration::from_millis(1));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portable_alarm_fires_at_its_moment() {
        let alarm = Sliced::default();
        let at = now() + Duration::from_millis(20);
        alarm.set(at);
        alarm.wait();
        assert!(now() >= at);
    }

    #[test]
    fn earlier_moment_replaces_a_later_one() {
        for alarm in [new(), Box::new(Sliced::default())] {
            alarm.set(now() + Duration::from_secs(3600));
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| alarm.wait());
                alarm.set(now() + Duration::from_millis(10));
                waiting.join().unwrap();
            });
        }
    }
}
