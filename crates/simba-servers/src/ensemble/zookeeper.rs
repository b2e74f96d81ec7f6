//! Several ZooKeepers that agree.

use std::net::SocketAddr;

use anyhow::Result;

use super::{Ensemble, said};
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
    Ok(said(address, "srvr")?.contains("Mode: leader"))
}
