//! Several Redis servers as one process group under a shell.

use std::fs;
use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Instance, Kind, redis};
use crate::setup::free_address;

const PROGRAMS: &[(&str, &str)] = &[("redis-server", "redis-server"), ("redis-cli", "redis-tools")];

/// A master with a replica, and three sentinels.
pub(crate) const SENTINEL: Kind = Kind {
    name: "redis-sentinel",
    programs: PROGRAMS,
    user: None,
    prepare: |instance| prepare(instance, 5),
    command: |instance| command(instance, include_str!("redis_sentinel.sh")),
    url: |instance| format!("redis+sentinel://{}/mymaster", hosts(instance, 2)),
    probe,
};

/// Three masters with a replica each.
pub(crate) const CLUSTER: Kind = Kind {
    name: "redis-cluster",
    programs: PROGRAMS,
    user: None,
    prepare: |instance| prepare(instance, 6),
    command: |instance| command(instance, include_str!("redis_cluster.sh")),
    url: |instance| format!("redis+cluster://{}", hosts(instance, 0)),
    probe,
};

/// Finds a port for each node, and one more for TLS if it is enabled; the first node has the port of the instance.
fn prepare(instance: &Instance, nodes: usize) -> Result<()> {
    let wanted = if instance.tls { 2 * nodes } else { nodes };
    let mut ports = vec![instance.address.port()];
    while ports.len() < wanted {
        let port = free_address()?.port();
        if !ports.contains(&port) {
            ports.push(port);
        }
    }
    let ports: Vec<_> = ports.iter().map(u16::to_string).collect();
    (0..nodes).try_for_each(|node| fs::create_dir(instance.path(&node.to_string())))?;
    let (plain, secured) = ports.split_at(nodes);
    if instance.tls {
        instance.write("tls-ports", &(secured.join("\n") + "\n"))?;
    }
    instance.write("ports", &plain.join(" "))
}

fn ports(instance: &Instance) -> Vec<String> {
    let ports = fs::read_to_string(instance.path("ports")).unwrap_or_default();
    ports.split_whitespace().map(Into::into).collect()
}

fn hosts(instance: &Instance, from: usize) -> String {
    let hosts: Vec<_> = ports(instance)[from..].iter().map(|port| format!("127.0.0.1:{port}")).collect();
    hosts.join(",")
}

fn command(instance: &Instance, script: &str) -> Result<Command> {
    let mut command = instance.program("sh")?;
    command.args(["-c", script, "redis"]).args(ports(instance));
    let _ = fs::remove_file(instance.path("ready"));
    Ok(command)
}

/// Succeeds when the shell has created the file `ready`.
fn probe(instance: &Instance) -> io::Result<()> {
    fs::metadata(instance.path("ready"))?;
    redis::probe(instance)
}
