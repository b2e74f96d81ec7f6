//! What a server is to be like, before it is started.

use std::ffi::OsString;
use std::fs;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::io::ErrorKind;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr as UnixAddress, UnixListener};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU16, AtomicU32, Ordering};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use anyhow::{Context, Result, bail};

use crate::certificates::Certificates;
use crate::debian;
use crate::disk::SmallDisk;
use crate::kinds::{self, Kind, Place};
use crate::logins::Login;
use crate::room::room;
use crate::server::Server;

/// A server to start: its kind, and what is special about it.
#[derive(Clone)]
#[must_use]
pub struct Setup {
    pub(crate) kind: &'static Kind,
    pub(crate) args: Vec<OsString>,
    pub(crate) env: Vec<(OsString, OsString)>,
    zone: Option<String>,
    tls: Option<Certificates>,
    upstream: Option<SocketAddr>,
    settings: Vec<String>,
    disk: Option<u32>,
}

impl Setup {
    /// A Redis without persistence.
    pub const fn redis() -> Self {
        Self::of(&kinds::redis::KIND)
    }

    /// A Valkey without persistence.
    pub const fn valkey() -> Self {
        Self::of(&kinds::valkey::KIND)
    }

    /// A Redis with a replica, and three sentinels that watch them as `mymaster`. They take the master for gone
    /// after as many milliseconds as the variable `DOWN_AFTER` of their environment says, and try a failover
    /// again after `FAILOVER_TIMEOUT`.
    ///
    /// Node `n` has its data, its log and its pid in the directory `n`: 0 and 1 are servers, 2 to 4 sentinels.
    pub const fn redis_sentinel() -> Self {
        Self::of(&kinds::redis_group::SENTINEL)
    }

    /// Six Redis nodes in a cluster: three masters with a replica each, in the directories 0 to 5. A node that is
    /// silent for `NODE_TIMEOUT` milliseconds, a variable of their environment, is taken for gone. With TLS each node
    /// tells its second port by `CONFIG GET tls-port`.
    pub const fn redis_cluster() -> Self {
        Self::of(&kinds::redis_group::CLUSTER)
    }

    /// A twemproxy that spreads keys over these Redis servers by their hash tags. It knows only commands that have
    /// a key, `PING` and `AUTH`, and closes a connection that sends any other.
    pub fn nutcracker(servers: &[SocketAddr]) -> Self {
        servers
            .iter()
            .fold(Self::of(&kinds::nutcracker::KIND), |setup, server| setup.with_setting(server.to_string()))
    }

    /// A MariaDB with a database `simba`.
    pub const fn mariadb() -> Self {
        Self::of(&kinds::mariadb::KIND)
    }

    /// A MySQL 8.0 with a database `simba`.
    pub const fn mysql() -> Self {
        Self::of(&kinds::mysql::KIND)
    }

    /// A PostgreSQL with its database `postgres`.
    pub const fn postgres() -> Self {
        Self::of(&kinds::postgres::KIND)
    }

    /// A PgBouncer in transaction mode in front of the PostgreSQL at this address.
    pub const fn pgbouncer(upstream: SocketAddr) -> Self {
        let mut setup = Self::of(&kinds::pgbouncer::KIND);
        setup.upstream = Some(upstream);
        setup
    }

    /// A ZooKeeper on its own, with short ticks and long sessions allowed.
    pub const fn zookeeper() -> Self {
        Self::of(&kinds::zookeeper::KIND)
    }

    /// An etcd on its own, whose elections are so short that it grants a lease of one second. A setting is one of its
    /// flags, such as `--max-txn-ops=8`, and replaces ours.
    ///
    /// With TLS it speaks nothing else, and with `--client-cert-auth` and `--trusted-ca-file=ca.pem` it asks clients
    /// for certificates.
    pub const fn etcd() -> Self {
        Self::of(&kinds::etcd::KIND)
    }

    const fn of(kind: &'static Kind) -> Self {
        Self {
            kind,
            args: Vec::new(),
            env: Vec::new(),
            zone: None,
            tls: None,
            upstream: None,
            settings: Vec::new(),
            disk: None,
        }
    }

    /// One more word on its command line.
    pub fn with_arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// A variable of its environment.
    pub fn with_env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// One more line in the file of settings, for a server that has one; one more flag of an etcd.
    pub fn with_setting(mut self, line: impl Into<String>) -> Self {
        self.settings.push(line.into());
        self
    }

    /// Lets a MariaDB or a MySQL tell the time of this zone.
    pub fn with_zone(self, zone: impl Into<String>) -> Self {
        Self { zone: Some(zone.into()), ..self }
    }

    /// Lets it speak TLS too, with these certificates; an etcd, TLS alone.
    pub fn with_tls(self, certificates: &Certificates) -> Self {
        Self { tls: Some(certificates.clone()), ..self }
    }

    /// Puts all that it has on a [disk](Server::disk) of so many mebibytes, which a test can fill.
    pub fn with_disk_of(self, mebibytes: u32) -> Self {
        Self { disk: Some(mebibytes), ..self }
    }

    /// Installs what is missing, makes the data, starts the server and waits until it serves.
    ///
    /// # Errors
    ///
    /// What it said when it did not start.
    pub fn start(self) -> Result<Server> {
        self.install()?;
        let place = self.settle()?;
        let name = self.kind.name;
        Server::start(self, place).with_context(|| format!("{name} did not start"))
    }

    /// Installs the programs that are missing.
    ///
    /// # Errors
    ///
    /// They cannot be installed; the error says what to type.
    pub fn install(&self) -> Result<()> {
        debian::install_missing(self.kind.programs)
    }

    /// Makes a directory and the data in it.
    fn settle(&self) -> Result<Place> {
        let address = free_address()?;
        let mut place = Place {
            dir: directory(self.kind.name)?,
            disk: None,
            address,
            tls: self.tls.is_some(),
            zone: self.zone.clone(),
            upstream: self.upstream,
            settings: self.settings.clone(),
            login: self.kind.user.map_or(Ok(None), Login::if_root)?,
        };
        let furnished = self.furnish(&mut place);
        if furnished.is_err() {
            place.clear();
        }
        furnished.with_context(|| format!("{} has no data", self.kind.name))?;
        Ok(place)
    }

    fn furnish(&self, place: &mut Place) -> Result<()> {
        if let Some(mebibytes) = self.disk {
            place.disk = Some(Arc::new(SmallDisk::mount(&place.dir, mebibytes)?));
        }
        if let Some(certificates) = &self.tls {
            // Servers of a group are clients of each other.
            for file in ["ca.pem", "server.pem", "server.key", "client.pem", "client.key"] {
                fs::copy(certificates.path(file), place.path(file))
                    .with_context(|| format!("cannot copy {file}"))?;
            }
        }
        if let Some(login) = place.login {
            login.own(&place.dir)?;
        }
        (self.kind.prepare)(place)
    }
}

impl std::fmt::Debug for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setup")
            .field("kind", &self.kind.name)
            .field("args", &self.args)
            .finish_non_exhaustive()
    }
}

/// Where servers listen: below the ports that the kernel gives to clients, or one of those might have it first.
const FIRST: u16 = 10_000;
/// How many ports there are; as many above them are for the other port of a node of a cluster of Redis, and of an etcd.
const PORTS: u16 = 10_000;

/// Returns an address that nobody listened on a moment ago, nor ten thousand ports above. No other process gets it while
/// this one lives, and this one does not get it twice: a server may be down for a while and come back.
pub(crate) fn free_address() -> Result<SocketAddr> {
    static BEGIN: LazyLock<u16> = LazyLock::new(|| {
        let random = RandomState::new().build_hasher().finish();
        u16::try_from(random % u64::from(PORTS)).unwrap_or_default()
    });
    static TAKEN: AtomicU16 = AtomicU16::new(0);
    for _ in 0..PORTS {
        let taken = TAKEN.fetch_add(1, Ordering::Relaxed);
        let port = FIRST + (*BEGIN + taken % PORTS) % PORTS;
        let is_free = |port| TcpListener::bind((Ipv4Addr::LOCALHOST, port)).is_ok();
        if is_free(port) && is_free(port + PORTS) && reserve(port)? {
            return Ok((Ipv4Addr::LOCALHOST, port).into());
        }
    }
    bail!("no port from {FIRST} to {} is free", FIRST + PORTS - 1)
}

/// Reserves a port for this process, unless another has it. An abstract socket is exclusive, and ends with its process.
fn reserve(port: u16) -> Result<bool> {
    static RESERVED: Mutex<Vec<UnixListener>> = Mutex::new(Vec::new());
    let name = UnixAddress::from_abstract_name(format!("simba-servers-{port}"))?;
    match UnixListener::bind_addr(&name) {
        Ok(listener) => RESERVED.lock().unwrap_or_else(PoisonError::into_inner).push(listener),
        Err(error) if error.kind() == ErrorKind::AddrInUse => return Ok(false),
        Err(error) => return Err(error).context("cannot reserve a port"),
    }
    Ok(true)
}

/// The other address of a server that was given this one.
pub(crate) fn beside(address: SocketAddr) -> SocketAddr {
    (address.ip(), address.port() + PORTS).into()
}

/// A directory that nobody had before, in its final spelling: it must compare equal to what the kernel says of
/// the process.
fn directory(name: &str) -> Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir: &Path = &room().join(format!("simba-{name}-{}-{count}", process::id()));
    fs::create_dir(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir.canonicalize()?)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_port_is_reserved_while_its_server_is_down() {
        let port = free_address().unwrap().port();
        assert!(!reserve(port).unwrap(), "another process would be refused in the same way");
    }

    #[test]
    fn no_port_is_given_twice_nor_one_that_a_client_may_have() {
        let ports: Vec<_> = (0..300).map(|_| free_address().unwrap().port()).collect();
        assert_eq!(ports.iter().collect::<HashSet<_>>().len(), ports.len());
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let clients: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        assert!(
            ports.iter().all(|port| port + PORTS < clients || clients < FIRST),
            "clients begin at {clients}"
        );
        assert!(ports.iter().all(|port| !ports.contains(&(port + PORTS))));
    }
}
