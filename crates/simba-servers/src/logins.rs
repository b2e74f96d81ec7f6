//! Users of this machine: some servers refuse to run as root.

use std::fs;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result};
use rustix::process::geteuid;

/// The ids of a user and of its group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Login {
    uid: u32,
    gid: u32,
}

impl Login {
    /// Returns the user of this name, if this process is root and can switch to it.
    pub(crate) fn if_root(name: &str) -> Result<Option<Self>> {
        if !geteuid().is_root() {
            return Ok(None);
        }
        let users = fs::read_to_string("/etc/passwd").context("cannot read the users of this machine")?;
        find(&users, name).with_context(|| format!("this machine has no user `{name}`")).map(Some)
    }

    /// Makes the command run as this user.
    pub(crate) fn apply_to(self, command: &mut Command) {
        command.uid(self.uid).gid(self.gid);
    }

    /// Makes the user the owner of a directory and its content.
    pub(crate) fn chown(self, path: &Path) -> Result<()> {
        chown(path, Some(self.uid), Some(self.gid))
            .with_context(|| format!("cannot change the owner of {}", path.display()))?;
        if path.is_dir() {
            for entry in fs::read_dir(path)? {
                self.chown(&entry?.path())?;
            }
        }
        Ok(())
    }
}

fn find(users: &str, name: &str) -> Option<Login> {
    users.lines().find_map(|line| {
        let mut fields = line.split(':');
        let matches = fields.next()? == name;
        let (uid, gid) = (fields.nth(1)?.parse().ok()?, fields.next()?.parse().ok()?);
        matches.then_some(Login { uid, gid })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_is_found_by_name() {
        let users = "root:x:0:0:root:/root:/bin/sh\npostgres:x:104:111:,,,:/var/lib/postgresql:/bin/bash\n";
        assert_eq!(find(users, "postgres"), Some(Login { uid: 104, gid: 111 }));
        assert_eq!(find(users, "post"), None);
    }
}
