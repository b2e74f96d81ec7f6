//! Limits how long a call waits for a transaction of another process.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait. A transaction takes microseconds, but on a busy machine a process may be preempted within it.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// How many attempts are made, besides the time, unless the limit is zero: while this process is paused, time passes
/// without an attempt.
const MIN_ATTEMPTS: i32 = 10;

thread_local! {
    /// The limit for the connection of this thread.
    static LIMIT: Cell<Duration> = const { Cell::new(MAX_WAIT) };
    /// When the wait started, by the clock: on a busy machine a short sleep takes many times as long as requested.
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Limits waits on this thread to a sixth of the callers' shortest ttl. A caller's own limit is a third, so it still
/// receives the cause.
pub(crate) fn limit(ttl: Option<Duration>) {
    LIMIT.set(ttl.map_or(MAX_WAIT, |ttl| (ttl / 6).min(MAX_WAIT)));
}

/// Sleeps and returns true, or returns false once the limit has passed and [`MIN_ATTEMPTS`] were made. SQLite passes the
/// number of earlier calls for the same lock.
pub(crate) fn wait(tried: i32) -> bool {
    let now = Instant::now();
    let since = SINCE.get().filter(|_| tried > 0).unwrap_or(now);
    SINCE.set(Some(since));
    let limit = LIMIT.get();
    let retry = now - since < limit || (tried < MIN_ATTEMPTS && !limit.is_zero());
    if retry {
        thread::sleep(step(tried));
    }
    retry
}

/// Returns the length of one sleep: short ones first.
fn step(tried: i32) -> Duration {
    Duration::from_micros(match tried {
        ..10 => 100,
        10..30 => 500,
        _ => 2_000,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn short_lease_shortens_the_wait_and_a_long_one_does_not_lengthen_it() {
        let limit_of = |ttl: Option<u64>| {
            limit(ttl.map(Duration::from_millis));
            LIMIT.get()
        };
        assert_eq!(limit_of(None), MAX_WAIT);
        assert_eq!(limit_of(Some(10_000)), MAX_WAIT);
        assert_eq!(limit_of(Some(600)), Duration::from_millis(100));
    }

    /// When steps were counted instead, a caller on a busy machine timed out before it received the cause.
    #[test]
    fn wait_is_limited_by_the_clock_and_not_by_the_number_of_steps() {
        limit(Some(Duration::from_millis(60)));
        assert!(wait(0), "the wait starts");
        thread::sleep(Duration::from_millis(10));
        assert!(wait(MIN_ATTEMPTS - 1), "the process may have been paused since its first attempt");
        assert!(!wait(MIN_ATTEMPTS), "the limit has passed");
        assert!(wait(0), "the next wait has its own limit");
        limit(Some(Duration::ZERO));
        assert!(!wait(0), "no caller waits");
    }
}
