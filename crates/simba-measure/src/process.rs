//! Memory and processor time of this process. Linux only.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result};

/// Returns the resident memory, in whole pages.
pub(crate) fn resident() -> Result<usize> {
    let path = "/proc/self/statm";
    let text = fs::read_to_string(path).context(path)?;
    let pages: usize = text.split(' ').nth(1).context(path)?.parse().context(path)?;
    Ok(pages * rustix::param::page_size())
}

/// Returns the processor time of all threads, user and system.
pub(crate) fn processor_time() -> Result<Duration> {
    let path = "/proc/self/stat";
    let text = fs::read_to_string(path).context(path)?;
    let ticks = ticks(&text).context(path)?;
    Ok(Duration::from_secs_f64(ticks as f64 / rustix::param::clock_ticks_per_second() as f64))
}

/// Returns the processor time of this thread.
pub(crate) fn thread_time() -> Result<Duration> {
    let path = "/proc/thread-self/schedstat";
    let text = fs::read_to_string(path).context(path)?;
    Ok(Duration::from_nanos(text.split(' ').next().context(path)?.parse().context(path)?))
}

/// Returns `utime + stime` of a line of `/proc/PID/stat`. The name in its second field may contain any character.
fn ticks(stat: &str) -> Option<u64> {
    let (_, after_name) = stat.rsplit_once(')')?;
    let mut fields = after_name.split_ascii_whitespace().skip(11);
    Some(fields.next()?.parse::<u64>().ok()? + fields.next()?.parse::<u64>().ok()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_are_counted_from_the_end_of_the_name() {
        let stat = "7 (a) b (c) S 1 7 7 0 -1 4194304 100 0 0 0 12 30 0 0 20 0 1 0 99 0 0";
        assert_eq!(ticks(stat), Some(42));
        assert_eq!(ticks("7 (a"), None);
    }
}
