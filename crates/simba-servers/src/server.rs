//! A running server, as a child of this process.

use std::fs::{self, File};
use std::net::SocketAddr;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use rustix::io::{Errno, retry_on_intr};
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::disk::SmallDisk;
use crate::kinds::Instance;
use crate::record::Record;
use crate::setup::Setup;

/// Time limit until a server is ready; several start at once on a small machine.
const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limit for the server to end by itself.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How many lines of the log an error shows.
const LOG_LINES: usize = 20;

/// A server that is stopped and removed with its data when this is dropped.
pub struct Server {
    setup: Setup,
    instance: Instance,
    child: Option<Child>,
}

impl Server {
    pub(crate) fn start(setup: Setup, instance: Instance) -> Result<Self> {
        let mut server = Self { setup, instance, child: None };
        server.spawn()?;
        Ok(server)
    }

    /// Returns its URL, with all permissions.
    #[must_use]
    pub fn url(&self) -> String {
        (self.setup.kind.url)(&self.instance)
    }

    /// Returns the address on which it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.instance.address
    }

    /// Returns its directory with the data and the file `log`. It is removed with the server.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.instance.dir
    }

    /// Returns the disk that only this server uses.
    ///
    /// # Panics
    ///
    /// If its set-up has [none](Setup::with_disk_of).
    #[must_use]
    pub fn disk(&self) -> &SmallDisk {
        self.instance.disk.as_ref().expect("the server has no disk of its own")
    }

    /// Returns its process id.
    ///
    /// # Panics
    ///
    /// If it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the server is not running").id()
    }

    /// Ends it gracefully and starts it again, with its data and on its port.
    ///
    /// # Errors
    ///
    /// It does not end, or does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.spawn()
    }

    /// Ends it gracefully. [`restart`](Self::restart) starts it again.
    ///
    /// # Errors
    ///
    /// It does not end.
    pub fn stop(&mut self) -> Result<()> {
        self.end(Signal::TERM)
    }

    /// Kills it, as a power failure would. [`restart`](Self::restart) starts it again.
    ///
    /// # Errors
    ///
    /// It does not end.
    pub fn kill(&mut self) -> Result<()> {
        self.end(Signal::KILL)
    }

    /// Pauses it and waits until all its threads are stopped; it neither answers nor closes a connection.
    ///
    /// # Errors
    ///
    /// It is not running.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        // One thread handles the signal. On a busy machine it is scheduled late, and the others answer until then.
        let process = Pid::from_child(self.child.as_ref().context("it is not running")?);
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        retry_on_intr(|| waitid(WaitId::Pid(process), stopped)).context("it did not stop")?;
        Ok(())
    }

    /// Resumes it after [`pause`](Self::pause).
    ///
    /// # Errors
    ///
    /// It is not running.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Leaves it running when this process ends. The record is needed to stop it.
    #[must_use]
    pub fn leave_running(mut self) -> Record {
        let record =
            Record { pid: self.pid(), url: self.url(), address: self.address(), dir: self.dir().to_owned() };
        self.child = None;
        // Keeps the data, too.
        std::mem::forget(self);
        record
    }

    fn spawn(&mut self) -> Result<()> {
        let log = self.instance.path("log");
        let output = File::options().create(true).append(true).open(&log)?;
        let mut command = (self.setup.kind.command)(&self.instance)?;
        command.args(&self.setup.args).envs(self.setup.env.iter().map(|(name, value)| (name, value)));
        // A separate process group, so that an interrupt from the keyboard does not reach the server.
        command.current_dir(&self.instance.dir).process_group(0);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        self.child = Some(command.spawn().context("cannot be started")?);
        self.wait_until_ready().with_context(|| format!("the end of its log:\n{}", tail(&log)))
    }

    fn wait_until_ready(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.as_mut().context("it is not running")?.try_wait()? {
                bail!("it ended with {status}");
            }
            match (self.setup.kind.probe)(&self.instance) {
                Ok(()) => return Ok(()),
                Err(error) if begun.elapsed() > START_LIMIT => {
                    return Err(error).context(format!("it is not ready after {START_LIMIT:?}"));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("it is not running")?;
        match kill_process_group(Pid::from_child(child), signal) {
            Ok(()) | Err(Errno::SRCH) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    fn end(&mut self, signal: Signal) -> Result<()> {
        if self.child.is_none() {
            return Ok(());
        }
        self.signal(signal)?;
        // A stopped process handles no other signal.
        self.signal(Signal::CONT)?;
        if !self.wait_for_end()? {
            self.signal(Signal::KILL)?;
            ensure!(self.wait_for_end()?, "{} survives being killed", self.setup.kind.name);
        }
        self.child = None;
        self.wait_for_children()
    }

    /// Waits for processes of PostgreSQL that have their own process groups and end slightly later; before that it
    /// cannot be started again.
    fn wait_for_children(&self) -> Result<()> {
        let begun = Instant::now();
        while has_process_in(&self.instance.dir) {
            ensure!(begun.elapsed() < STOP_LIMIT, "processes of {} survive it", self.setup.kind.name);
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn wait_for_end(&mut self) -> Result<bool> {
        let Some(child) = &mut self.child else { return Ok(true) };
        let begun = Instant::now();
        while begun.elapsed() < STOP_LIMIT {
            if child.try_wait()?.is_some() {
                return Ok(true);
            }
            thread::sleep(Duration::from_millis(5));
        }
        Ok(false)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.end(Signal::KILL);
        self.instance.clear();
    }
}

impl std::fmt::Debug for Server {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Server")
            .field("setup", &self.setup)
            .field("address", &self.address())
            .finish_non_exhaustive()
    }
}

/// Returns whether any process has its working directory in this directory.
fn has_process_in(dir: &Path) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let is_inside = |process: fs::DirEntry| {
        fs::read_link(process.path().join("cwd")).is_ok_and(|cwd| cwd.starts_with(dir))
    };
    processes.into_iter().any(is_inside)
}

fn tail(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kinds::Kind;

    const FAILING: Kind = Kind {
        name: "failing",
        programs: &[],
        user: None,
        prepare: |_| Ok(()),
        command: |instance| {
            let mut command = instance.program("sh")?;
            command.args(["-c", "echo the reason; exit 7"]);
            Ok(command)
        },
        url: |instance| format!("none://{}", instance.address),
        probe: |_| Err(std::io::Error::other("never ready")),
    };

    #[test]
    fn server_that_ends_at_once_is_an_error_with_the_end_of_its_log() {
        let mut setup = Setup::redis();
        setup.kind = &FAILING;
        let error = format!("{:#}", setup.start().unwrap_err());
        assert!(error.contains("the reason") && error.contains("exit status: 7"), "{error}");
    }

    #[test]
    fn tail_of_a_log_is_its_last_lines() {
        let log = std::env::temp_dir().join(format!("simba-servers-tail-{}", std::process::id()));
        fs::write(&log, (1..=100).map(|n| format!("{n}\n")).collect::<String>()).unwrap();
        let tail = tail(&log);
        fs::remove_file(&log).unwrap();
        assert!(tail.starts_with("81\n") && tail.ends_with("\n100"), "{tail}");
    }
}
