//! What endangers mutexes in a file, for operators.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use simba_core::operate::Finding;

use crate::file::OpenFile;
use crate::machine;
use crate::table::Fault;

/// With less room than this, a few hundred mutexes more may fill the disk.
const LITTLE_ROOM: u64 = 16 << 20;

/// What to do when the system has no watch to give.
pub(crate) const WATCH_CURE: &str = "raise fs.inotify.max_user_instances and fs.inotify.max_user_watches";

/// Looks for all of it; `heard` is whether the bell can be watched.
pub(crate) fn of(file: &OpenFile, heard: bool) -> Result<Vec<Finding>, Fault> {
    let folder = file.path.parent().unwrap_or(Path::new("/"));
    let damage: String = file.connection.query_row("PRAGMA quick_check(1)", [], |row| row.get(0))?;
    let found = [
        damaged(&damage),
        open_to_others(&file.path),
        open_to_others(folder),
        little_room(folder),
        (!heard).then(|| Finding::new("the file cannot be watched, so waiters poll", WATCH_CURE)),
    ];
    Ok(found.into_iter().flatten().collect())
}

fn damaged(report: &str) -> Option<Finding> {
    (report != "ok").then(|| {
        let cure = "stop all that use the file and move it away; a new one is made by itself";
        Finding::new(format!("the file is damaged: {report}"), cure)
    })
}

/// Who can write the file can free every mutex; who can write its folder can replace it.
fn open_to_others(path: &Path) -> Option<Finding> {
    let found = std::fs::metadata(path).ok()?;
    // A sticky folder, such as /tmp, lets nobody touch what is another's.
    let sticky = found.is_dir() && found.mode() & 0o1000 != 0;
    (found.mode() & 0o002 != 0 && !sticky).then(|| {
        let problem = format!("every user of this machine can write {}", path.display());
        Finding::new(problem, format!("chmod o-w {}", path.display()))
    })
}

fn little_room(folder: &Path) -> Option<Finding> {
    let left = machine::room_left(folder).ok().filter(|left| *left < LITTLE_ROOM)?;
    let problem = format!("only {} KiB are left on the disk under {}", left >> 10, folder.display());
    Some(Finding::new(problem, "make room: on a full disk nothing can be acquired, renewed or released"))
}
