//! What the servers have in common, and one file for each.

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

/// How to get, start and probe one kind of server.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    /// Programs that must be there, each with the Debian package that has it.
    pub(crate) programs: &'static [(&'static str, &'static str)],
    /// The user to run as if we are root.
    pub(crate) user: Option<&'static str>,
    /// Makes the data, once.
    pub(crate) prepare: fn(&Place) -> Result<()>,
    /// The command that starts it in the foreground.
    pub(crate) command: fn(&Place) -> Result<Command>,
    /// Where it is, with the right to do everything.
    pub(crate) url: fn(&Place) -> String,
    /// Succeeds once it serves.
    pub(crate) probe: fn(&Place) -> io::Result<()>,
}

/// Where one server lives.
#[derive(Clone, Debug)]
pub(crate) struct Place {
    /// A directory that nobody else has.
    pub(crate) dir: PathBuf,
    /// What is mounted there, if that is to be a disk of its own.
    pub(crate) disk: Option<Arc<SmallDisk>>,
    pub(crate) address: SocketAddr,
    /// Certificates of its own, if it is to speak TLS.
    pub(crate) tls: bool,
    /// The zone of a server whose time is not UTC.
    pub(crate) zone: Option<String>,
    /// The server behind a pooler.
    pub(crate) upstream: Option<SocketAddr>,
    /// Lines for its file of settings.
    pub(crate) settings: Vec<String>,
    pub(crate) login: Option<Login>,
}

impl Place {
    /// A file or directory of the server's.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }

    /// The same as text, for an option.
    pub(crate) fn text(&self, name: &str) -> String {
        self.path(name).display().to_string()
    }

    pub(crate) fn port(&self) -> String {
        self.address.port().to_string()
    }

    /// A program of this kind, as the server's user, in its directory.
    pub(crate) fn program(&self, name: &str) -> Result<Command> {
        let path = debian::find(name).with_context(|| format!("`{name}` is not installed"))?;
        let mut command = Command::new(path);
        command.current_dir(&self.dir);
        if let Some(login) = self.login {
            login.run(&mut command);
        }
        Ok(command)
    }

    /// Removes all that is there.
    pub(crate) fn clear(&mut self) {
        self.disk = None;
        let _ = fs::remove_dir_all(&self.dir);
    }

    /// Writes a file that the server can read.
    pub(crate) fn write(&self, name: &str, text: &str) -> Result<()> {
        let path = self.path(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        self.login.map_or(Ok(()), |login| login.own(&path))
    }
}

/// Runs a program to its end; what it said is told if it fails.
pub(crate) fn finish(command: &mut Command, input: &[u8]) -> Result<Vec<u8>> {
    let name = Path::new(command.get_program()).display().to_string();
    let piped = std::process::Stdio::piped;
    let mut child = command
        .stdin(piped())
        .stdout(piped())
        .stderr(piped())
        .spawn()
        .with_context(|| format!("cannot start {name}"))?;
    // A program that ends without reading everything says why in its own words.
    let _ = child.stdin.take().context("no way to write to it")?.write_all(input);
    let output = child.wait_with_output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{name} ended with {}:\n{said}", output.status);
    Ok(output.stdout)
}

/// Connects, sends a line, and gives the beginning of the answer.
pub(crate) fn ask(address: SocketAddr, question: &[u8], answer: &mut [u8]) -> io::Result<()> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    stream.write_all(question)?;
    stream.read_exact(answer)
}

/// Asks, and succeeds if the answer begins like this.
pub(crate) fn expect(address: SocketAddr, question: &str, beginning: &str) -> io::Result<()> {
    let mut answer = vec![0; beginning.len()];
    ask(address, question.as_bytes(), &mut answer)?;
    if answer != beginning.as_bytes() {
        let (question, answer) = (question.trim_end(), String::from_utf8_lossy(&answer));
        return Err(io::Error::other(format!("the answer to {question} is {answer:?}")));
    }
    Ok(())
}
