//! Another process on the same file: the test program started once more, told what to do line by line.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use simba_core::{Lease, Simba};
use simba_sqlite::{SqliteBackend, SqliteConfig};

use super::Sqlite;

/// The variable with a player's part.
const PART: &str = "SIMBA_SQLITE_PART";
/// What a player says begins with this; the test harness says more.
const MARK: &str = "player: ";
/// How long a process may take to start and to answer on a noisy machine.
const PATIENCE: Duration = Duration::from_secs(20);

/// A process that plays a part, killed when it is dropped.
pub struct Player {
    child: Child,
    stdin: ChildStdin,
    said: Receiver<String>,
}

impl Player {
    /// Starts one: `words` is its part, see [`play`].
    pub fn start(path: &Path, words: &[&str]) -> Self {
        Self::start_by(Command::new(std::env::current_exe().unwrap()), path, words)
    }

    /// Starts one by a command that ends where the program's arguments begin.
    pub fn start_by(mut command: Command, path: &Path, words: &[&str]) -> Self {
        command.args(["--exact", "player", "--ignored", "--nocapture"]);
        command.env(PART, [&[path.to_str().unwrap()], words].concat().join("\n"));
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (stdin, stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let (say, said) = channel();
        thread::spawn(move || {
            for line in BufReader::new(stdout).lines().map_while(Result::ok) {
                // The harness may have begun the line.
                if let Some((_, words)) = line.split_once(MARK) {
                    say.send(words.to_owned()).ok();
                }
            }
        });
        Self { child, stdin, said }
    }

    /// The next thing that it says.
    pub fn hear(&self) -> String {
        self.said.recv_timeout(PATIENCE).expect("a player says something")
    }

    pub fn tell(&mut self) {
        self.stdin.write_all(b"go on\n").unwrap();
    }

    /// Sends the signal of this name to the process.
    pub fn signal(&self, name: &str) {
        let sent = Command::new("kill").args(["-s", name, &self.child.id().to_string()]).status().unwrap();
        assert!(sent.success(), "the process is there");
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    /// Waits for its end, which must be a good one.
    pub fn end(mut self) {
        assert!(self.child.wait().unwrap().success(), "a player ends well");
    }
}

impl Drop for Player {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn say(words: impl std::fmt::Display) {
    println!("{MARK}{words}");
}

fn await_word() {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line).unwrap();
}

/// Plays the part that the variable names, or says the kind of the error if the file cannot be opened:
///
/// - `hold MUTEX`: waits for the mutex and holds it until told to go on, by a lease that outlasts every test
/// - `try MUTEX`: tries once
/// - `count MUTEX FILE TIMES`: adds one to the number in a file, that often
/// - `open`: opens the file and nothing else
/// - `write`: changes everything in a transaction and never commits
#[tokio::main]
pub async fn play() {
    let part = std::env::var(PART).expect("a player is started by a test");
    let part: Vec<&str> = part.lines().collect();
    let store = Sqlite::at(part[0]);
    if part[1] == "write" {
        return write(store.path());
    }
    let simba = match SqliteBackend::connect(SqliteConfig::new(store.path())).await {
        Ok(backend) => Simba::builder(Arc::new(backend)).lease(super::long()).build(),
        Err(error) => return say(error.kind()),
    };
    match part[1] {
        "hold" => {
            let guard = simba.locker(part[2]).lock().await.unwrap();
            say(format!("held {}", guard.token()));
            await_word();
            guard.release().await.unwrap();
        }
        "open" => say("opened"),
        "try" => match simba.locker(part[2]).try_lock().await.unwrap() {
            Some(_) => say("free"),
            None => say("refused"),
        },
        "count" => count(&simba, part[2], Path::new(part[3]), part[4].parse().unwrap()).await,
        other => panic!("nobody knows the part {other}"),
    }
    simba.shutdown().await;
}

async fn count(simba: &Simba, mutex: &str, file: &Path, times: u64) {
    let lease = Lease::new(Duration::from_secs(5), Duration::from_secs(5)).unwrap();
    let lease = lease.with_poll(Duration::from_secs(30)).unwrap();
    let locker = simba.locker(mutex).with_lease(lease);
    for _ in 0..times {
        let guard = locker.lock().await.unwrap();
        let before: u64 = std::fs::read_to_string(file).unwrap().parse().unwrap();
        tokio::task::yield_now().await;
        std::fs::write(file, (before + 1).to_string()).unwrap();
        guard.release().await.unwrap();
    }
    say("counted");
}

fn write(path: &Path) {
    let connection = rusqlite::Connection::open(path).unwrap();
    connection.execute_batch("BEGIN IMMEDIATE; UPDATE simba_mutex SET owner = NULL, token = 0").unwrap();
    say("writing");
    loop {
        thread::park();
    }
}
