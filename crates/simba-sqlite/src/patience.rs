//! How long a call waits for other processes to finish theirs.

use std::cell::Cell;
use std::thread;
use std::time::{Duration, Instant};

/// The longest wait. A transaction of ours takes microseconds: whoever keeps the file for longer hangs.
const LONGEST: Duration = Duration::from_millis(200);

thread_local! {
    /// For the connection of this thread.
    static LIMIT: Cell<Duration> = const { Cell::new(LONGEST) };
    /// Since when it waits, by the clock: on a busy machine a short sleep takes many times as long as asked for.
    static SINCE: Cell<Option<Instant>> = const { Cell::new(None) };
}

/// Waits on this thread for a sixth of the shortest of these leases at the most: the caller waits for a third, and
/// is to be told what went wrong.
pub(crate) fn limit(ttls: impl Iterator<Item = Duration>) {
    LIMIT.set(ttls.min().map_or(LONGEST, |ttl| (ttl / 6).min(LONGEST)));
}

/// Waits a little longer, or gives up. SQLite asks with the number of times it has asked before.
pub(crate) fn wait(tried: i32) -> bool {
    let now = Instant::now();
    let since = SINCE.get().filter(|_| tried > 0).unwrap_or(now);
    SINCE.set(Some(since));
    let goes_on = now - since < LIMIT.get();
    if goes_on {
        thread::sleep(step(tried));
    }
    goes_on
}

/// Short steps first.
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
    fn a_short_lease_shortens_the_wait_and_a_long_one_does_not_lengthen_it() {
        let limit_of = |ttls: &[u64]| {
            limit(ttls.iter().copied().map(Duration::from_millis));
            LIMIT.get()
        };
        assert_eq!(limit_of(&[]), LONGEST);
        assert_eq!(limit_of(&[10_000]), LONGEST);
        assert_eq!(limit_of(&[10_000, 600]), Duration::from_millis(100));
    }

    /// Steps that were counted instead let a caller on a busy machine run out of time before he was told why.
    #[test]
    fn a_wait_ends_by_the_clock_however_few_its_steps() {
        limit([Duration::from_millis(60)].into_iter());
        assert!(wait(0), "it begins");
        thread::sleep(Duration::from_millis(10));
        assert!(!wait(1), "the machine kept us for longer than the limit");
        assert!(wait(0), "the next wait has a limit of its own");
    }
}
