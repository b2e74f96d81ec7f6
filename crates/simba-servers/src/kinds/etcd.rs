//! etcd, alone or as one of a cluster.

use std::env::consts::ARCH;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::process::{self, Command};

use anyhow::Result;

use super::{Kind, Place, expect};
use crate::setup::beside;

pub(crate) const KIND: Kind = Kind {
    name: "etcd",
    programs: &[
        ("etcd", "etcd-server"),
        // Not for the server: tests look into it by this.
        ("etcdctl", "etcd-client"),
    ],
    user: None,
    prepare: |_| Ok(()),
    command,
    // The certificate is for the name and not for the address.
    url: |place| {
        if place.tls {
            format!("etcds://localhost:{}", place.port())
        } else {
            format!("etcd://{}", place.address)
        }
    },
    probe,
};

fn command(place: &Place) -> Result<Command> {
    let address = place.address;
    let mut command = place.program("etcd")?;
    command.arg(format!("--data-dir={}", place.text("data"))).args(["--logger=zap", "--log-outputs=stderr"]);
    // No lease is shorter than one and a half elections, in whole seconds: with these, one second is granted.
    command.args(["--heartbeat-interval=50", "--election-timeout=500"]);
    // Never both on one port: now and then clients without TLS would get to the service that has it.
    if place.tls {
        command.arg(format!("--listen-client-urls=https://{address}"));
        command.arg(format!("--advertise-client-urls=https://localhost:{}", place.port()));
        command.args(["--cert-file=server.pem", "--key-file=server.key"]);
    } else {
        command.arg(format!("--listen-client-urls=http://{address}"));
        command.arg(format!("--advertise-client-urls=http://{address}"));
    }
    command.arg(format!("--listen-metrics-urls=http://{}", health(address)));
    // Of a flag that is there twice the last one counts: a member of a cluster has others.
    command.args(membership(0, &[NO_PEER])).args(&place.settings);
    if ARCH != "x86_64" {
        // It must be told, in the words of Go, that we know where it is not tested.
        command.env("ETCD_UNSUPPORTED_ARCH", if ARCH == "aarch64" { "arm64" } else { ARCH });
    }
    Ok(command)
}

/// Where one that is alone listens for others: on any port, since none come.
const NO_PEER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// Where the server at this address says in plain text how it is, whatever it speaks with its clients.
pub(crate) fn health(address: SocketAddr) -> SocketAddr {
    beside(address)
}

/// What makes a server one of those that talk to each other at these addresses. It heeds that once: from then on it is
/// what its data say.
pub(crate) fn membership(own: usize, peers: &[SocketAddr]) -> [String; 6] {
    let all: Vec<_> = peers.iter().enumerate().map(|(at, peer)| format!("{at}=http://{peer}")).collect();
    [
        format!("--name={own}"),
        format!("--listen-peer-urls=http://{}", peers[own]),
        format!("--initial-advertise-peer-urls=http://{}", peers[own]),
        format!("--initial-cluster={}", all.join(",")),
        "--initial-cluster-state=new".into(),
        // Whoever had these ports before is none of them.
        format!("--initial-cluster-token=simba-{}-{}", process::id(), peers[0].port()),
    ]
}

/// Succeeds when it has a leader and a quorum. One that has no room left serves too, and tells whoever writes.
fn probe(place: &Place) -> io::Result<()> {
    expect(health(place.address), "GET /health?exclude=NOSPACE HTTP/1.0\r\n\r\n", "HTTP/1.0 200")
}
