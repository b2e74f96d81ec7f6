//! Checks the dependencies by the rules in `deny.toml`.

use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::step::{self, Verdict};
use crate::workspace::Workspace;

/// Pinned, so that a new version of the tool cannot fail an unchanged workspace.
const VERSION: &str = "0.20.2";

/// Checks licences, bans and sources. Installs the tool if it is missing.
pub(crate) fn step(workspace: &Workspace) -> Result<Verdict> {
    let program = match find(workspace) {
        Some(program) => program,
        None => install(workspace)?,
    };
    check(workspace, program)?;
    Ok(Verdict::Passed)
}

/// Runs the checks, without advisories: their database is not reachable from every machine, and a new advisory would
/// fail an unchanged workspace.
fn check(workspace: &Workspace, program: PathBuf) -> Result<()> {
    step::run(workspace.command(program).args(["--locked", "check", "licenses", "bans", "sources"]))
}

fn find(workspace: &Workspace) -> Option<PathBuf> {
    let ours = workspace.scratch("tools").join("bin/cargo-deny");
    [PathBuf::from("cargo-deny"), ours].into_iter().find(|program| is_wanted(workspace, program))
}

fn is_wanted(workspace: &Workspace, program: &Path) -> bool {
    let output = workspace.command(program).arg("--version").output();
    output.is_ok_and(|output| output.stdout.trim_ascii() == format!("cargo-deny {VERSION}").as_bytes())
}

fn install(workspace: &Workspace) -> Result<PathBuf> {
    let tools = workspace.scratch("tools");
    // Not optimised: it runs for a second only, and an optimised build takes minutes longer.
    let words = format!("install cargo-deny --version {VERSION} --locked --debug --root");
    step::run(workspace.cargo(&words).arg(&tools).env("CARGO_PROFILE_DEV_DEBUG", "0"))?;
    Ok(tools.join("bin/cargo-deny"))
}
