//! MariaDB, as durable as it is by default.

use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Kind, Place, ask, finish};

/// Who may do everything, over TCP.
pub(super) const ADMIN: &str = "CREATE DATABASE IF NOT EXISTS simba;\n\
    CREATE USER IF NOT EXISTS 'admin'@'%' IDENTIFIED BY 'simba-admin';\n\
    GRANT ALL ON *.* TO 'admin'@'%' WITH GRANT OPTION;\n";

pub(crate) const KIND: Kind = Kind {
    name: "mariadb",
    programs: &[
        ("mariadbd", "mariadb-server"),
        ("mariadb-install-db", "mariadb-server"),
        ("mariadb-tzinfo-to-sql", "mariadb-server"),
        // Some tests bend the time of a server.
        ("faketime", "faketime"),
    ],
    user: None,
    prepare,
    command,
    url: |place| format!("mysql://admin:simba-admin@{}/simba", place.address),
    probe,
};

fn prepare(place: &Place) -> Result<()> {
    let mut install = place.program("mariadb-install-db")?;
    install.args(["--no-defaults", "--skip-test-db", "--auth-root-authentication-method=normal"]);
    install.arg(format!("--datadir={}", place.text("data"))).arg(scratch(place)).args(as_ourselves());
    finish(&mut install, b"")?;
    place.write("init.sql", ADMIN)?;
    place.zone.as_deref().map_or(Ok(()), |zone| teach_zone(place, zone))
}

/// A server knows zones by name once its tables do.
fn teach_zone(place: &Place, zone: &str) -> Result<()> {
    let mut read = place.program("mariadb-tzinfo-to-sql")?;
    read.arg(format!("/usr/share/zoneinfo/{zone}")).arg(zone);
    let sql = [b"USE mysql;\n".to_vec(), finish(&mut read, b"")?].concat();
    let mut server = basic(place)?;
    finish(server.arg("--bootstrap"), &sql).map(drop)
}

fn command(place: &Place) -> Result<Command> {
    Ok(listening(basic(place)?, place))
}

/// Adds the options of a server that tests connect to.
pub(super) fn listening(mut command: Command, place: &Place) -> Command {
    command.args(["--skip-log-bin", "--skip-name-resolve", "--max-connections=500"]);
    command.args([format!("--bind-address={}", place.address.ip()), format!("--port={}", place.port())]);
    command.args([
        format!("--socket={}", place.text("socket")),
        format!("--init-file={}", place.text("init.sql")),
        format!("--pid-file={}", place.text("pid")),
    ]);
    if let Some(zone) = &place.zone {
        command.arg(format!("--default-time-zone={zone}"));
    }
    if place.tls {
        for (option, file) in [("ca", "ca.pem"), ("cert", "server.pem"), ("key", "server.key")] {
            command.arg(format!("--ssl-{option}={}", place.text(file)));
        }
    }
    command
}

fn basic(place: &Place) -> Result<Command> {
    let mut command = place.program("mariadbd")?;
    // Small, since several run at once; nothing here makes a commit less durable.
    command.args(["--no-defaults", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M"]);
    command.arg(format!("--datadir={}", place.text("data"))).arg(scratch(place)).args(as_ourselves());
    Ok(command)
}

/// A server that starts clears its folder for temporary tables, whosever they are: each has its own.
pub(super) fn scratch(place: &Place) -> String {
    format!("--tmpdir={}", place.dir.display())
}

/// Root must say that it means it.
pub(super) fn as_ourselves() -> Option<&'static str> {
    rustix::process::geteuid().is_root().then_some("--user=root")
}

/// Succeeds when the server greets: four bytes of header, then its protocol's version.
pub(super) fn probe(place: &Place) -> io::Result<()> {
    let mut greeting = [0; 5];
    ask(place.address, b"", &mut greeting)?;
    match greeting[4] {
        10 => Ok(()),
        other => Err(io::Error::other(format!("it greets with {other} instead of a version"))),
    }
}
