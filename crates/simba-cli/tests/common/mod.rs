//! The real program, as a user types it, in a home of its own.

#![allow(dead_code, reason = "every test program takes what it needs")]
#![allow(unreachable_pub, reason = "a module of tests, in every test program once more")]
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

/// How long anything may take that is not waited for on purpose.
pub const SOON: Duration = Duration::from_secs(30);
/// The variable by which all processes below a `simba` are found.
const TAG: &str = "TEST_TAG";

/// A store and a home, for one test.
#[derive(Debug)]
pub struct World {
    pub dir: TempDir,
    pub url: String,
}

/// How a `simba` ended.
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

    /// Checks the exit code, and shows everything if it is another.
    #[track_caller]
    pub fn expect(self, code: i32) -> Self {
        assert_eq!(self.status.code(), Some(code), "{self:#?}");
        self
    }

    /// Everything that was said.
    pub fn said(&self) -> String {
        format!("{}{}", self.out, self.err)
    }
}

/// A `simba` that runs. Ends with all below it when it is dropped.
#[derive(Debug)]
pub struct Running {
    child: Child,
    files: PathBuf,
    tag: String,
}

impl World {
    /// A SQLite file of its own.
    pub fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let url = format!("sqlite:{}", dir.path().join("store.db").display());
        Self { dir, url }
    }

    /// A server, set up.
    pub fn on(url: &str) -> Self {
        let world = Self { dir: tempfile::tempdir().unwrap(), url: url.to_owned() };
        world.run(&["schema", "--apply"]).expect(0);
        world
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// A place where a command waits for a line, without any process of its own.
    pub fn fifo(&self, name: &str) {
        assert!(tool("mkfifo").arg(self.path(name)).status().unwrap().success());
    }

    pub fn read(&self, name: &str) -> String {
        fs::read_to_string(self.path(name)).unwrap_or_default()
    }

    /// `simba`, without a store.
    pub fn bare(&self) -> Command {
        // Whoever started the tests in the background may have left signals ignored, and `simba` heeds that.
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

    /// `simba --on` the store of this world.
    pub fn simba(&self, args: &[&str]) -> Command {
        let mut command = self.bare();
        command.args(["--on", &self.url]).args(args);
        command
    }

    /// Runs it to its end.
    pub fn run(&self, args: &[&str]) -> Finished {
        self.start(self.simba(args)).wait()
    }

    pub fn spawn(&self, args: &[&str]) -> Running {
        self.start(self.simba(args))
    }

    /// Starts a command, with its output in files: a pipe would be kept open by whoever is left.
    pub fn start(&self, mut command: Command) -> Running {
        let tag = format!("{}-{}", std::process::id(), fresh());
        let files = self.path(&tag);
        let file = |kind: &str| File::create(files.with_extension(kind)).unwrap();
        command.env(TAG, &tag).stdout(file("out")).stderr(file("err"));
        Running { child: command.spawn().unwrap(), files, tag }
    }
}

/// A number that no other call of this process gets.
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

    /// Waits for its end, and leaves what it left behind alone.
    #[track_caller]
    pub fn status(&mut self) -> ExitStatus {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(begun.elapsed() < 2 * SOON, "it does not end: {}{}", self.out(), self.err());
            thread::sleep(Duration::from_millis(2));
        }
    }

    pub fn is_over(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    /// The guard of the command.
    pub fn guard(&self) -> i32 {
        until("a guard", || children(self.pid()).first().copied())
    }

    /// All living processes that it started, whatever became of their parents, and itself.
    pub fn processes(&self) -> Vec<i32> {
        let wanted = format!("{TAG}={}", self.tag);
        let tagged = |pid: &i32| {
            let environ = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environ.split(|byte| *byte == 0).any(|pair| pair == wanted.as_bytes())
        };
        pids().filter(tagged).filter(|pid| is_alive(*pid)).collect()
    }

    /// Those of them that are the command's and may still do something: not `simba`, not its guard, and nobody who
    /// is killed and waits for a processor to end on.
    pub fn work(&self) -> Vec<i32> {
        let mut work = self.processes();
        work.retain(|pid| *pid != self.pid() && !is_guard(*pid) && !is_doomed(*pid));
        work
    }
}

/// Whether a process is a guard that has begun its work.
pub fn is_guard(pid: i32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim_end() == "simba-guard")
}

/// Whether a process runs no instruction of its own any more: it is killed, or on its way out.
fn is_doomed(pid: i32) -> bool {
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
        // Until a look finds nobody: what is killed may have forked.
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

/// Signals a process that may be gone.
pub fn send(pid: i32, signal: Signal) {
    let _ = kill_process(Pid::from_raw(pid).unwrap(), signal);
}

pub fn pids() -> impl Iterator<Item = i32> {
    let entries = fs::read_dir("/proc").unwrap().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

/// A field of `/proc/PID/stat`, counted from the state, which is the first.
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

/// Waits until something is there.
#[track_caller]
pub fn until<T>(what: &str, look: impl FnMut() -> Option<T>) -> T {
    within(SOON, look).unwrap_or_else(|| panic!("there is no {what}"))
}

/// Waits until something holds.
#[track_caller]
pub fn until_true(what: &str, mut holds: impl FnMut() -> bool) {
    until(what, || holds().then_some(()));
}

pub fn within<T>(limit: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begun = Instant::now();
    loop {
        if let Some(found) = look() {
            return Some(found);
        }
        if begun.elapsed() > limit {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// The content of a file once it has a whole line.
#[track_caller]
pub fn line(path: &Path) -> String {
    let text = until(&format!("line in {}", path.display()), || {
        fs::read_to_string(path).ok().filter(|text| text.ends_with('\n'))
    });
    text.trim_end().to_owned()
}

/// A program that must be there: what is missing fails a test.
pub fn tool(name: &str) -> Command {
    let found = Command::new("sh").args(["-c", &format!("command -v {name}")]).stdout(Stdio::null()).status();
    assert!(found.is_ok_and(|status| status.success()), "install `{name}`: this test needs it");
    Command::new(name)
}

/// Keeps the file of a store locked, as a process that hangs in a transaction.
pub fn hang(world: &World) -> rusqlite::Connection {
    let path = world.url.strip_prefix("sqlite:").unwrap();
    let file = rusqlite::Connection::open(path).unwrap();
    until_true("turn to lock the file", || file.execute_batch("BEGIN EXCLUSIVE").is_ok());
    file
}

/// What a command wrote to a pipe.
pub fn output(command: &mut Command) -> io::Result<std::process::Output> {
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn()?.wait_with_output()
}
