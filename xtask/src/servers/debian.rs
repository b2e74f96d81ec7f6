//! Gets missing servers from Debian.

use std::env;
use std::io;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};
use rustix::process::geteuid;

use super::Server;
use crate::step;
use crate::workspace::Workspace;

/// Installs the packages of the servers whose program is missing; without the right to, says what to type.
pub(super) fn install_missing(workspace: &Workspace, servers: &[Server]) -> Result<()> {
    let missing: Vec<&str> =
        servers.iter().filter(|server| !is_on_path(server.program)).map(|server| server.package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let mut update = apt_get(workspace, &["update"]);
    let mut install = apt_get(workspace, &["install", "-y", "--no-install-recommends"]);
    install.args(&missing);
    if !geteuid().is_root() {
        let (update, install) = (step::line(&update), step::line(&install));
        bail!("not installed: {}; run as root:\n  {update}\n  {install}", missing.join(", "));
    }
    step::run(&mut update).and_then(|()| step::run(&mut install)).context("cannot install the servers")
}

/// The package may try to start a service of its own. That does not matter: ours has another port.
fn apt_get(workspace: &Workspace, words: &[&str]) -> Command {
    let mut command = workspace.command("apt-get");
    // Our stdout is for the shell to evaluate.
    command.args(words).env("DEBIAN_FRONTEND", "noninteractive").stdout(io::stderr());
    command
}

fn is_on_path(program: &str) -> bool {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path).any(|dir| is_file(&dir.join(program)))
}

fn is_file(path: &Path) -> bool {
    path.metadata().is_ok_and(|metadata| metadata.is_file())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_is_looked_for_on_the_path() {
        assert!(is_on_path("sh"));
        assert!(!is_on_path("no-such-program"));
    }
}
