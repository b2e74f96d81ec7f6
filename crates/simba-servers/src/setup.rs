//! The configuration of a server, before it is started.

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
use crate::data_dir::base_dir;
use crate::debian;
use crate::disk::SmallDisk;
use crate::kinds::{self, Instance, Kind};
use crate::logins::Login;
use crate::server::Server;

/// The configuration of a server to start.
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
    /// Returns a Redis without persistence.
    pub const fn redis() -> Self {
        Self::of(&kinds::redis::KIND)
    }

    /// Returns a Valkey without persistence.
    pub const fn valkey() -> Self {
        Self::of(&kinds::valkey::KIND)
    }

    /// Returns a Redis with a replica, and three sentinels that monitor them as `mymaster`. They consider the master
    /// down after `DOWN_AFTER` milliseconds, a variable of their environment, and retry a failover after
    /// `FAILOVER_TIMEOUT`.
    ///
    /// Node `n` has its data, its log and its pid in the directory `n`: 0 and 1 are servers, 2 to 4 sentinels.
    pub const fn redis_sentinel() -> Self {
        Self::of(&kinds::redis_group::SENTINEL)
    }

    /// Returns six Redis nodes in a cluster: three masters with a replica each, in the directories 0 to 5. A node that
    /// does not answer for `NODE_TIMEOUT` milliseconds, a variable of their environment, is considered down. With TLS
    /// each node reports its second port by `CONFIG GET tls-port`.
    pub const fn redis_cluster() -> Self {
        Self::of(&kinds::redis_group::CLUSTER)
    }

    /// Returns a twemproxy that distributes keys to these Redis servers by their hash tags. It supports only commands
    /// with a key, `PING` and `AUTH`, and closes a connection that sends any other.
    pub fn nutcracker(servers: &[SocketAddr]) -> Self {
        servers
            .iter()
            .fold(Self::of(&kinds::nutcracker::KIND), |setup, server| setup.with_setting(server.to_string()))
    }

    /// Returns a MariaDB with a database `simba`.
    pub const fn mariadb() -> Self {
        Self::of(&kinds::mariadb::KIND)
    }

    /// Returns a MySQL 8.0 with a database `simba`.
    pub const fn mysql() -> Self {
        Self::of(&kinds::mysql::KIND)
    }

    /// Returns a PostgreSQL with its database `postgres`.
    pub const fn postgres() -> Self {
        Self::of(&kinds::postgres::KIND)
    }

    /// Returns a PgBouncer in transaction mode in front of the PostgreSQL at this address.
    pub const fn pgbouncer(upstream: SocketAddr) -> Self {
        let mut setup = Self::of(&kinds::pgbouncer::KIND);
        setup.upstream = Some(upstream);
        setup
    }

    /// Returns a standalone ZooKeeper with short ticks and long sessions allowed.
    pub const fn zookeeper() -> Self {
        Self::of(&kinds::zookeeper::KIND)
    }

    /// Returns a standalone etcd whose election timeout is so short that it grants a lease of one second. A setting is
    /// one of its flags, such as `--max-txn-ops=8`, and replaces ours.
    ///
    /// With TLS it accepts no plain text, and with `--client-cert-auth` and `--trusted-ca-file=ca.pem` it requires
    /// client certificates.
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

    /// Adds an argument to its command line.
    pub fn with_arg(mut self, arg: impl Into<OsString>) -> Self {
        self.args.push(arg.into());
        self
    }

    /// Sets a variable of its environment.
    pub fn with_env(mut self, name: impl Into<OsString>, value: impl Into<OsString>) -> Self {
        self.env.push((name.into(), value.into()));
        self
    }

    /// Adds a line to the configuration file of a server that has one, or a flag of an etcd.
    pub fn with_setting(mut self, line: impl Into<String>) -> Self {
        self.settings.push(line.into());
        self
    }

    /// Sets the time zone of a MariaDB or a MySQL.
    pub fn with_zone(self, zone: impl Into<String>) -> Self {
        Self { zone: Some(zone.into()), ..self }
    }

    /// Enables TLS with these certificates; an etcd then accepts TLS only.
    pub fn with_tls(self, certificates: &Certificates) -> Self {
        Self { tls: Some(certificates.clone()), ..self }
    }

    /// Puts its data on a [disk](Server::disk) of this many mebibytes, which a test can fill.
    pub fn with_disk_of(self, mebibytes: u32) -> Self {
        Self { disk: Some(mebibytes), ..self }
    }

    /// Installs missing programs, creates the data, starts the server and waits until it is ready.
    ///
    /// # Errors
    ///
    /// The server did not start; the error contains the end of its log.
    pub fn start(self) -> Result<Server> {
        self.install()?;
        let instance = self.create_instance()?;
        let name = self.kind.name;
        Server::start(self, instance).with_context(|| format!("{name} did not start"))
    }

    /// Installs missing programs.
    ///
    /// # Errors
    ///
    /// The programs cannot be installed; the error contains the command to do so.
    pub fn install(&self) -> Result<()> {
        debian::install_missing(self.kind.programs)
    }

    /// Creates a directory and the data in it.
    fn create_instance(&self) -> Result<Instance> {
        let address = free_address()?;
        let mut instance = Instance {
            dir: directory(self.kind.name)?,
            disk: None,
            address,
            tls: self.tls.is_some(),
            zone: self.zone.clone(),
            upstream: self.upstream,
            settings: self.settings.clone(),
            login: self.kind.user.map_or(Ok(None), Login::if_root)?,
        };
        let prepared = self.prepare(&mut instance);
        if prepared.is_err() {
            instance.clear();
        }
        prepared.with_context(|| format!("cannot create the data of {}", self.kind.name))?;
        Ok(instance)
    }

    fn prepare(&self, instance: &mut Instance) -> Result<()> {
        if let Some(mebibytes) = self.disk {
            instance.disk = Some(Arc::new(SmallDisk::mount(&instance.dir, mebibytes)?));
        }
        if let Some(certificates) = &self.tls {
            // Servers of a group connect to each other as clients.
            for file in ["ca.pem", "server.pem", "server.key", "client.pem", "client.key"] {
                fs::copy(certificates.path(file), instance.path(file))
                    .with_context(|| format!("cannot copy {file}"))?;
            }
        }
        if let Some(login) = instance.login {
            login.chown(&instance.dir)?;
        }
        (self.kind.prepare)(instance)
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

/// The first port for servers: below the ephemeral ports, so that no client takes one first.
const FIRST: u16 = 10_000;
/// How many ports there are; the same number above them is for the second port of a Redis cluster node or an etcd.
const PORTS: u16 = 10_000;

/// Returns an address that is not in use, nor is the port ten thousand above. No other process gets it while this one
/// lives, and this one does not get it twice: a server may be stopped and started again later.
///
/// # Errors
///
/// No port is free.
pub fn free_address() -> Result<SocketAddr> {
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

/// Returns the second address of a server with this address.
pub(crate) fn second_address(address: SocketAddr) -> SocketAddr {
    (address.ip(), address.port() + PORTS).into()
}

/// Creates a unique directory and returns its canonical path, which must equal the one that the kernel reports for the
/// process.
fn directory(name: &str) -> Result<PathBuf> {
    static COUNT: AtomicU32 = AtomicU32::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let dir: &Path = &base_dir().join(format!("simba-{name}-{}-{count}", process::id()));
    fs::create_dir(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    Ok(dir.canonicalize()?)
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn port_is_reserved_while_its_server_is_down() {
        let port = free_address().unwrap().port();
        assert!(!reserve(port).unwrap(), "the port is not reserved");
    }

    #[test]
    fn ports_are_unique_and_not_ephemeral() {
        let ports: Vec<_> = (0..300).map(|_| free_address().unwrap().port()).collect();
        assert_eq!(ports.iter().collect::<HashSet<_>>().len(), ports.len());
        let range = fs::read_to_string("/proc/sys/net/ipv4/ip_local_port_range").unwrap();
        let clients: u16 = range.split_whitespace().next().unwrap().parse().unwrap();
        assert!(
            ports.iter().all(|port| port + PORTS < clients || clients < FIRST),
            "ephemeral ports start at {clients}"
        );
        assert!(ports.iter().all(|port| !ports.contains(&(port + PORTS))));
    }
}
