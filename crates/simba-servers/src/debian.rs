//! Installs missing programs from Debian.

use std::env;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use rustix::process::geteuid;

/// The directory of PostgreSQL's programs in Debian, with one directory per version.
const POSTGRES: &str = "/usr/lib/postgresql";

/// Programs that tests need besides servers: shells for completions, a renderer of manual pages, tools to isolate
/// processes, a locale for sorting, a proxy and the server of the example backend, which tests start themselves.
const TOOLS: &[(&str, &str)] = &[
    ("/usr/share/i18n/locales/en_US", "locales"),
    ("fish", "fish"),
    ("man", "man-db"),
    ("mandoc", "mandoc"),
    ("memcached", "memcached"),
    ("nutcracker", "nutcracker"),
    ("pkill", "procps"),
    ("setpriv", "util-linux"),
    ("setsid", "util-linux"),
    ("unshare", "util-linux"),
    ("zsh", "zsh"),
];

/// Installs the programs that tests call, if they are missing.
///
/// # Errors
///
/// The programs cannot be installed; the error contains the command to do so.
pub fn install_tools() -> Result<()> {
    install_missing(TOOLS)
}

/// Installs the packages whose program is missing. Without root, returns an error with the command.
pub(crate) fn install_missing(wanted: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> =
        wanted.iter().filter(|(program, _)| find(program).is_none()).map(|(_, package)| *package).collect();
    if missing.is_empty() {
        return Ok(());
    }
    let packages = missing.join(" ");
    let install = "apt-get install -y --no-install-recommends";
    if !geteuid().is_root() {
        bail!("not installed: {packages}; run as root:\n  apt-get update\n  {install} {packages}");
    }
    run("apt-get update -q", &[])?;
    // Another installation, such as an automatic upgrade, may be under way.
    run(&format!("{install} -o DPkg::Lock::Timeout=600"), &missing).context("cannot install the servers")
}

/// Runs an apt command. The package may start a service, which listens on another port than ours.
fn run(line: &str, packages: &[&str]) -> Result<()> {
    let mut words = line.split_whitespace();
    let mut command = Command::new(words.next().unwrap_or_default());
    // Not to stdout, which a shell evaluates.
    command.args(words).args(packages).env("DEBIAN_FRONTEND", "noninteractive").stdout(io::stderr());
    let status = command.status().with_context(|| format!("cannot start `{line}`"))?;
    ensure!(status.success(), "`{line} {}` ended with {status}", packages.join(" "));
    Ok(())
}

/// Returns the path of a program: on `PATH`, or in one of Debian's directories outside it.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    let on_path = env::split_paths(&path).chain(["/usr/sbin".into(), "/usr/local/sbin".into()]);
    on_path.chain(versions(Path::new(POSTGRES))).map(|dir| dir.join(program)).find(|file| file.is_file())
}

/// Returns the directories with programs of each version, the latest first.
fn versions(root: &Path) -> Vec<PathBuf> {
    let mut found: Vec<(u32, PathBuf)> = root
        .read_dir()
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path().join("bin"))))
        .collect();
    found.sort_unstable();
    found.into_iter().rev().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn program_is_found_on_the_path() {
        assert!(find("sh").is_some());
        assert_eq!(find("no-such-program"), None);
    }
}
