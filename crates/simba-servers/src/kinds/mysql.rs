//! MySQL 8.0, from the packages of Ubuntu 22.04: Debian 12 has MariaDB alone. They are unpacked, not installed, since
//! MySQL and MariaDB have programs of the same name.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::mariadb::{ADMIN, as_ourselves, probe, scratch};
use super::{Kind, Place, finish};

/// The release pocket of a distribution never changes, so these files stay where they are.
const ARCHIVE: &str = "MIRROR";

const VERSION: &str = "8.0.28";

/// The server and the libraries that Debian has in other versions, each pinned by its SHA-256: what is downloaded is
/// executed.
const PACKAGES: &[(&str, &str)] = &[
    (
        "m/mysql-8.0/mysql-server-core-8.0_8.0.28-0ubuntu4_amd64.deb",
        "69a97fa36a94ce981cf4a5fd6eb674003fa42559b442ba9807309c69d1b90fdb",
    ),
    ("i/icu/libicu70_70.1-2_amd64.deb", "58a154f6307289813da2276f900498ef536ae7c0522d2cf31a3c3c5cf62dfd9a"),
    (
        "libe/libevent/libevent-core-2.1-7_2.1.12-stable-1build3_amd64.deb",
        "9317ae74915b9e4372f7506fbd16ae2a021e0ead79a8d88f96dad49b87d94508",
    ),
    (
        "libe/libevent/libevent-pthreads-2.1-7_2.1.12-stable-1build3_amd64.deb",
        "078211a125a9ef5a9c7d24eb441761cefde8812b69889f7cee96824b0dc66831",
    ),
    (
        "m/mecab/libmecab2_0.996-14build9_amd64.deb",
        "cb25c996ff0ed53158bc6b9cda66f68f003ff3824f8276ddfa0ad20d60e1411a",
    ),
    (
        "p/protobuf/libprotobuf-lite23_3.12.4-1ubuntu7_amd64.deb",
        "74213165bb99962044366f56d43eaebf7f7ffd7903d60820abd8373f6fe067c0",
    ),
];

pub(crate) const KIND: Kind = Kind {
    name: "mysql",
    programs: &[
        ("curl", "curl"),
        ("dpkg-deb", "dpkg"),
        ("sha256sum", "coreutils"),
        ("/usr/lib/x86_64-linux-gnu/libaio.so.1", "libaio1"),
        ("/usr/lib/x86_64-linux-gnu/libnuma.so.1", "libnuma1"),
        ("/usr/lib/x86_64-linux-gnu/libtirpc.so.3", "libtirpc3"),
    ],
    user: None,
    prepare,
    command,
    url: |place| format!("mysql://admin:simba-admin@{}/simba", place.address),
    probe,
};

fn prepare(place: &Place) -> Result<()> {
    let mut make = basic(place)?;
    make.arg("--initialize-insecure");
    if let Some(zone) = &place.zone {
        place.write("zone.sql", &zone_statements(zone)?)?;
        make.arg(format!("--init-file={}", place.text("zone.sql")));
    }
    finish(&mut make, b"")?;
    place.write("init.sql", ADMIN)
}

/// Returns the statements that teach a server a zone by its name, one to a line as an init file wants them.
fn zone_statements(zone: &str) -> Result<String> {
    let mut read = program("bin/mysql_tzinfo_to_sql")?;
    read.arg(format!("/usr/share/zoneinfo/{zone}")).arg(zone);
    let sql = String::from_utf8(finish(&mut read, b"")?)?;
    let lines = sql.split(";\n").map(|statement| statement.replace('\n', " "));
    let statements: Vec<_> = lines.filter(|line| !line.trim().is_empty()).collect();
    Ok(format!("USE mysql;\n{};\n", statements.join(";\n")))
}

fn command(place: &Place) -> Result<Command> {
    let mut command = basic(place)?;
    command.args(["--skip-log-bin", "--skip-name-resolve", "--max-connections=500", "--mysqlx=OFF"]);
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
    Ok(command)
}

/// Returns the server with the options that all its runs share. Nothing here makes a commit less durable.
fn basic(place: &Place) -> Result<Command> {
    let mut command = program("sbin/mysqld")?;
    command.current_dir(&place.dir);
    command.args(["--no-defaults", "--innodb-buffer-pool-size=64M", "--innodb-log-file-size=32M"]);
    command.args(["--secure-file-priv=NULL", "--performance-schema=OFF"]);
    command.arg(format!("--basedir={}", files()?.join("usr").display()));
    command.arg(format!("--plugin-dir={}", files()?.join("usr/lib/mysql/plugin").display()));
    command.arg(format!("--datadir={}", place.text("data"))).arg(scratch(place)).args(as_ourselves());
    Ok(command)
}

/// Returns a program of the packages, which finds the libraries of the packages.
fn program(name: &str) -> Result<Command> {
    let files = files()?;
    let mut command = Command::new(files.join("usr").join(name));
    command.env("LD_LIBRARY_PATH", files.join("usr/lib/x86_64-linux-gnu"));
    Ok(command)
}

/// Returns where the packages are unpacked; downloads them once per checkout. Only its owner can write there, unlike
/// in the directory for temporary files.
fn files() -> Result<PathBuf> {
    let cache = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/downloads");
    let files = cache.join(format!("mysql-{VERSION}"));
    if !files.is_dir() {
        ensure!(env::consts::ARCH == "x86_64", "the packages of MySQL are for x86_64 alone");
        download(&files).with_context(|| format!("cannot get MySQL {VERSION} from {ARCHIVE}"))?;
    }
    Ok(files.canonicalize()?)
}

/// Unpacks into another directory and renames it, so that two downloads at once do not mix.
fn download(files: &Path) -> Result<()> {
    let aside = files.with_extension(format!("{}.part", std::process::id()));
    fs::create_dir_all(&aside)?;
    for (path, sum) in PACKAGES {
        let package = aside.join("package.deb");
        let mut curl = Command::new("curl");
        curl.args(["--silent", "--show-error", "--fail", "--location", "--retry", "2", "--output"]);
        finish(curl.arg(&package).arg(format!("{ARCHIVE}/{path}")), b"")?;
        let told = finish(Command::new("sha256sum").arg(&package), b"")?;
        ensure!(told.starts_with(sum.as_bytes()), "{path} is not the file that was checked");
        finish(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&aside), b"")?;
        fs::remove_file(&package)?;
    }
    if fs::rename(&aside, files).is_err() {
        // Another process was faster.
        fs::remove_dir_all(&aside)?;
    }
    Ok(())
}
