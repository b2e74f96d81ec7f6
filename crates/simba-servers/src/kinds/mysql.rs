//! MySQL itself, from Debian unstable: Debian's stable releases have MariaDB alone. The packages are unpacked with all
//! the libraries that they need, not installed, since MySQL and MariaDB have programs of the same name.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::mariadb::{ADMIN, as_ourselves, listening, probe, scratch};
use super::{Kind, Place, finish};
use crate::cache;

const PACKAGE: &str = "mysql-server-core";

pub(crate) const KIND: Kind = Kind {
    name: "mysql",
    programs: &[("apt-get", "apt"), ("dpkg-deb", "dpkg")],
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
    let mut command = listening(basic(place)?, place);
    command.arg("--mysqlx=OFF");
    Ok(command)
}

/// Returns the server with the options that all its runs share. Nothing here makes a commit less durable.
fn basic(place: &Place) -> Result<Command> {
    let mut command = program("sbin/mysqld")?;
    command.current_dir(&place.dir);
    command.args(["--no-defaults", "--innodb-buffer-pool-size=64M", "--innodb-redo-log-capacity=64M"]);
    command.args(["--secure-file-priv=NULL", "--performance-schema=OFF"]);
    command.arg(format!("--basedir={}", files()?.join("usr").display()));
    command.arg(format!("--plugin-dir={}", files()?.join("usr/lib/mysql/plugin").display()));
    command.arg(format!("--datadir={}", place.text("data"))).arg(scratch(place)).args(as_ourselves());
    Ok(command)
}

/// Returns a program of the packages, started by their own loader, so that it finds their libraries. Programs of this
/// machine would not start with those, so no variable names them.
fn program(name: &str) -> Result<Command> {
    let files = files()?;
    let libraries = files.join(format!("usr/lib/{}-linux-gnu", env::consts::ARCH));
    let loader = fs::read_dir(&libraries)?.flatten().map(|entry| entry.path());
    let is_loader = |path: &PathBuf| path.to_string_lossy().contains("/ld-linux-");
    let mut command =
        Command::new(loader.into_iter().find(is_loader).context("the packages have no loader")?);
    command.arg("--library-path").arg(&libraries).arg(files.join("usr").join(name));
    Ok(command)
}

/// Returns where the packages are unpacked; downloads them once per user.
fn files() -> Result<PathBuf> {
    let files = cache::folder()?.join(format!("{PACKAGE}-unstable"));
    if !files.is_dir() {
        download(&files).context("cannot get MySQL from Debian unstable")?;
    }
    Ok(files)
}

/// Unpacks into another directory and renames it, so that two downloads at once do not mix.
fn download(files: &Path) -> Result<()> {
    let aside = files.with_extension(format!("{}.part", std::process::id()));
    let state = aside.join("apt");
    for folder in ["lists/partial", "archives/partial"] {
        fs::create_dir_all(state.join(folder))?;
    }
    // Nothing is installed there, so that all libraries are downloaded too.
    fs::write(state.join("status"), "")?;
    fs::write(state.join("sources.list"), format!("deb {} unstable main\n", mirror()?))?;
    finish(apt(&state).args(["--quiet", "update"]), b"")?;
    let install = ["--quiet", "--yes", "--no-install-recommends", "--download-only", "install", PACKAGE];
    finish(apt(&state).args(install), b"")?;
    for package in fs::read_dir(state.join("archives"))?.flatten().map(|entry| entry.path()) {
        if package.extension().is_some_and(|extension| extension == "deb") {
            finish(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&aside), b"")?;
        }
    }
    fs::remove_dir_all(&state)?;
    if fs::rename(&aside, files).is_err() {
        // Another process was faster.
        fs::remove_dir_all(&aside)?;
    }
    Ok(())
}

/// Returns apt with a state of its own. It checks signatures as it does for this machine.
fn apt(state: &Path) -> Command {
    let mut command = Command::new("apt-get");
    for (option, name) in [
        ("Dir::Etc::sourcelist", "sources.list"),
        ("Dir::State::lists", "lists"),
        ("Dir::State::status", "status"),
        ("Dir::Cache::archives", "archives"),
        ("Dir::Cache::pkgcache", "pkgcache.bin"),
        ("Dir::Cache::srcpkgcache", "srcpkgcache.bin"),
    ] {
        command.arg("-o").arg(format!("{option}={}", state.join(name).display()));
    }
    command.args(["-o", "Dir::Etc::sourceparts=-"]);
    command
}

/// Returns the mirror of Debian that this machine uses.
fn mirror() -> Result<String> {
    let format = "$(ORIGIN) $(LABEL) $(REPO_URI)";
    let told = finish(Command::new("apt-get").args(["indextargets", "--format", format]), b"")?;
    let told = String::from_utf8(told)?;
    let mirror = told.lines().find_map(|line| line.strip_prefix("Debian Debian "));
    ensure!(mirror.is_some(), "apt knows no mirror of Debian: run `apt-get update` first");
    Ok(mirror.unwrap_or_default().to_owned())
}
