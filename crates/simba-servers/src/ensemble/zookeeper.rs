//! A ZooKeeper ensemble.

use std::net::SocketAddr;

use anyhow::Result;

use super::{Ensemble, query};
use crate::setup::{Setup, free_address};

/// An ensemble before it is started, with the addresses for its internal connections.
#[derive(Clone, Debug)]
#[must_use]
pub struct EnsemblePlan {
    /// For each server, the addresses under which it connects to the others, and its own.
    views: Vec<Vec<Ports>>,
    settings: Vec<Vec<String>>,
}

/// The ports on which a server accepts followers, and votes.
#[derive(Clone, Copy, Debug)]
struct Ports {
    quorum: SocketAddr,
    election: SocketAddr,
}

impl EnsemblePlan {
    /// Creates a plan for this many servers.
    ///
    /// # Errors
    ///
    /// The system has no free ports.
    pub fn new(servers: usize) -> Result<Self> {
        let ports = || Ok(Ports { quorum: free_address()?, election: free_address()? });
        let all: Vec<Ports> = (0..servers).map(|_| ports()).collect::<Result<_>>()?;
        Ok(Self { views: vec![all; servers], settings: vec![Vec::new(); servers] })
    }

    /// Returns the address on which a server accepts followers.
    #[must_use]
    pub fn quorum_address(&self, server: usize) -> SocketAddr {
        self.views[server][server].quorum
    }

    /// Makes one server connect to another through this address.
    pub fn with_detour(mut self, follower: usize, leader: usize, by: SocketAddr) -> Self {
        self.views[follower][leader].quorum = by;
        self
    }

    /// Adds a line to the configuration of one server.
    pub fn with_setting(mut self, server: usize, line: impl Into<String>) -> Self {
        self.settings[server].push(line.into());
        self
    }

    /// Starts all servers, and waits until all are ready.
    ///
    /// # Errors
    ///
    /// A server did not start; the error contains the end of its log.
    pub fn start(self) -> Result<Ensemble> {
        Ensemble::start_all((0..self.views.len()).map(|server| self.setup(server)).collect(), leads)
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

fn leads(address: SocketAddr) -> Result<bool> {
    Ok(query(address, "srvr")?.contains("Mode: leader"))
}
