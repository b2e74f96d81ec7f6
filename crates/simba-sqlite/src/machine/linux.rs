use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, Mode, RenameFlags, StatxFlags};
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use rustix::time::{ClockId, clock_gettime};
use simba_core::{Error, ErrorKind, Result};

/// The time since this machine booted, including suspend, and the id of the boot. All processes of one kernel agree on
/// both, and the wall clock changes neither.
#[derive(Clone, Debug)]
pub(crate) struct BootClock {
    boot: String,
    /// By how much the clocks of this process's time namespace are ahead of the machine's, in microseconds.
    ahead: i64,
}

const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";
/// The file system of everything under `/proc` that the kernel itself provides.
const PROC: u64 = 0x9fa0;

impl BootClock {
    pub(crate) fn read() -> Result<Self> {
        if is_between_namespaces() {
            return Err(Error::new(
                ErrorKind::Config,
                "this process created a time namespace and is not in it yet, so its clock cannot be corrected: \
                 start a process in the namespace and connect there",
            ));
        }
        let ahead = offset().map_err(|error| unreadable("/proc/self/timens_offsets", error))?;
        Ok(Self { boot: boot_id()?, ahead })
    }

    /// Returns the id of the boot.
    pub(crate) fn boot(&self) -> &str {
        &self.boot
    }

    /// Returns the microseconds since the boot.
    pub(crate) fn now(&self) -> i64 {
        let time = clock_gettime(ClockId::Boottime);
        time.tv_sec.saturating_mul(1_000_000).saturating_add(time.tv_nsec / 1_000).saturating_sub(self.ahead)
    }
}

/// Returns the kernel's own boot id. Some container managers mount a generated one over it, another one in each
/// container: containers would not accept each other's leases.
fn boot_id() -> Result<String> {
    let unreadable = |error| unreadable(BOOT_ID, error);
    let own = file_system(Path::new(BOOT_ID)).map_err(unreadable)? == PROC;
    let id = std::fs::read_to_string(BOOT_ID).map_err(unreadable)?;
    if own && !id.trim().is_empty() {
        return Ok(id.trim().to_owned());
    }
    Err(Error::new(
        ErrorKind::Config,
        format!(
            "{BOOT_ID} is not the kernel's own: the container manager gives each container another, so containers \
             could not agree on a lease: use a store with a server here"
        ),
    ))
}

fn unreadable(path: &str, error: io::Error) -> Error {
    let message = format!("cannot read {path}, which the boot clock needs: mount /proc");
    Error::new(ErrorKind::Config, message).with_source(error)
}

/// Returns whether the offsets that the kernel shows are those of future children, and not of this process.
fn is_between_namespaces() -> bool {
    let link = |name: &str| std::fs::read_link(format!("/proc/self/ns/{name}")).ok();
    link("time") != link("time_for_children")
}

/// Returns the offset of this time namespace in microseconds; zero on a kernel without such namespaces.
fn offset() -> io::Result<i64> {
    match std::fs::read_to_string("/proc/self/timens_offsets") {
        Ok(text) => parse_offset(&text)
            .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no line about `boottime`")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(0),
        Err(error) => Err(error),
    }
}

/// Parses lines of `<clock> <seconds> <nanoseconds>`. The seconds may be negative, the nanoseconds never are.
fn parse_offset(text: &str) -> Option<i64> {
    let words = text.lines().map(|line| line.split_ascii_whitespace().collect::<Vec<_>>());
    let [_, seconds, nanos] = words.into_iter().find(|words| words.first() == Some(&"boottime"))?[..] else {
        return None;
    };
    let nanos: i64 = nanos.parse().ok()?;
    seconds.parse::<i64>().ok()?.checked_mul(1_000_000)?.checked_add(nanos / 1_000)
}

/// The identity of the thread that keeps queue entries alive, by which other processes can check whether it has ended.
///
/// The text is `<pid namespace> <time namespace> <thread id> <start time>`. A thread id is unique within its pid
/// namespace, and the start time distinguishes a thread from an earlier one with the same id. It is a thread and not
/// its process, since a process may outlive the handle, and its main thread may end first.
#[derive(Clone, Debug)]
pub(crate) struct WaiterThread(String);

impl WaiterThread {
    /// Identifies the calling thread. Returns none where `/proc` is missing or shows another pid namespace than that of
    /// this process: then an entry lasts until it expires.
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
        Some(Self(format!("{pid_namespace} {time_namespace} {id} {started}")))
    }

    pub(crate) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns whether the given thread is known to have ended. False if that cannot be decided in this process, such
    /// as for a thread in another pid namespace.
    pub(crate) fn knows_ended(&self, thread: &str) -> bool {
        let (Some(ours), Some(theirs)) = (words(&self.0), words(thread)) else { return false };
        let [pid_namespace, time_namespace, id, started] = theirs;
        // Zero and negative numbers mean groups of processes.
        let Some(pid) = id.parse().ok().filter(|id| *id > 0).and_then(Pid::from_raw) else { return false };
        if ours == theirs || pid_namespace != ours[0] {
            return false;
        }
        // Not `/proc` alone: that may be mounted so that it hides the processes of other users.
        if test_kill_process(pid) == Err(Errno::SRCH) {
            return true;
        }
        // The kernel shifts start times by the offset of the reader's time namespace.
        time_namespace == ours[1]
            && std::fs::read_to_string(format!("/proc/{id}/stat"))
                .is_ok_and(|stat| start_time(&stat).is_some_and(|found| found != started))
    }
}

/// Splits the text of a [`WaiterThread`].
fn words(thread: &str) -> Option<[&str; 4]> {
    thread.split(' ').collect::<Vec<_>>().try_into().ok()
}

/// Returns the thread id from `/proc/<id>/status`. Returns none if there are several: one for each pid namespace from
/// that of the mounted `/proc` down to that of the thread.
fn only_thread_id(status: &str) -> Option<&str> {
    let mut ids = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?.split_ascii_whitespace();
    ids.next().filter(|_| ids.next().is_none())
}

/// Returns field 22 of `/proc/<id>/stat`. Field 2 is a name in parentheses that may contain anything.
fn start_time(stat: &str) -> Option<&str> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(19)
}

/// Returns the magic number of the file system that holds `path`.
pub(crate) fn file_system(path: &Path) -> io::Result<u64> {
    #[expect(clippy::cast_sign_loss, reason = "the numbers are 32 bits wide")]
    Ok(rustix::fs::statfs(path)?.f_type as u64 & 0xffff_ffff)
}

/// Returns whether the file itself is a mount point, so that its companion files are in another folder. Returns false
/// on a kernel that does not report mounts.
pub(crate) fn is_mount_point(file: &Path, folder: &Path) -> io::Result<bool> {
    let mount = |path: &Path| -> io::Result<Option<u64>> {
        let stat = rustix::fs::statx(CWD, path, AtFlags::empty(), StatxFlags::MNT_ID)?;
        let reported = stat.stx_mask & StatxFlags::MNT_ID.bits() != 0;
        Ok(reported.then_some(stat.stx_mnt_id))
    };
    Ok(mount(file)? != mount(folder)?)
}

/// Returns device and inode of each file that this process has open under one of these names, found without opening it
/// again.
pub(crate) fn open_files(names: &[PathBuf]) -> io::Result<Vec<(u64, u64)>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc/self/fd")? {
        let descriptor = entry?.path();
        // Other names are not followed: that could hang on another file system. Some folders ignore the case.
        let named = |target: &Path| names.iter().any(|name| target.as_os_str().eq_ignore_ascii_case(name));
        // Another thread may close it meanwhile.
        if std::fs::read_link(&descriptor).is_ok_and(|target| named(&target))
            && let Ok(file) = std::fs::metadata(&descriptor)
        {
            found.push((file.dev(), file.ino()));
        }
    }
    Ok(found)
}

/// Creates an empty file for this user alone, without opening it: closing a second descriptor would drop the locks
/// that SQLite has on the first.
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
    fn offset_of_the_boot_clock_is_parsed() {
        assert_eq!(parse_offset("monotonic  7  8\nboottime  1000  500000000\n"), Some(1_000_500_000));
        assert_eq!(parse_offset("boottime 0 0"), Some(0));
        assert_eq!(parse_offset("boottime -2 750000000"), Some(-1_250_000), "a clock that is behind");
    }

    #[test]
    fn invalid_offset_is_not_parsed_as_zero() {
        let invalid = ["", "monotonic 1 2", "boottime", "boottime 1", "boottime x 0", "boottime 1 2 3"];
        for text in invalid {
            assert_eq!(parse_offset(text), None, "{text:?}");
        }
        assert_eq!(parse_offset("boottime 9223372036854775807 0"), None, "it would overflow");
    }

    #[test]
    fn ended_thread_is_detected_and_a_running_one_is_not() {
        let ours = WaiterThread::current().unwrap();
        assert!(!ours.knows_ended(ours.as_str()));
        let (end, wait) = std::sync::mpsc::channel::<()>();
        let (sender, receiver) = std::sync::mpsc::channel();
        let thread = std::thread::spawn(move || {
            sender.send(WaiterThread::current().unwrap()).unwrap();
            wait.recv().unwrap_err();
        });
        let other = receiver.recv().unwrap();
        assert!(!ours.knows_ended(other.as_str()), "{other:?}");
        drop(end);
        thread.join().unwrap();
        // The kernel removes a thread a moment after it can be joined.
        let begun = std::time::Instant::now();
        while !ours.knows_ended(other.as_str()) {
            assert!(begun.elapsed().as_secs() < 10, "{other:?}");
            std::thread::yield_now();
        }
    }

    #[test]
    fn reused_thread_id_is_detected_by_the_start_time() {
        let ours = WaiterThread::current().unwrap();
        let (rest, _) = ours.as_str().rsplit_once(' ').unwrap();
        assert!(ours.knows_ended(&format!("{rest} 1")), "{rest}");
    }

    #[test]
    fn thread_that_cannot_be_checked_counts_as_running() {
        let ours = WaiterThread::current().unwrap();
        let [pid, time, id, _] = words(ours.as_str()).unwrap();
        let gone = i32::MAX;
        assert!(ours.knows_ended(&format!("{pid} {time} {gone} 1")));
        assert!(ours.knows_ended(&format!("{pid} time:[1] {gone} 1")), "no start time is needed");
        for thread in [
            format!("pid:[1] {time} {gone} 1"),
            format!("{pid} time:[1] {id} 1"),
            format!("{pid} {time} 0 1"),
            format!("{pid} {time} -1 1"),
            format!("{pid} {time} {gone} 1 more"),
            format!("{pid} {time} {gone}"),
            String::new(),
        ] {
            assert!(!ours.knows_ended(&thread), "{thread:?}");
        }
    }

    #[test]
    fn fields_of_proc_are_parsed_after_names_with_parentheses() {
        let numbers: Vec<_> = (4..=30).map(|field| field.to_string()).collect();
        assert_eq!(start_time(&format!("1 (a) b) S {}", numbers.join(" "))), Some("22"));
        assert_eq!(start_time("1 (a"), None);
        assert_eq!(only_thread_id("Name:\ta\nNSpid:\t17\n"), Some("17"));
        assert_eq!(only_thread_id("NSpid:\t17\t1\n"), None, "/proc of another namespace");
        assert_eq!(only_thread_id("Name:\ta\n"), None);
    }

    #[test]
    fn clock_has_a_boot_id_and_does_not_run_backwards() {
        let clock = BootClock::read().unwrap();
        assert_eq!(clock.boot().len(), 36);
        let before = clock.now();
        assert!(before > 0 && clock.now() >= before);
    }
}
