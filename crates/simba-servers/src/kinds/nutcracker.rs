//! Twemproxy, in Debian nutcracker: distributes keys to the Redis servers behind it.

use std::io;
use std::process::Command;

use anyhow::{Result, ensure};

use super::{Instance, Kind, expect};
use crate::setup::second_address;

pub(crate) const KIND: Kind = Kind {
    name: "nutcracker",
    programs: &[("nutcracker", "nutcracker")],
    user: None,
    prepare,
    command,
    url: |instance| format!("redis://{}", instance.address),
    probe,
};

/// Writes one pool. Its servers are the settings, each as `host:port`.
fn prepare(instance: &Instance) -> Result<()> {
    ensure!(!instance.settings.is_empty(), "a proxy needs servers behind it");
    let servers: String = instance.settings.iter().map(|server| format!("   - {server}:1\n")).collect();
    let address = instance.address;
    let pool = format!(
        "pool:\n  listen: {address}\n  redis: true\n  hash: fnv1a_64\n  hash_tag: \"{{}}\"\n  \
         distribution: modula\n  servers:\n{servers}"
    );
    instance.write("nutcracker.yml", &pool)
}

fn command(instance: &Instance) -> Result<Command> {
    let statistics = second_address(instance.address);
    let mut command = instance.program("nutcracker")?;
    command.arg("-c").arg(instance.path("nutcracker.yml"));
    command.args(["-a", &statistics.ip().to_string(), "-s", &statistics.port().to_string()]);
    Ok(command)
}

/// Succeeds when the proxy answers a PING, which it does without a server. It does not accept inline commands.
fn probe(instance: &Instance) -> io::Result<()> {
    expect(instance.address, "*1\r\n$4\r\nPING\r\n", "+PONG\r\n")
}
