//! Runs the real program with its own home directory.

#![allow(dead_code, reason = "every test program uses a part of it")]
#![allow(unreachable_pub, reason = "a module that every test program includes")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

pub mod pty;
pub mod rows;

use std::fs::{self, File};
use std::io;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

/// Time limit for conditions that need no waiting.
pub const SOON: Duration = Duration::from_secs(60);
/// Time limit for a whole program, such as a benchmark on a busy machine.
pub const AT_MOST: Duration = Duration::from_secs(240);
/// The variable that marks all processes below a `simba`.
const TAG: &str = "TEST_TAG";

/// A store and a home directory for one test.
#[derive(Debug)]
pub struct World {
    pub dir: TempDir,
    pub url: String,
}

/// The result of a `simba`.
#[derive(Debug)]
pub struct Finished {
    pub status: ExitStatus,
    pub out: String,
    pub err: String,
}

impl Finished {
    pub fn code(&self) -> i32 {
        self.status.code().unwrap_or_else(|| panic!("ended by {:?}: {self:?}", self.status.signal()))
    }

    /// Checks the exit code, and shows everything if it differs.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{self:#?}");
        self
    }

    /// Returns stdout and stderr.
    pub fn output_text(&self) -> String {
        format!("{}{}", self.out, self.err)
    }
}

/// A running `simba`. Ends with all its descendants when it is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    files: PathBuf,
    tag: String,
}

/// Returns the URL with limits that a server on a busy machine keeps. Calls that hold a mutex are limited by its lease.
fn with_long_limits(url: &str) -> String {
    let keys = match url.split(':').next() {
        Some("postgres") => "statement_timeout=20s&connect_timeout=20s",
        Some("redis") => "timeout=10s&connect_timeout=10s",
        Some("mysql") => "connect-timeout=20s",
        _ => return url.to_owned(),
    };
    format!("{url}{}{keys}", if url.contains('?') { '&' } else { '?' })
}

impl World {
    /// Creates a world with its own SQLite file.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("store.db").display());
        Self { dir, url }
    }

    /// Creates a world on a server, with its schema applied.
    pub fn on(url: &str) -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap(), url: with_long_limits(url) };
        world.run(&["schema", "--apply"]).expect(0);
        world
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Creates a fifo. A command that reads a line from it waits without starting a child process.
    pub fn fifo(&self, name: &str) {
        assert!(tool("mkfifo").arg(self.path(name)).status().unwrap().success());
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// Returns the command `simba` without a store.
    pub fn bare(&self) -> Command {
        // Tests that were started in the background may inherit ignored signals, which `simba` keeps ignored.
        let mut command = Command::new("env");
        command.arg("--default-signal").arg(env!("CARGO_BIN_EXE_simba"));
        for (name, _) in std::env::vars_os() {
            if name.to_string_lossy().starts_with("SIMBA_") {
                command.env_remove(name);
            }
        }
        command.env("HOME", self.dir.path()).env("XDG_STATE_HOME", self.path("state"));
        command.env("XDG_CONFIG_HOME", self.path("config")).env_remove("NO_COLOR");
        command.current_dir(self.dir.path()).stdin(Stdio::null());
        command
    }

    /// Returns the command `simba --on` the store of this world.
    pub fn simba(&self, args: &[&str]) -> Command {
        let mut command = self.bare();
        command.args(["--on", &self.url]).args(args);
        command
    }

    /// Runs `simba` to its end.
    pub fn run(&self, args: &[&str]) -> Finished {
        self.start(self.simba(args)).wait()
    }

    /// Starts a shell script under the mutex `m`.
    pub fn spawn_script(&self, script: &str) -> Running {
        self.spawn(&["run", "m", "--", "sh", "-c", script])
    }

    pub fn spawn(&self, args: &[&str]) -> Running {
        self.start(self.simba(args))
    }

    /// Waits until a mutex has this many waiters. Returns at once on a store that does not count them.
    #[track_caller]
    pub fn until_waiting(&self, mutex: &str, count: u64) {
        until_true("waiter in the queue", || {
            let status = self.run(&["status", mutex, "--json"]).expect(0).out;
            let status: serde_json::Value = serde_json::from_str(&status).unwrap();
            status[0]["waiters"].as_u64().is_none_or(|waiters| waiters == count)
        });
    }

    /// Starts a command with its output in files: remaining processes would keep a pipe open.
    pub fn start(&self, mut command: Command) -> Running {
        let tag = format!("{}-{}", std::process::id(), fresh());
        let files = self.path(&tag);
        let file = |kind: &str| File::create(files.with_extension(kind)).unwrap();
        command.env(TAG, &tag).stdout(file("out")).stderr(file("err"));
        Running { child: command.spawn().unwrap(), files, tag }
    }
}

/// Returns a number that no other call of this process gets.
pub fn fresh() -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

impl Running {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }

    pub fn out(&self) -> String {
        fs::read_to_string(self.files.with_extension("out")).unwrap()
    }

    pub fn err(&self) -> String {
        fs::read_to_string(self.files.with_extension("err")).unwrap()
    }

    /// Waits for its end.
    #[track_caller]
    pub fn wait(mut self) -> Finished {
        let status = self.status();
        Finished { status, out: self.out(), err: self.err() }
    }

    /// Waits for its end. Does not kill the processes that it left behind.
    #[track_caller]
    pub fn status(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < AT_MOST, "it is still running: {}{}", self.out(), self.err());
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// Returns the guard of the command.
    pub fn guard(&self) -> i32 {
        // An earlier one may be about to exit.
        until("a guard", || children(self.pid()).into_iter().find(|pid| is_guard(*pid) && !is_exiting(*pid)))
    }

    /// Returns this process and all live processes that it started, also if their parents have ended.
    pub fn processes(&self) -> Vec<i32> {
        let wanted = format!("{TAG}={}", self.tag);
        let tagged = |pid: &i32| {
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.split(|byte| *byte == 0).any(|pair| pair == wanted.as_bytes())
        };
        pids().filter(tagged).filter(|pid| is_alive(*pid)).collect()
    }

    /// Returns those processes of the command that can still act: not `simba`, not its guard, and none that is killed
    /// and waits for a processor to exit.
    pub fn work(&self) -> Vec<i32> {
        let mut work = self.processes();
        work.retain(|pid| *pid != self.pid() && !is_guard(*pid) && !is_exiting(*pid));
        work
    }

    /// Checks that no process of the command is left after `simba`. Its guard is idle, but may still exit.
    #[track_caller]
    pub fn assert_nothing_left(&self) {
        let mut left = self.processes();
        left.retain(|pid| !is_guard(*pid) && is_alive(*pid));
        assert_eq!(left, Vec::<i32>::new(), "processes are left");
        until_true("end of the guard", || self.processes().is_empty());
    }
}

/// Returns whether a process is a guard that has started to work.
pub fn is_guard(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "simba-guard")
}

/// Returns whether a process does not run its program any more: it was killed, or it exits.
fn is_exiting(pid: i32) -> bool {
    const EXITING: u32 = 0x4;
    let flags = stat(pid, 6).and_then(|flags| flags.parse::<u32>().ok());
    let Some(flags) = flags else { return true };
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    let Some(pending) = pending.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()) else {
        return true;
    };
    flags & EXITING != 0 || pending & (1 << (Signal::KILL.as_raw() - 1)) != 0
}

impl Drop for Running {
    fn drop(&mut self) {
        // Repeats until a scan finds none: a process may have forked before it was killed.
        for _ in 0..100 {
            let left = self.processes();
            if left.is_empty() {
                break;
            }
            left.into_iter().for_each(|pid| send(pid, Signal::KILL));
            thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Signals a process, which may be gone.
pub fn send(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

pub fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// Returns a field of `/proc/PID/stat`, counted from the state, which is 0.
pub fn stat(pid: i32, field: usize) -> Option<String> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    text.rsplit_once(") ")?.1.split(' ').nth(field).map(str::to_owned)
}

pub fn is_alive(pid: i32) -> bool {
    stat(pid, 0).is_some_and(|state| !matches!(state.as_str(), "Z" | "X"))
}

pub fn children(pid: i32) -> Vec<i32> {
    pids().filter(|child| stat(*child, 1) == Some(pid.to_string())).collect()
}

/// Waits until there is a value.
#[track_caller]
pub fn until<T>(what: &str, check: impl FnMut() -> Option<T>) -> T {
    within(SOON, check).unwrap_or_else(|| panic!("timeout: no {what}"))
}

/// Waits until a condition holds.
#[track_caller]
pub fn until_true(what: &str, mut holds: impl FnMut() -> bool) {
    until(what, || holds().then_some(()));
}

pub fn within<T>(limit: Duration, mut check: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(found) = check() {
            return Some(found);
        }
        if begun.elapsed() > limit {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// Returns the content of a file once it has a complete line.
#[track_caller]
pub fn line(path: &Path) -> String {
    let text = until(&format!("line in {}", path.display()), || {
        fs::read_to_string(path).ok().filter(|text| text.ends_with('\n'))
    });
    text.trim_end().to_owned()
}

/// Returns a command for a program that must be installed: the test fails if it is missing.
pub fn tool(name: &str) -> Command {
    let found = Command::new("sh").args(["-c", &format!("command -v {name}")]).stdout(Stdio::null()).status();
    assert!(found.is_ok_and(|status| status.success()), "install `{name}`: this test needs it");
    Command::new(name)
}

/// Locks the file of a store, like a process that hangs in a transaction.
pub fn hang(world: &World) -> rusqlite::Connection {
    let path = world.url.strip_prefix("sqlite:").unwrap();
    let file = rusqlite::Connection::open(path).unwrap();
    until_true("turn to lock the file", || file.execute_batch("BEGIN EXCLUSIVE").is_ok());
    file
}

/// Returns what a command wrote to stdout and stderr.
pub fn output(command: &mut Command) -> io::Result<std::process::Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?.wait_with_output()
}
