//! The tree of processes below one, and how to fell it.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, PidfdFlags, Signal, getpid, pidfd_open, pidfd_send_signal};

/// A process, told from a later one with the same number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Process {
    pid: i32,
    started: u64,
}

/// What `/proc` says of one process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Stat {
    process: Process,
    parent: i32,
    group: i32,
    session: i32,
    /// It has ended and waits to be reaped.
    dead: bool,
}

/// Kills everything below `root`, whatever it forks meanwhile, and waits until all of it is gone.
///
/// `gone` is asked between two looks: it reaps, and says whether the kernel knows of nobody any more, which no
/// look at `/proc` can tell for sure. False if something is left when the time is up: a process that the kernel
/// does not let go of, or one of another user.
pub(crate) fn fell(root: Pid, spared: &Spared, limit: Duration, mut gone: impl FnMut() -> bool) -> bool {
    let begun = Instant::now();
    loop {
        if gone() {
            return true;
        }
        stand_still(root, spared).iter().for_each(|process| signal(*process, Signal::KILL));
        if gone() {
            return true;
        }
        if begun.elapsed() > limit {
            return false;
        }
        thread::sleep(Duration::from_millis(1));
    }
}

/// Children that were there before: a shell may have left them to the program that it became.
#[derive(Debug, Default)]
pub(crate) struct Spared(HashSet<Process>);

impl Spared {
    /// Whoever is a child of this process now.
    pub(crate) fn of_today(root: Pid) -> Self {
        let children = listed_children(root).unwrap_or_else(|| {
            let root = root.as_raw_nonzero().get();
            all().filter(|stat| stat.parent == root).collect()
        });
        Self(children.into_iter().map(|stat| stat.process).collect())
    }

    /// Whether nobody else below `root` is alive, as far as two looks can tell: a process that forks and ends
    /// may slip through one.
    pub(crate) fn are_alone(&self, root: Pid) -> bool {
        (0..2).all(|_| below(root, self).iter().all(|stat| stat.dead))
    }
}

/// Stops everything below `root`, until a look finds nothing new: what stands still forks no more.
fn stand_still(root: Pid, spared: &Spared) -> HashSet<Process> {
    let mut stopped = HashSet::new();
    loop {
        let found = below(root, spared).into_iter().filter(|stat| !stat.dead).map(|stat| stat.process);
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

/// Signals this very process and no later one with its number. One of another user is left to the look that
/// follows.
fn signal(process: Process, what: Signal) {
    let Some(pid) = Pid::from_raw(process.pid) else { return };
    let Ok(handle) = pidfd_open(pid, PidfdFlags::empty()) else { return };
    // The handle may be of a later process; what it shows of itself tells.
    if stat(process.pid).is_some_and(|found| found.process == process) {
        let _ = pidfd_send_signal(handle, what);
    }
}

/// All processes below `root`, parents before their children.
fn below(root: Pid, spared: &Spared) -> Vec<Stat> {
    let mut children: HashMap<i32, Vec<Stat>> = HashMap::new();
    for stat in all().filter(|stat| !spared.0.contains(&stat.process)) {
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

/// Who started this process, or took it over; none if that one is out of sight.
pub(crate) fn parent_of(pid: Pid) -> Option<Pid> {
    Pid::from_raw(stat(pid.as_raw_nonzero().get())?.parent)
}

/// The group that this process is in; none if it is one of outside a container.
pub(crate) fn own_group() -> Option<Pid> {
    Pid::from_raw(stat(getpid().as_raw_nonzero().get())?.group)
}

/// Whether no shell cares for our group: the first process above it is of another session, or out of sight.
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

/// Whether `/proc` shows the processes that we see, under the numbers by which we know them.
pub(crate) fn is_in_sight() -> bool {
    fs::read_link("/proc/self").is_ok_and(|own| own.to_str() == Some(&getpid().to_string()))
}

/// The children as the kernel lists them, which not every kernel does: far less to read than all processes.
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
    parse(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
}

/// `pid (name) state parent …`; the name may hold anything, also brackets and blanks.
fn parse(text: &str) -> Option<Stat> {
    let (pid, _) = text.split_once(' ')?;
    let mut fields = text.rsplit_once(')')?.1.split_ascii_whitespace();
    let dead = matches!(fields.next()?, "Z" | "X");
    let mut number = || fields.next()?.parse().ok();
    let (parent, group, session) = (number()?, number()?, number()?);
    // The 22nd field of all, of which the first two are gone and four were taken.
    let started = fields.nth(15)?.parse().ok()?;
    Some(Stat { process: Process { pid: pid.parse().ok()?, started }, parent, group, session, dead })
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use rustix::process::{WaitOptions, set_child_subreaper, wait};

    use super::*;

    #[test]
    fn a_name_with_brackets_and_blanks_is_read() {
        let line = "12 (a) b (c) S 7 13 14 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 4711 9 9";
        let stat = parse(line).unwrap();
        assert_eq!((stat.process.pid, stat.parent, stat.process.started, stat.dead), (12, 7, 4711, false));
        assert_eq!((stat.group, stat.session), (13, 14));
        assert!(parse(&line.replace(" S ", " Z ")).unwrap().dead);
        assert_eq!(parse("12 (a)"), None);
    }

    #[test]
    fn a_tree_that_forks_sets_sessions_up_and_ignores_signals_is_felled() {
        set_child_subreaper(Some(getpid())).unwrap();
        let script =
            "trap '' TERM; (setsid sleep 1000 &) ; (sh -c 'trap \"\" TERM; sleep 1000' &); sleep 1000";
        let nobody = Spared::default();
        let child = Command::new("sh").args(["-c", script]).spawn().unwrap();
        let begun = Instant::now();
        while below(getpid(), &nobody).len() < 4 {
            assert!(begun.elapsed() < Duration::from_secs(10), "the tree does not grow");
            thread::sleep(Duration::from_millis(5));
        }
        let felled = fell(getpid(), &nobody, Duration::from_secs(5), || {
            loop {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) => {}
                    left => return left.is_err(),
                }
            }
        });
        assert!(felled && below(getpid(), &nobody).is_empty(), "{:?}", below(getpid(), &nobody));
        drop(child);
    }
}
