use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, StatxFlags};
use rustix::time::{ClockId, clock_gettime};
use simba_core::{Error, ErrorKind, Result};

/// The time of this machine since it booted, and which boot that was. All processes of one kernel agree on
/// both, whatever the wall clock says; suspend counts.
#[derive(Clone, Debug)]
pub(crate) struct BootClock {
    boot: Arc<str>,
    /// How far the clocks of this process's time namespace run ahead of the machine's, in microseconds.
    ahead: i64,
}

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// `statfs` on anything that the kernel itself makes up under `/proc`.
const PROC: u64 = 0x9fa0;

impl BootClock {
    pub(crate) fn read() -> Result<Self> {
        let ahead = if is_between_namespaces() {
            return Err(Error::new(
                ErrorKind::Config,
                "this process made itself a new time namespace and is not in it yet, so its clock cannot be \
                 told from the machine's: start a process in the namespace and connect there",
            ));
        } else {
            offset().map_err(|error| unreadable("/proc/self/timens_offsets", error))?
        };
        Ok(Self { boot: boot_id()?.into(), ahead })
    }

    /// Names the boot.
    pub(crate) fn boot(&self) -> &str {
        &self.boot
    }

    /// Microseconds since then.
    pub(crate) fn now(&self) -> i64 {
        let time = clock_gettime(ClockId::Boottime);
        time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_nsec / 1_000).saturating_sub(self.ahead)
    }
}

/// The kernel's own boot id. Some container managers put a made-up one over it, for each container another:
/// leases of one would be void to the next.
fn boot_id() -> Result<String> {
    let read = || -> io::Result<Option<String>> {
        if super::file_system(Path::new(BOOT_ID))? != PROC {
            return Ok(None);
        }
        Ok(Some(std::fs::read_to_string(BOOT_ID)?.trim().to_owned()))
    };
    match read() {
        Ok(Some(id)) if !id.is_empty() => Ok(id),
        Ok(_) => Err(Error::new(
            ErrorKind::Config,
            format!(
                "{BOOT_ID} is not the kernel's own: the container manager gives each container another, so \
                 containers could not agree on a lease; take a store with a server here"
            ),
        )),
        Err(error) => Err(unreadable(BOOT_ID, error)),
    }
}

fn unreadable(path: &str, error: io::Error) -> Error {
    let message = format!("cannot read {path}, which tells one boot from the next: mount /proc");
    Error::new(ErrorKind::Config, message).with_source(error)
}

/// Whether the offsets that the kernel shows are those of future children, and not ours.
fn is_between_namespaces() -> bool {
    let link = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
    link("time") != link("time_for_children")
}

/// The offset of this time namespace in microseconds; none on a kernel without such namespaces.
fn offset() -> io::Result<i64> {
    match std::fs::read_to_string("/proc/self/timens_offsets") {
        Ok(text) => parse_offset(&text)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no line about `boottime`")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// From lines of `<clock> <seconds> <nanoseconds>`; the seconds may be negative, the nanoseconds never are.
fn parse_offset(text: &str) -> Option<i64> {
    let words = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let [_, seconds, nanos] = words.into_iter().find(|words| words.first() == Some(&"boottime"))?[..] else {
        return None;
    };
    let nanos: i64 = nanos.parse().ok()?;
    seconds.parse::<i64>().ok()?.checked_mul(1_000_000)?.checked_add(nanos / 1_000)
}

/// The kind of file system that this lies on, by the kernel's number for it.
pub(crate) fn file_system(path: &Path) -> io::Result<u64> {
    #[expect(clippy::cast_sign_loss, reason = "the numbers are 32 bits wide")]
    Ok(rustix::fs::statfs(path)?.f_type as u64 & 0xffff_ffff)
}

/// The bytes that are left for us on the file system under `path`.
pub(crate) fn room_left(path: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(path)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether the file itself is mounted where it stands, so that its folder is not the one that it comes from.
/// A kernel that cannot tell says no.
pub(crate) fn is_mount_point(file: &Path, folder: &Path) -> io::Result<bool> {
    let mount = |path: &Path| -> io::Result<Option<u64>> {
        let stat = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?;
        let told = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
        Ok(told.then_some(stat.stx_mnt_id))
    };
    Ok(mount(file)? != mount(folder)?)
}

/// Makes an empty file for this user alone, without opening it: closing a second descriptor would drop the
/// locks that SQLite has on the first.
pub(crate) fn create_empty(path: &Path) -> io::Result<()> {
    Ok(rustix::fs::mknodat(CWD, path, FileType::RegularFile, Mode::RUSR | Mode::WUSR, 0)?)
}

/// Renames a file unless the new name is taken.
pub(crate) fn rename_new(from: &Path, to: &Path) -> io::Result<()> {
    Ok(rustix::fs::renameat_with(CWD, from, CWD, to, RenameFlags::NOREPLACE)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_offset_of_the_boot_clock_is_found_among_the_others() {
        assert_eq!(parse_offset("monotonic  7  8\nboottime  1000  500000000\n"), Some(1_000_500_000));
        assert_eq!(parse_offset("boottime 0 0"), Some(0));
        assert_eq!(parse_offset("boottime -2 750000000"), Some(-1_250_000), "a clock that is behind");
    }

    #[test]
    fn what_is_no_offset_is_not_taken_for_zero() {
        let odd = ["", "monotonic 1 2", "boottime", "boottime 1", "boottime x 0", "boottime 1 2 3"];
        for text in odd {
            assert_eq!(parse_offset(text), None, "{text:?}");
        }
        assert_eq!(parse_offset("boottime 9223372036854775807 0"), None, "it would overflow");
    }

    #[test]
    fn the_clock_names_its_boot_and_goes_on() {
        let clock = BootClock::read().unwrap();
        assert_eq!(clock.boot().len(), 36);
        let before = clock.now();
        assert!(before > 0 && clock.now() >= before);
    }
}
