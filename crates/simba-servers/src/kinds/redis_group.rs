//! Several Redis servers that belong together, as one process group under a shell.

use std::fs;
use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Kind, Place, redis};
use crate::setup::free_address;

const PROGRAMS: &[(&str, &str)] = &[("redis-server", "redis-server"), ("redis-cli", "redis-tools")];

/// A master with a replica, and three sentinels.
pub(crate) const SENTINEL: Kind = Kind {
    name: "redis-sentinel",
    programs: PROGRAMS,
    user: None,
    prepare: |place| prepare(place, 5),
    command: |place| command(place, include_str!("redis_sentinel.sh")),
    url: |place| format!("redis+sentinel://{}/mymaster", hosts(place, 2)),
    probe,
};

/// Three masters with a replica each.
pub(crate) const CLUSTER: Kind = Kind {
    name: "redis-cluster",
    programs: PROGRAMS,
    user: None,
    prepare: |place| prepare(place, 6),
    command: |place| command(place, include_str!("redis_cluster.sh")),
    url: |place| format!("redis+cluster://{}", hosts(place, 0)),
    probe,
};

/// Finds a port for each, and one more for TLS if it is asked for; the first one has that of the place.
fn prepare(place: &Place, nodes: usize) -> Result<()> {
    let wanted = if place.tls { 2 * nodes } else { nodes };
    let mut ports = vec![place.address.port()];
    while ports.len() < wanted {
        let port = free_address()?.port();
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
    (0..nodes).try_for_each(|node| fs::create_dir(place.path(&node.to_string())))?;
    let (plain, secured) = ports.split_at(nodes);
    if place.tls {
        place.write("tls-ports", &(secured.join("\n") + "\n"))?;
    }
    place.write("ports", &plain.join(" "))
}

fn ports(place: &Place) -> Vec<String> {
    let ports = fs::read_to_string(place.path("ports")).unwrap_or_default();
    ports.split_whitespace().map(Into::into).collect()
}

fn hosts(place: &Place, from: usize) -> String {
    let hosts: Vec<_> = ports(place)[from..].iter().map(|port| format!("127.0.0.1:{port}")).collect();
    hosts.join(",")
}

fn command(place: &Place, script: &str) -> Result<Command> {
    let mut command = place.program("sh")?;
    command.args(["-c", script, "redis"]).args(ports(place));
    let _ = fs::remove_file(place.path("ready"));
    Ok(command)
}

/// Succeeds when the shell has said so.
fn probe(place: &Place) -> io::Result<()> {
    fs::metadata(place.path("ready"))?;
    redis::probe(place)
}
