//! The location of the servers' data.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::statvfs;

/// A file system in memory.
const MEMORY: &str = "/dev/shm";
/// The free space that is required: the servers of the tests write less.
const MIN_SPACE: u64 = 4 << 30;

static ON_DISK: AtomicBool = AtomicBool::new(false);

/// Makes servers that are started from now on keep their data on disk.
///
/// By default they keep it in memory if there is space: the disk of a busy host may block for seconds, which is not a
/// fault of the store. Killed servers keep their data, as on a disk; power failures are not tested. Benchmarks use the
/// disk.
pub fn keep_data_on_disk() {
    ON_DISK.store(true, Ordering::Relaxed);
}

/// Returns the directory in which the directories of servers are created.
pub(crate) fn base_dir() -> PathBuf {
    let memory = Path::new(MEMORY);
    if !ON_DISK.load(Ordering::Relaxed) && has_space(memory) { memory.into() } else { env::temp_dir() }
}

fn has_space(dir: &Path) -> bool {
    statvfs(dir).is_ok_and(|stats| stats.f_bavail.saturating_mul(stats.f_frsize) >= MIN_SPACE)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_directory_has_no_space() {
        assert!(!has_space(Path::new("/no/such/directory")));
        assert!(base_dir().is_dir());
    }
}
