use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

use super::timer::Timer;
use super::{Clock, Moment, Sleep};

/// The clock of this machine, which does not stop in suspend.
///
/// Linux: `CLOCK_BOOTTIME`. Other systems: `CLOCK_MONOTONIC`, which does not stop in suspend on macOS either.
/// In a virtual machine that is paused from outside every clock stops; only a fencing token covers that.
///
/// All values of this type are one clock with one timer thread, which starts at the first sleep.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

#[cfg(target_os = "linux")]
const CLOCK: ClockId = ClockId::Boottime;
#[cfg(not(target_os = "linux"))]
const CLOCK: ClockId = ClockId::Monotonic;

/// Returns the current moment of the machine's clock.
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
        self.sleep_until(next_tick(at))
    }
}

/// Returns the first tick that is not before this moment. The ticks are the same for all processes of the machine.
fn next_tick(at: Moment) -> Moment {
    const TICK: u128 = 8_000_000;
    let over = at.since_zero().as_nanos() % TICK;
    if over == 0 { at } else { at + Duration::from_nanos((TICK - over) as u64) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn approximate_sleep_ends_at_the_next_tick() {
        let ms = |ms: u64| Moment::ZERO + Duration::from_millis(ms);
        assert_eq!((next_tick(ms(0)), next_tick(ms(8))), (ms(0), ms(8)));
        assert_eq!((next_tick(ms(1)), next_tick(ms(9)), next_tick(ms(15))), (ms(8), ms(16), ms(16)));
        assert_eq!(next_tick(ms(8) + Duration::from_nanos(1)), ms(16));
    }

    #[tokio::test]
    async fn sleep_does_not_end_before_its_moment() {
        let at = SystemClock.now() + Duration::from_millis(20);
        SystemClock.sleep_until(at).await;
        assert!(SystemClock.now() >= at);
    }

    #[tokio::test]
    async fn none_of_many_sleeps_ends_before_its_moment() {
        let start = SystemClock.now();
        // Ten per millisecond: more than the timer thread wakes up for separately.
        let sleeps = (0..300).map(|n| async move {
            let at = start + Duration::from_micros(n * 100);
            SystemClock.sleep_until(at).await;
            SystemClock.now() >= at
        });
        assert!(futures_util::future::join_all(sleeps).await.into_iter().all(|on_time| on_time));
    }

    #[tokio::test]
    async fn an_earlier_sleep_is_not_held_up_by_a_later_one() {
        let later = SystemClock.sleep_until(SystemClock.now() + Duration::from_secs(3600));
        let earlier = SystemClock.sleep_until(SystemClock.now() + Duration::from_millis(20));
        tokio::select! {
            () = later => panic!("an hour has passed"),
            () = earlier => {}
        }
    }
}
