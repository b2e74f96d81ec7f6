//! The contestants of one test, as their parent sees them.

use std::cell::{Ref, RefCell};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use simba_core::Lease;
use tempfile::TempDir;

use super::Shared;
use super::contestant::{ORDERS, Orders};
use super::ledger::{Ledger, Line, Note, Pages, uptime};
use crate::world::{SOON, name};

/// How often the ledger is looked at.
const LOOK: Duration = Duration::from_millis(2);

/// Some contestants, and what they wrote down.
pub(super) struct Field<F: Shared> {
    contestants: Vec<Child>,
    orders: Orders,
    door: &'static str,
    ledger: Ledger,
    read: RefCell<Pages>,
    _store: F,
    _dir: TempDir,
}

impl<F: Shared> Field<F> {
    /// Starts that many contestants, each a process that enters by the test of that path.
    pub(super) fn start(path: &'static str, many: usize) -> Self {
        let store = Self::store();
        let lease = crate::rows::lease(&store);
        Self::start_on(store, path, many, lease)
    }

    /// Starts the store alone.
    pub(super) fn store() -> F {
        crate::explain_failures();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        // A fixture may start tasks; this one only needs to exist.
        runtime.block_on(async { F::start() })
    }

    /// Starts contestants on this store, with this lease.
    pub(super) fn start_on(store: F, path: &'static str, many: usize, lease: Lease) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let orders =
            Orders { address: store.address(), mutex: name(), dir: dir.path().display().to_string(), lease };
        // A test is known by its path within its program.
        let door = path.split_once("::").map_or(path, |(_, door)| door);
        let ledger = Ledger::new(dir.path());
        let mut field = Self {
            contestants: Vec::new(),
            orders,
            door,
            ledger,
            read: RefCell::default(),
            _store: store,
            _dir: dir,
        };
        for _ in 0..many {
            field.join();
        }
        field
    }

    /// Starts one more contestant and waits until it waits for the leader; its process.
    pub(super) fn join_and_wait(&mut self) -> u32 {
        let pid = self.join();
        self.first("a contestant waits", |line| line.note == Note::Waits && line.pid == pid);
        pid
    }

    /// Starts one more contestant; its process.
    pub(super) fn join(&mut self) -> u32 {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["--exact", self.door, "--ignored", "--nocapture"]);
        command.env(ORDERS, self.orders.to_line()).stdin(Stdio::null()).stdout(Stdio::null());
        let child = command.spawn().unwrap();
        let pid = child.id();
        self.contestants.push(child);
        pid
    }

    pub(super) fn lease(&self) -> Lease {
        self.orders.lease
    }

    /// What all of them wrote down so far.
    pub(super) fn lines(&self) -> Ref<'_, [Line]> {
        self.ledger.read_on(&mut self.read.borrow_mut()).unwrap();
        Ref::map(self.read.borrow(), |read| &read.lines[..])
    }

    /// The latest leader, once it has written.
    pub(super) fn leader(&self) -> Line {
        self.wait("somebody leads", |lines| {
            let latest = lines.iter().map(|line| line.token).max()?;
            lines.iter().rev().find(|line| line.note == Note::Wrote && line.token == latest).copied()
        })
    }

    /// The first leader after the one with this token.
    pub(super) fn successor(&self, token: u64) -> Line {
        self.first("somebody comes next", |line| line.note == Note::Acquired && line.token > token)
    }

    /// The first such line, waited for.
    pub(super) fn first(&self, promise: &str, wanted: impl Fn(&Line) -> bool) -> Line {
        self.wait(promise, |lines| lines.iter().find(|line| wanted(line)).copied())
    }

    fn wait(&self, promise: &str, find: impl Fn(&[Line]) -> Option<Line>) -> Line {
        let begun = Instant::now();
        let limit = self.lease().total() * 4 + SOON;
        loop {
            if let Some(line) = find(&self.lines()) {
                return line;
            }
            assert!(begun.elapsed() < limit, "broken: {promise} within {limit:?}:\n{:#?}", &*self.lines());
            thread::sleep(LOOK);
        }
    }

    /// Stops one of them, and returns once it stands still. Never in the middle of what it writes down: the
    /// others would wait for the log, and not for the mutex.
    pub(super) fn stop(&self, pid: u32) {
        let _turn = self.ledger.turn().unwrap();
        self.signal(pid, Signal::STOP);
        let begun = Instant::now();
        while !stands_still(pid) {
            assert!(begun.elapsed() < SOON, "broken: a stopped process stands still");
            thread::sleep(LOOK);
        }
    }

    /// Sends a signal to one of them; when that was.
    pub(super) fn signal(&self, pid: u32, signal: Signal) -> Duration {
        let pid = Pid::from_raw(i32::try_from(pid).unwrap()).unwrap();
        let at = uptime();
        kill_process(pid, signal).unwrap();
        at
    }

    /// Waits until one of them has ended, and forgets it.
    pub(super) fn bury(&mut self, pid: u32) {
        let at = self.contestants.iter().position(|child| child.id() == pid).expect("one of ours");
        let mut child = self.contestants.remove(at);
        let begun = Instant::now();
        while child.try_wait().unwrap().is_none() {
            assert!(begun.elapsed() < SOON, "broken: a contestant that is told to end ends");
            thread::sleep(LOOK);
        }
    }

    /// Checks that nobody wrote under a token after a greater one was acquired, and that nobody tried to. Only a
    /// process that was stopped between the check of its tenure and its write may have tried: those with the tokens
    /// in `stopped`.
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
                    assert!(line.token >= greatest, "broken: nobody works beside the next:\n{:#?}", &*lines);
                }
                Note::Refused => {
                    let excused = stopped.contains(&line.token);
                    assert!(excused, "broken: nobody tries to write beside the next:\n{:#?}", &*lines);
                }
                Note::Ended | Note::Lost | Note::Waits => {}
            }
        }
    }
}

/// Whether every thread of the process has obeyed a stop.
fn stands_still(pid: u32) -> bool {
    let stopped = |task: std::fs::DirEntry| {
        let stat = std::fs::read_to_string(task.path().join("stat")).unwrap_or_default();
        // The name before the state may hold anything.
        stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with('T'))
    };
    std::fs::read_dir(format!("/proc/{pid}/task")).unwrap().flatten().all(stopped)
}

impl<F: Shared> Drop for Field<F> {
    fn drop(&mut self) {
        for child in &mut self.contestants {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
