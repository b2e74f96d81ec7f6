//! The descendants of a process, and how to kill them.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

/// A process, distinguished from a later one with the same id by its start time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Process {
    pid: i32,
    started: u64,
}

/// What `/proc` shows about one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    process: Process,
    parent: i32,
    group: i32,
    session: i32,
    /// All its threads have ended.
    dead: bool,
}

/// Kills all descendants of `root`, including those that they fork meanwhile, and waits for their end.
///
/// `all_gone` is called between two scans: it reaps children, and returns whether none is left. A scan of `/proc` cannot
/// determine this reliably. Returns false if processes are left after `limit`: the kernel does not end them, or they
/// belong to another user.
pub(crate) fn kill_all(
    root: Pid,
    excluded: &Excluded,
    limit: Duration,
    mut all_gone: impl FnMut() -> bool,
) -> bool {
    let begun = Instant::now();
    loop {
        if all_gone() {
            return true;
        }
        stop_all(root, excluded).iter().for_each(|process| signal(*process, Signal::KILL));
        if all_gone() {
            return true;
        }
        if begun.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Children that this process had before the command: a shell that `exec`s `simba` leaves its children to it.
#[derive(Debug, Default)]
pub(crate) struct Excluded(HashSet<Process>);

impl Excluded {
    /// Returns the current children of this process.
    pub(crate) fn children_of(root: Pid) -> Self {
        let children = listed_children(root).unwrap_or_else(|| {
            let root = root.as_raw_nonzero().get();
            all().filter(|stat| stat.parent == root).collect()
        });
        Self(children.into_iter().map(|stat| stat.process).collect())
    }

    /// Returns whether no other descendant of `root` is alive, as far as two scans can tell: a single scan may miss a
    /// process that forks and ends.
    pub(crate) fn no_others_alive(&self, root: Pid) -> bool {
        (0..2).all(|_| descendants(root, self).iter().all(|stat| stat.dead))
    }
}

/// Stops all descendants of `root`, until a scan finds no new one: a stopped process does not fork.
fn stop_all(root: Pid, excluded: &Excluded) -> HashSet<Process> {
    let mut stopped = HashSet::new();
    loop {
        let found =
            descendants(root, excluded).into_iter().filter(|stat| !stat.dead).map(|stat| stat.process);
        let new: Vec<Process> = found.filter(|process| !stopped.contains(process)).collect();
        if new.is_empty() {
            return stopped;
        }
        for process in new {
            signal(process, Signal::STOP);
            stopped.insert(process);
        }
    }
}

/// Signals this process and no later one with the same id. A process of another user is left to the next scan.
fn signal(process: Process, what: Signal) {
    let Some(pid) = Pid::from_raw(process.pid) else { return };
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // The handle may belong to a later process: compare the start time.
    if stat(process.pid).is_some_and(|found| found.process == process) {
        let _ = pidfd_send_signal(handle, what);
    }
}

/// Returns all descendants of `root`, parents before their children.
fn descendants(root: Pid, excluded: &Excluded) -> Vec<Stat> {
    let mut children: HashMap<i32, Vec<Stat>> = HashMap::new();
    for stat in all().filter(|stat| !excluded.0.contains(&stat.process)) {
        children.entry(stat.parent).or_default().push(stat);
    }
    let mut found = Vec::new();
    let mut parents = vec![root.as_raw_nonzero().get()];
    while let Some(parent) = parents.pop() {
        for stat in children.remove(&parent).unwrap_or_default() {
            parents.push(stat.process.pid);
            found.push(stat);
        }
    }
    found
}

/// Returns the parent of a process; `None` if it is not visible.
pub(crate) fn parent_of(pid: Pid) -> Option<Pid> {
    Pid::from_raw(stat(pid.as_raw_nonzero().get())?.parent)
}

/// Returns the group of this process; `None` if it is a group outside the container.
pub(crate) fn own_group() -> Option<Pid> {
    Pid::from_raw(stat(getpid().as_raw_nonzero().get())?.group)
}

/// Returns whether no shell controls our group: the first process above it is in another session, or not visible.
pub(crate) fn is_orphaned() -> bool {
    let Some(own) = stat(getpid().as_raw_nonzero().get()) else { return true };
    let mut next = own;
    while let Some(above) = stat(next.parent) {
        if above.group != own.group {
            return above.session != own.session;
        }
        next = above;
    }
    true
}

/// Returns whether `/proc` shows our processes under the ids by which we know them.
pub(crate) fn is_proc_usable() -> bool {
    fs::read_link("/proc/self").is_ok_and(|own| own.to_str() == Some(&getpid().to_string()))
}

/// Returns the children as the kernel lists them, which is cheaper than a scan. Not every kernel supports it.
fn listed_children(root: Pid) -> Option<Vec<Stat>> {
    let mut found = Vec::new();
    for thread in fs::read_dir(format!("/proc/{root}/task")).ok()?.flatten() {
        let listed = fs::read_to_string(thread.path().join("children")).ok()?;
        found.extend(listed.split_ascii_whitespace().filter_map(|pid| stat(pid.parse().ok()?)));
    }
    Some(found)
}

fn all() -> impl Iterator<Item = Stat> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| stat(entry.file_name().to_str()?.parse().ok()?))
}

fn stat(pid: i32) -> Option<Stat> {
    // Not always UTF-8: a program may have any name, and the kernel cuts it off within a character.
    parse(&String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/stat")).ok()?))
}

/// Parses `pid (name) state parent …`; the name may contain anything, also brackets and blanks.
fn parse(text: &str) -> Option<Stat> {
    let (pid, _) = text.split_once(' ')?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let ended = matches!(fields.next()?, "Z" | "X");
    let mut number = || fields.next()?.parse().ok();
    let (parent, group, session) = (number()?, number()?, number()?);
    // The 20th and the 22nd field, of which the first two are cut off and four were read.
    let threads: u32 = fields.nth(13)?.parse().ok()?;
    let started = fields.nth(1)?.parse().ok()?;
    // The state is that of the first thread, which may end before the others.
    let dead = ended && threads <= 1;
    Some(Stat { process: Process { pid: pid.parse().ok()?, started }, parent, group, session, dead })
}

#[cfg(test)]
mod tests {
    use std::process::Command;
    use std::sync::{Mutex, PoisonError};

    use rustix::process::{WaitOptions, set_child_subreaper, wait};

    use super::*;

    /// Locked by a test while it has children: a kill of all descendants would end those of another test.
    static CHILDREN: Mutex<()> = Mutex::new(());

    #[test]
    fn name_with_brackets_and_blanks_is_parsed() {
        let line = "12 (a) b (c) S 7 13 14 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        let stat = parse(line).unwrap();
        assert_eq!((stat.process.pid, stat.parent, stat.process.started, stat.dead), (12, 7, 4711, false));
        assert_eq!((stat.group, stat.session), (13, 14));
        assert_eq!(parse("12 (a)"), None);
    }

    #[test]
    fn process_is_dead_once_its_last_thread_has_ended() {
        let dead = |state, threads| {
            let line = format!("12 (a) {state} 7 13 14 0 -1 0 1 2 3 4 5 6 7 8 20 0 {threads} 0 4711 9 9");
            parse(&line).unwrap().dead
        };
        assert!(dead("Z", 1) && dead("X", 0));
        assert!(!dead("Z", 2), "its first thread has ended, another runs");
        assert!(!dead("S", 1));
    }

    /// Kills all children of this process, and checks that none is left.
    #[track_caller]
    fn assert_killed() {
        let none = Excluded::default();
        let killed = kill_all(getpid(), &none, Duration::from_secs(5), || {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) => {}
                    left => return left.is_err(),
                }
            }
        });
        assert!(killed && descendants(getpid(), &none).is_empty(), "{:?}", descendants(getpid(), &none));
    }

    #[test]
    fn tree_that_forks_creates_sessions_and_ignores_signals_is_killed() {
        let _children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
        set_child_subreaper(Some(getpid())).unwrap();
        let script =
            "trap '' TERM; (setsid sleep 1000 &) ; (sh -c 'trap \"\" TERM; sleep 1000' &); sleep 1000";
        let none = Excluded::default();
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let begun = Instant::now();
        while descendants(getpid(), &none).len() < 4 {
            assert!(begun.elapsed() < Duration::from_secs(10), "the tree has too few processes");
            thread::sleep(Duration::from_millis(5));
        }
        assert_killed();
        drop(child);
    }

    #[test]
    fn process_whose_name_is_not_utf_8_is_killed() {
        let _children = CHILDREN.lock().unwrap_or_else(PoisonError::into_inner);
        set_child_subreaper(Some(getpid())).unwrap();
        let folder = tempfile::tempdir().unwrap();
        // The kernel keeps 15 bytes, which end within the `ü`.
        let program = folder.path().join("nightly-sicherü.sh");
        // In a process of its own: a file that a child of another test has open for writing cannot be executed.
        let write = "printf '#!/bin/sh\nsleep 1000\n' > \"$0\" && chmod u+x \"$0\"";
        assert!(Command::new("sh").args(["-c", write]).arg(&program).status().unwrap().success());
        let child = Command::new(&program).spawn().unwrap();
        let name = || fs::read(format!("/proc/{}/comm", child.id())).unwrap();
        let begun = Instant::now();
        while String::from_utf8(name()).is_ok() {
            assert!(begun.elapsed() < Duration::from_secs(10), "the program was not executed");
            thread::sleep(Duration::from_millis(1));
        }
        assert_killed();
        drop(child);
    }
}
