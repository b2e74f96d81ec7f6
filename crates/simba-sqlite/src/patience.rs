//! How long a call waits for other processes to finish theirs.

use std::cell::Cell;
use std::thread;
use std::time::Duration;

/// The longest wait. A transaction of ours takes microseconds: whoever keeps the file for longer hangs.
const LONGEST: Duration = Duration::from_millis(200);

thread_local! {
    /// For the connection of this thread.
    static LIMIT: Cell<Duration> = const { Cell::new(LONGEST) };
}

/// Waits on this thread for a sixth of the shortest of these leases at the most: the caller waits for a third, and
/// is to be told what went wrong.
pub(crate) fn limit(ttls: impl Iterator<Item = Duration>) {
    LIMIT.set(ttls.min().map_or(LONGEST, |ttl| (ttl / 6).min(LONGEST)));
}

/// Waits a little longer, or gives up. SQLite asks with the number of times it has asked before.
pub(crate) fn wait(tried: i32) -> bool {
    let tried = u32::try_from(tried).unwrap_or(u32::MAX);
    let goes_on = waited(tried) < LIMIT.get();
    if goes_on {
        thread::sleep(step(tried));
    }
    goes_on
}

/// Short steps first.
fn step(tried: u32) -> Duration {
    Duration::from_micros(match tried {
        ..10 => 100,
        10..30 => 500,
        _ => 2_000,
    })
}

/// How long all steps before this one took, without a look at the clock.
fn waited(tried: u32) -> Duration {
    let later = step(u32::MAX).saturating_mul(tried.saturating_sub(30));
    (0..tried.min(30)).map(step).sum::<Duration>().saturating_add(later)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_steps_add_up() {
        assert_eq!(waited(0), Duration::ZERO);
        assert_eq!(waited(10), Duration::from_millis(1));
        assert_eq!(waited(30), Duration::from_millis(11));
        assert_eq!(waited(130), Duration::from_millis(211));
        assert!(waited(u32::MAX) > Duration::from_secs(3600));
    }

    #[test]
    fn a_short_lease_shortens_the_wait_and_a_long_one_does_not_lengthen_it() {
        let limit_of = |ttls: &[u64]| {
            limit(ttls.iter().copied().map(Duration::from_millis));
            LIMIT.get()
        };
        assert_eq!(limit_of(&[]), LONGEST);
        assert_eq!(limit_of(&[10_000]), LONGEST);
        assert_eq!(limit_of(&[10_000, 600]), Duration::from_millis(100));
        assert!(!wait(1_000), "it ends");
    }
}
