//! Where servers have their data.

use std::env;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::statvfs;

/// Where Linux keeps files in memory.
const MEMORY: &str = "/dev/shm";
/// Far more than all servers of the tests write.
const ROOM: u64 = 4 << 30;

static ON_DISK: AtomicBool = AtomicBool::new(false);

/// Lets servers that are started from now on have their data on the disk.
///
/// Without it they have it in memory where there is room: a disk that stands still for seconds, as that of a crowded
/// host does, says nothing about a store. Servers that are killed keep what they had, as they do on a disk; a machine
/// that loses its power is not what tests are about. A benchmark is about the disk, too.
pub fn keep_data_on_disk() {
    ON_DISK.store(true, Ordering::Relaxed);
}

/// Where the directories of servers are made.
pub(crate) fn room() -> PathBuf {
    let memory = Path::new(MEMORY);
    if !ON_DISK.load(Ordering::Relaxed) && has_room(memory) { memory.into() } else { env::temp_dir() }
}

fn has_room(dir: &Path) -> bool {
    statvfs(dir).is_ok_and(|told| told.f_bavail.saturating_mul(told.f_frsize) >= ROOM)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_there_has_no_room() {
        assert!(!has_room(Path::new("/no/such/directory")));
        assert!(room().is_dir());
    }
}
