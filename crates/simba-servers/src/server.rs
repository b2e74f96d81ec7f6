//! A server that runs, as a child of this process.

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
use crate::kinds::Place;
use crate::record::Record;
use crate::setup::Setup;

/// How long a server may take to serve; several start at once on a small machine.
const START: Duration = Duration::from_secs(60);
/// How long it may take to end by itself.
const END: Duration = Duration::from_secs(10);
/// How much of the log an error shows.
const TAIL: usize = 20;

/// A server of our own, stopped and removed with its data when this is dropped.
pub struct Server {
    setup: Setup,
    place: Place,
    child: Option<Child>,
}

impl Server {
    pub(crate) fn start(setup: Setup, place: Place) -> Result<Self> {
        let mut server = Self { setup, place, child: None };
        server.spawn()?;
        Ok(server)
    }

    /// Where it is, with the right to do everything.
    #[must_use]
    pub fn url(&self) -> String {
        (self.setup.kind.url)(&self.place)
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.place.address
    }

    /// Its data and its log, `log`; gone with it.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.place.dir
    }

    /// The disk that it has for itself.
    ///
    /// # Panics
    ///
    /// If its set-up asks for [none](Setup::with_disk_of).
    #[must_use]
    pub fn disk(&self) -> &SmallDisk {
        self.place.disk.as_ref().expect("the server has a disk of its own")
    }

    /// Its process.
    ///
    /// # Panics
    ///
    /// If it does not run.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the server runs").id()
    }

    /// Ends it in order and starts it again, with its data and on its port.
    ///
    /// # Errors
    ///
    /// It does not end, or does not start.
    pub fn restart(&mut self) -> Result<()> {
        self.stop()?;
        self.spawn()
    }

    /// Ends it in order. [`restart`](Self::restart) brings it back.
    ///
    /// # Errors
    ///
    /// It does not end.
    pub fn stop(&mut self) -> Result<()> {
        self.end(Signal::TERM)
    }

    /// Ends it without a word, as a power cut does. [`restart`](Self::restart) brings it back.
    ///
    /// # Errors
    ///
    /// It does not end.
    pub fn kill(&mut self) -> Result<()> {
        self.end(Signal::KILL)
    }

    /// Stops it and waits until all its threads stand still; it neither answers nor breaks a connection.
    ///
    /// # Errors
    ///
    /// It does not run.
    pub fn pause(&self) -> Result<()> {
        self.signal(Signal::STOP)?;
        // One thread takes the signal. On a busy machine it is scheduled late, and the others answer until then.
        let process = Pid::from_child(self.child.as_ref().context("it does not run")?);
        let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
        retry_on_intr(|| waitid(WaitId::Pid(process), stopped)).context("it did not stop")?;
        Ok(())
    }

    /// Lets it go on.
    ///
    /// # Errors
    ///
    /// It does not run.
    pub fn resume(&self) -> Result<()> {
        self.signal(Signal::CONT)
    }

    /// Lets it outlive this process; the record tells how to end it.
    #[must_use]
    pub fn leave_running(mut self) -> Record {
        let record =
            Record { pid: self.pid(), url: self.url(), address: self.address(), dir: self.dir().to_owned() };
        self.child = None;
        // Its data stays too.
        std::mem::forget(self);
        record
    }

    fn spawn(&mut self) -> Result<()> {
        let log = self.place.path("log");
        let output = File::options().create(true).append(true).open(&log)?;
        let mut command = (self.setup.kind.command)(&self.place)?;
        command.args(&self.setup.args).envs(self.setup.env.iter().map(|(name, value)| (name, value)));
        // A process group of its own, so that an interrupt from the keyboard is not for the server.
        command.current_dir(&self.place.dir).process_group(0);
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        self.child = Some(command.spawn().context("cannot be started")?);
        self.wait_until_it_serves().with_context(|| format!("the end of its log:\n{}", tail(&log)))
    }

    fn wait_until_it_serves(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.as_mut().context("it does not run")?.try_wait()? {
                bail!("it ended with {status}");
            }
            match (self.setup.kind.probe)(&self.place) {
                Ok(()) => return Ok(()),
                Err(error) if begun.elapsed() > START => {
                    return Err(error).context(format!("it does not serve after {START:?}"));
                }
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let child = self.child.as_ref().context("it does not run")?;
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
        // A process that stands still takes no other signal.
        self.signal(Signal::CONT)?;
        if !self.ends()? {
            self.signal(Signal::KILL)?;
            ensure!(self.ends()?, "{} survives being killed", self.setup.kind.name);
        }
        self.child = None;
        self.wait_for_its_children()
    }

    /// Those of PostgreSQL have process groups of their own and end a little later than it; until then it cannot be
    /// started again.
    fn wait_for_its_children(&self) -> Result<()> {
        let begun = Instant::now();
        while somebody_works_in(&self.place.dir) {
            ensure!(begun.elapsed() < END, "processes of {} survive it", self.setup.kind.name);
            thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }

    fn ends(&mut self) -> Result<bool> {
        let Some(child) = &mut self.child else { return Ok(true) };
        let begun = Instant::now();
        while begun.elapsed() < END {
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
        self.place.clear();
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

/// Whether the working directory of any process is in this one.
fn somebody_works_in(dir: &Path) -> bool {
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let works_there = |process: fs::DirEntry| {
        fs::read_link(process.path().join("cwd")).is_ok_and(|place| place.starts_with(dir))
    };
    processes.into_iter().any(works_there)
}

fn tail(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
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
        command: |place| {
            let mut command = place.program("sh")?;
            command.args(["-c", "echo the reason; exit 7"]);
            Ok(command)
        },
        url: |place| format!("none://{}", place.address),
        probe: |_| Err(std::io::Error::other("never ready")),
    };

    #[test]
    fn a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log() {
        let mut setup = Setup::redis();
        setup.kind = &FAILING;
        let error = format!("{:#}", setup.start().unwrap_err());
        assert!(error.contains("the reason") && error.contains("exit status: 7"), "{error}");
    }

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let log = std::env::temp_dir().join(format!("simba-servers-tail-{}", std::process::id()));
        fs::write(&log, (1..=100).map(|n| format!("{n}\n")).collect::<String>()).unwrap();
        let tail = tail(&log);
        fs::remove_file(&log).unwrap();
        assert!(tail.starts_with("81\n") && tail.ends_with("\n100"), "{tail}");
    }
}
