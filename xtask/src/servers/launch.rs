//! Starts one server and waits until it serves.

use std::fs::{self, File};
use std::net::{SocketAddr, TcpListener};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use rustix::process::Pid;

use super::{Server, instance::Instance, loopback};
use crate::step;

/// How long a server may take to serve.
const PATIENCE: Duration = Duration::from_secs(10);

/// How much of the log an error shows.
const TAIL: usize = 20;

/// Starts the server; one that does not serve in time is stopped, and the error shows what it logged.
pub(super) fn launch(state: &Path, server: &Server) -> Result<Instance> {
    let address = free_address()?;
    let dir = data_directory(server.name, address)?;
    let log = state.join(format!("{}.log", server.name));
    let mut child = spawn(server, address, &dir, &log)?;
    let instance = Instance { pid: Pid::from_child(&child), address, url: (server.url)(address), dir };
    instance.save(state, server.name)?;
    if let Err(error) = wait_until_it_serves(&mut child, server, address) {
        instance.stop()?;
        instance.forget(state, server.name)?;
        bail!("{error:#}; the end of {}:\n{}", log.display(), tail(&log));
    }
    eprintln!("{}: started, pid {}, log {}", server.name, instance.pid, log.display());
    Ok(instance)
}

fn spawn(server: &Server, address: SocketAddr, dir: &Path, log: &Path) -> Result<Child> {
    let log = File::create(log).with_context(|| format!("cannot create {}", log.display()))?;
    let mut command = Command::new(server.program);
    (server.configure)(&mut command, address, dir);
    // A process group of its own, so that an interrupt from the keyboard is not for the server.
    command.current_dir(dir).process_group(0).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    command.spawn().with_context(|| format!("cannot start `{}`", step::line(&command)))
}

fn wait_until_it_serves(child: &mut Child, server: &Server, address: SocketAddr) -> Result<()> {
    let mut last = None;
    let served = step::poll(PATIENCE, || {
        if let Some(status) = child.try_wait()? {
            bail!("it ended with {status}");
        }
        Ok((server.probe)(address).map_err(|error| last = Some(error)).ok())
    })?;
    match (served, last) {
        (Some(()), _) => Ok(()),
        (None, Some(error)) => Err(error).with_context(|| format!("it does not serve after {PATIENCE:?}")),
        (None, None) => bail!("it does not serve after {PATIENCE:?}"),
    }
}

/// An address that nobody listened on a moment ago.
fn free_address() -> Result<SocketAddr> {
    let listener = TcpListener::bind(loopback(0)).context("no free port")?;
    Ok(listener.local_addr()?)
}

/// Creates a directory that nobody had before, in its final spelling: it must compare equal to what the
/// kernel says of the process.
fn data_directory(name: &str, address: SocketAddr) -> Result<PathBuf> {
    let dir = std::env::temp_dir().join(format!("simba-{name}-{}-{}", process::id(), address.port()));
    fs::create_dir(&dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir.canonicalize()?)
}

fn tail(log: &Path) -> String {
    let bytes = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes);
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::super::tests::Scratch;
    use super::*;

    fn server(name: &'static str) -> Server {
        Server {
            name,
            variable: "SIMBA_TCK_NONE",
            package: "none",
            program: "sh",
            configure: |_, _, _| {},
            url: |address| format!("none://{address}"),
            probe: |_| Err(io::Error::other("never ready")),
        }
    }

    #[test]
    fn a_server_that_ends_at_once_is_an_error_with_the_end_of_its_log() {
        let state = Scratch::new("ends");
        let failing = Server {
            configure: |command, _, _| {
                command.args(["-c", "echo the reason; exit 7"]);
            },
            ..server("failing")
        };
        let error = format!("{:#}", launch(&state.0, &failing).unwrap_err());
        assert!(error.contains("the reason") && error.contains("exit status: 7"), "{error}");
        assert_eq!(Instance::load(&state.0, "failing").unwrap(), None);
    }

    #[test]
    fn the_tail_of_a_log_is_its_last_lines() {
        let scratch = Scratch::new("tail");
        let log = scratch.0.join("log");
        fs::write(&log, (1..=100).map(|n| format!("{n}\n")).collect::<String>()).unwrap();
        let tail = tail(&log);
        assert!(tail.starts_with("81\n") && tail.ends_with("\n100"), "{tail}");
    }
}
