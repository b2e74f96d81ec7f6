//! PgBouncer in transaction mode: each transaction of a client may run on another server process.

use std::io;
use std::process::Command;

use anyhow::{Context, Result};

use super::{Instance, Kind, postgres};

pub(crate) const KIND: Kind = Kind {
    name: "pgbouncer",
    programs: &[("pgbouncer", "pgbouncer")],
    user: Some("postgres"),
    prepare,
    command,
    url: |instance| format!("postgres://postgres@{}/postgres", instance.address),
    probe,
};

fn prepare(instance: &Instance) -> Result<()> {
    let upstream = instance.upstream.context("a pooler needs a server behind it")?;
    let (host, port) = (upstream.ip(), upstream.port());
    let (ip, own) = (instance.address.ip(), instance.port());
    // Accepts every client, and logs in to the server as the user below.
    let settings = format!(
        "[databases]\n\
         postgres = host={host} port={port} user=postgres password=simba-admin\n\
         [pgbouncer]\n\
         listen_addr = {ip}\nlisten_port = {own}\nunix_socket_dir =\n\
         auth_type = any\npool_mode = transaction\ndefault_pool_size = 4\n"
    );
    instance.write("pgbouncer.ini", &settings)
}

fn command(instance: &Instance) -> Result<Command> {
    let mut command = instance.program("pgbouncer")?;
    command.arg(instance.path("pgbouncer.ini"));
    Ok(command)
}

fn probe(instance: &Instance) -> io::Result<()> {
    (postgres::KIND.probe)(instance)
}
