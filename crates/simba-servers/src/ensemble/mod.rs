//! Several servers that agree.

mod etcd;
mod zookeeper;

pub use zookeeper::EnsemblePlan;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};

use crate::server::Server;
use crate::setup::Setup;

/// An ensemble of ZooKeeper or a cluster of etcd that runs, stopped and removed when this is dropped.
#[derive(Debug)]
pub struct Ensemble {
    servers: Vec<Server>,
    leads: Leads,
}

/// Whether the server at this address says that it leads the others.
type Leads = fn(SocketAddr) -> Result<bool>;

impl Ensemble {
    /// Starts three ZooKeepers.
    ///
    /// # Errors
    ///
    /// What one of them said when it did not start.
    pub fn start() -> Result<Self> {
        EnsemblePlan::new(3)?.start()
    }

    /// Starts three members of a cluster of etcd.
    ///
    /// # Errors
    ///
    /// What one of them said when it did not start.
    pub fn start_etcd() -> Result<Self> {
        Self::start_etcd_with(|_, member| member)
    }

    /// Starts three members of a cluster of etcd, each with what is special about it.
    ///
    /// # Errors
    ///
    /// What one of them said when it did not start.
    pub fn start_etcd_with(special: impl Fn(usize, Setup) -> Setup) -> Result<Self> {
        let members = etcd::members(3)?;
        let members = members.into_iter().enumerate().map(|(at, member)| special(at, member));
        Self::start_all(members.collect(), etcd::leads)
    }

    /// At once: none of them serves before most of them run.
    fn start_all(setups: Vec<Setup>, leads: Leads) -> Result<Self> {
        // One after the other: two of them cannot install packages at the same time.
        setups.iter().try_for_each(Setup::install)?;
        let servers: Result<_> = thread::scope(|scope| {
            let starts: Vec<_> = setups.into_iter().map(|setup| scope.spawn(|| setup.start())).collect();
            starts.into_iter().map(|start| start.join().map_err(|_| anyhow!("a start panicked"))?).collect()
        });
        Ok(Self { servers: servers?, leads })
    }

    /// All servers in one URL.
    #[must_use]
    pub fn url(&self) -> String {
        let urls: Vec<_> = self.servers.iter().map(Server::url).collect();
        Self::url_of(urls.iter().map(String::as_str))
    }

    /// One URL of the URLs of all servers.
    #[must_use]
    pub fn url_of<'a>(urls: impl IntoIterator<Item = &'a str>) -> String {
        let parts: Vec<_> = urls.into_iter().filter_map(|url| url.split_once("://")).collect();
        let scheme = parts.first().map_or("", |(scheme, _)| scheme);
        let hosts: Vec<_> = parts.iter().map(|(_, host)| *host).collect();
        format!("{scheme}://{}", hosts.join(","))
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
        let leads = |server: &Server| (self.leads)(server.address()).unwrap_or(false);
        self.servers.iter().position(leads).context("no server leads")
    }

    /// Gives the servers away, one by one.
    #[must_use]
    pub fn into_servers(self) -> Vec<Server> {
        self.servers
    }
}

/// All that a server says when it is asked this.
fn said(address: SocketAddr, question: &str) -> Result<String> {
    const PATIENCE: Duration = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, PATIENCE)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.write_all(question.as_bytes())?;
    let mut said = String::new();
    stream.read_to_string(&mut said)?;
    Ok(said)
}
