//! The contestants of one test, in the parent process.

use std::cell::{Ref, RefCell};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use simba_core::Lease;
use tempfile::TempDir;

use super::Shared;
use super::contestant::{SETTINGS, Settings};
use super::shared_log::{Line, Lines, Note, SharedLog, uptime};
use crate::world::{SOON, name};

/// The poll interval of the log.
const POLL: Duration = Duration::from_millis(2);
/// Time limit for the end of a process: many times what it takes.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Some contestants, and their log.
pub(super) struct Contestants<F: Shared> {
    contestants: Vec<Child>,
    settings: Settings,
    entry_test: &'static str,
    log: SharedLog,
    read: RefCell<Lines>,
    _store: F,
    _dir: TempDir,
}

impl<F: Shared> Contestants<F> {
    /// Starts `many` contestants, each a process that runs the test of this path.
    pub(super) fn start(path: &'static str, many: usize) -> Self {
        let store = Self::store();
        let lease = crate::rows::lease(&store);
        Self::start_on(store, path, many, lease)
    }

    /// Starts the store only.
    pub(super) fn store() -> F {
        crate::explain_failures();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // A fixture may spawn tasks; here it only has to exist.
        runtime.block_on(async { F::start() })
    }

    /// Starts contestants on this store, with this lease.
    pub(super) fn start_on(store: F, path: &'static str, many: usize, lease: Lease) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let settings = Settings {
            address: store.address(),
            mutex: name(),
            dir: dir.path().display().to_string(),
            lease,
        };
        // The path of a test does not include the name of its program.
        let entry_test = path.split_once("::").map_or(path, |(_, test)| test);
        let log = SharedLog::new(dir.path());
        let mut contestants = Self {
            contestants: Vec::new(),
            settings,
            entry_test,
            log,
            read: RefCell::default(),
            _store: store,
            _dir: dir,
        };
        for _ in 0..many {
            contestants.join();
        }
        contestants
    }

    /// Starts one more contestant and waits until it is queued. Returns its process id.
    pub(super) fn join_and_wait(&mut self) -> u32 {
        let pid = self.join();
        self.first("a contestant waits", |line| line.note == Note::Waits && line.pid == pid);
        pid
    }

    /// Starts one more contestant. Returns its process id.
    pub(super) fn join(&mut self) -> u32 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", self.entry_test, "--ignored", "--nocapture"]);
        command.env(SETTINGS, self.settings.to_line()).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().unwrap();
        let pid = child.id();
        self.contestants.push(child);
        pid
    }

    pub(super) fn lease(&self) -> Lease {
        self.settings.lease
    }

    /// Returns what all of them wrote so far.
    pub(super) fn lines(&self) -> Ref<'_, [Line]> {
        self.log.read_new(&mut self.read.borrow_mut()).unwrap();
        Ref::map(self.read.borrow(), |read| &read.lines[..])
    }

    /// Waits for the latest leader to write, and returns that line.
    pub(super) fn leader(&self) -> Line {
        self.wait("one contestant leads", |lines| {
            let latest = lines.iter().map(|line| line.token).max()?;
            lines.iter().rev().find(|line| line.note == Note::Wrote && line.token == latest).copied()
        })
    }

    /// Waits for the first leader after the one with this token.
    pub(super) fn successor(&self, token: u64) -> Line {
        self.first("another contestant acquires next", |line| {
            line.note == Note::Acquired && line.token > token
        })
    }

    /// Waits for the first line that satisfies the predicate.
    pub(super) fn first(&self, guarantee: &str, wanted: impl Fn(&Line) -> bool) -> Line {
        self.wait(guarantee, |lines| lines.iter().find(|line| wanted(line)).copied())
    }

    fn wait(&self, guarantee: &str, find: impl Fn(&[Line]) -> Option<Line>) -> Line {
        let begun = Instant::now();
        let limit = self.lease().total() * 4 + SOON;
        loop {
            if let Some(line) = find(&self.lines()) {
                return line;
            }
            assert!(begun.elapsed() < limit, "broken: {guarantee} within {limit:?}:\n{:#?}", &*self.lines());
            thread::sleep(POLL);
        }
    }

    /// Stops a contestant, and returns once it is stopped. Never while it writes: the others would wait for the log,
    /// and not for the mutex.
    pub(super) fn stop(&self, pid: u32) {
        let _lock = self.log.lock().unwrap();
        self.signal(pid, Signal::STOP);
        let begun = Instant::now();
        while !is_stopped(pid) {
            assert!(begun.elapsed() < END_LIMIT, "broken: all threads of a stopped process stop");
            thread::sleep(POLL);
        }
    }

    /// Sends a signal to a contestant. Returns the time.
    pub(super) fn signal(&self, pid: u32, signal: Signal) -> Duration {
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        let at = uptime();
        kill_process(pid, signal).unwrap();
        at
    }

    /// Waits until a contestant has ended, and removes it.
    pub(super) fn wait_for_exit(&mut self, pid: u32) {
        let at = self.contestants.iter().position(|child| child.id() == pid).expect("one of ours");
        let mut child = self.contestants.remove(at);
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < END_LIMIT, "broken: a terminated contestant ends");
            thread::sleep(POLL);
        }
    }

    /// Checks that no contestant wrote under a token after a greater one was acquired, or tried to. Only a process that
    /// was stopped between the check of its tenure and its write may have tried: those with the tokens in `stopped`.
    pub(super) fn assert_no_overlap(&self, stopped: &[u64]) {
        let lines = self.lines();
        let mut greatest = 0;
        for line in lines.iter() {
            match line.note {
                Note::Acquired => {
                    assert!(line.token > greatest, "broken: tokens grow:\n{:#?}", &*lines);
                    greatest = line.token;
                }
                Note::Wrote => {
                    assert!(
                        line.token >= greatest,
                        "broken: contestants never work at once:\n{:#?}",
                        &*lines
                    );
                }
                Note::Refused => {
                    let allowed = stopped.contains(&line.token);
                    assert!(
                        allowed,
                        "broken: a contestant does not write after the next has acquired:\n{:#?}",
                        &*lines
                    );
                }
                Note::Ended | Note::Lost | Note::Waits => {}
            }
        }
    }
}

/// Returns whether every thread of the process is stopped.
fn is_stopped(pid: u32) -> bool {
    let stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The name before the state may contain anything.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().all(stopped)
}

impl<F: Shared> Drop for Contestants<F> {
    fn drop(&mut self) {
        for child in &mut self.contestants {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
