//! Twemproxy, which Debian calls nutcracker: spreads keys over the Redis servers behind it.

use std::io;
use std::process::Command;

use anyhow::{Result, ensure};

use super::{Kind, Place, expect};
use crate::setup::beside;

pub(crate) const KIND: Kind = Kind {
    name: "nutcracker",
    programs: &[("nutcracker", "nutcracker")],
    user: None,
    prepare,
    command,
    url: |place| format!("redis://{}", place.address),
    probe,
};

/// Writes one pool. Its servers are the settings, each as `host:port`.
fn prepare(place: &Place) -> Result<()> {
    ensure!(!place.settings.is_empty(), "a proxy needs servers behind it");
    let servers: String = place.settings.iter().map(|server| format!("   - {server}:1\n")).collect();
    let address = place.address;
    let pool = format!(
        "pool:\n  listen: {address}\n  redis: true\n  hash: fnv1a_64\n  hash_tag: \"{{}}\"\n  \
         distribution: modula\n  servers:\n{servers}"
    );
    place.write("nutcracker.yml", &pool)
}

fn command(place: &Place) -> Result<Command> {
    let statistics = beside(place.address);
    let mut command = place.program("nutcracker")?;
    command.arg("-c").arg(place.path("nutcracker.yml"));
    command.args(["-a", &statistics.ip().to_string(), "-s", &statistics.port().to_string()]);
    Ok(command)
}

/// The proxy answers a PING itself, but not in a line of plain words.
fn probe(place: &Place) -> io::Result<()> {
    expect(place.address, "*1\r\n$4\r\nPING\r\n", "+PONG\r\n")
}
