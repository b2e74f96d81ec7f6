//! Several servers that form a quorum.

mod etcd;
mod zookeeper;

pub use zookeeper::EnsemblePlan;

use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow, ensure};

use crate::server::Server;
use crate::setup::Setup;

/// Time limit for an election. On a busy machine the servers lose their connections, and elect again.
const ELECTION: Duration = Duration::from_secs(30);

/// A running ZooKeeper ensemble or etcd cluster, stopped and removed when this is dropped.
#[derive(Debug)]
pub struct Ensemble {
    servers: Vec<Server>,
    leads: Leads,
}

/// Returns whether the server at this address reports that it is the leader.
type Leads = fn(SocketAddr) -> Result<bool>;

impl Ensemble {
    /// Starts three ZooKeeper servers.
    ///
    /// # Errors
    ///
    /// A server did not start; the error contains the end of its log.
    pub fn start() -> Result<Self> {
        EnsemblePlan::new(3)?.start()
    }

    /// Starts three members of a cluster of etcd.
    ///
    /// # Errors
    ///
    /// A server did not start; the error contains the end of its log.
    pub fn start_etcd() -> Result<Self> {
        Self::start_etcd_with(|_, member| member)
    }

    /// Starts three members of a cluster of etcd. `special` may change the set-up of each.
    ///
    /// # Errors
    ///
    /// A server did not start; the error contains the end of its log.
    pub fn start_etcd_with(special: impl Fn(usize, Setup) -> Setup) -> Result<Self> {
        let members = etcd::members(3)?;
        let members = members.into_iter().enumerate().map(|(at, member)| special(at, member));
        Self::start_all(members.collect(), etcd::leads)
    }

    /// Starts all servers at once: none is ready before a majority runs.
    fn start_all(setups: Vec<Setup>, leads: Leads) -> Result<Self> {
        // One after the other: two package installations cannot run at the same time.
        setups.iter().try_for_each(Setup::install)?;
        let servers: Result<_> = thread::scope(|scope| {
            let starts: Vec<_> = setups.into_iter().map(|setup| scope.spawn(|| setup.start())).collect();
            starts
                .into_iter()
                .map(|start| start.join().map_err(|_| anyhow!("a server start panicked"))?)
                .collect()
        });
        Ok(Self { servers: servers?, leads })
    }

    /// Returns one URL with all servers.
    #[must_use]
    pub fn url(&self) -> String {
        let urls: Vec<_> = self.servers.iter().map(Server::url).collect();
        Self::url_of(urls.iter().map(String::as_str))
    }

    /// Combines the URLs of all servers into one.
    #[must_use]
    pub fn url_of<'a>(urls: impl IntoIterator<Item = &'a str>) -> String {
        let parts: Vec<_> = urls.into_iter().filter_map(|url| url.split_once("://")).collect();
        let scheme = parts.first().map_or("", |(scheme, _)| scheme);
        let hosts: Vec<_> = parts.iter().map(|(_, host)| *host).collect();
        format!("{scheme}://{}", hosts.join(","))
    }

    /// Returns a server.
    #[must_use]
    pub fn server(&self, at: usize) -> &Server {
        &self.servers[at]
    }

    /// Returns a server to kill or to restart.
    pub fn server_mut(&mut self, at: usize) -> &mut Server {
        &mut self.servers[at]
    }

    /// Returns the index of the leader. Waits for the end of an election.
    ///
    /// # Errors
    ///
    /// No server is the leader for 30 s.
    pub fn leader(&self) -> Result<usize> {
        let leads = |server: &Server| (self.leads)(server.address()).unwrap_or(false);
        let begun = Instant::now();
        loop {
            if let Some(leader) = self.servers.iter().position(leads) {
                return Ok(leader);
            }
            ensure!(begun.elapsed() < ELECTION, "no leader after {ELECTION:?}");
            thread::sleep(Duration::from_millis(20));
        }
    }

    /// Returns the servers.
    #[must_use]
    pub fn into_servers(self) -> Vec<Server> {
        self.servers
    }
}

/// Sends a request and returns the whole answer.
fn query(address: SocketAddr, request: &str) -> Result<String> {
    const LIMIT: Duration = Duration::from_secs(1);
    let mut stream = TcpStream::connect_timeout(&address, LIMIT)?;
    stream.set_read_timeout(Some(LIMIT))?;
    stream.write_all(request.as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer)
}
