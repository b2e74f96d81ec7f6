//! Checks that the files under their names are still those that SQLite has open.
//!
//! A program that opens another file under one of the names would see other owners. Three calls of the system for each
//! transaction took a fifth of its time, so most checks make one: they compare the folder with its state before the last
//! check of all three files.
//!
//! | event | what shows it |
//! |---|---|
//! | a file is removed, renamed, replaced or exchanged | the change time of the folder |
//! | the folder, or a folder above it, is renamed or replaced; something is mounted over it | the inode of the folder |
//! | something is mounted over one of the files | the next check of all files, after at most [`VALIDITY`] |
//!
//! A change time proves something only if a later change would get another one. The system takes it from a clock that
//! advances every 10 ms or more often, and some file systems store whole seconds. So it counts only once it is older
//! than such a unit; before that, every check is one of all files. If the wall clock is set back to exactly that time, a
//! change is found after at most [`VALIDITY`]. No program can set a change time.

use std::cell::Cell;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use simba_core::{Error, Result};

use crate::error::{system, unusable};
use crate::machine;

/// How long a check of all files is valid if the folder does not change.
const VALIDITY: Duration = Duration::from_millis(100);
/// The age from which on a change time with a fraction of a second counts.
const SETTLED_AFTER: Duration = Duration::from_millis(100);
/// The age from which on a change time in whole seconds counts.
const SETTLED_AFTER_SECONDS: Duration = Duration::from_secs(2);

/// The names of the database, its journal and the journal's index, and the files that they stand for.
#[derive(Debug)]
pub(crate) struct Names {
    folder: PathBuf,
    files: [Name; 3],
    /// The folder before the last check of all files, and until when that check is valid.
    checked: Cell<Option<(Folder, Instant)>>,
}

impl Names {
    /// Returns the names with the files that this process has just opened under them. SQLite itself removes none of
    /// these files while a connection is open.
    ///
    /// # Errors
    ///
    /// A name stands for another file by now, or for none.
    pub(crate) fn find(database: &Path) -> Result<Self> {
        let folder = database.parent().unwrap_or(Path::new("/")).to_owned();
        let paths = ["", "-wal", "-shm"].map(|suffix| with_suffix(database, suffix));
        let open = machine::open_files(&paths);
        let open = open.map_err(|error| system(database, "find the open files of", error))?;
        let [database, journal, index] = paths.map(|path| Name::find(path, &open));
        Ok(Self { folder, files: [database?, journal?, index?], checked: Cell::new(None) })
    }

    /// Fails if one of the names stands for another file, or for none.
    pub(crate) fn check(&self) -> Result<()> {
        // Before the files: a change during their check shows at the next one.
        let (now, folder) = (Instant::now(), Folder::find(&self.folder));
        let valid = |(checked, until)| folder == Some(checked) && now < until;
        if self.checked.get().is_some_and(valid) {
            return Ok(());
        }
        self.files.iter().try_for_each(Name::check)?;
        // At the time when the folder was read: a later change must show, however long the check took.
        let then = SystemTime::now() - now.elapsed();
        let settled = folder.filter(|folder| folder.is_settled(then));
        self.checked.set(settled.map(|folder| (folder, now + VALIDITY)));
        Ok(())
    }
}

/// Returns the path with `suffix` appended.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

/// A name, and the numbers that distinguish its file from another one.
#[derive(Debug)]
struct Name {
    path: PathBuf,
    file: (u64, u64),
}

impl Name {
    fn find(path: PathBuf, open: &[(u64, u64)]) -> Result<Self> {
        let found = identity(&path)?;
        // A program may have replaced it since SQLite opened it.
        if open.contains(&found) { Ok(Self { path, file: found }) } else { Err(lost(&path, "replaced")) }
    }

    fn check(&self) -> Result<()> {
        if identity(&self.path)? == self.file { Ok(()) } else { Err(lost(&self.path, "replaced")) }
    }
}

/// Returns device and inode of the file that the name stands for.
fn identity(path: &Path) -> Result<(u64, u64)> {
    let found = fs::metadata(path).map_err(|error| lost(path, "removed").with_source(error))?;
    Ok((found.dev(), found.ino()))
}

fn lost(path: &Path, what: &str) -> Error {
    unusable(path, &format!("was {what} while it was in use: restart every program that uses it"))
}

/// A folder at one point in time: a change of its entries changes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Folder {
    device: u64,
    inode: u64,
    /// The change time, since 1970.
    changed: Duration,
}

impl Folder {
    fn find(path: &Path) -> Option<Self> {
        let found = fs::metadata(path).ok()?;
        let changed = Duration::new(found.ctime().try_into().ok()?, found.ctime_nsec().try_into().ok()?);
        Some(Self { device: found.dev(), inode: found.ino(), changed })
    }

    /// Returns whether every change from now on will show, see the module's documentation.
    fn is_settled(&self, now: SystemTime) -> bool {
        let whole = self.changed.subsec_nanos() == 0;
        let after = self.changed + if whole { SETTLED_AFTER_SECONDS } else { SETTLED_AFTER };
        now.duration_since(UNIX_EPOCH).is_ok_and(|now| now > after)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::file;

    /// A program may replace a file in the moment between the open and this check.
    #[test]
    fn file_that_was_replaced_since_it_was_opened_is_refused() {
        for suffix in ["", "-wal", "-shm"] {
            let folder = tempfile::tempdir().unwrap();
            let (_connection, path) = file::open(&folder.path().join("simba.db")).unwrap();
            Names::find(&path).expect("all files are those that are open");
            let replacement = path.with_extension("other");
            fs::write(&replacement, "").unwrap();
            fs::rename(&replacement, with_suffix(&path, suffix)).unwrap();
            let error = Names::find(&path).expect_err(suffix);
            assert!(error.to_string().contains("replaced while it was in use"), "{suffix}: {error}");
        }
    }

    #[test]
    fn change_time_counts_once_no_later_change_can_have_the_same() {
        let settled = |changed, now| {
            let changed = Duration::from_millis(changed);
            Folder { device: 1, inode: 1, changed }.is_settled(UNIX_EPOCH + Duration::from_millis(now))
        };
        assert!(!settled(1_500, 1_500), "the present");
        assert!(!settled(1_500, 1_600), "a unit may not be over yet");
        assert!(settled(1_500, 1_601));
        assert!(!settled(1_000, 3_000), "a file system may store whole seconds");
        assert!(settled(1_000, 3_001));
        assert!(!settled(1_500, 900), "the future: the wall clock was set back");
    }
}
