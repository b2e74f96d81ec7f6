//! MariaDB, with its default durability.

use std::io;
use std::process::Command;

use anyhow::Result;

use super::{Instance, Kind, finish, query};

/// Creates the database and a user with all permissions, over TCP.
pub(super) const ADMIN: &str = "CREATE DATABASE IF NOT EXISTS simba;\n\
    CREATE USER IF NOT EXISTS 'admin'@'%' IDENTIFIED BY 'simba-admin';\n\
    GRANT ALL ON *.* TO 'admin'@'%' WITH GRANT OPTION;\n";

pub(crate) const KIND: Kind = Kind {
    name: "mariadb",
    programs: &[
        ("mariadbd", "mariadb-server"),
        ("mariadb-install-db", "mariadb-server"),
        ("mariadb-tzinfo-to-sql", "mariadb-server"),
        // For tests that change the clock of the server.
        ("faketime", "faketime"),
    ],
    user: None,
    prepare,
    command,
    url: |instance| format!("mysql://admin:simba-admin@{}/simba", instance.address),
    probe,
};

fn prepare(instance: &Instance) -> Result<()> {
    let mut install = instance.program("mariadb-install-db")?;
    install.args(["--no-defaults", "--skip-test-db", "--auth-root-authentication-method=normal"]);
    install
        .arg(format!("--datadir={}", instance.text("data")))
        .arg(tmpdir_option(instance))
        .args(user_option());
    finish(&mut install, b"")?;
    instance.write("init.sql", ADMIN)?;
    instance.zone.as_deref().map_or(Ok(()), |zone| load_zone(instance, zone))
}

/// Loads a time zone into the server's tables, which makes its name known.
fn load_zone(instance: &Instance, zone: &str) -> Result<()> {
    let mut read = instance.program("mariadb-tzinfo-to-sql")?;
    read.arg(format!("/usr/share/zoneinfo/{zone}")).arg(zone);
    let sql = [b"USE mysql;\n".to_vec(), finish(&mut read, b"")?].concat();
    let mut server = basic(instance)?;
    finish(server.arg("--bootstrap"), &sql).map(drop)
}

fn command(instance: &Instance) -> Result<Command> {
    Ok(listening(basic(instance)?, instance))
}

/// Adds the options of a server that tests connect to.
pub(super) fn listening(mut command: Command, instance: &Instance) -> Command {
    command.args(["--skip-log-bin", "--skip-name-resolve", "--max-connections=500"]);
    command
        .args([format!("--bind-address={}", instance.address.ip()), format!("--port={}", instance.port())]);
    command.args([
        format!("--socket={}", instance.text("socket")),
        format!("--init-file={}", instance.text("init.sql")),
        format!("--pid-file={}", instance.text("pid")),
    ]);
    if let Some(zone) = &instance.zone {
        command.arg(format!("--default-time-zone={zone}"));
    }
    if instance.tls {
        for (option, file) in [("ca", "ca.pem"), ("cert", "server.pem"), ("key", "server.key")] {
            command.arg(format!("--ssl-{option}={}", instance.text(file)));
        }
    }
    command
}

fn basic(instance: &Instance) -> Result<Command> {
    let mut command = instance.program("mariadbd")?;
    // Small, since several run at once; no option reduces the durability of a commit.
    command.args(["--no-defaults", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M"]);
    command
        .arg(format!("--datadir={}", instance.text("data")))
        .arg(tmpdir_option(instance))
        .args(user_option());
    Ok(command)
}

/// Returns the option for a separate temporary directory: a server deletes the content at the start.
pub(super) fn tmpdir_option(instance: &Instance) -> String {
    format!("--tmpdir={}", instance.dir.display())
}

/// Returns the option with which the server accepts to run as root.
pub(super) fn user_option() -> Option<&'static str> {
    rustix::process::geteuid().is_root().then_some("--user=root")
}

/// Succeeds when the server sends its greeting: four bytes of header, then its protocol's version.
pub(super) fn probe(instance: &Instance) -> io::Result<()> {
    let mut greeting = [0; 5];
    query(instance.address, b"", &mut greeting)?;
    match greeting[4] {
        10 => Ok(()),
        other => Err(io::Error::other(format!("unexpected protocol version {other}"))),
    }
}
