//! PostgreSQL, as durable as it is by default. It refuses to run as root.

use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Kind, Place, ask, finish};

pub(crate) const KIND: Kind = Kind {
    name: "postgres",
    programs: &[
        ("initdb", "postgresql"),
        ("postgres", "postgresql"),
        // Some tests bend the time of a server.
        ("faketime", "faketime"),
    ],
    user: Some("postgres"),
    prepare,
    command,
    url: |place| format!("postgres://postgres:simba-admin@{}/postgres", place.address),
    probe,
};

fn prepare(place: &Place) -> Result<()> {
    place.write("password", "simba-admin\n")?;
    let mut init = place.program("initdb")?;
    init.args(["--username=postgres", "--auth=scram-sha-256", "--encoding=UTF8", "--locale=C", "--no-sync"]);
    init.arg(format!("--pwfile={}", place.text("password"))).arg(format!("--pgdata={}", place.text("data")));
    finish(&mut init, b"").map(drop)
}

fn command(place: &Place) -> Result<Command> {
    let mut command = place.program("postgres")?;
    command.arg("-D").arg(place.path("data"));
    let set = |option: &str, value: &str| [String::from("-c"), format!("{option}={value}")];
    command.args(set("listen_addresses", &place.address.ip().to_string())).args(set("port", &place.port()));
    command.args(set("unix_socket_directories", &place.dir.display().to_string()));
    command.args(set("max_connections", "200"));
    if place.tls {
        command.args(set("ssl", "on")).args(set("ssl_ca_file", &place.text("ca.pem")));
        command.args(set("ssl_cert_file", &place.text("server.pem")));
        command.args(set("ssl_key_file", &place.text("server.key")));
    }
    Ok(command)
}

/// Succeeds when a login is answered by a question for the password; a server that still starts up answers by
/// an error.
fn probe(place: &Place) -> io::Result<()> {
    const STARTUP: &[u8] = b"\0\0\0\x17\0\x03\0\0user\0postgres\0\0";
    let mut answer = [0];
    ask(place.address, STARTUP, &mut answer)?;
    match answer {
        [b'R'] => Ok(()),
        [other] => Err(io::Error::other(format!("the answer to a login is {:?}", char::from(other)))),
    }
}
