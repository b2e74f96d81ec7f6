//! etcd, standalone or as a member of a cluster.

use std::env::consts::ARCH;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{self, Command};

use anyhow::Result;

use super::{Instance, Kind, expect};
use crate::setup::second_address;

pub(crate) const KIND: Kind = Kind {
    name: "etcd",
    programs: &[
        ("etcd", "etcd-server"),
        // For tests that inspect the data.
        ("etcdctl", "etcd-client"),
    ],
    user: None,
    prepare: |_| Ok(()),
    command,
    // The certificate is for the name and not for the address.
    url: |instance| {
        if instance.tls {
            format!("etcds://localhost:{}", instance.port())
        } else {
            format!("etcd://{}", instance.address)
        }
    },
    probe,
};

fn command(instance: &Instance) -> Result<Command> {
    let address = instance.address;
    let mut command = instance.program("etcd")?;
    command
        .arg(format!("--data-dir={}", instance.text("data")))
        .args(["--logger=zap", "--log-outputs=stderr"]);
    // A lease is at least one and a half election timeouts, rounded up to seconds: this one grants one second.
    command.args(["--heartbeat-interval=50", "--election-timeout=500"]);
    // Never both on one port: clients without TLS would sometimes reach the service with TLS.
    if instance.tls {
        command.arg(format!("--listen-client-urls=https://{address}"));
        command.arg(format!("--advertise-client-urls=https://localhost:{}", instance.port()));
        command.args(["--cert-file=server.pem", "--key-file=server.key"]);
    } else {
        command.arg(format!("--listen-client-urls=http://{address}"));
        command.arg(format!("--advertise-client-urls=http://{address}"));
    }
    command.arg(format!("--listen-metrics-urls=http://{}", health(address)));
    // The last of repeated flags wins, so the settings of a cluster member override this.
    command.args(membership(0, &[NO_PEER])).args(&instance.settings);
    if ARCH != "x86_64" {
        // etcd requires this on untested architectures, with Go's name of the architecture.
        command.env("ETCD_UNSUPPORTED_ARCH", if ARCH == "aarch64" { "arm64" } else { ARCH });
    }
    Ok(command)
}

/// The peer address of a standalone server: any port.
const NO_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Returns the address of the health endpoint, which uses plain text also if the clients use TLS.
pub(crate) fn health(address: SocketAddr) -> SocketAddr {
    second_address(address)
}

/// Returns the flags for a member of a cluster with these peer addresses. Only the first start uses them; later the
/// data decide.
pub(crate) fn membership(own: usize, peers: &[SocketAddr]) -> [String; 6] {
    let all: Vec<_> = peers.iter().enumerate().map(|(at, peer)| format!("{at}=http://{peer}")).collect();
    [
        format!("--name={own}"),
        format!("--listen-peer-urls=http://{}", peers[own]),
        format!("--initial-advertise-peer-urls=http://{}", peers[own]),
        format!("--initial-cluster={}", all.join(",")),
        "--initial-cluster-state=new".into(),
        // Excludes members of an earlier cluster on the same ports.
        format!("--initial-cluster-token=simba-{}-{}", process::id(), peers[0].port()),
    ]
}

/// Succeeds when the server has a leader and a quorum. A server without space is ready, too, and rejects writes.
fn probe(instance: &Instance) -> io::Result<()> {
    expect(health(instance.address), "GET /health?exclude=NOSPACE HTTP/1.0\r\n\r\n", "HTTP/1.0 200")
}
