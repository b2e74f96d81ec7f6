//! The record of a server that outlives the process that started it.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process_group};

/// Time limit for a server to end by itself, and once more after it was killed.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A server that was left running.
#[derive(Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Record {
    /// The process id.
    pub pid: u32,
    /// The URL, with all permissions.
    pub url: String,
    /// The address on which it listens.
    pub address: SocketAddr,
    /// Its data and working directory. It is unique, so it identifies the process of the server.
    pub dir: PathBuf,
}

impl Record {
    /// Returns the server of this name that was started last and not stopped since.
    ///
    /// # Errors
    ///
    /// The file is not a valid record; the error contains its path.
    pub fn load(state: &Path, name: &str) -> Result<Option<Self>> {
        let path = file(state, name);
        let text = match fs::read_to_string(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            text => text.with_context(|| format!("cannot read {}", path.display()))?,
        };
        Self::parse(&text)
            .with_context(|| format!("invalid record in {}: remove the file", path.display()))
            .map(Some)
    }

    /// Writes the record for [`load`](Self::load).
    ///
    /// # Errors
    ///
    /// The directory cannot be written to.
    pub fn save(&self, state: &Path, name: &str) -> Result<()> {
        let path = file(state, name);
        let text = format!("{}\n{}\n{}\n{}\n", self.pid, self.address, self.url, self.dir.display());
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }

    fn parse(text: &str) -> Result<Self> {
        let mut lines = text.lines();
        let mut line = || lines.next().context("a line is missing");
        Ok(Self {
            pid: line()?.parse()?,
            address: line()?.parse()?,
            url: line()?.to_owned(),
            dir: line()?.into(),
        })
    }

    /// Removes the data and the file that [`save`](Self::save) wrote.
    ///
    /// # Errors
    ///
    /// They cannot be removed.
    pub fn forget(&self, state: &Path, name: &str) -> Result<()> {
        ignore_not_found(fs::remove_dir_all(&self.dir))
            .with_context(|| format!("cannot remove {}", self.dir.display()))?;
        let path = file(state, name);
        ignore_not_found(fs::remove_file(&path)).with_context(|| format!("cannot remove {}", path.display()))
    }

    /// Returns whether the process runs and is the server: after a reboot another process may have its id.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let works_in = fs::read_link(format!("/proc/{}/cwd", self.pid)).unwrap_or_default();
        // The kernel adds ` (deleted)` to the path of a directory that was removed.
        works_in.to_string_lossy().starts_with(&*self.dir.to_string_lossy())
    }

    /// Asks the server to end and kills it if it does not.
    ///
    /// # Errors
    ///
    /// The server survives the kill.
    pub fn stop(&self) -> Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw).context("not a process id")?;
        ignore_no_process(kill_process_group(pid, Signal::TERM))?;
        self.wait_for_end();
        // Also ends processes that a server of several processes leaves behind.
        ignore_no_process(kill_process_group(pid, Signal::KILL))?;
        ensure!(self.wait_for_end(), "process {} survives being killed", self.pid);
        Ok(())
    }

    fn wait_for_end(&self) -> bool {
        let begun = Instant::now();
        while self.is_alive() && begun.elapsed() < STOP_LIMIT {
            thread::sleep(Duration::from_millis(20));
        }
        !self.is_alive()
    }
}

fn file(state: &Path, name: &str) -> PathBuf {
    state.join(format!("{name}.server"))
}

fn ignore_not_found(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn ignore_no_process(signalled: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match signalled {
        Err(Errno::SRCH) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::os::unix::process::CommandExt as _;
    use std::process::{self, Child, Command};

    use super::*;

    /// A directory for one test, removed with its content.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("simba-record-{}-{name}", process::id()));
            fs::create_dir(&dir).unwrap();
            Self(dir.canonicalize().unwrap())
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    fn start(script: &str, dir: &Path) -> (Child, Record) {
        let child =
            Command::new("sh").args(["-c", script]).current_dir(dir).process_group(0).spawn().unwrap();
        let (url, address) = ("redis://127.0.0.1:1".to_owned(), (Ipv4Addr::LOCALHOST, 1).into());
        let record = Record { pid: child.id(), address, url, dir: dir.to_owned() };
        (child, record)
    }

    #[test]
    fn saved_record_is_loaded_until_it_is_removed() {
        let (state, data) = (Scratch::new("state"), Scratch::new("data"));
        let (mut child, record) = start("exit 0", &data.0);
        child.wait().unwrap();
        assert_eq!(Record::load(&state.0, "redis").unwrap(), None);
        record.save(&state.0, "redis").unwrap();
        assert_eq!(Record::load(&state.0, "redis").unwrap().as_ref(), Some(&record));
        record.forget(&state.0, "redis").unwrap();
        assert_eq!(Record::load(&state.0, "redis").unwrap(), None);
        assert!(!data.0.exists());
    }

    #[test]
    fn error_of_a_broken_record_contains_its_path() {
        let state = Scratch::new("broken");
        fs::write(file(&state.0, "redis"), "no number\n").unwrap();
        let error = Record::load(&state.0, "redis").unwrap_err();
        assert!(error.to_string().contains(&state.0.display().to_string()), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn running_server_is_stopped() {
        let data = Scratch::new("running");
        let (mut child, record) = start("exec sleep 3600", &data.0);
        assert!(record.is_alive());
        record.stop().unwrap();
        assert!(!record.is_alive());
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn server_of_several_processes_is_stopped_as_a_whole() {
        let data = Scratch::new("several");
        let (mut child, record) = start("sleep 3600 & echo $! >node; wait", &data.0);
        let node = data.0.join("node");
        while fs::read_to_string(&node).unwrap_or_default().is_empty() {
            thread::sleep(Duration::from_millis(10));
        }
        let pid = fs::read_to_string(&node).unwrap().trim().parse().unwrap();
        let node = Record { pid, url: String::new(), address: record.address, dir: data.0.clone() };
        assert!(node.is_alive());
        record.stop().unwrap();
        assert!(node.wait_for_end(), "its second process still runs");
        child.wait().unwrap();
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn other_process_with_the_same_id_is_not_stopped() {
        let data = Scratch::new("other");
        let (mut child, record) = start("exec sleep 3600", &data.0);
        let outdated = Record { dir: PathBuf::from("/elsewhere"), ..record };
        outdated.stop().unwrap();
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
