//! etcd servers behind proxies that inject faults.

#![allow(dead_code, unused_imports, clippy::unwrap_used, reason = "each test file uses a part of it")]

pub(crate) mod login;

use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::process::Command;
use std::time::Duration;

use simba_core::spi::ConnectUrl;
use simba_core::{Contention, FencingToken, Lease, MutexName, Result, Tenure};
use simba_etcd::{EtcdBackend, EtcdConfig};
use simba_servers::{Server, Setup, shared};
use simba_test_support::{QueueServer, QueueStore, queue};
pub(crate) use simba_test_support::{contend, long, name, sees, soon};

/// Connects without a proxy.
pub(crate) async fn connect(url: &str) -> Result<EtcdBackend> {
    queue::connect::<EtcdStore>(url).await
}

/// Runs `etcdctl` on the server at this URL and returns its output.
pub(crate) async fn ctl(url: &str, args: &[&str]) -> String {
    let mut command = etcdctl(url);
    command.args(args);
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

pub(crate) fn etcdctl(url: &str) -> Command {
    let mut command = Command::new("etcdctl");
    command.args(["--endpoints", &url.replacen("etcd", "http", 1)]);
    // Far longer than a server needs on a busy machine. The dial timeout includes the login.
    command.args(["--dial-timeout=30s", "--command-timeout=30s"]);
    command
}

/// Runs `etcdctl` on the shared server.
pub(crate) async fn shared_ctl(args: &[&str]) -> String {
    ctl(&shared(EtcdStore::SHARED), args).await
}

/// Returns the keys of a mutex, in no particular order.
pub(crate) async fn keys(mutex: &MutexName) -> Vec<String> {
    let output = shared_ctl(&["get", "--prefix", "--keys-only", &format!("simba/{mutex}/")]).await;
    output.lines().filter(|line| !line.is_empty()).map(ToOwned::to_owned).collect()
}

/// A server or a cluster behind proxies.
pub(crate) type Etcd = QueueServer<EtcdStore>;
/// The connection of one process.
pub(crate) type Peer = queue::Peer<EtcdStore>;

/// Returns the cluster that all tests share.
pub(crate) fn cluster() -> Etcd {
    Etcd::at(shared("SIMBA_TCK_ETCD_CLUSTER"))
}

/// Waits until a contender leads.
pub(crate) async fn leads(contention: &Contention) -> Tenure {
    queue::leads::<EtcdStore>(contention).await
}

/// Returns a lease that ends within a test and survives a machine that pauses for two seconds. Servers count whole
/// seconds.
pub(crate) fn lease() -> Lease {
    Lease::new(Duration::from_millis(2_400), Duration::from_millis(1_600)).unwrap()
}

/// etcd, as the rows for stores with queues need it.
pub(crate) struct EtcdStore;

impl QueueStore for EtcdStore {
    type Backend = EtcdBackend;

    const SCHEME: &'static str = "etcd";
    const SHARED: &'static str = "SIMBA_TCK_ETCD";
    const HTTP2: bool = true;

    fn setup() -> Setup {
        Setup::etcd()
    }

    async fn connect(url: &ConnectUrl) -> Result<EtcdBackend> {
        EtcdBackend::connect(EtcdConfig::from_url(url)?).await
    }

    fn short() -> Lease {
        lease()
    }

    fn granted(lease: &Lease) -> Duration {
        lease.total()
    }

    async fn entries(mutex: &MutexName) -> Vec<String> {
        keys(mutex).await
    }

    async fn delete_entry(mutex: &MutexName) {
        assert_eq!(shared_ctl(&["del", "--prefix", &format!("simba/{mutex}/")]).await.trim(), "1");
    }

    async fn last_token(mutex: &MutexName) -> FencingToken {
        let output = shared_ctl(&["get", "--prefix", &format!("simba/{mutex}/"), "-w", "json"]).await;
        let revisions = output.split("\"create_revision\":").skip(1);
        let revisions = revisions.map(|text| text.split(',').next().unwrap().parse().unwrap());
        FencingToken::new(revisions.max().unwrap())
    }

    fn received(server: &Server) -> usize {
        let mut stream = TcpStream::connect(server.address()).unwrap();
        stream.write_all(b"GET /metrics HTTP/1.0\r\n\r\n").unwrap();
        let mut metrics = String::new();
        stream.read_to_string(&mut metrics).unwrap();
        let counts = metrics.lines().filter(|line| line.starts_with("grpc_server_msg_received_total"));
        counts.map(|line| line.rsplit_once(' ').unwrap().1.parse::<usize>().unwrap()).sum()
    }
}
