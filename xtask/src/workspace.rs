//! The location of the workspace, and commands that run in it.

use std::env;
use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

/// An environment variable: name and value.
pub(crate) type Variable = (&'static str, String);

/// The workspace that this program belongs to.
#[derive(Clone, Debug)]
pub(crate) struct Workspace {
    root: PathBuf,
    variables: Vec<Variable>,
    quick: bool,
}

impl Workspace {
    /// Finds the workspace, from any directory within it.
    pub(crate) fn find() -> Result<Self> {
        let manifest = env::var_os("CARGO_MANIFEST_DIR").context("start this program with `cargo xtask`")?;
        let root = Path::new(&manifest).parent().context("the `xtask` package has no workspace above it")?;
        Ok(Self { root: root.to_owned(), variables: Vec::new(), quick: false })
    }

    /// Sets these variables for every command, in addition to the earlier ones.
    pub(crate) fn with_variables(mut self, variables: Vec<Variable>) -> Self {
        self.variables.extend(variables);
        self
    }

    /// Returns the value of such a variable.
    pub(crate) fn variable(&self, name: &str) -> Option<String> {
        self.variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.clone())
    }

    /// Leaves out tests that need root, packages or servers.
    pub(crate) fn quick(self) -> Self {
        Self { quick: true, ..self }
    }

    pub(crate) fn is_quick(&self) -> bool {
        self.quick
    }

    /// Returns a path that is not in version control and is removed by `cargo clean`.
    pub(crate) fn scratch(&self, name: &str) -> PathBuf {
        self.root.join("target").join(name)
    }

    /// Returns a command that runs in the root of the workspace.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        command.current_dir(&self.root);
        // `cargo run` describes this package in these variables. Build scripts that watch them (that of `ring` does)
        // would run again after every switch between `cargo` and `cargo xtask`.
        for (name, _) in env::vars_os().filter(|(name, _)| describes_a_package(name)) {
            command.env_remove(name);
        }
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        command
    }

    /// Returns a cargo command, with `words` as its arguments, separated by spaces.
    pub(crate) fn cargo(&self, words: &str) -> Command {
        let mut command = self.command("cargo");
        command.args(words.split_whitespace());
        command
    }
}

fn describes_a_package(variable: &OsStr) -> bool {
    variable
        .to_str()
        .is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_variables_that_describe_a_package_are_removed() {
        assert!(describes_a_package(OsStr::new("CARGO_PKG_NAME")));
        assert!(describes_a_package(OsStr::new("CARGO_MANIFEST_DIR")));
        assert!(!describes_a_package(OsStr::new("CARGO_HOME")));
        assert!(!describes_a_package(OsStr::new("CARGO_TARGET_DIR")));
    }
}
