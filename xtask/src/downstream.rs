//! Builds with dependency versions other than those in `Cargo.lock`: the lowest and newest of our published ranges.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// Builds and runs `examples/downstream` with the newest versions that our ranges allow, as a new user would.
pub(crate) fn newest(workspace: &Workspace) -> Result<Verdict> {
    // A copy, so that its lock file does not stay in the tree; two levels below the root like the original, so that
    // its relative paths stay valid.
    let copy = workspace.scratch("downstream-newest");
    for file in ["Cargo.toml", "src/main.rs"] {
        copy_file(&copy.join("../../examples/downstream").join(file), &copy.join(file))?;
    }
    remove_lock_file(&copy)?;
    let mut command = workspace.cargo("run --target-dir target/downstream --manifest-path");
    command.arg(copy.join("Cargo.toml"));
    // The copy does not inherit the profile of our workspace.
    step::run(command.env("CARGO_PROFILE_DEV_DEBUG", "0"))?;
    Ok(Verdict::Passed)
}

/// Checks the published crates with the lowest versions that our ranges allow.
pub(crate) fn lowest(workspace: &Workspace) -> Result<Verdict> {
    let directory = workspace.scratch("downstream-lowest");
    remove_lock_file(&directory)?;
    step::run(cargo_with_lock_file(workspace, &directory).args([
        "-Z",
        "direct-minimal-versions",
        "generate-lockfile",
    ]))?;
    let mut check = cargo_with_lock_file(workspace, &directory);
    check.args(["check", "--locked", "--all-features", "--target-dir", "target/downstream"]);
    step::run(check.args(["-p", "simba-mutex", "-p", "simba-tck", "-p", "simba-cli"]))?;
    Ok(Verdict::Passed)
}

/// Returns a cargo command in our workspace with the lock file of `directory` instead of our own.
fn cargo_with_lock_file(workspace: &Workspace, directory: &Path) -> Command {
    let mut command = workspace.cargo("-Z lockfile-path --config");
    command.arg(format!("resolver.lockfile-path='{}'", lock_file(directory).display()));
    // Both this option and minimal versions are unstable; this makes a stable cargo accept them.
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}

fn lock_file(directory: &Path) -> PathBuf {
    directory.join("Cargo.lock")
}

/// Removes the lock file of the last run, so that cargo chooses all versions again.
fn remove_lock_file(directory: &Path) -> Result<()> {
    let path = lock_file(directory);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let directory = to.parent().context("the path has no directory")?;
    fs::create_dir_all(directory)
        .and_then(|()| fs::copy(from, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}
