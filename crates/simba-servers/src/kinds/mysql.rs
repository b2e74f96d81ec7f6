//! MySQL, from Debian unstable: Debian's stable releases have MariaDB only. The packages are unpacked with all their
//! libraries, not installed, because MySQL and MariaDB have programs of the same name.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::mariadb::{ADMIN, listening, tmpdir_option, user_option};
use super::{Instance, Kind, finish, mariadb};
use crate::cache;

const PACKAGE: &str = "mysql-server-core";

pub(crate) const KIND: Kind = Kind {
    name: "mysql",
    programs: &[("apt-get", "apt"), ("dpkg-deb", "dpkg")],
    prepare,
    command,
    ..mariadb::KIND
};

fn prepare(instance: &Instance) -> Result<()> {
    let mut init = basic(instance)?;
    init.arg("--initialize-insecure");
    if let Some(zone) = &instance.zone {
        instance.write("zone.sql", &zone_statements(zone)?)?;
        init.arg(format!("--init-file={}", instance.text("zone.sql")));
    }
    finish(&mut init, b"")?;
    instance.write("init.sql", ADMIN)
}

/// Returns the statements that load a time zone, one per line as an init file requires.
fn zone_statements(zone: &str) -> Result<String> {
    let mut read = program("bin/mysql_tzinfo_to_sql")?;
    read.arg(format!("/usr/share/zoneinfo/{zone}")).arg(zone);
    let sql = String::from_utf8(finish(&mut read, b"")?)?;
    let lines = sql.split(";\n").map(|statement| statement.replace('\n', " "));
    let statements: Vec<_> = lines.filter(|line| !line.trim().is_empty()).collect();
    Ok(format!("USE mysql;\n{};\n", statements.join(";\n")))
}

fn command(instance: &Instance) -> Result<Command> {
    let mut command = listening(basic(instance)?, instance);
    command.arg("--mysqlx=OFF");
    Ok(command)
}

/// Returns the server with the options that all its runs share. No option reduces the durability of a commit.
fn basic(instance: &Instance) -> Result<Command> {
    let mut command = program("sbin/mysqld")?;
    command.current_dir(&instance.dir);
    command.args(["--no-defaults", "--innodb-buffer-pool-size=64M", "--innodb-redo-log-capacity=64M"]);
    command.args(["--secure-file-priv=NULL", "--performance-schema=OFF"]);
    command.arg(format!("--basedir={}", files()?.join("usr").display()));
    command.arg(format!("--plugin-dir={}", files()?.join("usr/lib/mysql/plugin").display()));
    command
        .arg(format!("--datadir={}", instance.text("data")))
        .arg(tmpdir_option(instance))
        .args(user_option());
    Ok(command)
}

/// Returns a program of the packages, started by their own loader, so that it finds their libraries. An environment
/// variable would break programs of this machine.
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

/// Returns the directory with the unpacked packages; downloads them once per user.
fn files() -> Result<PathBuf> {
    let files = cache::dir()?.join(format!("{PACKAGE}-unstable"));
    if !files.is_dir() {
        download(&files).context("cannot get MySQL from Debian unstable")?;
    }
    Ok(files)
}

/// Unpacks into another directory and renames it, so that two downloads at once do not mix.
fn download(files: &Path) -> Result<()> {
    let partial = files.with_extension(format!("{}.part", std::process::id()));
    let state = partial.join("apt");
    for name in ["lists/partial", "archives/partial"] {
        fs::create_dir_all(state.join(name))?;
    }
    // An empty list of installed packages, so that all libraries are downloaded too.
    fs::write(state.join("status"), "")?;
    fs::write(state.join("sources.list"), format!("deb {} unstable main\n", mirror()?))?;
    finish(apt(&state).args(["--quiet", "update"]), b"")?;
    let install = ["--quiet", "--yes", "--no-install-recommends", "--download-only", "install", PACKAGE];
    finish(apt(&state).args(install), b"")?;
    for package in fs::read_dir(state.join("archives"))?.flatten().map(|entry| entry.path()) {
        if package.extension().is_some_and(|extension| extension == "deb") {
            finish(Command::new("dpkg-deb").arg("--extract").arg(&package).arg(&partial), b"")?;
        }
    }
    fs::remove_dir_all(&state)?;
    if fs::rename(&partial, files).is_err() {
        // Another process created the directory first.
        fs::remove_dir_all(&partial)?;
    }
    Ok(())
}

/// Returns apt with its own state directory. It checks signatures as usual.
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
    let targets = finish(Command::new("apt-get").args(["indextargets", "--format", format]), b"")?;
    let targets = String::from_utf8(targets)?;
    let mirror = targets.lines().find_map(|line| line.strip_prefix("Debian Debian "));
    ensure!(mirror.is_some(), "no mirror of Debian is configured: run `apt-get update` first");
    Ok(mirror.unwrap_or_default().to_owned())
}
