//! A disk that is small enough to fill.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};

/// The size of the first write. Halved whenever a write does not fit.
const LARGEST: usize = 1 << 20;
const FILLER: &str = "filler";
/// Time limit for the kernel to free the space.
const FREE_LIMIT: Duration = Duration::from_secs(30);

/// A file system in memory of a few mebibytes, unmounted when this is dropped.
#[derive(Debug)]
pub struct SmallDisk {
    at: PathBuf,
}

impl SmallDisk {
    /// Mounts a disk on this directory.
    ///
    /// # Errors
    ///
    /// This user must not mount; the error says to run as root.
    pub fn mount(at: &Path, mebibytes: u32) -> Result<Self> {
        let size = format!("size={mebibytes}m,mode=0755");
        let mut command = Command::new("mount");
        command.args(["-t", "tmpfs", "-o", &size, "tmpfs"]).arg(at);
        let output = command.output().context("cannot start `mount`")?;
        let stderr = String::from_utf8_lossy(&output.stderr);
        ensure!(
            output.status.success(),
            "cannot mount a small disk on {}: run this as root, where mounting is allowed\n{stderr}",
            at.display()
        );
        Ok(Self { at: at.to_owned() })
    }

    /// Returns the mount point.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.at
    }

    /// Writes until the disk is full.
    ///
    /// # Errors
    ///
    /// The disk cannot be written to at all.
    pub fn fill(&self) -> io::Result<()> {
        let mut filler = File::options().create(true).append(true).open(self.at.join(FILLER))?;
        let mut piece = LARGEST;
        while piece > 0 {
            match filler.write_all(&vec![0; piece]) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::StorageFull => piece /= 2,
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Removes what [`fill`](Self::fill) wrote, and waits until the kernel has freed the space, which it does
    /// asynchronously.
    ///
    /// # Errors
    ///
    /// The disk was not filled, or there is still no space.
    pub fn make_room(&self) -> io::Result<()> {
        fs::remove_file(self.at.join(FILLER))?;
        let (trial, begun) = (self.at.join("trial"), Instant::now());
        loop {
            let written = fs::write(&trial, [0]);
            fs::remove_file(&trial)?;
            match written {
                Err(error) if error.kind() == io::ErrorKind::StorageFull && begun.elapsed() < FREE_LIMIT => {
                    thread::sleep(Duration::from_millis(1));
                }
                written => return written,
            }
        }
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // Files that are still open stay accessible to their processes.
        let _ = Command::new("umount").arg("--lazy").arg(&self.at).status();
    }
}

#[cfg(test)]
mod tests {
    /// Mounting a disk needs root.
    mod as_root {
        use super::super::*;

        #[test]
        fn small_disk_is_filled_emptied_and_unmounted() {
            let at = std::env::temp_dir().join(format!("simba-servers-disk-{}", std::process::id()));
            fs::create_dir(&at).unwrap();
            let disk = SmallDisk::mount(&at, 1).unwrap();
            disk.fill().unwrap();
            let full = fs::write(at.join("more"), "more").unwrap_err();
            assert_eq!(full.kind(), io::ErrorKind::StorageFull);
            disk.make_room().unwrap();
            fs::write(at.join("more"), "more").unwrap();
            drop(disk);
            assert_eq!(fs::read_dir(&at).unwrap().count(), 0);
            fs::remove_dir(&at).unwrap();
        }
    }
}
