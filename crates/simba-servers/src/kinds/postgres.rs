//! PostgreSQL, with its default durability. It refuses to run as root.

use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Instance, Kind, finish, query};

pub(crate) const KIND: Kind = Kind {
    name: "postgres",
    programs: &[
        ("initdb", "postgresql"),
        ("postgres", "postgresql"),
        // For tests that change the clock of the server.
        ("faketime", "faketime"),
    ],
    user: Some("postgres"),
    prepare,
    command,
    url: |instance| format!("postgres://postgres:simba-admin@{}/postgres", instance.address),
    probe,
};

fn prepare(instance: &Instance) -> Result<()> {
    instance.write("password", "simba-admin\n")?;
    let mut init = instance.program("initdb")?;
    init.args(["--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]);
    init.arg(format!("--pwfile={}", instance.text("password")))
        .arg(format!("--pgdata={}", instance.text("data")));
    finish(&mut init, b"").map(drop)
}

fn command(instance: &Instance) -> Result<Command> {
    let mut command = instance.program("postgres")?;
    command.arg("-D").arg(instance.path("data"));
    let set = |option: &str, value: &str| [String::from("-c"), format!("{option}={value}")];
    command
        .args(set("listen_addresses", &instance.address.ip().to_string()))
        .args(set("port", &instance.port()));
    command.args(set("unix_socket_directories", &instance.dir.display().to_string()));
    command.args(set("max_connections", "200"));
    if instance.tls {
        command.args(set("ssl", "on")).args(set("ssl_ca_file", &instance.text("ca.pem")));
        command.args(set("ssl_cert_file", &instance.text("server.pem")));
        command.args(set("ssl_key_file", &instance.text("server.key")));
    }
    Ok(command)
}

/// Succeeds when the server asks for a password at a login; a server that still starts answers with an error.
fn probe(instance: &Instance) -> io::Result<()> {
    const STARTUP: &[u8] = b"\0\0\0\x17\0\x03\0\0user\0postgres\0\0";
    let mut answer = [0];
    query(instance.address, STARTUP, &mut answer)?;
    match answer {
        [b'R'] => Ok(()),
        [other] => Err(io::Error::other(format!("the answer to a login is {:?}", char::from(other)))),
    }
}
