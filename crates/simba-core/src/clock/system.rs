use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::timer::Timer;
use super::{Clock, Moment, Sleep};

/// The clock of this machine, which goes on through suspend.
///
/// Linux: `CLOCK_BOOTTIME`. Elsewhere: `CLOCK_MONOTONIC`, which on macOS goes on through suspend too.
/// A virtual machine that is paused from outside stops every clock in it; only a fencing token covers that.
///
/// All values of this type are one clock, served by one timer thread, started at the first sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

#[cfg(target_os = "linux")]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(target_os = "linux"))]
const CLOCK: ClockId = ClockId::Monotonic;

/// This moment on the machine's clock.
pub(super) fn now() -> Moment {
    let time = clock_gettime(CLOCK);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let nanos = u64::try_from(time.tv_nsec).unwrap_or(0);
    Moment::ZERO + Duration::from_secs(seconds) + Duration::from_nanos(nanos)
}

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        now()
    }

    fn sleep_until(&self, at: Moment) -> Sleep {
        static TIMER: OnceLock<&'static Timer> = OnceLock::new();
        Box::pin(TIMER.get_or_init(Timer::new).sleep_until(at))
    }

    fn sleep_until_about(&self, at: Moment) -> Sleep {
        self.sleep_until(next_beat(at))
    }
}

/// The first beat that does not come before this moment, the same for all of the machine.
fn next_beat(at: Moment) -> Moment {
    const BEAT: u128 = 8_000_000;
    let over = at.since_zero().as_nanos() % BEAT;
    if over == 0 { at } else { at + Duration::from_nanos((BEAT - over) as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_has_time_waits_for_the_next_beat_and_no_longer() {
        let ms = |ms: u64| Moment::ZERO + Duration::from_millis(ms);
        assert_eq!((next_beat(ms(0)), next_beat(ms(8))), (ms(0), ms(8)));
        assert_eq!((next_beat(ms(1)), next_beat(ms(9)), next_beat(ms(15))), (ms(8), ms(16), ms(16)));
        assert_eq!(next_beat(ms(8) + Duration::from_nanos(1)), ms(16));
    }

    #[tokio::test]
    async fn a_sleep_ends_at_its_moment_and_not_before() {
        let at = SystemClock.now() + Duration::from_millis(20);
        SystemClock.sleep_until(at).await;
        assert!(SystemClock.now() >= at);
    }

    #[tokio::test]
    async fn every_sleep_of_a_crowd_ends_at_its_moment_and_not_before() {
        let start = SystemClock.now();
        // Ten in a millisecond: more than the timer thread wakes up for one by one.
        let sleeps = (0..300).map(|n| async move {
            let at = start + Duration::from_micros(n * 100);
            SystemClock.sleep_until(at).await;
            SystemClock.now() >= at
        });
        assert!(futures_util::future::join_all(sleeps).await.into_iter().all(|on_time| on_time));
    }

    #[tokio::test]
    async fn an_earlier_sleep_is_not_held_up_by_a_later_one() {
        let late = SystemClock.sleep_until(SystemClock.now() + Duration::from_secs(3600));
        let early = SystemClock.sleep_until(SystemClock.now() + Duration::from_millis(20));
        tokio::select! {
            () = late => panic!("an hour has passed"),
            () = early => {}
        }
    }
}
