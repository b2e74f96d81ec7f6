//! The common part of the servers, and one file for each kind.

pub(crate) mod etcd;
pub(crate) mod mariadb;
pub(crate) mod mysql;
pub(crate) mod nutcracker;
pub(crate) mod pgbouncer;
pub(crate) mod postgres;
pub(crate) mod redis;
pub(crate) mod redis_group;
pub(crate) mod valkey;
pub(crate) mod zookeeper;

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use crate::debian;
use crate::disk::SmallDisk;
use crate::logins::Login;

/// How to install, start and probe one kind of server.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// Required programs, each with its Debian package.
    pub(crate) programs: &'static [(&'static str, &'static str)],
    /// The user to run as if this process is root.
    pub(crate) user: Option<&'static str>,
    /// Creates the data, once.
    pub(crate) prepare: fn(&Instance) -> Result<()>,
    /// Returns the command that starts it in the foreground.
    pub(crate) command: fn(&Instance) -> Result<Command>,
    /// Returns its URL, with all permissions.
    pub(crate) url: fn(&Instance) -> String,
    /// Succeeds once it is ready.
    pub(crate) probe: fn(&Instance) -> io::Result<()>,
}

/// The location and configuration of one server.
#[derive(Clone, Debug)]
pub(crate) struct Instance {
    /// A directory that only this server uses.
    pub(crate) dir: PathBuf,
    /// The disk that is mounted there, if it has its own.
    pub(crate) disk: Option<Arc<SmallDisk>>,
    pub(crate) address: SocketAddr,
    /// TLS is enabled; its certificates are in the directory.
    pub(crate) tls: bool,
    /// The time zone, if it is not UTC.
    pub(crate) zone: Option<String>,
    /// The server behind a pooler.
    pub(crate) upstream: Option<SocketAddr>,
    /// Lines for its configuration file.
    pub(crate) settings: Vec<String>,
    pub(crate) login: Option<Login>,
}

impl Instance {
    /// Returns the path of a file or directory of the server.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// Returns the path as text, for an option.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub(crate) fn port(&self) -> String {
        self.address.port().to_string()
    }

    /// Returns a command for a program of this kind, as the server's user, in its directory.
    pub(crate) fn program(&self, name: &str) -> Result<Command> {
        let path = debian::find(name).with_context(|| format!("`{name}` is not installed"))?;
        let mut command = Command::new(path);
        command.current_dir(&self.dir);
        if let Some(login) = self.login {
            login.apply_to(&mut command);
        }
        Ok(command)
    }

    /// Removes the directory.
    pub(crate) fn clear(&mut self) {
        self.disk = None;
        let _ = fs::remove_dir_all(&self.dir);
    }

    /// Writes a file that the server can read.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        self.login.map_or(Ok(()), |login| login.chown(&path))
    }
}

/// Runs a program to its end. An error contains what it wrote to stderr.
pub(crate) fn finish(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    let name = Path::new(command.get_program()).display().to_string();
    let piped = std::process::Stdio::piped;
    let mut child = command
        .stdin(piped())
        .stdout(piped())
        .stderr(piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    // Ignore write errors: a program that ends without reading its input reports why on stderr.
    let _ = child.stdin.take().context("no stdin")?.write_all(input);
    let output = child.wait_with_output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} ended with {}:\n{stderr}", output.status);
    Ok(output.stdout)
}

/// Connects, sends a request, and reads the beginning of the answer.
pub(crate) fn query(address: SocketAddr, request: &[u8], answer: &mut [u8]) -> io::Result<()> {
    const LIMIT: Duration = Duration::from_secs(5);
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.set_write_timeout(Some(LIMIT))?;
    stream.write_all(request)?;
    stream.read_exact(answer)
}

/// Sends a request, and succeeds if the answer starts with `beginning`.
pub(crate) fn expect(address: SocketAddr, request: &str, beginning: &str) -> io::Result<()> {
    let mut answer = vec![0; beginning.len()];
    query(address, request.as_bytes(), &mut answer)?;
    if answer != beginning.as_bytes() {
        let (request, answer) = (request.trim_end(), String::from_utf8_lossy(&answer));
        return Err(io::Error::other(format!("the answer to {request} is {answer:?}")));
    }
    Ok(())
}
