//! PgBouncer in transaction mode: the client of one transaction is another server process in the next.

use std::io;
use std::process::Command;

use anyhow::{Context, Result};

use super::{Kind, Place, postgres};

pub(crate) const KIND: Kind = Kind {
    name: "pgbouncer",
    programs: &[("pgbouncer", "pgbouncer")],
    user: Some("postgres"),
    prepare,
    command,
    url: |place| format!("postgres://postgres@{}/postgres", place.address),
    probe,
};

fn prepare(place: &Place) -> Result<()> {
    let upstream = place.upstream.context("a pooler needs a server behind it")?;
    let (host, port) = (upstream.ip(), upstream.port());
    let (ip, own) = (place.address.ip(), place.port());
    // Every client is let in, as the user that is named here.
    let settings = format!(
        "[databases]\n\
         postgres = host={host} port={port} user=postgres password=simba-admin\n\
         [pgbouncer]\n\
         listen_addr = {ip}\nlisten_port = {own}\nunix_socket_dir =\n\
         auth_type = any\npool_mode = transaction\ndefault_pool_size = 4\n"
    );
    place.write("pgbouncer.ini", &settings)
}

fn command(place: &Place) -> Result<Command> {
    let mut command = place.program("pgbouncer")?;
    command.arg(place.path("pgbouncer.ini"));
    Ok(command)
}

fn probe(place: &Place) -> io::Result<()> {
    (postgres::KIND.probe)(place)
}
