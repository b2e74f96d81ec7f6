use std::io;
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
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

/// Names the thread that keeps queue entries alive, so that other processes can find out whether it has ended.
///
/// The text is `<pid namespace> <time namespace> <thread id> <start time>`. A thread id is unique within its pid
/// namespace, and the start time tells a thread from an earlier one of the same id. It is a thread and not its
/// process, since a process may outlive the handle, and its main thread may end first.
#[derive(Clone, Debug)]
pub(crate) struct WaiterThread {
    text: String,
    pid_namespace: String,
    time_namespace: String,
}

impl WaiterThread {
    /// Names the calling thread. Returns none where `/proc` is not there or shows another pid namespace than ours:
    /// then the lease of an entry decides.
    pub(crate) fn current() -> Option<Self> {
        let read = |name: &str| std::fs::read_to_string(format!("/proc/thread-self/{name}")).ok();
        let namespace = |name: &str| {
            let link = std::fs::read_link(format!("/proc/thread-self/ns/{name}")).ok()?;
            Some(link.to_str()?.replace(' ', ""))
        };
        let (status, stat) = (read("status")?, read("stat")?);
        let (id, started) = (only_thread_id(&status)?, start_time(&stat)?);
        let pid_namespace = namespace("pid")?;
        // Kernels before 5.6 have no time namespaces.
        let time_namespace = namespace("time").unwrap_or_else(|| "-".into());
        let text = format!("{pid_namespace} {time_namespace} {id} {started}");
        Some(Self { text, pid_namespace, time_namespace })
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.text
    }

    /// Returns whether the thread of that name is known to have ended. What cannot be judged from here, such as a
    /// thread in another pid namespace, may still run.
    pub(crate) fn sees_end_of(&self, thread: &str) -> bool {
        if thread == self.text {
            return false;
        }
        let mut words = thread.split(' ');
        let [Some(pid_namespace), Some(time_namespace), Some(id), Some(started), None] =
            [words.next(), words.next(), words.next(), words.next(), words.next()]
        else {
            return false;
        };
        // Zero and negative numbers mean groups of processes.
        let Some(pid) = id.parse().ok().filter(|id| *id > 0).and_then(Pid::from_raw) else { return false };
        if pid_namespace != self.pid_namespace {
            return false;
        }
        // Not `/proc` alone: that may be mounted so that it hides the processes of other users.
        if test_kill_process(pid) == Err(Errno::SRCH) {
            return true;
        }
        // The kernel shifts start times by the offset of the reader's time namespace.
        time_namespace == self.time_namespace
            && std::fs::read_to_string(format!("/proc/{id}/stat"))
                .is_ok_and(|stat| start_time(&stat).is_some_and(|found| found != started))
    }
}

/// Returns the thread id from `/proc/<id>/status`; none if it has several, one for each pid namespace from that of
/// the mounted `/proc` down to its own.
fn only_thread_id(status: &str) -> Option<&str> {
    let mut ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_ascii_whitespace();
    ids.next().filter(|_| ids.next().is_none())
}

/// Returns field 22 of `/proc/<id>/stat`. Field 2 is a name in parentheses that may contain anything.
fn start_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)
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
    fn a_running_thread_is_not_seen_to_have_ended_and_an_ended_one_is() {
        let ours = WaiterThread::current().unwrap();
        assert!(!ours.sees_end_of(ours.as_str()));
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let (tell, told) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            tell.send(WaiterThread::current().unwrap()).unwrap();
            wait.recv().unwrap_err();
        });
        let other = told.recv().unwrap();
        assert!(!ours.sees_end_of(other.as_str()), "{other:?}");
        drop(end);
        thread.join().unwrap();
        // The kernel removes a thread a moment after it can be joined.
        let begun = std::time::Instant::now();
        while !ours.sees_end_of(other.as_str()) {
            assert!(begun.elapsed().as_secs() < 10, "{other:?}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn a_thread_id_that_was_used_again_is_told_by_the_start_time() {
        let ours = WaiterThread::current().unwrap();
        let (rest, _) = ours.as_str().rsplit_once(' ').unwrap();
        assert!(ours.sees_end_of(&format!("{rest} 1")), "{rest}");
    }

    #[test]
    fn what_cannot_be_judged_may_still_run() {
        let ours = WaiterThread::current().unwrap();
        let (pid, time) = (&ours.pid_namespace, &ours.time_namespace);
        let id = ours.as_str().split(' ').nth(2).unwrap();
        let gone = i32::MAX;
        assert!(ours.sees_end_of(&format!("{pid} {time} {gone} 1")));
        assert!(ours.sees_end_of(&format!("{pid} time:[1] {gone} 1")), "no start time is needed");
        for thread in [
            format!("pid:[1] {time} {gone} 1"),
            format!("{pid} time:[1] {id} 1"),
            format!("{pid} {time} 0 1"),
            format!("{pid} {time} -1 1"),
            format!("{pid} {time} {gone} 1 more"),
            format!("{pid} {time} {gone}"),
            String::new(),
        ] {
            assert!(!ours.sees_end_of(&thread), "{thread:?}");
        }
    }

    #[test]
    fn fields_of_proc_are_found_beside_odd_names() {
        let numbers: Vec<_> = (4..=30).map(|field| field.to_string()).collect();
        assert_eq!(start_time(&format!("1 (a) b) S {}", numbers.join(" "))), Some("22"));
        assert_eq!(start_time("1 (a"), None);
        assert_eq!(only_thread_id("Name:\ta\nNSpid:\t17\n"), Some("17"));
        assert_eq!(only_thread_id("NSpid:\t17\t1\n"), None, "/proc is that of another namespace");
        assert_eq!(only_thread_id("Name:\ta\n"), None);
    }

    #[test]
    fn the_clock_names_its_boot_and_goes_on() {
        let clock = BootClock::read().unwrap();
        assert_eq!(clock.boot().len(), 36);
        let before = clock.now();
        assert!(before > 0 && clock.now() >= before);
    }
}
