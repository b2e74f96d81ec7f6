//! Time that the host of a virtual machine took from it.

use std::time::Duration;

/// A moment from which stolen time is counted.
///
/// A virtual machine shares processors with others, and stands still now and then, for up to a second on a crowded
/// host. How late something came meanwhile says nothing about a store. The kernel counts such time, and a limit in a
/// test can leave it out:
///
/// ```
/// use std::time::{Duration, Instant};
///
/// use simba_tck::StolenTime;
///
/// let (begun, stolen) = (Instant::now(), StolenTime::mark());
/// // What must not take long.
/// assert!(begun.elapsed() <= Duration::from_secs(1) + stolen.so_far());
/// ```
#[derive(Clone, Copy, Debug)]
pub struct StolenTime {
    before: Duration,
}

impl StolenTime {
    /// Counts from now on.
    #[must_use]
    pub fn mark() -> Self {
        Self { before: stolen() }
    }

    /// How much was taken since, of all processors together: a chain of programs that wait for each other may have
    /// stood still on one after the other. Zero where the kernel does not tell.
    #[must_use]
    pub fn so_far(&self) -> Duration {
        stolen().saturating_sub(self.before)
    }
}

/// Since the machine was started.
fn stolen() -> Duration {
    let counts = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks = stolen_ticks(&counts).unwrap_or(0);
    Duration::from_secs(ticks) / u32::try_from(rustix::param::clock_ticks_per_second()).unwrap_or(u32::MAX)
}

/// The eighth count in the line about all processors.
fn stolen_ticks(counts: &str) -> Option<u64> {
    let all = counts.lines().next()?.strip_prefix("cpu ")?;
    all.split_ascii_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_took_is_the_eighth_count_of_all_processors() {
        let counts = "cpu  1 2 3 4 5 6 7 190709 9 10\ncpu0 1 2 3 4 5 6 7 100000 9 10\nintr 8\n";
        assert_eq!(stolen_ticks(counts), Some(190_709));
    }

    #[test]
    fn a_kernel_that_does_not_tell_took_nothing() {
        for counts in ["", "cpu  1 2 3 4\n", "intr 1 2 3 4 5 6 7 8 9\n", "cpu  1 2 3 4 5 6 7 x\n"] {
            assert_eq!(stolen_ticks(counts), None, "{counts:?}");
        }
    }
}
