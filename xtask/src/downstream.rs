//! Builds with other versions of the dependencies than those in `Cargo.lock`: the ends of our published ranges.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// Builds and runs `examples/downstream` as a user would today: with the newest versions that our ranges allow.
pub(crate) fn newest(workspace: &Workspace) -> Result<Verdict> {
    // A copy, so that its lock file does not stay in the tree; two levels below the root, as the original, so that
    // its relative paths stay right.
    let copy = workspace.scratch("downstream-newest");
    for file in ["Cargo.toml", "src/main.rs"] {
        copy_file(&copy.join("../../examples/downstream").join(file), &copy.join(file))?;
    }
    remove_lock_file(&copy)?;
    let mut command = workspace.cargo("run --target-dir target/downstream --manifest-path");
    command.arg(copy.join("Cargo.toml"));
    // The profile of our own workspace is not that of the copy.
    step::run(command.env("CARGO_PROFILE_DEV_DEBUG", "0"))?;
    Ok(Verdict::Passed)
}

/// Checks what is published with the lowest versions that our ranges allow.
pub(crate) fn lowest(workspace: &Workspace) -> Result<Verdict> {
    let folder = workspace.scratch("downstream-lowest");
    remove_lock_file(&folder)?;
    step::run(cargo_with_lock_file(workspace, &folder).args([
        "-Z",
        "direct-minimal-versions",
        "generate-lockfile",
    ]))?;
    let mut check = cargo_with_lock_file(workspace, &folder);
    check.args(["check", "--locked", "--all-features", "--target-dir", "target/downstream"]);
    step::run(check.args(["-p", "simba-mutex", "-p", "simba-tck", "-p", "simba-cli"]))?;
    Ok(Verdict::Passed)
}

/// Returns a cargo command in our workspace with the lock file of `folder` instead of our own.
fn cargo_with_lock_file(workspace: &Workspace, folder: &Path) -> Command {
    let mut command = workspace.cargo("-Z lockfile-path --config");
    command.arg(format!("resolver.lockfile-path='{}'", lock_file(folder).display()));
    // Both this option and minimal versions are unstable; this lets a stable cargo take them.
    command.env("RUSTC_BOOTSTRAP", "1");
    command
}

fn lock_file(folder: &Path) -> PathBuf {
    folder.join("Cargo.lock")
}

/// Removes the lock file of the last run, so that cargo chooses all versions anew.
fn remove_lock_file(folder: &Path) -> Result<()> {
    let path = lock_file(folder);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

fn copy_file(from: &Path, to: &Path) -> Result<()> {
    let folder = to.parent().context("a file has a folder")?;
    fs::create_dir_all(folder)
        .and_then(|()| fs::copy(from, to))
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))?;
    Ok(())
}
