//! Findings about the file for operators (`simba doctor`).

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use simba_core::operate::Finding;

use crate::database::Database;
use crate::tables::Fault;

/// With less free space than this, a few hundred more mutexes may fill the disk.
const MIN_FREE_SPACE: u64 = 16 << 20;

/// What an operator has to do if the system has no watch left.
pub(crate) const WATCH_FIX: &str = "raise fs.inotify.max_user_instances and fs.inotify.max_user_watches";

/// Returns everything that endangers mutexes in the file; `watched` is whether the wakeup file can be watched.
pub(crate) fn findings(database: &Database, watched: bool) -> Result<Vec<Finding>, Fault> {
    let folder = database.path.parent().unwrap_or(Path::new("/"));
    let damage: String = database.connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    let found = [
        damaged(&damage),
        world_writable(&database.path),
        world_writable(folder),
        low_space(folder),
        (!watched).then(|| Finding::new("the file cannot be watched, so waiters poll", WATCH_FIX)),
    ];
    Ok(found.into_iter().flatten().collect())
}

fn damaged(report: &str) -> Option<Finding> {
    (report != "ok").then(|| {
        let fix = "stop every program that uses the file and move it away; the next one creates a new file";
        Finding::new(format!("the file is damaged: {report}"), fix)
    })
}

/// Reports a path that every user can write: such a user can free every mutex in a file, or replace the file in a
/// folder.
fn world_writable(path: &Path) -> Option<Finding> {
    let found = std::fs::metadata(path).ok()?;
    // In a sticky folder, such as /tmp, only the owner of a file can replace it.
    let sticky = found.is_dir() && found.mode() & 0o1000 != 0;
    (found.mode() & 0o002 != 0 && !sticky).then(|| {
        let problem = format!("every user of this machine can write {}", path.display());
        Finding::new(problem, format!("chmod o-w {}", path.display()))
    })
}

fn low_space(folder: &Path) -> Option<Finding> {
    let found = rustix::fs::statvfs(folder).ok()?;
    let left = Some(found.f_bavail.saturating_mul(found.f_frsize)).filter(|left| *left < MIN_FREE_SPACE)?;
    let problem = format!("only {} KiB are left on the disk under {}", left >> 10, folder.display());
    Some(Finding::new(problem, "make room: on a full disk nothing can be acquired, renewed or released"))
}
