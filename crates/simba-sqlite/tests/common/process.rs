//! Another process on the same file: the test program started once more, with commands in a variable.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use simba_core::Simba;
use simba_sqlite::{SqliteBackend, SqliteConfig};

use super::Sqlite;

/// The variable with the command of a child process.
const VARIABLE: &str = "SIMBA_SQLITE_PART";
/// The prefix of a child's output; the test harness prints other lines.
const PREFIX: &str = "child: ";
/// How long a process may take to start and to answer on a busy machine, also after hundreds of hand-overs.
const LIMIT: Duration = Duration::from_secs(240);

/// A process that carries out a command, killed when it is dropped.
pub struct ChildProcess {
    child: Child,
    stdin: ChildStdin,
    output: Receiver<String>,
}

impl ChildProcess {
    /// Starts a process with a command, see [`run_child`].
    pub fn start(path: &Path, words: &[&str]) -> Self {
        Self::start_with(Command::new(std::env::current_exe().unwrap()), path, words)
    }

    /// Starts a process with a launcher that ends where the program's arguments begin.
    pub fn start_with(mut launcher: Command, path: &Path, words: &[&str]) -> Self {
        launcher.args(["--exact", "child_process", "--ignored", "--nocapture"]);
        launcher.env(VARIABLE, [&[path.to_str().unwrap()], words].concat().join("\n"));
        let mut child = launcher.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (sender, output) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The harness may have printed the start of the line.
                if let Some((_, words)) = line.split_once(PREFIX) {
                    sender.send(words.to_owned()).ok();
                }
            }
        });
        Self { child, stdin, output }
    }

    /// Waits for the next line of output.
    pub fn line(&self) -> String {
        self.output.recv_timeout(LIMIT).expect("a child process prints a line")
    }

    /// Lets a process that holds a mutex release it and end.
    pub fn finish(&mut self) {
        self.stdin.write_all(b"finish\n").unwrap();
    }

    /// Stops the process outside of a transaction on this file, which would lock all other processes out.
    pub fn stop(&self, path: &Path) {
        let other = rusqlite::Connection::open(path).unwrap();
        other.busy_timeout(Duration::from_millis(100)).unwrap();
        loop {
            self.signal("STOP");
            // On a busy machine its threads still run for some time.
            while !self.is_stopped() {
                thread::sleep(Duration::from_millis(1));
            }
            if other.execute_batch("BEGIN IMMEDIATE; ROLLBACK").is_ok() {
                return;
            }
            self.signal("CONT");
        }
    }

    fn signal(&self, name: &str) {
        let kill = format!("kill -s {name} {}", self.child.id());
        let sent = Command::new("sh").args(["-c", &kill]).status().unwrap();
        assert!(sent.success(), "the process exists");
    }

    fn is_stopped(&self) -> bool {
        let mut tasks = std::fs::read_dir(format!("/proc/{}/task", self.child.id())).unwrap();
        tasks.all(|task| {
            let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap_or_default();
            stat.rsplit_once(')').is_some_and(|(_, rest)| rest.starts_with(" T"))
        })
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits until the process ends with exit code 0.
    pub fn wait(mut self) {
        assert!(self.child.wait().unwrap().success(), "a child process exits with 0");
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn print(words: impl std::fmt::Display) {
    println!("{PREFIX}{words}");
}

fn wait_for_finish() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

/// Carries out the command in the variable, or prints the kind of the error if the file cannot be opened:
///
/// - `hold MUTEX`: waits for the mutex and holds it until [`ChildProcess::finish`], by a lease that outlasts every test
/// - `try MUTEX`: tries once
/// - `count MUTEX FILE TIMES`: adds one to the number in a file, that often
/// - `open`: opens the file and nothing else
/// - `write`: changes everything in a transaction and never commits
#[tokio::main]
pub async fn run_child() {
    let command = std::env::var(VARIABLE).expect("a child process is started by a test");
    let command: Vec<&str> = command.lines().collect();
    let store = Sqlite::at(command[0]);
    if command[1] == "write" {
        return write(store.path());
    }
    let simba = match SqliteBackend::connect(SqliteConfig::new(store.path())).await {
        Ok(backend) => Simba::builder(Arc::new(backend)).with_lease(super::long()).build(),
        Err(error) => return print(error.kind()),
    };
    match command[1] {
        "hold" => {
            let guard = simba.locker(command[2]).lock().await.unwrap();
            print(format!("held {}", guard.token()));
            wait_for_finish();
            guard.release().await.unwrap();
        }
        "open" => print("opened"),
        "try" => match simba.locker(command[2]).try_lock().await.unwrap() {
            Some(_) => print("free"),
            None => print("refused"),
        },
        "count" => count(&simba, command[2], Path::new(command[3]), command[4].parse().unwrap()).await,
        other => panic!("unknown command {other}"),
    }
    simba.shutdown().await;
}

async fn count(simba: &Simba, mutex: &str, file: &Path, times: u64) {
    let locker = simba.locker(mutex);
    for _ in 0..times {
        let guard = locker.lock().await.unwrap();
        let before: u64 = std::fs::read_to_string(file).unwrap().parse().unwrap();
        tokio::task::yield_now().await;
        std::fs::write(file, (before + 1).to_string()).unwrap();
        guard.release().await.unwrap();
    }
    print("counted");
}

fn write(path: &Path) {
    let connection = rusqlite::Connection::open(path).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE; UPDATE simba_mutex SET owner = NULL, token = 0").unwrap();
    print("writing");
    loop {
        thread::park();
    }
}
