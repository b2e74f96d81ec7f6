//! The test servers: each on a loopback port and in a temporary directory of its own.
//!
//! They outlive this program; what is needed to find them again is in `target/servers`.

mod debian;
mod instance;
mod launch;
mod redis;

use std::fs;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};

use crate::workspace::Workspace;
use instance::Instance;

/// A variable that tells the tests where a server is: name and value.
pub(crate) type Variable = (&'static str, String);

/// How to get, start and probe one kind of server.
struct Server {
    name: &'static str,
    /// The variable in which the tests look for its URL.
    variable: &'static str,
    /// The Debian package to install when `program` is missing.
    package: &'static str,
    program: &'static str,
    /// Sets port and data directory on the command that starts it in the foreground.
    configure: fn(&mut Command, SocketAddr, &Path),
    url: fn(SocketAddr) -> String,
    /// Succeeds once it serves.
    probe: fn(SocketAddr) -> io::Result<()>,
}

/// Where a server with this port listens.
fn loopback(port: u16) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, port))
}

/// All servers. A new one is a new entry.
const SERVERS: &[Server] = &[redis::SERVER];

/// Starts the servers that do not run yet and says where all of them are.
pub(crate) fn up(workspace: &Workspace) -> Result<Vec<Variable>> {
    let state = workspace.scratch("servers");
    fs::create_dir_all(&state).with_context(|| format!("cannot create {}", state.display()))?;
    debian::install_missing(workspace, SERVERS)?;
    SERVERS.iter().map(|server| Ok((server.variable, bring_up(&state, server)?.url))).collect()
}

/// Stops the servers that run.
pub(crate) fn down(workspace: &Workspace) -> Result<()> {
    let state = workspace.scratch("servers");
    for server in SERVERS {
        match Instance::load(&state, server.name)? {
            Some(instance) => bring_down(&state, server, &instance)?,
            None => eprintln!("{}: does not run", server.name),
        }
    }
    Ok(())
}

fn bring_up(state: &Path, server: &Server) -> Result<Instance> {
    if let Some(instance) = Instance::load(state, server.name)? {
        if instance.is_alive() && (server.probe)(instance.address).is_ok() {
            eprintln!("{}: runs already, pid {}", server.name, instance.pid);
            return Ok(instance);
        }
        // Ended without us, or hangs: it makes room for a new one.
        bring_down(state, server, &instance)?;
    }
    launch::launch(state, server).with_context(|| format!("{} did not start", server.name))
}

fn bring_down(state: &Path, server: &Server, instance: &Instance) -> Result<()> {
    instance.stop().with_context(|| format!("{} did not stop", server.name))?;
    instance.forget(state, server.name)?;
    eprintln!("{}: stopped, pid {}", server.name, instance.pid);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process;

    use super::*;

    /// A directory for one test, removed with all that is in it.
    pub(super) struct Scratch(pub(super) PathBuf);

    impl Scratch {
        pub(super) fn new(name: &str) -> Self {
            let dir = std::env::temp_dir().join(format!("simba-xtask-{}-{name}", process::id()));
            fs::create_dir(&dir).unwrap();
            Self(dir.canonicalize().unwrap())
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    #[test]
    fn no_two_servers_share_a_name_or_a_variable() {
        for (at, server) in SERVERS.iter().enumerate() {
            for other in &SERVERS[at + 1..] {
                assert_ne!(server.name, other.name);
                assert_ne!(server.variable, other.variable);
            }
        }
    }
}
