//! Several ZooKeepers that agree.

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::server::Server;
use crate::setup::{Setup, free_address};

/// An ensemble before it is started: where its servers talk to each other.
#[derive(Clone, Debug)]
#[must_use]
pub struct EnsemblePlan {
    /// What each server takes the others' two addresses for, and its own.
    views: Vec<Vec<Ports>>,
    settings: Vec<Vec<String>>,
}

/// Where a server follows another, and where they elect one.
#[derive(Clone, Copy, Debug)]
struct Ports {
    quorum: SocketAddr,
    election: SocketAddr,
}

impl EnsemblePlan {
    /// This many servers.
    ///
    /// # Errors
    ///
    /// The system has no free ports.
    pub fn new(servers: usize) -> Result<Self> {
        let ports = || Ok(Ports { quorum: free_address()?, election: free_address()? });
        let all: Vec<Ports> = (0..servers).map(|_| ports()).collect::<Result<_>>()?;
        Ok(Self { views: vec![all; servers], settings: vec![Vec::new(); servers] })
    }

    /// Where a server is followed by the others.
    #[must_use]
    pub fn quorum_address(&self, server: usize) -> SocketAddr {
        self.views[server][server].quorum
    }

    /// Lets one server follow another by way of this address.
    pub fn with_detour(mut self, follower: usize, leader: usize, by: SocketAddr) -> Self {
        self.views[follower][leader].quorum = by;
        self
    }

    /// A line for the settings of one server.
    pub fn with_setting(mut self, server: usize, line: impl Into<String>) -> Self {
        self.settings[server].push(line.into());
        self
    }

    /// Starts all of them, and waits until all serve.
    ///
    /// # Errors
    ///
    /// What one of them said when it did not start.
    pub fn start(self) -> Result<Ensemble> {
        Setup::zookeeper().install()?;
        let setups: Vec<Setup> = (0..self.views.len()).map(|server| self.setup(server)).collect();
        // None of them serves before most of them run.
        let servers: Result<_> = thread::scope(|scope| {
            let starts: Vec<_> = setups.into_iter().map(|setup| scope.spawn(|| setup.start())).collect();
            starts.into_iter().map(|start| start.join().map_err(|_| anyhow!("a start panicked"))?).collect()
        });
        Ok(Ensemble { servers: servers? })
    }

    fn setup(&self, server: usize) -> Setup {
        let mut setup = Setup::zookeeper().with_setting(format!("myid={}", server + 1));
        for (at, Ports { quorum, election }) in self.views[server].iter().enumerate() {
            let (ip, election) = (quorum.ip(), election.port());
            setup = setup.with_setting(format!("server.{}={ip}:{}:{election}", at + 1, quorum.port()));
        }
        self.settings[server].iter().fold(setup, |setup, line| setup.with_setting(line))
    }
}

/// An ensemble that runs, stopped and removed when this is dropped.
#[derive(Debug)]
pub struct Ensemble {
    servers: Vec<Server>,
}

impl Ensemble {
    /// Starts three servers.
    ///
    /// # Errors
    ///
    /// What one of them said when it did not start.
    pub fn start() -> Result<Self> {
        EnsemblePlan::new(3)?.start()
    }

    /// All servers in one URL.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses: Vec<_> = self.servers.iter().map(|server| server.address().to_string()).collect();
        format!("zookeeper://{}", addresses.join(","))
    }

    /// One of them.
    #[must_use]
    pub fn server(&self, at: usize) -> &Server {
        &self.servers[at]
    }

    /// One of them, to kill or to restart.
    pub fn server_mut(&mut self, at: usize) -> &mut Server {
        &mut self.servers[at]
    }

    /// Which of them the others follow.
    ///
    /// # Errors
    ///
    /// None, for the moment.
    pub fn leader(&self) -> Result<usize> {
        (0..self.servers.len())
            .find(|at| mode(self.servers[*at].address()).is_ok_and(|said| said.contains("Mode: leader")))
            .context("no server leads")
    }

    /// Gives the servers away, one by one.
    #[must_use]
    pub fn into_servers(self) -> Vec<Server> {
        self.servers
    }
}

fn mode(address: SocketAddr) -> Result<String> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(b"srvr")?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    Ok(said)
}
