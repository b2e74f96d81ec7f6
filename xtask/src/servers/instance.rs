//! A server that was started, by this or an earlier call.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use rustix::io::Errno;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use crate::step;

/// How long a server may take to end by itself, and then to be gone once killed.
const PATIENCE: Duration = Duration::from_secs(5);

/// What is known of a server that was started.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Instance {
    pub(super) pid: Pid,
    pub(super) address: SocketAddr,
    pub(super) url: String,
    /// Its data and its working directory, which nobody else has: by it a process is known to be the server.
    pub(super) dir: PathBuf,
}

impl Instance {
    /// Finds the server of this name that was started last and not stopped since.
    pub(super) fn load(state: &Path, name: &str) -> Result<Option<Self>> {
        let Some(pid) = read(state, name, "pid")? else {
            return Ok(None);
        };
        let part = |kind| read(state, name, kind)?.with_context(|| format!("{name}.{kind} is missing"));
        let parse = || -> Result<Self> {
            Ok(Self {
                pid: Pid::from_raw(pid.parse()?).context("not a process id")?,
                address: part("address")?.parse()?,
                url: part("url")?,
                dir: part("dir")?.into(),
            })
        };
        parse().map(Some).with_context(|| format!("bad state of {name} in {}: remove it", state.display()))
    }

    /// Writes down what [`load`](Self::load) needs; the process id last, since it counts.
    pub(super) fn save(&self, state: &Path, name: &str) -> Result<()> {
        write(state, name, "dir", &self.dir.display().to_string())?;
        write(state, name, "url", &self.url)?;
        write(state, name, "address", &self.address.to_string())?;
        write(state, name, "pid", &self.pid.to_string())
    }

    /// Removes the data and what [`save`](Self::save) wrote; the process id last, since it counts.
    pub(super) fn forget(&self, state: &Path, name: &str) -> Result<()> {
        absent_is_fine(fs::remove_dir_all(&self.dir))
            .with_context(|| format!("cannot remove {}", self.dir.display()))?;
        for kind in ["dir", "url", "address", "pid"] {
            let path = path(state, name, kind);
            absent_is_fine(fs::remove_file(&path))
                .with_context(|| format!("cannot remove {}", path.display()))?;
        }
        Ok(())
    }

    /// Whether the process runs and is still the server: after a reboot its id may be somebody else's.
    pub(super) fn is_alive(&self) -> bool {
        let works_in = fs::read_link(format!("/proc/{}/cwd", self.pid)).unwrap_or_default();
        // The kernel adds a remark to the name of a directory that was removed.
        works_in.to_string_lossy().starts_with(&*self.dir.to_string_lossy())
    }

    /// Asks the server to end and kills it if it does not.
    pub(super) fn stop(&self) -> Result<()> {
        if !self.is_alive() {
            return Ok(());
        }
        gone_is_fine(kill_process(self.pid, Signal::TERM))?;
        if self.ends()? {
            return Ok(());
        }
        gone_is_fine(kill_process_group(self.pid, Signal::KILL))?;
        ensure!(self.ends()?, "process {} survives being killed", self.pid);
        Ok(())
    }

    fn ends(&self) -> Result<bool> {
        Ok(step::poll(PATIENCE, || Ok((!self.is_alive()).then_some(())))?.is_some())
    }
}

fn path(state: &Path, name: &str, kind: &str) -> PathBuf {
    state.join(format!("{name}.{kind}"))
}

fn read(state: &Path, name: &str, kind: &str) -> Result<Option<String>> {
    let path = path(state, name, kind);
    match fs::read_to_string(&path) {
        Ok(text) => Ok(Some(text.trim_end().to_owned())),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error).with_context(|| format!("cannot read {}", path.display())),
    }
}

fn write(state: &Path, name: &str, kind: &str, text: &str) -> Result<()> {
    let path = path(state, name, kind);
    fs::write(&path, format!("{text}\n")).with_context(|| format!("cannot write {}", path.display()))
}

fn absent_is_fine(removed: io::Result<()>) -> io::Result<()> {
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    }
}

fn gone_is_fine(signalled: rustix::io::Result<()>) -> rustix::io::Result<()> {
    match signalled {
        Err(Errno::SRCH) => Ok(()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command};

    use super::super::{loopback, tests::Scratch};
    use super::*;

    fn start(script: &str, dir: &Path) -> (Child, Instance) {
        use std::os::unix::process::CommandExt as _;
        let child =
            Command::new("sh").args(["-c", script]).current_dir(dir).process_group(0).spawn().unwrap();
        let url = "redis://127.0.0.1:1".to_owned();
        let instance =
            Instance { pid: Pid::from_child(&child), address: loopback(1), url, dir: dir.to_owned() };
        (child, instance)
    }

    #[test]
    fn what_was_saved_is_loaded_until_it_is_forgotten() {
        let state = Scratch::new("state");
        let data = Scratch::new("data");
        let (mut child, instance) = start("exit 0", &data.0);
        child.wait().unwrap();
        assert_eq!(Instance::load(&state.0, "redis").unwrap(), None);
        instance.save(&state.0, "redis").unwrap();
        assert_eq!(Instance::load(&state.0, "redis").unwrap().as_ref(), Some(&instance));
        instance.forget(&state.0, "redis").unwrap();
        assert_eq!(Instance::load(&state.0, "redis").unwrap(), None);
        assert!(!data.0.exists());
    }

    #[test]
    fn a_broken_state_says_where_it_is() {
        let state = Scratch::new("broken");
        write(&state.0, "redis", "pid", "no number").unwrap();
        let error = Instance::load(&state.0, "redis").unwrap_err();
        assert!(error.to_string().contains(&state.0.display().to_string()), "{error}");
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_running_server_is_stopped() {
        let data = Scratch::new("running");
        let (mut child, instance) = start("exec sleep 3600", &data.0);
        assert!(instance.is_alive());
        instance.stop().unwrap();
        assert!(!instance.is_alive());
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_stranger_with_the_same_process_id_is_left_alone() {
        let data = Scratch::new("stranger");
        let (mut child, instance) = start("exec sleep 3600", &data.0);
        let mistaken = Instance { dir: PathBuf::from("/elsewhere"), ..instance };
        mistaken.stop().unwrap();
        assert_eq!(child.try_wait().unwrap(), None);
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
